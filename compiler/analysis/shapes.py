"""Pass: every value gets its type and its global shape, dims as expressions over the dynamic dims of the inputs.

Dims that the inputs name are the program's symbols; the plan's Symbols say what is promised of them. A shape counts as known when
every dim is an integer or an expression over symbols: only then can a rank post a receive without being told the size.

    x: (batch, 1, 28, 28), batch = 64N   Reshape(x, [-1, 784])   ->   (batch, 784), batch = 64N
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
from partc.compiler.analysis.bindings import bind_inputs
from partc.compiler.analysis.infer_shapes import infer_shapes, type_text
from partc.compiler.analysis.operand_types import refuse_other_integers
from partc.compiler.analysis.part_symbols import part_symbols
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.program import Program
from partc.compiler.ir.value_info import Shape, ValueInfo


def shapes(program: Program) -> Program:
    """Fills `symbols` and `values`.

    Raises CompileError where the plan contradicts the model's inputs, or an op takes no operands of such a type.
    """
    found = inferred(replace(program, symbols=part_symbols(program, bind_inputs(program))))
    refuse_other_integers(found)
    return found


def inferred(program: Program) -> Program:
    """The program with the `values` that follow from its inputs' shapes and its symbols."""
    graph, symbols = program.model.graph, program.symbols
    failed = infer_shapes(program.model, {name: info.facts for name, info in symbols.items()})
    _refuse_negative_sizes(program)
    known = frozenset(symbols)
    values: dict[ir.Value, ValueInfo] = {}
    memo: dict[ir.SymbolicDim, bool] = {}
    for value in [*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)]:
        values[value] = _info(value, known, memo)
    told = (
        f"{program.paths.get(node, node.op_type)}: the shape rule of {node.op_type} failed ({reason}); sizes behind it count as unknown"
        for node, reason in failed.items()
    )
    return replace(program, values=values, warnings=tuple(dict.fromkeys((*program.warnings, *told))))


def _refuse_negative_sizes(program: Program) -> None:
    """Raises CompileError for the nodes that make a negative size of sizes that are none."""
    problems = []
    for node in program.model.graph:
        if any(_negative(value) for value in node.inputs if value is not None):
            continue
        for value in filter(_negative, node.outputs):
            shapes = ", ".join(f"'{given.name}' of {given.shape}" for given in node.inputs if given is not None)
            fact = f"{node.op_type} '{program.paths.get(node, node.name)}' makes '{value.name}' of {value.shape}"
            law = f"a size is at least 0; it reads {shapes}"
            help_ = "a window must not be larger than the padded dim that it slides over, nor a pad cut away more than there is"
            problems.append(Problem(program.name, fact, law, help_))
    if problems:
        raise CompileError(problems)


def _negative(value: ir.Value) -> bool:
    return value.shape is not None and any(isinstance(dim, int) and dim < 0 for dim in value.shape.dims)


def _info(value: ir.Value, known: frozenset[str], memo: dict[ir.SymbolicDim, bool]) -> ValueInfo:
    kind = type_text(value.type)
    dense = isinstance(value.type, ir.TensorType) and value.type.dtype not in (
        ir.DataType.STRING,
        ir.DataType.UNDEFINED,
    )
    dtype = value.type.dtype if isinstance(value.type, ir.TensorType) else None
    bits = dtype.bitwidth if dense and dtype is not None else None
    return ValueInfo(kind, _known_shape(value.shape, known, memo), bits // 8 if bits and bits % 8 == 0 else None)


def _known_shape(shape: ir.Shape | None, known: frozenset[str], memo: dict[ir.SymbolicDim, bool]) -> Shape | None:
    if shape is None:
        return None
    dims: list[int | str] = []
    for dim in shape.dims:
        if isinstance(dim, int):
            dims.append(dim)
            continue
        if dim not in memo:
            memo[dim] = dim.value is not None and dim.free_symbols() <= known
        if not memo[dim]:
            return None
        dims.append(str(dim.value))
    return tuple(dims)
