"""Caches of a decoder that nodes update in place: onnxruntime writes only the new entries where input and output share memory.

    next = TensorScatter(cache, entries, position)
    y, next_k, next_v = GroupQueryAttention(q, k, v, cache_k, cache_v, ends, length)

This is correct if no other node reads the cache: readers of `next` run after the append. A state is not appended to but replaced, by a
node that reads the copy which the state's only reader makes:

    begun = Where(is_first, zero, state)      next = Where(has_token, new, begun)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..format import CACHE, StateRecord
from .onnx_graph import integer_of, node_title, reads

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


_APPENDING: Mapping[tuple[str, str], Mapping[int, int]] = {
    ("", "TensorScatter"): {0: 0},
    ("com.microsoft", "GroupQueryAttention"): {3: 1, 4: 2},
}
"""Maps each op to its inputs whose memory an output may share: index of the input to index of that output."""


_AXIS: Mapping[str, int] = {"TensorScatter": -2, "GroupQueryAttention": 2}
"""Maps each op to the dim of a cache along which it appends, if the node has no attribute `axis`."""


def appended(model: ModelProto, records: Iterable[StateRecord]) -> list[StateRecord]:
    """Returns the records of the caches that are updated in place: a node appends to the cache, or copies the state for its replacement."""
    records = list(records)
    others = {record.value for record, _, _ in not_appended(model, records)}
    return [one for one in records if one.kind == CACHE and one.next and one.value not in others]


def not_appended(
    model: ModelProto, records: Iterable[StateRecord]
) -> Iterator[tuple[StateRecord, NodeProto | None, str]]:
    """Yields each cache that is not updated in place, with the node that prevents it (None if no node does) and the reason."""
    caches = [one for one in records if one.kind == CACHE and one.next]
    if not caches:
        return
    readers: dict[str, list[NodeProto]] = {one.value: [] for one in caches}
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        for name in dict.fromkeys(reads(node)):
            if name in readers:
                readers[name].append(node)
    outputs = {port.name for port in model.graph.output}
    for cache in caches:
        reading = readers[cache.value]
        appends = [node for node in reading if _appends(node, cache) or _begins(node, cache, makers.get(cache.next))]
        if not appends:
            yield (
                cache,
                next(iter(reading), None),
                f"no node makes '{cache.next}' of '{cache.value}' by appending to it or replacing it",
            )
        elif others := [node for node in reading if node is not appends[0]]:
            yield cache, others[0], f"it reads '{cache.value}', which {node_title(appends[0])} overwrites"
        elif cache.value in outputs:
            yield (
                cache,
                None,
                f"the graph gives '{cache.value}' as an output, and {node_title(appends[0])} overwrites it",
            )


def replaced(model: ModelProto, records: Iterable[StateRecord]) -> set[str]:
    """Returns the names of the states: caches whose next value is not made by a node that appends."""
    appending = {name for node in model.graph.node if (node.domain, node.op_type) in _APPENDING for name in node.output}
    return {one.value for one in records if one.kind == CACHE and one.next and one.next not in appending}


def entries_axis(model: ModelProto, record: StateRecord) -> int | None:
    """The dim of a cache along which a node appends to it; None where no node does."""
    found = [node for node in model.graph.node if _appends(node, record)]
    return integer_of(found[0], "axis", _AXIS[found[0].op_type]) if found else None


def _appends(node: NodeProto, record: StateRecord) -> bool:
    """Whether a node appends to a cache: it reads the cache once, and its output that may share this memory is the cache's next value."""
    where = [k for k, name in enumerate(node.input) if name == record.value]
    output = _APPENDING.get((node.domain, node.op_type), {}).get(where[0]) if len(where) == 1 else None
    return output is not None and len(node.output) > output and node.output[output] == record.next


def _begins(node: NodeProto, record: StateRecord, following: NodeProto | None) -> bool:
    """Whether a node copies a state by Where(is_first, zero, state), and `following`, which makes the next state, keeps rows of it."""
    is_copy = node.op_type == "Where" and [name == record.value for name in node.input] == [False, False, True]
    return is_copy and following is not None and following.op_type == "Where" and following.input[2] == node.output[0]
