"""Functions of torch that its exporter translates into other numbers or not at all, in operators that it translates rightly.

    cross_entropy        loses `label_smoothing`, and takes probabilities for classes
    embedding_bag        becomes sequences of tensors, whose sizes are lost; here for bags of one length, a matrix of ids
    Tensor.detach_       leaves no trace
    gaussian_nll_loss    asks whether a variance is negative; one below `eps` counts as `eps`, with the gradient of itself

`rewritten()` maps each to the function that takes its place while a module is traced.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@functools.cache
def rewritten() -> dict[object, Callable[..., Tensor]]:
    """By a function of torch the one that is traced in place of it."""
    import torch
    from torch.nn import functional

    return {
        torch.Tensor.detach_: _detach_,
        functional.cross_entropy: _cross_entropy,
        functional.embedding_bag: _embedding_bag,
        functional.gaussian_nll_loss: _gaussian_nll_loss,
    }


def _detach_(tensor: Tensor) -> Tensor:
    return tensor.copy_(tensor.detach())


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """(1 - s) nll + s / C sum over classes of -log p w; of probabilities t the sum of -log p w ((1 - s) t + s / C)."""
    import torch
    from torch.nn import functional

    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    if not target.is_floating_point() and not label_smoothing:
        return functional.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    classes = 0 if input.dim() == 1 else 1
    count = input.shape[classes]
    logs = functional.log_softmax(input, classes)
    weighted = logs if weight is None else logs * weight.reshape([-1] + [1] * (input.dim() - classes - 1))
    if target.is_floating_point():
        shares = target * (1 - label_smoothing) + label_smoothing / count if label_smoothing else target
        each = -(weighted * shares).sum(classes)
        return _reduced(each, reduction)
    likelihood = functional.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)
    counts = target != ignore_index
    smooth = torch.where(counts, -weighted.sum(classes), 0.0)
    if reduction == "mean":
        kept = counts.to(logs.dtype)
        if weight is not None:
            kept = kept * weight[torch.where(counts, target, 0)]
        smooth = smooth.sum() / kept.sum()
    elif reduction == "sum":
        smooth = smooth.sum()
    return (1 - label_smoothing) * likelihood + label_smoothing / count * smooth


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """The sum, mean or maximum of a bag's rows but those of padding; of an empty bag zeros."""
    import torch
    from torch.nn import functional

    if input.dim() != 2 or max_norm is not None:
        return functional.embedding_bag(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
    rows = functional.embedding(input, weight, None, None, 2.0, scale_grad_by_freq, sparse)
    kept = None
    if padding_idx is not None:
        kept = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        if kept is None:
            return rows.max(1).values
        largest = rows.masked_fill(~kept, float("-inf")).max(1).values
        return torch.where(kept.any(1), largest, 0.0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if kept is not None:
        rows = torch.where(kept, rows, 0.0)
    if mode == "sum":
        return rows.sum(1)
    return rows.mean(1) if kept is None else rows.sum(1) / kept.to(rows.dtype).sum(1).clamp(min=1)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """(log v + (input - target)^2 / v) / 2 with v = max(var, eps)."""
    import torch

    if isinstance(var, float):
        var = var * torch.ones_like(input)
    if var.size() != input.size() and input.size()[:-1] == var.size():
        var = var.unsqueeze(-1)
    # var - var is 0, with the gradient of var
    var = torch.where(var < eps, (var - var.detach()) + eps, var)
    each = (var.log() + (input - target) ** 2 / var) / 2
    return _reduced(each + math.log(2 * math.pi) / 2 if full else each, reduction)


def _reduced(each: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return each.mean()
    return each.sum() if reduction == "sum" else each
