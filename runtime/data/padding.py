"""Computes the length to which the ragged records of a batch are padded.

It is the longest length in the global batch, even if a rank reads only a shard, rounded up to a multiple of the spec's `multiple` and of
the number of shards of the dim. Fields whose inputs have the same name for the dim get one length; if the dim of an input is a number, that
is the length.
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
    """The ragged fields of a dataset, or of one batch of a stream."""

    @property
    def spec(self) -> Spec:
        """The plan's settings of the data."""
        ...

    @property
    def transform(self) -> Transform | None:
        """The transform from fields to inputs, None where there is none."""
        ...

    def ragged(self, names: Collection[str]) -> list[str]:
        """Returns those of the named fields that are ragged."""
        ...

    def lengths(self, name: str) -> Index:
        """Returns the lengths of all records of a ragged field."""
        ...


@dataclass(frozen=True, eq=False)
class PaddedLength:
    """The rule for the padded length that some ragged fields share."""

    names: tuple[str, ...]
    longest: Index
    """For each record, the length of its longest field among these."""
    multiple: int
    fixed: int | None

    def of(self, indices: Index) -> int:
        """Returns the padded length for a batch of these records."""
        if self.fixed is not None:
            return self.fixed
        return -(-max(int(self.longest[indices].max()), 1) // self.multiple) * self.multiple


def padded_lengths(
    data: RaggedData, ports: Sequence[Port], names: Collection[str]
) -> tuple[list[PaddedLength], list[str]]:
    """Returns the padded lengths of the ragged fields among `names`, and a problem for each field with records too long for its input.

    With a transform it is not known which input a field becomes: each field then has its own length, divisible by the shard counts of all
    inputs.
    """
    inputs = {} if data.transform else {port.name: port for port in ports}
    all_cuts = math.lcm(*(_shards_of_length(port) for port in ports)) if data.transform else 1
    groups: dict[str | int, list[str]] = {}
    for name in data.ragged(names):
        dim = _dim(inputs.get(name))
        groups.setdefault(name if dim is None else f"dim {dim}", []).append(name)
    lengths, problems = [], []
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
        lengths.append(PaddedLength(tuple(members), longest, math.lcm(data.spec.multiple, all_cuts, *cuts), fixed))
    return lengths, problems


def _dim(port: Port | None) -> int | str | None:
    return port.shape[1] if port is not None and port.shape is not None and len(port.shape) > 1 else None


def _shards_of_length(port: Port) -> int:
    return divisor(port.boxes, 1) if port.boxes and len(port.boxes[0]) > 1 else 1
