"""Why a size is not known at compile time: the first node whose output depends on values of the run, and the remedy.

The name of an unknown dim is not a symbol. Names run through shapes and through the entries of shape arithmetic, so the first node, in the
order of the graph, whose outputs have the name is the one that lost it."""

from __future__ import annotations

import json

import onnx_ir as ir
from onnx_shape_inference import SYM_DATA_KEY
from partc.compiler.analysis.shape_extents import BROADCASTING
from partc.compiler.dims.reading import read
from partc.compiler.ir.graph import bodies
from partc.compiler.ir.program import Typed
from partc.runtime.artifact.graph.kernels import host_inputs

_BY_DATA = frozenset({"Compress", "NonMaxSuppression", "NonZero", "StringSplit", "Unique"})


def dim_of(program: Typed, value: ir.Value, dim: int) -> int | str | None:
    """Returns a dim of a value, even where its other dims are unknown; None where this one is."""
    shape = program.values[value].shape if value in program.values else None
    if shape is not None:
        return shape[dim] if dim < len(shape) else None
    found = value.shape[dim] if value.shape is not None and dim < len(value.shape) else None
    if isinstance(found, int) or found is None or found.value is None:
        return found if isinstance(found, int) else None
    return None if _strange(program, found) else found.value


def unknown_dims(program: Typed, value: ir.Value) -> list[int]:
    """Returns the dims of a value that are known only at run time; also [] where its rank is not known."""
    return [k for k in range(len(value.shape or ())) if dim_of(program, value, k) is None]


def how_lost(program: Typed, value: ir.Value, dim: int | None = None) -> tuple[str, str]:
    """Returns the reason why the size of a dim (or, without `dim`, the rank) is not known, and the remedy."""
    node = _where(program, value, dim)
    if node is None:
        return "its size is known only at run time", "leave it whole"
    subject = f"{node.op_type} ({program.paths.get(node, node.name)})"
    if node.op_type in _BY_DATA:
        return f"{subject} decides its size by the numbers in its operand", "do not shard it, or shard another dim"
    if bodies(node):
        return f"{subject} gives it a size that is known only at run time", "do not shard it, or shard another dim"
    if node.op_type in BROADCASTING | {"MatMul", "Expand"} and (names := _different(program, node)):
        symbols = sorted({str(name) for text in names if (one := read(text)) is not None for name in one.free_symbols})
        law = f"{subject} broadcasts {' and '.join(names)}, and either may be 1 or 0"
        same = "give them one name under `inputs` if they are equal; else " if symbols == sorted(names) else ""
        return law, f"{same}declare `symbols: {{{symbols[0]}: {{min: 2}}}}`"
    for k in host_inputs(node.domain, node.op_type):
        sizes = node.inputs[k] if k < len(node.inputs) else None
        if sizes is None or sizes.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            continue
        if ir.convenience.get_const_tensor(sizes) is None:
            remedy = "make it a constant, or compute it of the inputs' shapes"
            return f"{subject} takes it from '{sizes.name}', which is known only at run time", remedy
    return f"its size is lost at {subject}", "do not shard it, or shard another dim"


def _where(program: Typed, value: ir.Value, dim: int | None) -> ir.Node | None:
    if value.shape is None or dim is None:
        return _first_without_rank(value)
    found = value.shape[dim]
    names = set() if isinstance(found, int) else _strange(program, found)
    for node in program.model.graph:
        if any(name in _names_in(out) for out in node.outputs for name in names):
            return node
    return value.producer()


def _first_without_rank(value: ir.Value) -> ir.Node | None:
    """Returns the first node after which the rank is unknown, though it was known before."""
    producer = value.producer()
    while producer is not None:
        before = next(
            (one for one in producer.inputs if one is not None and one.shape is None and one.producer()), None
        )
        if before is None:
            return producer
        producer = before.producer()
    return None


def _strange(program: Typed, dim: ir.SymbolicDim) -> set[str]:
    """The names in a dim that are not symbols of the program."""
    expression = read(str(dim.value))
    return {str(dim.value)} if expression is None else {str(n) for n in expression.free_symbols} - set(program.symbols)


def _names_in(value: ir.Value) -> set[str]:
    texts = [str(dim.value) for dim in value.shape or () if isinstance(dim, ir.SymbolicDim)]
    texts += [text for text in json.loads(value.metadata_props.get(SYM_DATA_KEY, "[]")) if isinstance(text, str)]
    found = [(text, read(text)) for text in texts]
    return {name for text, one in found for name in ({text} if one is None else {str(n) for n in one.free_symbols})}


def _different(program: Typed, node: ir.Node) -> list[str]:
    """Returns two symbols that a node would have to broadcast."""
    shapes = [value.shape for value in node.inputs if value is not None and value.shape is not None]
    for place in range(1, max(map(len, shapes), default=0) + 1):
        dims = [shape[-place] for shape in shapes if len(shape) >= place]
        symbolic = [dim for dim in dims if isinstance(dim, ir.SymbolicDim) and dim.value is not None]
        texts = list(dict.fromkeys(str(dim.value) for dim in symbolic if not _strange(program, dim)))
        if len(texts) > 1:
            return texts[:2]
    return []
