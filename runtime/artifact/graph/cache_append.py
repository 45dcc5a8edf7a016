"""Appending to a decoder's cache in place: onnxruntime writes only the new entries where input and output have one memory.

    next = TensorScatter(cache, entries, position)
    y, next_k, next_v = GroupQueryAttention(q, k, v, cache_k, cache_v, ends, length)

That is right where nothing else reads the cache: all readers of `next` come after it. A state is replaced, by a node that reads what the
one reader of the state has copied of it:

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
"""Maps each op to its outputs that may share the memory of an input, each with that input."""


_AXIS: Mapping[str, int] = {"TensorScatter": -2, "GroupQueryAttention": 2}
"""Maps each op to the dim of a cache along which it appends, where no attribute says another one."""


def appended(model: ModelProto, records: Iterable[StateRecord]) -> list[StateRecord]:
    """The records of the caches to which one node appends in place."""
    records = list(records)
    others = {record.value for record, _, _ in not_appended(model, records)}
    return [one for one in records if one.kind == CACHE and one.next and one.value not in others]


def not_appended(
    model: ModelProto, records: Iterable[StateRecord]
) -> Iterator[tuple[StateRecord, NodeProto | None, str]]:
    """Each cache to which no node appends in place, with the node that is to blame, if one is, and what is wrong."""
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
    for one in caches:
        found = readers[one.value]
        appends = [node for node in found if _appends(node, one) or _begins(node, one, makers.get(one.next))]
        if not appends:
            yield (
                one,
                next(iter(found), None),
                f"no node makes '{one.next}' of '{one.value}' by appending to it or replacing it",
            )
        elif others := [node for node in found if node is not appends[0]]:
            yield one, others[0], f"it reads '{one.value}', which {node_title(appends[0])} overwrites"
        elif one.value in outputs:
            yield one, None, f"the graph gives '{one.value}' as an output, and {node_title(appends[0])} overwrites it"


def replaced(model: ModelProto, records: Iterable[StateRecord]) -> set[str]:
    """The states: the caches for which a node makes other values, and does not append."""
    appending = {name for node in model.graph.node if (node.domain, node.op_type) in _APPENDING for name in node.output}
    return {one.value for one in records if one.kind == CACHE and one.next and one.next not in appending}


def entries_axis(model: ModelProto, record: StateRecord) -> int | None:
    """The dim of a cache along which a node appends to it; None where none does."""
    found = [node for node in model.graph.node if _appends(node, record)]
    return integer_of(found[0], "axis", _AXIS[found[0].op_type]) if found else None


def _appends(node: NodeProto, record: StateRecord) -> bool:
    """Whether a node makes a cache's next entries where the cache lies, and reads it once."""
    where = [k for k, name in enumerate(node.input) if name == record.value]
    output = _APPENDING.get((node.domain, node.op_type), {}).get(where[0]) if len(where) == 1 else None
    return output is not None and len(node.output) > output and node.output[output] == record.next


def _begins(node: NodeProto, record: StateRecord, following: NodeProto | None) -> bool:
    """Whether a node copies a state, and what replaces the state keeps rows of that copy."""
    is_copy = node.op_type == "Where" and [name == record.value for name in node.input] == [False, False, True]
    return is_copy and following is not None and following.op_type == "Where" and following.input[2] == node.output[0]
