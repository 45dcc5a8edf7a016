"""Checks a Pull or a Push: its operands against each other and the manifest, and the owners' rows against the layout of the table.

Of the table, whose rows are cut, the k-th owner has the k-th of equal runs, and all owners the same of the other dims; a rank that asks
gets, or gives, the same of these. `given` and `made` of a record are the layouts of the table and of what is looked up, of a Push the
other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from partc.runtime.artifact.comm_node import Call
from partc.runtime.artifact.format import MANIFEST, PULL, Collective, Dim, Manifest
from partc.runtime.checker.graph.declared import ValueType
from partc.runtime.checker.graph.symbols import same_dims

if TYPE_CHECKING:
    from partc.runtime.checker.across.layouts import Layout

_IDS = ("tensor(int32)", "tensor(int64)")


def lookup_types(call: Call, types: Mapping[str, ValueType]) -> tuple[tuple[str, ValueType | None], ...]:
    """Of each value of a call what its file declares: ids, the other operand, ids that come out, and rows."""
    names = (call.source, call.operand, call.numbers, call.result)
    return tuple((name or "", types.get(name or "")) for name in names)


def wrong_operands(
    call: Call, record: Collective, types: Sequence[tuple[str, ValueType | None]], manifest: Manifest
) -> Iterator[str]:
    """What is wrong with the types and shapes of a call's values."""
    ids, operand, numbers, result = types
    for name, declared in types:
        if name and declared is None:
            yield f"its file declares no type of '{name}'"
    row: list[Dim] = list(call.row)
    asked = None if record.shape is None else [*record.shape, *row]
    pulls = call.op == PULL
    if ids[1] is not None:
        if ids[1][0] not in _IDS:
            yield f"its ids '{ids[0]}' are a {ids[1][0]}"
        if not same_dims(ids[1][1], record.shape, manifest):
            yield f"its ids '{ids[0]}' have the shape {ids[1][1]}; {MANIFEST} says {record.shape}"
    if numbers[1] is not None and (numbers[1][0] != "tensor(int64)" or len(numbers[1][1] or [0]) != 1):
        yield f"the ids '{numbers[0]}' that come are a {numbers[1][0]} {numbers[1][1]}"
    for (name, declared), shape in ((operand, [call.rows_of_owner, *row] if pulls else asked), (result, asked)):
        if declared is None:
            continue
        if declared[0] != record.type:
            yield f"its '{name}' is a {declared[0]}; {MANIFEST} says {record.type}"
        if not pulls and name == result[0]:
            if declared[1] is not None and (len(declared[1]) != 1 + len(row) or declared[1][1:] != row):
                yield f"its '{name}' has the shape {declared[1]}; rows have the shape {row}"
        elif shape is not None and declared[1] is not None and not same_dims(declared[1], shape, manifest):
            yield f"its '{name}' has the shape {declared[1]}, and it is {shape}"


def check_owners(record: Collective, call: Call, ranks: Sequence[int], given: Layout, made: Layout) -> None:
    """Raises ValueError where the ranks of a list do not have the runs of rows that the call says."""
    table, asked = (given, made) if record.op == PULL else (made, given)
    if given.terms > 1 or made.terms > 1:
        raise ValueError("it looks up terms of a sum")
    count = len(call.owners)
    shards = [table.held[ranks[place]].shard for place in call.owners]
    for k, (place, shard) in enumerate(zip(call.owners, shards, strict=True)):
        if shard[0] != (Fraction(k, count), Fraction(k + 1, count)):
            raise ValueError(
                f"rank {ranks[place]} is owner {k} of {count}, and has rows {shard[0][0]} to {shard[0][1]}"
            )
        if shard[1:] != shards[0][1:]:
            raise ValueError(f"owners {ranks[call.owners[0]]} and {ranks[place]} have other columns")
    columns = shards[0][1:]
    for rank in ranks:
        shard = asked.held[rank].shard if rank in asked.held else ()
        if shard and columns and shard[len(shard) - len(columns) :] != columns:
            raise ValueError(f"rank {rank} has other columns than the owners of the table")
