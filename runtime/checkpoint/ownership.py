"""Assigns the owners of a checkpoint's elements: each element of each tensor is written once, by the lowest rank that has it.

The owners follow from the list of all records alone, so every rank computes the same ones without communication. A tensor may have several
records, one for each of its layouts: a later layout owns only the elements that the layouts before do not have. The boxes of one record are
equal or disjoint, as the shards of a layout are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from partc.runtime.artifact.format import Box, StateRecord
from partc.runtime.artifact.ranks import Grid
from partc.runtime.artifact.tensors.boxes import Region, full_region, region, remaining
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.artifact.tensors.safetensors_stream import STORED


@dataclass(frozen=True)
class Owned:
    """The `region` of a tensor that a rank writes. `value`: the tensor's name in the rank file; `held`: all that the rank has of it."""

    rank: int
    value: str
    region: Region
    held: Region


def region_of_rank(record: StateRecord, rank: int) -> Region:
    """Returns the region of a record's tensor that a rank has; ValueError where its edges are not whole numbers."""
    return _region(record, record.box(rank))


def _region(record: StateRecord, box: Box | None) -> Region:
    return full_region(record.shape) if box is None else region(box, record.shape)


def owners(records: Sequence[StateRecord]) -> dict[str, list[Owned]]:
    """Maps each tensor to its regions with their owners, tensors in the order of the records; ValueError lists all contradictions."""
    by_tensor: dict[str, list[StateRecord]] = {}
    for record in records:
        by_tensor.setdefault(record.tensor, []).append(record)
    owned: dict[str, list[Owned]] = {}
    problems: list[str] = []
    for tensor, some in by_tensor.items():
        wrong = list(_contradictions(tensor, some))
        if not wrong:
            try:
                owned[tensor] = _assigned(some)
            except ValueError as error:
                wrong = [f"'{tensor}': {error}"]
        problems += wrong
    if problems:
        raise ValueError("\n".join(problems))
    return owned


def _contradictions(tensor: str, records: Sequence[StateRecord]) -> Iterator[str]:
    first = records[0]
    for other in records[1:]:
        if (other.type, other.shape, other.kind) != (first.type, first.shape, first.kind):
            yield (
                f"'{tensor}' is {first.kind} {first.type} {first.shape} as '{first.value}' and "
                f"{other.kind} {other.type} {other.shape} as '{other.value}'"
            )
    dtype = dense(first.type)
    if dtype is None or dtype.shown not in STORED:
        yield f"'{tensor}' is {first.type}, which the safetensors format lacks"


def _assigned(records: Sequence[StateRecord]) -> list[Owned]:
    candidates = sorted(
        (rank, at, held) for at, record in enumerate(records) for held, rank in _distinct(record).items()
    )
    taken: list[tuple[int, Region]] = []
    pieces = []
    for rank, at, held in candidates:
        rest = remaining([held], (other for layout, other in taken if layout != at))
        taken.append((at, held))
        pieces += [Owned(rank, records[at].value, part, held) for part in rest]
    pieces = [piece for piece in pieces if piece.region.count]
    count, needed = sum(piece.region.count for piece in pieces), math.prod(records[0].shape)
    if count != needed:
        raise ValueError(f"the ranks hold {count} of its {needed} elements, each counted once")
    return pieces


def _distinct(record: StateRecord) -> dict[Region, int]:
    """Maps each distinct region of a record to the lowest rank that has it."""
    if record.boxes is None:
        return {full_region(record.shape): min(record.ranks)}
    lowest: dict[tuple[tuple[int, ...], ...], tuple[int, Box]] = {}
    pairs: Iterable[tuple[int, Box]] = zip(record.ranks, record.boxes, strict=True)
    if isinstance(record.boxes, Grid) and record.ranks == sorted(record.ranks):
        pairs = ((record.ranks[place], box) for place, box in record.boxes.distinct())
    for rank, box in sorted(pairs, key=lambda pair: pair[0]):
        lowest.setdefault(tuple(map(tuple, box)), (rank, box))
    return {_region(record, box): rank for rank, box in lowest.values()}
