"""Pass: every value gets its type and its global shape, dims as expressions over the dynamic dims of the inputs.

Dims that the inputs name are the program's symbols; the plan's Symbols hold their promised facts. A shape counts as known when every dim is
an integer or an expression over symbols: only then can a rank post a receive without receiving the size.

    x: (batch, 1, 28, 28), batch = 64N   Reshape(x, [-1, 784])   ->   (batch, 784), batch = 64N
"""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import cache
from typing import TypeVar

import onnx
import onnx_ir as ir
from partc.compiler.analysis.bindings import bind_inputs
from partc.compiler.analysis.infer_shapes import infer_shapes, type_text
from partc.compiler.analysis.least_sizes import with_least_sizes
from partc.compiler.analysis.part_symbols import part_symbols
from partc.compiler.analysis.records import batch_dims, contradictions, wrong_batch_dims
from partc.compiler.dims.facts import Facts
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import nodes_of
from partc.compiler.ir.program import PAST_ENTRIES, Prepared, Typed
from partc.compiler.ir.training import ProgramKind
from partc.compiler.ir.value_info import Shape, SymbolInfo, ValueInfo

_INTEGERS = frozenset(f"tensor({sign}int{bits})" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64))


def refuse_other_integers(program: Prepared) -> None:
    """Raises CompileError that lists every operand whose type is not among the integer types that its op takes: ids, sizes, axes.

    onnxruntime refuses a Gather with ids of float, too, but a rank's program may have no such node: sharded rows are looked up by other
    ops, which would cut the fraction off.
    """
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


T = TypeVar("T", bound=Typed)


def shapes(program: Prepared) -> Typed:
    """Pass: sets the type and global shape of every value of the model.

    Raises CompileError where the plan contradicts the model's inputs, or an operand has a type that its op does not take.
    """
    symbols, batch_dims = bind_inputs(program), _batch_dims(program)
    symbols = part_symbols(program, symbols, batch_dims)
    typed = inferred(program.into(Typed, symbols=symbols, batch_dims=batch_dims, values={}))
    _refuse_other_sizes(typed)
    refuse_other_integers(typed)
    legal = with_least_sizes(typed.model.graph, typed.symbols, typed.paths, program.name)
    if legal == typed.symbols:
        return typed
    told = (_too_small(name, symbols[name], info) for name, info in legal.items() if info != symbols[name])
    before = replace(typed, symbols=legal, warnings=program.warnings)
    return replace(typed := inferred(before), warnings=(*typed.warnings, *filter(None, told)))


def _too_small(name: str, said: SymbolInfo, needed: SymbolInfo) -> str:
    """A warning that a plan allows smaller sizes than the model; empty where it allows 0 or nothing is promised."""
    if said.facts.min == 0:
        return ""
    least = needed.facts.min
    return (
        f"{said.where}: '{name}' may be {said.facts.min}, and the model needs at least {least}: {needed.because}; "
        f"say `{name}: {{min: {least}}}`"
    )


def _batch_dims(program: Prepared) -> dict[ir.Value, int]:
    """The inputs that hold records of a batch, where the program learns of records or runs them by microbatches."""
    graph, train, pipeline = program.model.graph, program.plan.train, program.plan.pipeline
    if problems := [*wrong_batch_dims(graph, program.plan)]:
        raise CompileError(problems)
    count = pipeline.microbatches if pipeline is not None and program.kind is not ProgramKind.EVALUATION else 1
    if train is None and count == 1:
        return {}
    found = batch_dims(graph, train.loss.labels if train is not None else "", program.plan.dims.batch_dims)
    if pipeline is not None and count > 1 and (problems := [*contradictions(graph, found, count, pipeline.where)]):
        raise CompileError(problems)
    return found


def inferred(program: T) -> T:
    """Returns the program with `values` inferred from its inputs' shapes and its symbols."""
    graph, symbols = program.model.graph, program.symbols
    facts = {name: info.facts for name, info in symbols.items()}
    if program.generation is not None:
        facts[PAST_ENTRIES] = Facts(max=program.generation.record.length)
    failed = infer_shapes(program.model, facts)
    if program.generation is not None and failed:
        raise CompileError(
            [_inconsistent(program, node, f"takes no such operands: {reason}") for node, reason in failed.items()]
        )
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


def _refuse_other_sizes(program: Typed) -> None:
    """Raises CompileError with the first value of a decoder that has another number of slots or of tokens than a step."""
    sizes = program.generation.sizes if program.generation is not None else {}
    for value, expected in sizes.items():
        info, node = program.values.get(value), value.producer()
        if node is None or info is None or info.shape is None or len(info.shape) != len(expected):
            continue  # a dim was added, or taken out, where each sequence got its own
        if any(
            isinstance(one, int) and size not in (None, one) for one, size in zip(info.shape, expected, strict=True)
        ):
            dims = ", ".join("?" if size is None else str(size) for size in expected)
            raise CompileError(_inconsistent(program, node, f"makes {list(info.shape)}, not [{dims}]"))


def _inconsistent(program: Typed, node: ir.Node, fact: str) -> Problem:
    """The problem of a node of a decoder whose operands do not fit now that each sequence of a step has a position of its own."""
    where = f"{program.name}: {program.paths.get(node, node.op_type)}"
    law = "with 'generate' each slot has positions of its own, and the model was exported for those of one sequence"
    return Problem(
        where, f"{node.op_type} {fact}", law, "export the model with an input 'position_ids', or write slots: 1"
    )


def _refuse_negative_sizes(program: Typed) -> None:
    """Raises CompileError that lists the nodes whose outputs have a negative size though their inputs have none."""
    graph, problems = program.model.graph, []
    values = [*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)]
    shaped = ((value, value.shape.dims) for value in values if value.shape is not None)
    negative = {value for value, dims in shaped for dim in dims if isinstance(dim, int) and dim < 0}
    for node in graph if negative else ():
        for value in node.outputs if negative.isdisjoint(node.inputs) else ():
            if value not in negative:
                continue
            shapes = ", ".join(f"'{given.name}' of {given.shape}" for given in node.inputs if given is not None)
            fact = f"{node.op_type} '{program.paths.get(node, node.name)}' makes '{value.name}' of {value.shape}"
            law = f"a size is at least 0; it reads {shapes}"
            help_ = "a window must not be larger than the padded dim that it slides over, nor a pad cut away more than there is"
            problems.append(Problem(program.name, fact, law, help_))
    if problems:
        raise CompileError(problems)


def _info(value: ir.Value, known: frozenset[str], memo: dict[ir.SymbolicDim, bool]) -> ValueInfo:
    shape, kind = _known_shape(value.shape, known, memo), value.type
    if isinstance(kind, ir.TensorType):
        text, item_bytes = _tensor_type(kind.dtype)
        return ValueInfo(text, shape, item_bytes)
    return ValueInfo(type_text(kind), shape, None)


@functools.cache
def _tensor_type(dtype: ir.DataType) -> tuple[str, int | None]:
    """The text of a tensor's type, and the bytes of an element; None for strings and types of less than a byte."""
    sized = dtype not in (ir.DataType.STRING, ir.DataType.UNDEFINED)
    bits = dtype.bitwidth if sized else None
    return type_text(ir.TensorType(dtype)), bits // 8 if bits and bits % 8 == 0 else None


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
