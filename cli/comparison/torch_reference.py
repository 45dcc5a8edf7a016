"""Runs torch itself as the reference of `partc verify`: the outputs of a module, and a training by autograd and torch.optim.

The training takes the whole batch, in the model's own precision, without dropout and late updates: the plan's microbatches, ranks and
rounding are compared with the unsharded model (`verify_training.py`). BatchNorm layers train where the plan trains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from partc.cli.comparison.verdict import Case
from partc.compiler.frontend.torch.torch_model import TorchModel, quiet, without_dropout
from partc.compiler.ir.graph import name_of
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.artifact.training.lr_schedule import rate_of

if TYPE_CHECKING:
    import torch
    from partc.compiler.ir.training import ParameterOptions, Training
    from partc.compiler.plan.training.optimizer import Optimizer
    from partc.compiler.plan.training.rules import TrainRules

Arrays: TypeAlias = dict[str, Array]


def torch_outputs(case: Case) -> tuple[Arrays, list[str]]:
    """Returns the module's outputs for the inputs, by name, and lines that name the parts that are not compared with torch."""
    from partc.compiler.frontend.torch.graph_sessions import drawn_outputs

    if case.torch_model is None:
        return {}, []
    values = {spec.name: np.asarray(case.values[spec.name]) for spec in case.torch_model.inputs}
    try:
        made = case.torch_model.run(values)
    except Exception as error:  # forward may raise anything for these inputs
        return {}, [f"torch's forward does not take these inputs, and is not compared: {_line(error)}"]
    names = {port.name for port in case.report.manifest.outputs} - {*drawn_outputs(case.source.model)}
    return {name: array for name, array in made.items() if name in names}, []


@dataclass
class TorchTraining:
    """The losses of all steps, the tensors after the last step, and the gradients of the first step.

    Names are those in an artifact's training.
    """

    values: Arrays = field(default_factory=dict)
    gradients: Arrays = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def torch_training(
    torch_model: TorchModel, training: Training, loss: str, records: Mapping[str, Array], steps: int, folder: Path
) -> TorchTraining:
    """Trains the module by a plan's rules, `steps` times on the same batch, and restores its tensors; `folder`: the plan's folder."""

    trained = TorchTraining()
    options = {name_of(value): one for value, one in training.parameters.items() if not one.frozen}
    unlike = sorted({kind for one in options.values() if (kind := _unlike(one.optimizer or training.rules.optimizer))})
    try:
        with _training(torch_model, training) as tensors:
            rates = rate_of(training.rules.schedule, training.rules.optimizer.lr, folder=folder)
            count = 1 if unlike else steps
            _train(torch_model, training.rules, options, tensors, loss, records, count, rates, trained)
            if unlike:
                trained.notes.append(
                    f"{', '.join(unlike)} is not in torch.optim: the first loss and the first gradients alone are compared with torch"
                )
            else:
                kept = {
                    **{name: tensors[name] for name in options if name in tensors},
                    **_statistics(torch_model, tensors),
                }
                trained.values |= {name: one.detach().cpu().numpy().copy() for name, one in kept.items()}
    except Exception as error:  # a module may raise anything in training
        return TorchTraining(notes=[f"torch does not train the module, and is not compared: {_line(error)}"])
    if missing := [name for name in options if name not in tensors]:
        trained.notes.append(
            f"torch has no parameter of its own for {', '.join(missing[:3])}, which the plan separates"
        )
    return trained


def _train(
    torch_model: TorchModel,
    rules: TrainRules,
    options: Mapping[str, ParameterOptions],
    tensors: Mapping[str, torch.Tensor],
    loss: str,
    records: Mapping[str, Array],
    steps: int,
    rate: Callable[[int], float],
    trained: TorchTraining,
) -> None:
    import torch

    inputs = {name: torch.from_numpy(np.array(array)) for name, array in records.items()}
    learned = {name: tensors[name] for name in options if name in tensors}
    optimizers = [_optimizer(tensor, options[name], rules.optimizer) for name, tensor in learned.items() if steps > 1]
    rates = [[float(group["lr"]) for group in one.param_groups] for one in optimizers]
    for step in range(steps):
        for tensor in learned.values():
            tensor.grad = None
        made = _loss(rules, torch_model.call(tensors if torch_model.stored else None, inputs), inputs)
        made.backward()  # type: ignore[no-untyped-call]
        trained.values[f"{loss}, step {step + 1}"] = np.array(made.detach().item(), np.float32)
        for tensor in learned.values():
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        if step == 0:
            trained.gradients |= {
                f"{name}.grad": one.grad.cpu().numpy().copy() for name, one in learned.items() if one.grad is not None
            }
        if rules.clipping.norm is not None:
            torch.nn.utils.clip_grad_norm_(learned.values(), rules.clipping.norm)
        if rules.clipping.value is not None:
            torch.nn.utils.clip_grad_value_(learned.values(), rules.clipping.value)
        share = rate(step) / rules.optimizer.lr if rules.optimizer.lr else 1.0
        for optimizer, own in zip(optimizers, rates, strict=True):
            for group, first in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = first * share
            optimizer.step()


