"""The states of an optimizer of `torch.optim` and of a program, which keep the same tensors of a parameter under similar names.

    torch     state_dict()["state"][3]["momentum_buffer"]     tensors by the number of a parameter, in the order of the groups
    partc     "fc1.weight.momentum"                           tensors by the name of the parameter

The number of a parameter is its place in the lists that the optimizer was made of. Which parameter that is, the file says by `param_names`
(an optimizer of `named_parameters()`), by names in place of numbers (torch.distributed), or by its weights: `model.parameters()` lists them
in the order of the model, tied ones once, and two groups are those that a decay is for, of two dims and more, and the others.
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
"""Maps the name of a slot to torch's, where they differ."""
STEP = "step"


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps: by slot (`fc1.weight.exp_avg`) a tensor, and how many steps it has counted, None where it counts none."""

    slots: Mapping[str, torch.Tensor]
    step: int | None


@dataclass(frozen=True)
class StateNames:
    """What a training keeps, by its names: `slots` has by the name of each parameter, by torch's name of a slot, that slot's tensor."""

    slots: Mapping[str, Mapping[str, str]]
    statistics: frozenset[str]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, str]]) -> StateNames:
        """What these tensors are, each given by its name, its kind and the name of its parameter."""
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
    found: dict[str, Any] = {}
    unnamed = []
    for group in groups:
        keys, names = group["params"], group.get("param_names")
        if names is None and all(isinstance(key, str) for key in keys):
            names = keys
        if names is None:
            unnamed.append(keys)
        else:
            found |= {name.removeprefix(file.prefix): key for name, key in zip(names, keys, strict=True)}
    if not unnamed:
        tied = file.tied()
        return {tied.get(name, name): key for name, key in found.items()}
    for names in _orders(file, ours):
        for split in _splits(file, names, [len(keys) for keys in unnamed]):
            keyed = {
                name: key
                for some, keys in zip(split, unnamed, strict=True)
                for name, key in zip(some, keys, strict=True)
            }
            if not found and _fits(file, keyed):
                return keyed
    sizes = " and ".join(str(len(keys)) for keys in unnamed)
    raise CheckpointError(
        f"{file.path}: which parameters the {sizes} of the optimizer's groups are does not follow from the file's weights\n"
        "  help: make the optimizer of model.named_parameters(), or give each group its 'param_names', and save again"
    )


def _orders(file: TorchFile, ours: StateNames) -> Iterator[list[str]]:
    """The lists of parameters that an optimizer may have been made of: all, and those that are trained."""
    tied = file.tied()
    first = [name for name, own in tied.items() if own == name]
    parameters = [name for name in first if file.weights[name].is_floating_point() and name not in ours.statistics]
    yield parameters
    yield [name for name in first if any(tied[other] == name for other in ours.slots if other in tied)]


def _splits(file: TorchFile, names: Sequence[str], sizes: Sequence[int]) -> Iterator[list[list[str]]]:
    """The ways to give the parameters to groups of these sizes that scripts are known to use."""
    if sizes == [len(names)]:
        yield [[*names]]
    matrices = [name for name in names if file.weights[name].dim() > 1]
    others = [name for name in names if file.weights[name].dim() <= 1]
    for split in ([matrices, others], [others, matrices]):
        if [len(some) for some in split] == sizes:
            yield split


def _fits(file: TorchFile, keyed: Mapping[str, Any]) -> bool:
    """Whether what the optimizer keeps of each parameter element by element has the parameter's shape."""
    assert file.optimizer is not None
    state = file.optimizer["state"]
    return all(
        one.shape == file.weights[name].shape
        for name, key in keyed.items()
        for slot, one in state.get(key, {}).items()
        if slot in ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg") and one is not None
    )


def read_state(file: TorchFile, ours: StateNames) -> OptimizerState:
    """The state in the file for the parameters of a program. CheckpointError has all that its optimizer does not keep, or lacks."""
    torch = torch_module()
    assert file.optimizer is not None
    state, keys, tied = file.optimizer["state"], parameter_keys(file, ours), file.tied()
    slots: dict[str, Any] = {}
    steps: dict[int, str] = {}
    problems = []
    for parameter, own in ours.slots.items():
        key = keys.get(tied.get(parameter, parameter))
        held = state.get(key, {}) if key is not None else {}
        found = {slot: one for slot, one in held.items() if isinstance(one, torch.Tensor) and slot != STEP}
        if STEP in held:
            steps.setdefault(int(held[STEP]), parameter)
        if found and found.keys() != own.keys():
            theirs, kept = (", ".join(sorted(some)) or "nothing" for some in (found, own))
            problems.append(f"{file.path}: the optimizer keeps {theirs} of '{parameter}'; the program's keeps {kept}")
        slots |= {own[slot]: one for slot, one in found.items() if slot in own}
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
    """The optimizer's `state_dict` of a file with other slots: its groups, and of each parameter that is trained what is kept of it."""
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
