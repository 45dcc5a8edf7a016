"""Refuses operands of a type that their op does not take where it takes some integers: ids, sizes, axes.

onnxruntime refuses them, too, but a rank's program may have no such node: where rows of a table are cut, other ops look them up, and they
would cut the fraction off.

    Gather(table, ids), ids of float      ->    the problem names the node, the operand and the types that it may have
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import onnx
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.program import Program

_INTEGERS = frozenset(f"tensor({sign}int{bits})" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64))


def refuse_other_integers(program: Program) -> None:
    """Raises CompileError with all operands that are no integers, or none of those that their op takes."""
    imports = program.model.opset_imports
    opset = min(imports.get("", imports.get("ai.onnx", 1)), onnx.defs.onnx_opset_version())
    problems = []
    for node in ir.traversal.RecursiveGraphIterator(program.model.graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        for value, allowed in _integers(node, opset):
            kind = type_text(value.type)
            known = isinstance(value.type, ir.TensorType) and value.dtype != ir.DataType.UNDEFINED
            if known and kind not in allowed:
                path = program.paths.get(node) or node.name or node.outputs[0].name
                fact = f"{node.op_type} '{path}' reads '{value.name}', a {kind}"
                law = f"it takes {' or '.join(allowed)} there"
                help = f"cast '{value.name}' in the model, or give it another type"
                problems.append(Problem(program.name, fact, law, help))
    if problems:
        raise CompileError(problems)


def _integers(node: ir.Node, opset: int) -> Iterator[tuple[ir.Value, tuple[str, ...]]]:
    """The operands that are to be integers, with the types that they may have."""
    operands = _operands(node.op_type, opset)
    for at, value in enumerate(node.inputs if any(operands) else ()):
        if value is not None and at < len(operands) and operands[at]:
            yield value, operands[at]


@cache
def _operands(op_type: str, opset: int) -> tuple[tuple[str, ...], ...]:
    """By input of an op the types that it may have, where all are integers; else none."""
    try:
        schema = onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return ()
    return tuple(tuple(sorted(one.types)) if one.types and one.types <= _INTEGERS else () for one in schema.inputs)
