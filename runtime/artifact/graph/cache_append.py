"""Appending to a decoder's cache where it lies: onnxruntime writes the new entries alone where input and output have one memory.

    next = TensorScatter(cache, entries, position)

That is right where nothing else reads the cache: all readers of `next` come after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..format import CACHE, StateRecord
from .onnx_graph import reads

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


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
    if len(found) != 1 or found[0].op_type != "TensorScatter" or found[0].domain not in ("", "ai.onnx"):
        return False
    node = found[0]
    return [*node.input].count(record.value) == 1 and node.input[0] == record.value and node.output[0] == record.next
