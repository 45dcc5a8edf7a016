"""Finds the values of a rank that are in the memory of a target other than the host, by the rules of targets.

A value is on the target of the node that makes it; the result of a Copy is on the Copy's target. On the host are graph inputs and outputs,
all values that are communicated, and the sizes that Shape and Size compute. A tensor of the state is on the target of the node that makes
its next value, or else of its readers. In a file without targets every value is on the host.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..artifact.format import CPU
from ..devices.devices import Devices
from ..errors import ArtifactError
from .rank_file import RankFile
from .steps import Copy, LookUp, PostRecv, Segment, Send, StartCollective, Step, Update

_SIZES = ("Shape", "Size")
"""Ops whose results are on the host, on whichever target they run."""


def locations(file: RankFile, devices: Devices, state: Mapping[str, str] | None = None) -> dict[str, str]:
    """Maps each value that is not on the host to its target; ArtifactError where a step reads a value of another target.

    `state`: the targets of tensors that another program of the same rank has laid out.
    """
    targets: dict[str, str] = {}
    for step in file.steps:
        if isinstance(step, Copy):
            targets[step.result] = devices.target(step.to)
        elif isinstance(step, Segment) and step.target:
            sizes = {name for node in step.nodes if node.op_type in _SIZES and not node.domain for name in node.output}
            names = dict(step.output_pairs)
            sizes = {names[name] for name in sizes if name in names}
            targets |= {name: devices.target(step.target) for name in step.outputs if name not in sizes}
        elif isinstance(step, Update) and step.target:
            targets |= {name: devices.target(step.target) for node in step.nodes for name in node.output}
    homes = _homes(file, devices) if state is None else state
    for record in file.state:
        targets[record.value] = targets[record.next] if record.next in targets else homes.get(record.value, CPU)
    targets = {name: target for name, target in targets.items() if target != CPU}
    if targets:
        _refuse_unreachable(file, devices, targets)
    return targets


def _homes(file: RankFile, devices: Devices) -> dict[str, str]:
    """Maps each tensor of the state to the target of its readers."""
    kept = {record.value for record in file.state}
    homes: dict[str, str] = {}
    for step in file.steps:
        if isinstance(step, Segment | Update) and step.target:
            for name in step.inputs:
                if name in kept:
                    homes.setdefault(name, devices.target(step.target))
    return homes


def _refuse_unreachable(file: RankFile, devices: Devices, targets: Mapping[str, str]) -> None:
    problems = []
    for step in file.steps:
        target, read = _reader(step, devices)
        problems += [
            f"{file.where}: the {step} reads '{name}', which lies on {targets[name]}, and no Copy brings it to {target}"
            for name in read
            if targets.get(name, target) != target
        ]
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: the file was changed; compile again"]))


def _reader(step: Step, devices: Devices) -> tuple[str, tuple[str, ...]]:
    """Returns the target on which a step reads values, and the values; none for a Copy, which reads on any target."""
    match step:
        case Segment() | Update():
            return devices.target(step.target), tuple(step.inputs)
        case Send() | PostRecv():
            return CPU, (step.value,)
        case StartCollective() | LookUp():
            return CPU, (*step.call.inputs, *step.call.outputs)
    return CPU, ()


def used_targets(steps: list[Step], devices: Devices) -> list[str]:
    """Returns the targets that a program uses, sorted."""
    computing = {devices.target(step.target) for step in steps if isinstance(step, Segment | Update)}
    return sorted(computing | {devices.target(step.to) for step in steps if isinstance(step, Copy)})
