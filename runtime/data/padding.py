"""The length to which the ragged records of a batch are padded.

The longest of the global batch, also where a rank reads a shard, rounded up to the spec's multiple and to what a cut of the dim
needs. Fields whose inputs name the dim alike get one length; an input whose dim is a number gets that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from partc.runtime.artifact.tensors.boxes import divisor
from partc.runtime.artifact.training.data_spec import Spec

from ..artifact.format import Port
from .code import Transform
from .fields import Index


class RaggedData(Protocol):
    """Ragged fields of a dataset, or of one batch of a stream."""

    @property
    def spec(self) -> Spec:
        """What the plan says of the data."""
        ...

    @property
    def transform(self) -> Transform | None:
        """What comes between the fields and the inputs."""
        ...

    def ragged(self, names: Collection[str]) -> list[str]:
        """The ragged ones of these fields."""
        ...

    def lengths(self, name: str) -> Index:
        """The lengths of all records of a ragged field."""
        ...


@dataclass(frozen=True, eq=False)
class PaddedLength:
    """The padded length of a batch that some ragged fields share."""

    names: tuple[str, ...]
    longest: Index
    """For each record, the length of its longest field among these."""
    multiple: int
    fixed: int | None

    def of(self, indices: Index) -> int:
        """The length for a batch."""
        if self.fixed is not None:
            return self.fixed
        return -(-max(int(self.longest[indices].max()), 1) // self.multiple) * self.multiple


def padded_lengths(
    data: RaggedData, ports: Sequence[Port], names: Collection[str]
) -> tuple[list[PaddedLength], list[str]]:
    """The padded lengths of the ragged ones among these fields, and problems: records longer than their input.

    Behind a transform it is not known which input a field becomes: each field has a length of its own, divisible by all shard counts.
    """
    inputs = {} if data.transform else {port.name: port for port in ports}
    all_cuts = math.lcm(*(_shards_of_length(port) for port in ports)) if data.transform else 1
    groups: dict[str | int, list[str]] = {}
    for name in data.ragged(names):
        dim = _dim(inputs.get(name))
        groups.setdefault(name if dim is None else f"dim {dim}", []).append(name)
    found, problems = [], []
    for members in groups.values():
        longest = np.maximum.reduce([data.lengths(name) for name in members])
        dim = _dim(inputs.get(members[0]))
        fixed = dim if isinstance(dim, int) else None
        if fixed is not None and longest.max(initial=0) > fixed:
            problems.append(
                f"input '{members[0]}' takes records of {fixed}; {int((longest > fixed).sum())} of {len(longest)} "
                f"are longer, up to {longest.max()}\n  help: shorten them, or compile the model for a dynamic dim"
            )
        cuts = (_shards_of_length(inputs[name]) for name in members if name in inputs)
        found.append(PaddedLength(tuple(members), longest, math.lcm(data.spec.multiple, all_cuts, *cuts), fixed))
    return found, problems


def _dim(port: Port | None) -> int | str | None:
    return port.shape[1] if port is not None and port.shape is not None and len(port.shape) > 1 else None


def _shards_of_length(port: Port) -> int:
    return divisor(port.boxes, 1) if port.boxes and len(port.boxes[0]) > 1 else 1
