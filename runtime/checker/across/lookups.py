"""Checks a lookup: its operands against each other and the manifest, and the owners' rows against the layout of the table.

The rows of the table are sharded: the k-th owner has the k-th of equal runs, and all owners have the same shard of the other dims, which is
also that of the rows that a rank gets or sends. `given` and `made` of a record are the layouts of the table and of the looked-up rows, for
a Push the other way round.

A Push sends rows without ids, so it is proven that its owners and givers know of the same ids: on every rank the request values that it
reads are those made by one Pull there, of the same ids' shape and rows, with the same ranks as owners and as givers, in the same order. In
the same way it is proven for a Return, and for a Route without ids, that all its ranks read the places and counts of one Route: each row
comes back to its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from onnx import ModelProto
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.format import (
    DOMAIN,
    MANIFEST,
    PULL,
    PUSH,
    RETURN,
    ROUTE,
    TAG,
    Collective,
    Dim,
    Manifest,
    Shape,
)
from partc.runtime.artifact.graph.onnx_graph import integer_of, node_title, path_of
from partc.runtime.checker.across.call_node import AGAIN, CallNode
from partc.runtime.checker.across.rank_shards import ShardLayout
from partc.runtime.checker.graph.declared import ValueType
from partc.runtime.checker.graph.symbols import same_dims
from partc.runtime.errors import Violation

_IDS = ("tensor(int32)", "tensor(int64)")
_WORDS = {
    PULL: ("the ids asked of an owner", "the counts", "the places"),
    ROUTE: ("the places of its rows", "the counts"),
}
"""Maps each op to descriptions of the values that it makes for other lookups."""


def lookup_types(call: LookupCall, types: Mapping[str, ValueType]) -> tuple[tuple[str, ValueType | None], ...]:
    """Returns the declared types of a call's values: ids, the other operand, the ids that are made, rows, and the request values."""
    names = (call.ids, call.operand, call.numbers, call.result, *call.requests)
    return tuple((name or "", types.get(name or "")) for name in names)


def wrong_operands(
    call: LookupCall, record: Collective, types: Sequence[tuple[str, ValueType | None]], manifest: Manifest
) -> Iterator[str]:
    """Yields the faults of the types and shapes of a call's values."""
    ids, operand, numbers, result, *asking = types
    for name, declared in types:
        if name and declared is None:
            yield f"its file declares no type of '{name}'"
    row: list[Dim] = list(call.row)
    if call.op in (ROUTE, RETURN):
        yield from _wrong_route(call, record, types, manifest)
        return
    asked = None if record.shape is None else [*record.shape, *row]
    pulls = call.op == PULL
    if ids[1] is not None:
        if ids[1][0] not in _IDS:
            yield f"its ids '{ids[0]}' are a {ids[1][0]}"
        if not same_dims(ids[1][1], record.shape, manifest):
            yield f"its ids '{ids[0]}' have the shape {ids[1][1]}; {MANIFEST} says {record.shape}"
    shapes: tuple[Shape, ...] = (None, None, [len(call.owners) + len(call.givers)], record.shape)
    for (name, declared), shape in zip((numbers, *asking), shapes, strict=True):
        if declared is not None and (declared[0] != "tensor(int64)" or not _fits(declared[1], shape, manifest)):
            yield f"its numbers '{name}' are a {declared[0]} {declared[1]}, and should be a tensor(int64) {shape or '[?]'}"
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


def _wrong_route(
    call: LookupCall, record: Collective, types: Sequence[tuple[str, ValueType | None]], manifest: Manifest
) -> Iterator[str]:
    """Yields the faults of the types and shapes of a Route's or Return's values; the record's shape is that of the rows that are sent."""
    ids, operand, numbers, result, places, counts = types
    row: list[Dim] = list(call.row)
    here: Shape = None if record.shape is None else [*record.shape]
    two: Shape = [2 * len(call.owners)]
    ends = {operand[0]: here, result[0]: None} if call.op == ROUTE else {operand[0]: None, result[0]: here}
    for name, declared in (operand, result):
        if declared is None:
            continue
        if declared[0] != record.type:
            yield f"its '{name}' is a {declared[0]}; {MANIFEST} says {record.type}"
        shape, known = declared[1], ends[name]
        wanted = None if shape is None else [*(shape[:1] if known is None else known), *row]
        if shape is not None and not same_dims(shape, wanted, manifest):
            yield f"its '{name}' has the shape {shape}, and its rows are {known or '[?]'} of the shape {row}"
    for (name, declared), shape in ((ids, here), (numbers, None), (places, here), (counts, two)):
        kinds = _IDS if name == ids[0] else ("tensor(int64)",)
        if declared is not None and (declared[0] not in kinds or not _fits(declared[1], shape, manifest)):
            yield f"its numbers '{name}' are a {declared[0]} {declared[1]}, and should be a tensor(int64) {shape or '[?]'}"


def _fits(shape: Shape, wanted: Shape, manifest: Manifest) -> bool:
    """Whether a declared shape is the wanted one, or has one dim if the wanted one is known only at run time."""
    return shape is None or (len(shape) == 1 if wanted is None else same_dims(shape, wanted, manifest))


