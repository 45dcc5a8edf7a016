"""Pass: a program that does not train, of a plan with microbatches, becomes the program of one microbatch.

Which values hold records, and that the rest is the same in every microbatch, follows from the ops' rules (`sharding/records.py`). Nodes
that have records get the local form that they would have on a rank: extents that they are given are divided, and the shape of a value
is that of the whole batch. Then the shapes are inferred anew, of a microbatch, and held against those of the batch.

    x: (batch, 6), 4 microbatches     h: (batch, 8), records along dim 0     y: (8,), the same in all of them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx_ir as ir
import sympy
from onnx_shape_inference import SYM_DATA_KEY
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.analysis.part_symbols import quotient
from partc.compiler.analysis.shapes import inferred
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.normal import normal
from partc.compiler.dims.reading import read, symbol
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.microbatched import Microbatched
from partc.compiler.ir.program import Program
from partc.compiler.ir.value_info import Array, Dim, Shape, SymbolInfo, ValueInfo
from partc.compiler.ops.rule import Rule
from partc.compiler.rewrite.rewriting import Rewriting
from partc.compiler.sharding.records import Records, local_form

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
    graph = program.model.graph
    before = {value: program.values[value].shape for value in program.values}
    part = _smaller(program, found, count)
    records = {value: found.rows[value].dim for value in (*graph.inputs, *graph.outputs) if value in found.rows}
    for value, dim in records.items():
        size = value.shape[dim] if value.is_graph_input() and value.shape is not None else None
        if value.shape is not None and isinstance(size, int):
            value.shape = ir.Shape([size // count if k == dim else one for k, one in enumerate(value.shape.dims)])
    for node in graph:
        for out in node.outputs:
            out.metadata_props.pop(SYM_DATA_KEY, None)
    part = inferred(replace(part, symbols={**program.symbols, **symbols}))
    _hold(part, found, before, {symbol(name): symbol(name) / count for name in symbols}, program.symbols, count)
    return replace(part, microbatched=Microbatched(count, records))


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
    """The inputs that hold records: those that have the batch at some place; it is the first input's first dim, or its first dynamic one.

    An input with another dynamic size at its first place holds records too, if no input has that size at a later one.
    """
    own = next((some for some in dims.values() if some), ())
    first = next((dim for dim in own if isinstance(dim, ir.SymbolicDim)), own[0] if own else None)
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
    """Raises CompileError for nodes on the way to an output that cannot run by microbatches, and outputs whose records lie apart."""
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
    apart = [value.name for value in graph.outputs if value in found.rows and found.rows[value].apart != 1]
    named = [*named[::-1], *(f"output '{name}' has no dim of records alone" for name in apart)]
    if not named:
        return
    shown = "; ".join(named[:_SHOWN])
    more = f", and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    first, dim = next((value, rows.dim) for value, rows in found.given.items())
    raise CompileError(
        Problem(
            rules.where,
            f"not all of the model can run by microbatches: {shown}{more}",
            f"a microbatch knows its own records alone; records are along dim {dim} of '{first.name}'",
            "leave out `pipeline`, or have the model give what each record has, and reduce that outside of it",
        )
    )


def _smaller(program: Program, found: Records, count: int) -> Program:
    """The program with every node that takes or makes records in its local form, and constants of them cut."""
    work = Rewriting(program)
    for value, rows in found.alike.items():
        tensor = None if value.is_graph_input() else ir.convenience.get_const_tensor(value)
        if tensor is None or value not in found.rows:
            continue
        array = tensor.numpy()
        less = array.take(range(array.shape[rows.dim] // count), rows.dim)
        made = _constant(work, value.name or "", less)
        value.replace_all_uses_with(made)
        if (producer := value.producer()) is not None:
            work.drop([producer])
    for node, (rule, letter) in found.cut.items():
        if rule.local is not None:
            _localize(work, node, rule, letter, count)
    return work.done()


def _localize(work: Rewriting, node: ir.Node, rule: Rule, letter: str, count: int) -> None:
    """Rewrites a node as its local form says: nodes before it, its own operands and attributes, nodes behind it."""
    local = local_form(work.before, node, rule, {letter: count}, {letter: 0})
    assert rule.local is not None
    rule.local(local)
    there = {value.name or "": value for value in node.inputs if value is not None}
    own = next(k for k, one in enumerate(local.nodes) if one.op_type == node.op_type)
    given = [value.name or "" for value in local.nodes[own].inputs if value is not None]
    if len(local.nodes) == 1 and given == [name for name in local.inputs if name]:
        return
    for name, array in local.constants.items():
        there[name] = _constant(work, name, array)
    for one in local.nodes[:own]:
        _put(work, node, one, there)
    new = local.nodes[own]
    node.resize_inputs(len(new.inputs))
    for k, value in enumerate(new.inputs):
        node.replace_input_with(k, None if value is None else there[value.name or ""])
    for attribute in new.attributes.values():
        node.attributes.add(attribute)
    if len(local.nodes) == own + 1:
        return
    out = node.outputs[0]
    name = out.name or ""
    made = work.like(out, name)
    there[new.outputs[0].name or ""], there[name] = out, made
    out.name = _free(work, new.outputs[0].name or "")
    out.replace_all_uses_with(made, replace_graph_outputs=True)
    at = node
    for one in local.nodes[own + 1 :]:
        at = _put(work, at, one, there, behind=True)


def _free(work: Rewriting, name: str) -> str:
    """The name of what is made for a microbatch: ranks' local forms take the plain words."""
    name = f"{name}.of_microbatch"
    while name in work.before.own_names:
        name += "'"
    return name


def _constant(work: Rewriting, name: str, array: Array) -> ir.Value:
    name = _free(work, name)
    tensor = ir.Tensor(array, name=name)
    kind = ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, type=kind, shape=ir.Shape(array.shape), const_value=tensor)
    work.graph.register_initializer(value)
    work.values[value] = ValueInfo(type_text(kind), array.shape, array.itemsize)
    return value


def _put(work: Rewriting, at: ir.Node, one: ir.Node, there: dict[str, ir.Value], behind: bool = False) -> ir.Node:
    """A node of a local form in front of another, or behind it; `there` has its operands by their names, and gets what it makes."""
    outputs = [
        there.setdefault(value.name or "", ir.Value(name=_free(work, value.name or ""))) for value in one.outputs
    ]
    inputs = [None if value is None else there[value.name or ""] for value in one.inputs]
    name = str(outputs[0].name) + (".of_batch" if behind else "")
    node = ir.Node(one.domain, one.op_type, inputs, one.attributes.values(), outputs=outputs, name=name)
    node.metadata_props.update(at.metadata_props)
    node.meta.update(at.meta)
    work.paths[node] = name
    (work.graph.insert_after if behind else work.graph.insert_before)(at, node)
    return node


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
            if whole is None or less is None:
                continue
            along = found.rows[out].dim if out in found.rows else None
            have = [in_batch(dim, count if along == k else 1) for k, dim in enumerate(less)]
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
