"""Appending to a decoder's cache where it lies: onnxruntime writes the new entries alone where input and output have one memory.

    next = TensorScatter(cache, entries, position)
    y, next_k, next_v = GroupQueryAttention(q, k, v, cache_k, cache_v, ends, length)

That is right where nothing else reads the cache: all readers of `next` come after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..format import CACHE, StateRecord
from .onnx_graph import reads

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


_APPENDING: Mapping[tuple[str, str], Mapping[int, int]] = {
    ("", "TensorScatter"): {0: 0},
    ("com.microsoft", "GroupQueryAttention"): {3: 1, 4: 2},
}
"""By op the output that may lie where an input does."""


def appended(model: ModelProto, records: Iterable[StateRecord]) -> list[StateRecord]:
    """The records of the caches to which one node appends in place."""
    caches = [one for one in records if one.kind == CACHE and one.next]
    if not caches:
        return []
    readers: dict[str, list[NodeProto]] = {one.value: [] for one in caches}
    for node in model.graph.node:
        for name in dict.fromkeys(reads(node)):
            if name in readers:
                readers[name].append(node)
    outputs = {port.name for port in model.graph.output}
    return [one for one in caches if one.value not in outputs and _appends(one, readers)]


def _appends(record: StateRecord, readers: Mapping[str, list[NodeProto]]) -> bool:
    found = readers[record.value]
    if len(found) != 1 or (found[0].domain, found[0].op_type) not in _APPENDING:
        return False
    node = found[0]
    where = [k for k, name in enumerate(node.input) if name == record.value]
    output = _APPENDING[node.domain, node.op_type].get(where[0]) if len(where) == 1 else None
    return output is not None and len(node.output) > output and node.output[output] == record.next