def check_pushed(manifest: Manifest, calls: Mapping[int, Sequence[CallNode]]) -> Iterator[Violation]:
    """Yields every Push, Return and Route that does not read the values of one Pull or Route on all its ranks; the nodes are checked."""
    records = {one.tag: one for one in manifest.collectives}
    makers = {
        (rank, name): (node, at)
        for rank, nodes in calls.items()
        for node in nodes
        if isinstance(node.call, LookupCall) and node.call.asks
        for at, name in enumerate(node.call.requests)
        if name
    }
    pulls: dict[int, CallNode] = {}
    for rank, nodes in calls.items():
        for node in nodes:
            call = node.call
            for at, name in enumerate(call.requests) if isinstance(call, LookupCall) and not call.asks else ():
                pull, place = makers.get((rank, name or ""), (None, at))
                source = PULL if call.op == PUSH else ROUTE
                if name and (pull is None or place != at or pull.call.op != source):
                    yield node.violation(f"its '{name}' is not {_WORDS[source][at]} of a {source}")
                elif pull is not None and (fact := _differs(manifest, records, node, pull, pulls)):
                    yield node.violation(fact)
                    break


def check_routed(
    models: Mapping[str, ModelProto],
    types: Mapping[str, Mapping[str, ValueType]],
    calls: Mapping[str, Sequence[CallNode]],
) -> Iterator[Violation]:
    """Yields every node that reads rows or experts of two Routes, and every Return of rows that did not come by its Route, by rank file.

    Between a Route and a Return values have as many rows as were received, a number that is in no file: all of them must be of one Route.
    """
    for file, nodes in calls.items():
        lookups = {node.call.tag: node for node in nodes if isinstance(node.call, LookupCall)}
        if not any(node.call.op == ROUTE for node in lookups.values()):
            continue
        of: dict[str, int] = {}
        sent: dict[str | None, int] = {}
        for proto in models[file].graph.node:
            own = lookups.get(integer_of(proto, TAG, -1)) if proto.domain == DOMAIN else None
            if own is not None and isinstance(call := own.call, LookupCall) and call.op in (ROUTE, RETURN):
                route = call.tag if call.asks else sent.get(call.requests[0])
                if call.op == RETURN and route is not None and of.get(call.operand or "") != route:
                    yield own.violation(f"its rows '{call.operand}' did not come by {lookups[route]}")
                if route is not None and call.op == ROUTE:
                    of |= {name: route for name in (call.result, call.numbers) if name}
                    sent |= {call.requests[0]: route} if call.asks else {}
                continue
            read = list(dict.fromkeys(of[name] for name in proto.input if name in of))
            if len(read) > 1:
                fact = f"it reads what came by {lookups[read[0]]}, and what came by {lookups[read[1]]}"
                yield Violation(file, fact, node_title(proto), path_of(proto), AGAIN)
            for name in proto.output if read else ():
                kind, shape = types[file].get(name, ("", None))
                if (
                    shape is None or kind in _IDS or any(isinstance(dim, str) for dim in shape)
                ):  # not a weight's gradient
                    of[name] = read[0]


def _differs(
    manifest: Manifest, records: Mapping[int, Collective], push: CallNode, pull: CallNode, pulls: dict[int, CallNode]
) -> str:
    """Returns the reason for which the rows of a Push do not match a Pull's ids on one rank, or ""; `pulls`: those of the Pushes seen."""
    pushed, other = push.call, pull.call
    assert isinstance(pushed, LookupCall)
    assert isinstance(other, LookupCall)
    first = pulls.setdefault(pushed.tag, pull)
    if first.call.tag != other.tag:
        return f"it reads what {pull} asked, and on rank {first.rank} what {first} asked"
    ranks, asked = (manifest.groups_of(push.rank)[call.group] for call in (pushed, other))
    for word, here, there in (("owners", pushed.owners, other.owners), ("givers", pushed.givers, other.givers)):
        wanted, have = ([some[place] for place in places] for some, places in ((asked, there), (ranks, here)))
        if wanted != have:
            return f"its {word} are ranks {have}, and those of {pull} are ranks {wanted}"
    if pushed.rows != other.rows or (pushed.row != other.row and pushed.op == PUSH):
        return f"it is of a table {[pushed.rows, *pushed.row]}, and {pull} of one {[other.rows, *other.row]}"
    shapes = [records[call.tag].shape for call in (pushed, other)]
    return "" if shapes[0] == shapes[1] else f"it has ids of the shape {shapes[0]}, and {pull} of {shapes[1]}"


def check_owners(
    record: Collective, call: LookupCall, ranks: Sequence[int], layout_before: ShardLayout, layout_after: ShardLayout
) -> None:
    """Raises ValueError if the ranks of a list do not have the runs of rows that the call states."""
    table, asked = (layout_before, layout_after) if record.op == PULL else (layout_after, layout_before)
    if layout_before.terms > 1 or layout_after.terms > 1:
        raise ValueError("it looks up rows of a partial sum")
    if record.op in (ROUTE, RETURN):
        ends = [(layout_before.shards[rank].shard[1:], layout_after.shards[rank].shard[1:]) for rank in ranks]
        if len({*ends}) > 1 or ends[0][0] != ends[0][1]:
            raise ValueError(f"ranks {', '.join(map(str, ranks))} have other columns of the rows")
        return
    count = len(call.owners)
    shards = [table.shards[ranks[place]].shard for place in call.owners]
    for k, (place, shard) in enumerate(zip(call.owners, shards, strict=True)):
        if shard[0] != (Fraction(k, count), Fraction(k + 1, count)):
            raise ValueError(
                f"rank {ranks[place]} is owner {k} of {count}, and has rows {shard[0][0]} to {shard[0][1]}"
            )
        if shard[1:] != shards[0][1:]:
            raise ValueError(f"owners {ranks[call.owners[0]]} and {ranks[place]} have other columns")
    columns = shards[0][1:]
    for rank in ranks:
        shard = asked.shards[rank].shard if rank in asked.shards else ()
        if shard and columns and shard[len(shard) - len(columns) :] != columns:
            raise ValueError(f"rank {rank} has other columns than the owners of the table")
