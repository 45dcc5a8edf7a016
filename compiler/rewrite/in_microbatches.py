"""Pass: a program that does not train, of a plan with microbatches, becomes the program of one microbatch.

Which values hold records, and that the rest is the same in every microbatch, follows from the ops' rules (`sharding/records.py`). The model
stays as it is, for it takes a batch of any size; where it fixes the size of the batch, sizes that its nodes are given as constants are
divided. Then the shapes are inferred anew, of a microbatch, and held against those of the batch.

    x: (batch, 6), 4 microbatches     h: (batch, 8), records along dim 0     y: (8,), the same in all of them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx_ir as ir
import sympy
from partc.compiler.analysis.part_symbols import quotient
from partc.compiler.analysis.shapes import inferred
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.normal import normal
from partc.compiler.dims.reading import read, symbol
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.microbatched import Microbatched
from partc.compiler.ir.program import Dim, Program, Shape, SymbolInfo
from partc.compiler.ops.node import axes_of, constant_ints, operand
from partc.compiler.rewrite.rewriting import Rewriting
from partc.compiler.sharding.records import OWN, SIZES, Records

_SHOWN = 3


def in_microbatches(program: Program) -> Program:
    """Fills `microbatched`, and makes symbols and shapes those of a microbatch. CompileError where that cannot be."""
    rules = program.plan.pipeline
    if rules is None or program.plan.train is not None or rules.microbatches == 1:
        return program
    count = rules.microbatches
    given, symbols = _batch(program, count)
    found = Records(program, given, count)
    _refuse(program, found)
    outputs = {value: state for value in program.model.graph.outputs if isinstance(state := found.state(value), int)}
    before = {value: program.values[value].shape for value in program.values}
    part = _smaller(program, found, count)
    for value, dim in given.items():
        size = value.shape[dim] if value.shape is not None else None
        if value.shape is not None and isinstance(size, int):
            value.shape = ir.Shape([size // count if k == dim else one for k, one in enumerate(value.shape.dims)])
    part = inferred(replace(part, symbols={**program.symbols, **symbols}))
    _hold(part, found, before, {symbol(name): symbol(name) / count for name in symbols}, program.symbols, count)
    return replace(part, microbatched=Microbatched(count, {**given, **outputs}))


def _batch(program: Program, count: int) -> tuple[dict[ir.Value, int], dict[str, SymbolInfo]]:
    """The inputs that hold records, with the dim of these; and the symbols of a microbatch, where they differ from those of the batch."""
    rules, graph = program.plan.pipeline, program.model.graph
    assert rules is not None
    tensors = [value for value in graph.inputs if isinstance(value.type, ir.TensorType)]
    law = f"a batch is cut into {count} microbatches"
    problems = [
        Problem(
            rules.where,
            f"the shape of input '{value.name}' is not known",
            law,
            f"say it in `inputs`, as in `inputs: {{{value.name}: [batch, 8]}}`",
        )
        for value in tensors
        if value.shape is None
    ]
    given = _holding({value: value.shape.dims for value in tensors if value.shape is not None})
    if not given and not problems:
        problems = [Problem(rules.where, "no input has a dim for the records of a batch", law, "leave out `pipeline`")]
    symbols: dict[str, SymbolInfo] = {}
    for value, dim in given.items():
        size = value.shape[dim] if value.shape is not None else None
        name = str(size.value) if isinstance(size, ir.SymbolicDim) else ""
        if name in symbols:
            continue
        info = program.symbols.get(name)
        facts = info.facts if info is not None else Facts.constant(size) if isinstance(size, int) else Facts()
        part = quotient(facts, count) if facts.divisible_by(count) else None
        if part is None:
            problems.append(_indivisible(value, dim, name, facts, info.where if info else rules.where, count))
        elif info is not None:
            symbols[name] = replace(info, facts=part, parts=count, whole=facts)
    if problems:
        raise CompileError(problems)
    return given, symbols


def _holding(dims: Mapping[ir.Value, tuple[int | ir.SymbolicDim, ...]]) -> dict[ir.Value, int]:
    """The inputs that hold records: those with the batch, which is the first dim of the first input with one, at some place.

    An input with another dynamic size at its first place holds records too, if no input has that size at a later one.
    """
    first = next((some[0] for some in dims.values() if some), None)
    if first is None:
        return {}
    if isinstance(first, int):
        return {value: 0 for value, some in dims.items() if some and some[0] == first}
    later = {str(dim.value) for some in dims.values() for dim in some[1:] if isinstance(dim, ir.SymbolicDim)}
    found: dict[ir.Value, int] = {}
    for value, some in dims.items():
        names = [str(dim.value) if isinstance(dim, ir.SymbolicDim) else "" for dim in some]
        if str(first.value) in names:
            found[value] = names.index(str(first.value))
        elif names and names[0] and names[0] not in later:
            found[value] = 0
    return found


def _indivisible(value: ir.Value, dim: int, name: str, facts: Facts, where: str, count: int) -> Problem:
    size = f"'{name}', {facts}," if name else f"dim {dim} of input '{value.name}', {facts},"
    remedy = (
        f"declare `{name}: {{divisor: {count}}}` under symbols" if name else "export the model with a dynamic batch"
    )
    return Problem(
        where,
        f"the batch cannot be cut into {count} microbatches: {size} is not always divisible by {count}",
        "microbatches are equal parts of a batch",
        f"{remedy}, or take a number of microbatches that divides it",
    )


def _refuse(program: Program, found: Records) -> None:
    """Raises CompileError for nodes on the way to an output that cannot run by microbatches, and for outputs that are of no use then."""
    rules, graph = program.plan.pipeline, program.model.graph
    assert rules is not None
    wanted = set(graph.outputs)
    named = []
    for node in reversed(list(graph)):
        if wanted.isdisjoint(node.outputs):
            continue
        wanted.update(program.reads[node])
        if node in found.refused:
            named.append(f"{program.paths[node]} ({node.op_type}) {found.refused[node]}")
    named += [
        f"output '{value.name}' is of the number of records" for value in graph.outputs if found.state(value) is OWN
    ]
    if not named:
        return
    shown = "; ".join(named[::-1][:_SHOWN])
    more = f", and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    first = next(iter(found.states))
    raise CompileError(
        Problem(
            rules.where,
            f"not all of the model can run by microbatches: {shown}{more}",
            f"a microbatch knows its own records alone; records are along dim {found.states[first]} of '{first.name}'",
            "leave out `pipeline`, or have the model give what each record has, and reduce that outside of it",
        )
    )


def _smaller(program: Program, found: Records, count: int) -> Program:
    """The program where constant sizes that a node is given are those of a microbatch, and where the dims to squeeze are named."""
    work = Rewriting(program)
    for node in list(work.graph):
        if not node.outputs or not isinstance(dim := found.state(node.outputs[0]), int):
            continue
        out = node.outputs[0]
        if node.op_type == "Squeeze" and not node.attributes.get("axes") and operand(node, 1) is None:
            _name_axes(work, node)
        for k in SIZES.get(node.op_type, ()):
            sizes = constant_ints(node, k) if k < len(node.inputs) else None
            if not sizes or node.op_type == "Tile" or out.shape is None:
                continue
            place = dim - len(out.shape) + len(sizes)
            if place >= 0 and sizes[place] > 1 and sizes[place] % count == 0:
                less = [size // count if at == place else size for at, size in enumerate(sizes)]
                node.replace_input_with(k, work.constant(f"{out.name}.of_microbatch", less))
    return work.done()


def _name_axes(work: Rewriting, node: ir.Node) -> None:
    """A microbatch may have one record, which a Squeeze of all dims of size 1 would take away, too."""
    source = node.inputs[0]
    axes = axes_of(node, 0 if source is None or source.shape is None else len(source.shape))
    if source is None or source.shape is None or axes is None:
        return
    named = axes or tuple(k for k, dim in enumerate(source.shape.dims) if dim == 1)
    if work.graph.opset_imports.get("", 1) < 13:
        node.attributes.add(ir.AttrInt64s("axes", named))
        return
    node.resize_inputs(2)
    node.replace_input_with(1, work.constant(f"{node.outputs[0].name}.axes", list(named)))


def _hold(
    part: Program,
    found: Records,
    before: Mapping[ir.Value, Shape | None],
    shares: Mapping[sympy.Symbol, sympy.Expr],
    symbols: Mapping[str, SymbolInfo],
    count: int,
) -> None:
    """Raises CompileError for the first values whose shape in a microbatch is not that of the batch, with fewer records."""
    known = {name: info.facts for name, info in symbols.items()}

    def in_batch(dim: Dim, times: int) -> str:
        expression = read(str(dim))
        if expression is None:
            return str(dim)
        return str(normal(expression.subs(shares, simultaneous=True) * times, known))

    def wrong(node: ir.Node) -> Iterator[str]:
        for out in node.outputs:
            whole, less = before.get(out), part.values[out].shape
            state = found.state(out)
            if whole is None or less is None or state is OWN:
                continue
            have = [in_batch(dim, count if state == k else 1) for k, dim in enumerate(less)]
            if have != [in_whole(dim, known) for dim in whole]:
                yield f"'{out.name}' is {_text(whole)} of a batch, and {_text(less)} of a microbatch"

    graph = part.model.graph
    for node in graph:
        if told := next(wrong(node), ""):
            assert part.plan.pipeline is not None
            fact = f"{node.op_type} ({part.paths[node]}) has no records to cut: {told}"
            law = "a value has the records of its microbatch, or is the same in all of them"
            raise CompileError(Problem(part.plan.pipeline.where, fact, law, "export the model with a dynamic batch"))


def in_whole(dim: Dim, known: Mapping[str, Facts]) -> str:
    """A dim in normal form."""
    expression = read(str(dim))
    return str(dim) if expression is None else str(normal(expression, known))


def _text(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))})"