@contextmanager
def _training(torch_model: TorchModel, training: Training) -> Iterator[dict[str, torch.Tensor]]:
    """A context in which the module is in the plan's training mode; afterwards it is as before.

    Yields the module's tensors, of which the plan's parameters require gradients. A module without weights of its own is called with copies
    of those that are stored.
    """
    import torch

    module = torch_model.module
    learned = {name_of(value) for value, one in training.parameters.items() if not one.frozen}
    frozen = {name_of(value) for value, one in training.parameters.items() if one.frozen}
    modes = {one: one.training for one in module.modules()}
    buffers = [(one, dict(one._buffers)) for one in module.modules()]
    tensors = _tensors(torch_model)
    before = {id(one): (one, one.detach().clone(), one.requires_grad, one.grad) for one in tensors.values()}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for tensor in tensors.values():
            tensor.requires_grad_(False)
        for name in learned & tensors.keys():
            tensors[name].requires_grad_(True)
        is_training = module.training
        for path, layer in module.named_modules():
            if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
                own = {f"{path}.{name}".lstrip(".") for name in ("weight", "bias")} & tensors.keys()
                layer.training = (layer.training or not is_training) and not (own and own <= frozen)
        with quiet(), without_dropout(module), torch.enable_grad():
            yield tensors
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for owner, held in buffers:
            owner._buffers.update(held)
        with torch.no_grad():
            for tensor, first, needs, gradient in before.values():
                tensor.requires_grad_(False)
                tensor.copy_(first)
                tensor.requires_grad_(needs)
                tensor.grad = gradient
        for layer, mode in modes.items():
            layer.training = mode


def _tensors(torch_model: TorchModel) -> dict[str, torch.Tensor]:
    """Maps names to parameters and buffers: the module's own, or copies of those that are stored."""
    module = torch_model.module
    if not torch_model.stored:
        return {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
    copies: dict[int, torch.Tensor] = {}
    found = torch_model.tensors()
    return {name: copies.setdefault(id(one), one.detach().clone()) for name, one in found.items()}


def _statistics(torch_model: TorchModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the floating-point buffers after the last step."""
    buffers = dict(torch_model.module.named_buffers(remove_duplicate=False))
    now = {name: tensors[name] for name in buffers} if torch_model.stored else buffers
    return {name: one for name, one in now.items() if one.is_floating_point()}


def _loss(rules: TrainRules, outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Computes the plan's loss of a batch with torch's functions."""
    import torch
    from torch.nn import functional

    said: Any = rules.loss
    y = outputs[said.output]
    if said.type == "output":
        return y
    labels = inputs[said.labels].to(y.device)
    reduction = "sum" if said.reduction == "sum" else "mean"
    numbers = {
        key: torch.tensor(one, dtype=y.dtype) for key in ("weights", "pos_weight") if (one := getattr(said, key, None))
    }
    match said.type:
        case "softmax_cross_entropy":
            axis = said.axis if said.axis is not None else (-1 if y.ndim <= 3 else 1)
            y = y.movedim(axis, -1)
            labels = labels.to(y.dtype).movedim(axis, -1) if said.probabilities else labels.long()
            ignored = -100 if said.ignore_index is None else said.ignore_index
            return functional.cross_entropy(
                y.reshape(-1, y.shape[-1]),
                labels.reshape(-1, y.shape[-1]) if said.probabilities else labels.reshape(-1),
                numbers.get("weights"),
                ignore_index=ignored,
                label_smoothing=said.label_smoothing,
                reduction=reduction,
            )
        case "binary_cross_entropy":
            weight = numbers.get("pos_weight")
            return functional.binary_cross_entropy_with_logits(
                y, labels.to(y.dtype), pos_weight=weight, reduction=reduction
            )
        case "mean_squared":
            return functional.mse_loss(y, labels.to(y.dtype), reduction=reduction)
        case _:
            return functional.l1_loss(y, labels.to(y.dtype), reduction=reduction)


def _classes() -> dict[str, tuple[Any, Callable[[Mapping[str, float]], dict[str, Any]]]]:
    """Maps each optimizer of a plan to torch's class, and a function from the plan's numbers to that class's options."""
    from torch import optim

    def adam(hyper: Mapping[str, float]) -> dict[str, Any]:
        return {"betas": (hyper["beta1"], hyper["beta2"]), "eps": hyper["eps"]}

    def rmsprop(hyper: Mapping[str, float]) -> dict[str, Any]:
        own = {key: hyper[key] for key in ("alpha", "eps", "momentum")}
        return {**own, "centered": bool(hyper["centered"])}

    return {
        "sgd": (optim.SGD, lambda hyper: {}),
        "momentum": (optim.SGD, lambda hyper: {"momentum": hyper["momentum"]}),
        "nesterov": (optim.SGD, lambda hyper: {"momentum": hyper["momentum"], "nesterov": True}),
        "adagrad": (
            optim.Adagrad,
            lambda hyper: {"initial_accumulator_value": hyper["initial_accumulator"], "eps": hyper["eps"]},
        ),
        "rmsprop": (optim.RMSprop, rmsprop),
        "adam": (optim.Adam, adam),
        "adamw": (optim.AdamW, adam),
    }


def _unlike(optimizer: Optimizer) -> str:
    """Returns the type of an optimizer that torch lacks; empty where torch has it."""
    known = optimizer.type in _classes() and not optimizer.hyper.get("nesterov")
    return "" if known else optimizer.type


def _optimizer(tensor: torch.Tensor, own: ParameterOptions, common: Optimizer) -> torch.optim.Optimizer:
    """Returns torch's optimizer for one parameter."""
    chosen = own.optimizer or common
    made, options = _classes()[chosen.type]
    decay = chosen.weight_decay if own.weight_decay is None else own.weight_decay
    numbers = {name: float(np.float32(number)) for name, number in chosen.hyper.items()}
    found: torch.optim.Optimizer = made([tensor], lr=chosen.lr * own.lr, weight_decay=decay, **options(numbers))
    return found


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
