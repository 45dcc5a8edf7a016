"""Rewrites torch functions that its exporter translates wrongly or not at all into operators that it translates rightly.

    cross_entropy        loses `label_smoothing`, and takes probabilities for classes
    embedding_bag        becomes sequences of tensors, whose sizes are lost; here for bags of one length, a matrix of ids
    dropouts             in place, of channels and alpha become random numbers, even in evaluation; here a Dropout
    rrelu                has no translation; in evaluation it is a leaky_relu
    rnn_tanh, rnn_relu   lose the dropout between their layers
    Tensor.detach_       leaves no trace
    gaussian_nll_loss    asks whether a variance is negative; one below `eps` counts as `eps`, with the gradient of itself

`rewritten()` maps each of them to the function that replaces it while a module is traced.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_SELU = 1.7580993408473766
"""The product of SELU's two constants; its negative is SELU's lowest value."""


@functools.cache
def rewritten() -> dict[object, Callable[..., Any]]:
    """Maps each function of torch to the function that replaces it in the trace."""
    import torch
    from torch.nn import functional

    return {
        **_dropouts(),
        **{one: functools.partial(_rnn, one) for one in (torch.rnn_tanh, torch.rnn_relu)},
        torch.Tensor.detach_: _detach_,
        functional.rrelu: _rrelu,
        functional.cross_entropy: _cross_entropy,
        functional.embedding_bag: _embedding_bag,
        functional.gaussian_nll_loss: _gaussian_nll_loss,
    }


def _detach_(tensor: Tensor) -> Tensor:
    return tensor.copy_(tensor.detach())


def _dropouts() -> dict[object, Callable[..., Tensor]]:
    """Maps each dropout function, except the plain one out of place, to a form that makes a Dropout."""
    import torch
    from torch.nn import functional

    channels = functools.partial(_drop_channels, 2)
    alpha_of_channels = functools.partial(_drop_alpha, 2)
    # Tensors with these numbers of dims have no batch dim.
    of_functional: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
        functional.dropout: functional.dropout,
        functional.dropout1d: lambda x, p, train: _drop_channels(1 if x.dim() == 2 else 2, x, p, train),
        functional.dropout2d: channels,
        functional.dropout3d: lambda x, p, train: _drop_channels(1 if x.dim() == 4 else 2, x, p, train),
        functional.alpha_dropout: functools.partial(_drop_alpha, None),
        functional.feature_alpha_dropout: alpha_of_channels,
    }
    plain: dict[str, Callable[..., Tensor]] = {
        "dropout": torch.dropout,
        "feature_dropout": channels,
        "alpha_dropout": functools.partial(_drop_alpha, None),
        "feature_alpha_dropout": alpha_of_channels,
    }
    return {
        **{one: _in_either_form(one, drop) for one, drop in of_functional.items()},
        **{getattr(torch, name): drop for name, drop in plain.items() if name != "dropout"},
        **{getattr(torch, f"{name}_"): functools.partial(_in_place, drop) for name, drop in plain.items()},
    }


def _in_place(drop: Callable[..., Tensor], input: Tensor, p: float, train: bool) -> Tensor:
    return input.copy_(drop(input, p, train))


def _in_either_form(function: Callable[..., Tensor], drop: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps `drop` with the signature of a function of `torch.nn.functional`: with `inplace` it copies the result into its input."""
    signature = inspect.signature(function)

    def dropout(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        input, p, training, inplace = bound.args
        made = drop(input, p, training)
        return input.copy_(made) if inplace else made

    return dropout


def _drop_channels(lead: int | None, input: Tensor, p: float, train: bool) -> Tensor:
    return input * _mask(lead, input, p) if train and p else input


def _drop_alpha(lead: int | None, input: Tensor, p: float, train: bool) -> Tensor:
    """Sets dropped elements to SELU's lowest value, and preserves mean and variance.

    Where the Dropout in the graph is off, its mask is all ones, and so this function changes nothing either.
    """
    import torch

    if not train or not p or p == 1:
        return input * 0 if train and p else input
    mask = _mask(lead, input, p)
    a, bits = 1 / math.sqrt((_SELU**2 * p + 1) * (1 - p)), mask * (1 - p)
    return torch.where(mask == 1, input, input * bits * a + (bits - (1 - p)) * _SELU * a)


def _mask(lead: int | None, input: Tensor, p: float) -> Tensor:
    """Returns a Dropout of ones: one for each element, or one for each index of the first `lead` dims."""
    import torch

    shape = input.shape if lead is None else (*input.shape[:lead], *[1] * (input.dim() - lead))
    return torch.dropout(input.new_ones(shape), p, True)


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    from torch.nn import functional

    if training:
        return functional.rrelu(input, lower, upper, training, inplace)
    return functional.leaky_relu(input, (lower + upper) / 2, inplace)


def _rnn(
    function: Callable[..., tuple[Tensor, Tensor]],
    input: Tensor,
    hidden: Tensor,
    weights: list[Tensor],
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Runs an RNN layer by layer, with a dropout between the layers."""
    import torch

    if len(options) != 6 or not isinstance(options[1], int):  # a packed sequence
        return function(input, hidden, weights, *options)
    has_biases, layers, share, train, bidirectional, batch_first = options
    if not share or not train or layers == 1:
        return function(input, hidden, weights, *options)
    each, states = len(weights) // layers, []
    for k, state in enumerate(hidden.chunk(layers)):
        input = torch.dropout(input, share, train) if k else input
        own = weights[k * each : (k + 1) * each]
        input, state = function(input, state, own, has_biases, 1, 0.0, train, bidirectional, batch_first)
        states.append(state)
    return input, torch.cat(states)


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
    """(1 - s) nll + s / C sum over classes of -log p w; for probabilities t, the sum of -log p w ((1 - s) t + s / C)."""
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
    """Returns the sum, mean or maximum of each bag's rows without those of padding; zeros for an empty bag."""
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
