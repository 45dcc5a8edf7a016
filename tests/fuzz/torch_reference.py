"""PyTorch's side of `random_torch.py`: a task of `torch_plans.py` trained by autograd and torch.optim, with loops of its own for the rest.

    want = Reference(net, task, start)
    loss = want.step(batch)       before the update, as partc tells it
    want.tensors()                parameters and running statistics

Of its own are: microbatches (statistics of a batch normalization are those of one, running ones move once a step by the mean over all),
shares of ranks, the clipped gradient, the loss scale and the steps that it skips, and the queue of a late update. The rest is torch's.
Losses and gradients are those of the whole batch, in float64; also in float32, with a 16-bit precision under torch's autocast (`low`),
which says how far rounding goes.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch_networks import Network
from torch_plans import Task

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


class Reference:
    """A module with its optimizers, and the state of loops of its own."""

    def __init__(self, net: Network, task: Task, start: Mapping[str, np.ndarray], low: bool = False) -> None:
        self.net, self.task, self.low = net, task, low
        self.module = copy.deepcopy(net.module)
        self.module.to(torch.float32 if low else torch.float64)
        self.names = dict(self.module.named_parameters())
        state = {name: torch.from_numpy(np.array(one)) for name, one in start.items()}
        left = self.module.load_state_dict(state, strict=False)
        assert not left.unexpected_keys, left.unexpected_keys
        self.count = self.applied = 0
        self.optimizers: list[tuple[torch.optim.Optimizer, list[float]]] = []
        self.late: dict[str, deque[torch.Tensor]] = {}
        self._optimizers()
        self.scale, self.good, self.dynamic = self._scale()

    def _scale(self) -> tuple[float, int, dict[str, float] | None]:
        scale = (self.task.precision or {}).get("loss_scale", "none")
        usual = {"first": 65536.0, "growth": 2.0, "backoff": 0.5, "interval": 2000.0}
        if isinstance(scale, dict) or scale == "dynamic":
            usual |= scale if isinstance(scale, dict) else {}
            return usual["first"], 0, usual
        return (float(scale) if isinstance(scale, int) else 1.0), 0, None

    def _optimizers(self) -> None:
        groups: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {}
        for name in self.names:
            own = self.task.parameters.get(name, {})
            if own.get("frozen"):
                self.names[name].requires_grad_(False)
                continue
            if "staleness" in own:
                zero = torch.zeros_like(self.names[name])
                self.late[name] = deque([zero] * int(own["staleness"]))
            other = own.get("optimizer")
            kind = str(other["type"]) if isinstance(other, dict) else self.task.optimizer
            options = dict(other) if isinstance(other, dict) else dict(self.task.options)
            options.pop("type", None)
            if "weight_decay" in own:
                options["weight_decay"] = own["weight_decay"]
            options["lr"] = float(options["lr"]) * float(own.get("lr", 1.0))
            groups.setdefault(kind, []).append((name, options, own))
        for kind, some in groups.items():
            given = [{"params": [self.names[name]], **torchs(kind, options)} for name, options, _ in some]
            # torch takes the first value of Adagrad's sums from the constructor alone.
            first = {key: given[0][key] for key in ("initial_accumulator_value",) if key in given[0]}
            made = CLASSES[kind](given, **first)
            self.optimizers.append((made, [float(group["lr"]) for group in made.param_groups]))

    def rate(self) -> float:
        """The share of the rate that the schedule says of this step."""
        said, k = self.task.schedule, self.applied
        if said is None:
            return 1.0
        first = float(self.task.options["lr"])  # type: ignore[arg-type]
        match said["type"]:
            case "step":
                return float(said["factor"]) ** (k // int(said["every"]))  # type: ignore[arg-type, call-overload]
            case "linear":
                return max(0.0, 1 - k / int(said["steps"]))  # type: ignore[call-overload]
            case _:
                least = float(said["minimum"]) / first  # type: ignore[arg-type]
                part = min(1.0, k / int(said["steps"]))  # type: ignore[call-overload]
                return least + (1 - least) * (1 + math.cos(math.pi * part)) / 2

    def step(self, batch: Mapping[str, np.ndarray]) -> float:
        """Forward, backward, update; the loss of the whole batch."""
        self.count += 1
        for parameter in self.names.values():
            parameter.grad = None
        before = self._statistics()
        loss, factor = self._loss(batch)
        (loss * (self.scale * factor)).backward()
        for parameter in self.names.values():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = {name: one.grad for name, one in self.names.items() if one.grad is not None}
        for one in gradients.values():
            one /= self.scale
        if self.dynamic is not None:
            if not all(bool(torch.isfinite(one).all()) for one in gradients.values()):
                self.scale, self.good = self.scale * self.dynamic["backoff"], 0
                self._put(before)
                return float(loss.detach())
            self.good += 1
            if self.good == self.dynamic["interval"]:
                self.scale, self.good = self.scale * self.dynamic["growth"], 0
        for name, queue in self.late.items():
            queue.append(gradients[name].clone())
            gradients[name].copy_(queue.popleft())
        self._clip(gradients)
        share = self.rate()
        for optimizer, rates in self.optimizers:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share
            optimizer.step()
        self.applied += 1
        return float(loss.detach())

    def _clip(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """By the norm of all gradients that are learned from, as torch.nn.utils.clip_grad_norm_ does."""
        said = self.task.clip or {}
        if "norm" in said:
            norm = torch.sqrt(sum((one.double().square().sum() for one in gradients.values()), torch.zeros(())))
            for one in gradients.values():
                one *= min(1.0, said["norm"] / (float(norm) + 1e-6))
        if "value" in said:
            for one in gradients.values():
                one.clamp_(-said["value"], said["value"])

    def _statistics(self) -> dict[str, torch.Tensor]:
        return {name: one.clone() for name, one in self.module.named_buffers() if one.is_floating_point()}

    def _put(self, values: Mapping[str, torch.Tensor]) -> None:
        """New running statistics, in tensors of their own: the backward pass may read the old."""
        for name, value in values.items():
            of, _, key = name.rpartition(".")
            self.module.get_submodule(of)._buffers[key] = value.clone()

    def _loss(self, batch: Mapping[str, np.ndarray]) -> tuple[torch.Tensor, float]:
        """The loss, and what its gradient is multiplied by."""
        task = self.task
        shares, parts = task.shares, task.parts
        at = np.arange(len(batch[task.labels])).reshape(shares, parts, -1)
        before = self._statistics()
        moved: dict[str, list[torch.Tensor]] = {name: [] for name in before}
        made: list[torch.Tensor] = []
        for k in range(parts if self.net.statistics else 1):
            some = at[:, k].ravel() if self.net.statistics else at.ravel()
            self._put(before)
            made.append(self.forward({name: one[some] for name, one in batch.items()}))
            for name, value in self._statistics().items():
                moved[name].append(value)
        self._put({name: torch.stack(values).mean(0) for name, values in moved.items()})
        order = np.concatenate([at[:, k].ravel() for k in range(parts)]) if self.net.statistics else at.ravel()
        y = torch.cat(made)[torch.from_numpy(np.argsort(order))]
        labels = torch.from_numpy(batch[task.labels])
        if task.loss.get("reduction") != "sum_over_ranks":
            return self.criterion(y, labels), 1.0
        each = [self.criterion(a, b) for a, b in zip(y.chunk(shares), labels.chunk(shares), strict=True)]
        return torch.stack(each).mean(), float(shares)

    def forward(self, batch: Mapping[str, np.ndarray]) -> torch.Tensor:
        """What the module makes of a batch."""
        kind = torch.float32 if self.low else torch.float64
        given = [torch.from_numpy(batch[name]) for name in self.net.inputs]
        given = [one.to(kind) if one.is_floating_point() else one for one in given]
        if not self.low:
            return self.module(*given)  # type: ignore[no-any-return]
        compute = str((self.task.precision or {}).get("compute", "float32"))
        with torch.autocast("cpu", getattr(torch, compute), enabled=compute != "float32"):
            return self.module(*given).float()  # type: ignore[no-any-return]

    def criterion(self, y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """torch's loss of outputs and labels."""
        said = self.task.loss
        reduction = "sum" if said.get("reduction") == "sum" else "mean"
        numbers = {key: torch.tensor(said[key], dtype=y.dtype) for key in ("weights", "pos_weight") if key in said}
        match said["type"]:
            case "softmax_cross_entropy":
                if y.ndim == 3:
                    y, labels = y.flatten(0, 1), labels.flatten()
                return functional.cross_entropy(
                    y,
                    labels,
                    numbers.get("weights"),
                    ignore_index=int(said.get("ignore_index", -100)),  # type: ignore[call-overload]
                    label_smoothing=float(said.get("label_smoothing", 0.0)),  # type: ignore[arg-type]
                    reduction=reduction,
                )
            case "binary_cross_entropy":
                return functional.binary_cross_entropy_with_logits(
                    y, labels.to(y.dtype), pos_weight=numbers.get("pos_weight"), reduction=reduction
                )
            case "mean_squared":
                return functional.mse_loss(y, labels.to(y.dtype), reduction=reduction)
            case _:
                return functional.l1_loss(y, labels.to(y.dtype), reduction=reduction)

    def evaluated(self, batches: Sequence[Mapping[str, np.ndarray]]) -> float:
        """The loss of an evaluation: of all records at once, by running statistics."""
        modes = {one: one.training for one in self.module.modules()}
        self.module.eval()
        with torch.no_grad():
            made = [self.forward(batch) for batch in batches]
        for one, training in modes.items():
            one.training = training
        y = torch.cat([one.reshape(-1, self.net.classes) for one in made])
        given = [torch.from_numpy(batch[self.task.labels]) for batch in batches]
        labels = torch.cat(
            [one.flatten() if self.task.labels == "label" else one.reshape(-1, y.shape[1]) for one in given]
        )
        return float(self.criterion(y, labels))

    def tensors(self) -> dict[str, np.ndarray]:
        """Parameters and running statistics, by the first of their names."""
        found = (*self.names.items(), *self.module.named_buffers())
        return {name: one.detach().double().numpy().copy() for name, one in found if one.is_floating_point()}


CLASSES: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "nesterov": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.999)},
    "adamw": {"betas": (0.9, 0.999)},
    "rmsprop": {"alpha": 0.99},
    "adafactor": {"eps": (float(np.finfo(np.float32).eps), 1e-3), "beta2_decay": -0.8},
}


def torchs(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a plan as torch's class takes them: float32, as partc's are; torch's defaults of them, too.

    Adafactor's first epsilon is that of float32 in partc, whatever the parameter's type.
    """
    found = {**DEFAULTS.get(kind, {}), **options}
    rounded = {key: float(np.float32(one)) for key, one in found.items() if isinstance(one, float)}
    found |= rounded
    if kind == "nesterov":
        found["nesterov"] = True
    if kind == "adagrad":
        found["initial_accumulator_value"] = found.pop("initial_accumulator")
    if "betas" in found:
        found["betas"] = tuple(float(np.float32(one)) for one in found["betas"])
    if kind == "adafactor":
        found.setdefault("weight_decay", 0.0)
    return found
