"""Refuses operands of a type that their op does not take where it takes some integers: ids, sizes, axes.

onnxruntime refuses them, too, but a rank's program may have no such node: where rows of a table are cut, other ops look them up, and they
would cut the fraction off.

    Gather(table, ids), ids of float      ->    the problem names the node, the operand and the types that it may have
"""

from __future__ import annotations

from functools import cache

import onnx
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import nodes_of
from partc.compiler.ir.program import Prepared

_INTEGERS = frozenset(f"tensor({sign}int{bits})" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64))


def refuse_other_integers(program: Prepared) -> None:
    """Raises CompileError that lists every operand whose type is not among the integer types that its op takes."""
    imports = program.model.opset_imports
    opset = min(imports.get("", imports.get("ai.onnx", 1)), onnx.defs.onnx_opset_version())
    problems = []
    for node in nodes_of(program.model.graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        for at, allowed in _operands(node.op_type, opset):
            value = node.inputs[at] if at < len(node.inputs) else None
            if value is None:
                continue
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


@cache
def _operands(op_type: str, opset: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The inputs of an op that are to be integers, with the types that they may have."""
    try:
        schema = onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return ()
    return tuple(
        (at, tuple(sorted(one.types))) for at, one in enumerate(schema.inputs) if one.types and one.types <= _INTEGERS
    )
