"""Values that are adjacent in one range of memory: the results of an AllReduce or ReduceScatter of several, and gradients of one update."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ..artifact.format import Shape
from ..errors import ArtifactError
from .rank_file import RankFile
from .steps import Copy, Segment, StartCollective, Step


@dataclass(frozen=True)
class FlatBuffer:
    """Values of one type, adjacent in memory in the order of `members`; `elements` has their numbers of elements, `name` is the range's."""

    name: str
    type: str
    members: tuple[str, ...]
    elements: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements of all members."""
        return sum(self.elements)

    @property
    def places(self) -> dict[str, int]:
        """Maps each member to its first element in the buffer."""
        return dict(zip(self.members, accumulate(self.elements, initial=0), strict=False))


def coalesced_buffers(file: RankFile, shapes: Mapping[str, Shape]) -> list[FlatBuffer]:
    """Returns a buffer for each AllReduce of several values, and for the results of each ReduceScatter of several values on the host.

    ArtifactError where the shape of a value is not fixed.
    """
    buffers = []
    for step in file.steps:
        if not isinstance(step, StartCollective):
            continue
        call = step.call
        if not call.parts or call.kind.joins or (step.target and not call.in_one_buffer):
            continue
        fixed = {name: fixed_shape(shapes.get(name)) for name in call.outputs}
        if unknown := [name for name, shape in fixed.items() if shape is None]:
            raise ArtifactError(
                f"{file.where}: {call.op} of several values: the shape of '{unknown[0]}' is not fixed\n"
                "  help: compile again"
            )
        elements = tuple(prod(fixed[name] or ()) for name in call.outputs)
        buffers.append(
            FlatBuffer(call.result or f"{call.value} and on", file.collectives[call.tag].type, call.outputs, elements)
        )
    return buffers


def flat_places(file: RankFile, buffers: Sequence[FlatBuffer]) -> dict[str, tuple[str, int]]:
    """Maps each value in a flat buffer to the buffer's name and the value's first element in it.

    The inputs of an AllReduce of several values have the same places as its results.
    """
    found = {name: (buffer.name, at) for buffer in buffers for name, at in buffer.places.items()}
    for call in file.calls:
        if call.in_one_buffer:
            found |= {source: found[result] for source, result in call.parts if result in found}
    return found


def fixed_shape(shape: Shape) -> tuple[int, ...] | None:
    """Returns a shape whose dims are all numbers, as a tuple; None for any other."""
    numbers = [dim for dim in shape or () if isinstance(dim, int)]
    return tuple(numbers) if shape is not None and len(numbers) == len(shape) else None


def copy_runs(steps: Sequence[Step]) -> list[list[int]]:
    """Groups the indices of steps that are copies into runs: consecutive copies to one target of which none reads another one's result.

    A run counts as one point in time: its copies may be done in any order, and no two of its values share memory (`lifetimes.py`).
    """
    runs: list[list[int]] = []
    results: set[str] = set()
    for index, step in enumerate(steps):
        if not isinstance(step, Copy):
            continue
        last = steps[index - 1] if index else None
        if isinstance(last, Copy) and (last.to, last.task) == (step.to, step.task) and step.source not in results:
            runs[-1].append(index)
        else:
            runs.append([index])
            results = set()
        results.add(step.result)
    return runs


def run_ends(steps: Sequence[Step]) -> dict[int, tuple[int, int]]:
    """Maps the index of each step that is a copy to the first and the last index of its run."""
    return {index: (run[0], run[-1]) for run in copy_runs(steps) for index in run}


def copied_buffers(
    file: RankFile, laid: Sequence[FlatBuffer], shapes: Mapping[str, Shape], types: Mapping[str, str]
) -> list[FlatBuffer]:
    """Returns buffers for the values on the other side of runs of copies that have one side in `laid`; none of them is in `laid` itself.

    So a run of copies is one move of memory: gradients that are copied to an update, or parameters that are copied to their readers, are
    adjacent on both sides. A sum to which tasks add stays in its own place, where each task adds to it.
    """
    places = {name: (buffer.name, at) for buffer in laid for name, at in buffer.places.items()}
    outputs = {name for step in file.steps if isinstance(step, Segment) for name in step.outputs}
    outputs -= {name for step in file.steps if isinstance(step, Segment) and step.task for _, name in step.sums}
    results = {step.result for step in file.copies} - {*file.outputs}
    taken = set(places)
    buffers: list[FlatBuffer] = []
    for run in copy_runs(file.steps):
        copies = [step for index in run if isinstance(step := file.steps[index], Copy)]
        pairs = [(one.result, one.source) for one in copies] + [(one.source, one.result) for one in copies]
        groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for flat, other in pairs:
            fits = other in (results if flat in {one.source for one in copies} else outputs) and other not in taken
            if flat in places and fits and fixed_shape(shapes.get(other)) is not None and other in types:
                buffer, at = places[flat]
                groups.setdefault((buffer, types[other]), []).append((at, other))
        for (buffer, type), members in groups.items():
            names = tuple(dict.fromkeys(name for _, name in sorted(members) if name not in taken))
            if len(names) > 1:
                taken.update(names)
                buffers.append(
                    FlatBuffer(
                        f"copies of {buffer} {run[0]}",
                        type,
                        names,
                        tuple(prod(fixed_shape(shapes[one]) or ()) for one in names),
                    )
                )
    return buffers


def merged(spans: Collection[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merges moves of memory (source address, target address, bytes) that are adjacent on both sides."""
    joined: list[tuple[int, int, int]] = []
    for source, target, size in sorted(spans):
        if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (source, target):
            joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + size)
        else:
            joined.append((source, target, size))
    return joined
