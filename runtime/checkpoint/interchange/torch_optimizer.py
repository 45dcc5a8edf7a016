"""Converts between the states of a `torch.optim` optimizer and of a program, which name the same tensors of a parameter differently.

    torch    state_dict()["state"][3]["momentum_buffer"]    tensors by the number of a parameter, in the order of the groups
    partc    "fc1.weight.momentum"                          tensors by the name of the parameter

A parameter's number is its index in the parameter lists from which the optimizer was constructed. The file determines the parameter of a
number in one of three ways: by `param_names` (an optimizer of `named_parameters()`), by names in place of numbers (torch.distributed), or
by the order of its weights: `model.parameters()` lists them in the model's order, tied ones once. Two groups are assumed to be the
parameters with weight decay, which have two dims or more, and the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from .torch_file import TorchFile, torch_module

if TYPE_CHECKING:
    import torch

_NAMES = {"momentum": "momentum_buffer"}
"""Maps the name of a slot to torch's name where they differ."""
STEP = "step"


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer: the tensor of each slot (`fc1.weight.exp_avg`), and its count of steps, None where it has no count."""

    slots: Mapping[str, torch.Tensor]
    step: int | None


@dataclass(frozen=True)
class StateNames:
    """The names of a training's state: `slots` maps each parameter's name to a mapping from torch's slot names to the slots' tensors."""

    slots: Mapping[str, Mapping[str, str]]
    statistics: frozenset[str]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, str]]) -> StateNames:
        """Builds the names from tensors, each as a tuple of its name, its kind and the name of its parameter."""
        rows = [*dict.fromkeys(tensors)]
        slots: dict[str, dict[str, str]] = {name: {} for name, kind, _ in rows if kind == "parameter"}
        for name, kind, parameter in rows:
            if kind == "optimizer" and parameter in slots:
                slot = name.removeprefix(f"{parameter}.")
                slots[parameter][_NAMES.get(slot, slot)] = name
        return cls(slots, frozenset(name for name, kind, _ in rows if kind == "statistics"))


def parameter_keys(file: TorchFile, ours: StateNames) -> dict[str, Any]:
    """Maps each parameter's name to its key in the optimizer's state; CheckpointError where the file does not determine it."""
    assert file.optimizer is not None
    groups = file.optimizer["param_groups"]
    by_name: dict[str, Any] = {}
    unnamed = []
    for group in groups:
        keys, names = group["params"], group.get("param_names")
        if names is None and all(isinstance(key, str) for key in keys):
            names = keys
        if names is None:
            unnamed.append(keys)
        else:
            by_name |= {name.removeprefix(file.prefix): key for name, key in zip(names, keys, strict=True)}
    if not unnamed:
        tied = file.tied()
        return {tied.get(name, name): key for name, key in by_name.items()}
    for names in _orders(file, ours):
        for split in _splits(file, names, [len(keys) for keys in unnamed]):
            keyed = {
                name: key
                for some, keys in zip(split, unnamed, strict=True)
                for name, key in zip(some, keys, strict=True)
            }
            if not by_name and _fits(file, keyed):
                return keyed
    sizes = " and ".join(str(len(keys)) for keys in unnamed)
    raise CheckpointError(
        f"{file.path}: which parameters the {sizes} of the optimizer's groups are does not follow from the file's weights\n"
        "  help: make the optimizer of model.named_parameters(), or give each group its 'param_names', and save again"
    )


def _orders(file: TorchFile, ours: StateNames) -> Iterator[list[str]]:
    """Yields the parameter lists from which the optimizer may have been constructed: all parameters, and only the trained ones."""
    tied = file.tied()
    first = [name for name, own in tied.items() if own == name]
    parameters = [name for name in first if file.weights[name].is_floating_point() and name not in ours.statistics]
    yield parameters
    yield [name for name in first if any(tied[other] == name for other in ours.slots if other in tied)]


def _splits(file: TorchFile, names: Sequence[str], sizes: Sequence[int]) -> Iterator[list[list[str]]]:
    """Yields the known ways in which scripts split the parameters into groups of these sizes."""
    if sizes == [len(names)]:
        yield [[*names]]
    matrices = [name for name in names if file.weights[name].dim() > 1]
    others = [name for name in names if file.weights[name].dim() <= 1]
    for split in ([matrices, others], [others, matrices]):
        if [len(some) for some in split] == sizes:
            yield split


def _fits(file: TorchFile, keyed: Mapping[str, Any]) -> bool:
    """Whether each element-wise slot of the optimizer has the shape of its parameter."""
    assert file.optimizer is not None
    state = file.optimizer["state"]
    return all(
        one.shape == file.weights[name].shape
        for name, key in keyed.items()
        for slot, one in state.get(key, {}).items()
        if slot in ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg") and one is not None
    )


def read_state(file: TorchFile, ours: StateNames) -> OptimizerState:
    """Reads the optimizer's state for the parameters of a program.

    CheckpointError lists all slots that the file lacks or that the program does not have, and counts of steps that differ.
    """
    torch = torch_module()
    assert file.optimizer is not None
    state, keys, tied = file.optimizer["state"], parameter_keys(file, ours), file.tied()
    slots: dict[str, Any] = {}
    steps: dict[int, str] = {}
    problems = []
    for parameter, own in ours.slots.items():
        key = keys.get(tied.get(parameter, parameter))
        held = state.get(key, {}) if key is not None else {}
        stored = {slot: one for slot, one in held.items() if isinstance(one, torch.Tensor) and slot != STEP}
        if STEP in held:
            steps.setdefault(int(held[STEP]), parameter)
        if stored and stored.keys() != own.keys():
            theirs, kept = (", ".join(sorted(some)) or "nothing" for some in (stored, own))
            problems.append(f"{file.path}: the optimizer keeps {theirs} of '{parameter}'; the program's keeps {kept}")
        slots |= {own[slot]: one for slot, one in stored.items() if slot in own}
    if len(steps) > 1:
        said = ", ".join(f"{step} for '{name}'" for step, name in [*steps.items()][:4])
        problems.append(f"{file.path}: the optimizer has counted other steps for each parameter: {said}")
    if problems:
        help = "compile with the optimizer of the file, or import its weights alone with --weights"
        raise CheckpointError("\n".join([*problems, f"  help: {help}"]))
    return OptimizerState(slots, next(iter(steps), None))


def optimizer_content(
    file: TorchFile, ours: StateNames, slots: Mapping[str, torch.Tensor], step: int
) -> dict[str, Any]:
    """Returns the file's optimizer `state_dict` with other slots: groups stay, the state of each trained parameter is replaced."""
    torch = torch_module()
    assert file.optimizer is not None
    keys, tied = parameter_keys(file, ours), file.tied()
    state = {**file.optimizer["state"]}
    for parameter, own in ours.slots.items():
        key = keys.get(tied.get(parameter, parameter))
        if key is not None and own:
            counted = {} if {*own} == {"momentum_buffer"} else {STEP: torch.tensor(float(step))}
            state[key] = {**counted, **{slot: slots[name] for slot, name in own.items()}}
    return {**file.optimizer, "state": state}
