"""Values that are adjacent in one range of memory: the results of an AllReduce or ReduceScatter of several, and gradients of one update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ..artifact.format import Shape
from ..errors import ArtifactError
from .rank_file import RankFile


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
    """Returns a buffer for each AllReduce of several values, and for the results of each ReduceScatter of several values.

    ArtifactError where the shape of a value is not fixed.
    """
    buffers = []
    for call in file.calls:
        if not call.parts or call.kind.joins:
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
