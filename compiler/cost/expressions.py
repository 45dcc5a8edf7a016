"""The operations and messages of a rank in a step as expressions in the symbols: `131072*batch + 64`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from partc.compiler.cost.actions import shown
from partc.compiler.cost.node import Known, products
from partc.compiler.cost.sizes import FileSizes
from partc.runtime.artifact.byte_count import ZERO, ByteCount, of_value
from partc.runtime.artifact.dim_expression import parse
from partc.runtime.artifact.tasks.task import parse as parse_task
from partc.runtime.program.steps import Segment, Send, StartCollective

if TYPE_CHECKING:
    from onnx import NodeProto

_EACH = "tensor(uint8)"
"""The type of which a value has as many bytes as elements."""


def operations(sizes: FileSizes) -> ByteCount:
    """The operations of a rank, two for each multiply-add; without those of nodes whose dims only a run tells."""
    total, known = ZERO, dict[int, ByteCount]()
    for step in sizes.file.steps:
        if isinstance(step, Segment):
            key = id(step.formal)
            if key not in known:
                known[key] = sum((_node(node, step, sizes) for node in step.formal.nodes), start=ZERO)
            total += known[key]
    return total


def _node(node: NodeProto, segment: Segment, sizes: FileSizes) -> ByteCount:
    names = sizes.names(segment)
    suffix = f".{parse_task(segment.task).microbatch}" if segment.task else ""

    def dims(name: str) -> Known:
        return sizes.shapes.get(names.get(name, name + suffix)) if name else None

    given, made = ([dims(name) for name in some] for some in (node.input, node.output))
    total = ZERO
    for term in products(shown(node), given, made, lambda dim: _size(dim, sizes.sizes)):
        total += of_value(_EACH, [2, *term]) or ZERO
    return total


def _size(dim: int | str, sizes: Mapping[str, int]) -> int:
    try:
        return parse(dim, sizes)(sizes)
    except ValueError:
        return 0


def payload(sizes: FileSizes) -> ByteCount:
    """The bytes that a rank gives messages and collectives, but for exchanges of boxes and lookups, whose bytes are those of a run."""
    total = ZERO
    for step in sizes.file.steps:
        if isinstance(step, Send):
            record = sizes.file.transfers[step.tag]
            total += of_value(record.type, record.shape) or ZERO
        elif isinstance(step, StartCollective) and not step.call.kind.boxes and len(step.ranks) > 1:
            one = sizes.file.collectives[step.call.tag]
            gives = step.call.kind.root != "gives" or step.ranks[step.call.root] == sizes.file.rank
            total += (of_value(one.type, one.shape) or ZERO) if gives else ZERO
    return total
