"""Pass: a program that does not train, of a plan with microbatches, becomes the program of one microbatch.

The ops' rules (`sharding/flow.py`) tell which values have records; all others are the same in every microbatch. Nodes with records get the
local form that they would have on a rank: extents in their operands are divided, and the shape of a value is that of the whole batch. Then
the shapes of a microbatch are inferred anew, and compared with those of the batch.

    x: (batch, 6), 4 microbatches     h: (batch, 8), records along dim 0     y: (8,), the same in all of them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir
from onnx_shape_inference import SYM_DATA_KEY
from partc.compiler.analysis.part_symbols import BatchDims, quotient
from partc.compiler.analysis.shapes import inferred
from partc.compiler.dims.facts import Facts
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import name_of, operand_name
from partc.compiler.ir.program import Annotated
from partc.compiler.ir.value_info import Shape, SymbolInfo
from partc.compiler.ops.rule import OWN, Rule
from partc.compiler.rewrite.rewriting import Rewriting
from partc.compiler.sharding.flow import Flow, local_in_time
from partc.runtime.spellings import first_free

_SHOWN = 3


def in_microbatches(program: Annotated) -> Annotated:
    """Adds the outputs to `batch_dims`, and changes symbols and shapes to those of a microbatch; raises CompileError if it cannot."""
    rules = program.plan.pipeline
    if rules is None or program.plan.train is not None or rules.microbatches == 1:
        return program
    count = rules.microbatches
    symbols = _symbols(program, count)
    flow = Flow(program, count)
    _refuse(program, flow)
    graph = program.model.graph
    before = {value: program.values[value].shape for value in program.values}
    part = _smaller(program, flow, count)
    records = {value: one.dim for value in (*graph.inputs, *graph.outputs) if (one := flow.shard(value)) is not None}
    for value, dim in records.items():
        size = value.shape[dim] if value.is_graph_input() and value.shape is not None else None
        if value.shape is not None and isinstance(size, int):
            value.shape = ir.Shape([size // count if k == dim else one for k, one in enumerate(value.shape.dims)])
    for node in graph:
        for out in node.outputs:
            out.metadata_props.pop(SYM_DATA_KEY, None)
    part = inferred(replace(part, symbols={**program.symbols, **symbols}))
    _hold(part, flow, before, count)
    return replace(part, batch_dims=records)


def _symbols(program: Annotated, count: int) -> dict[str, SymbolInfo]:
    """Returns the symbols of a microbatch that differ from those of the batch."""
    rules, graph, dims_of_inputs = program.plan.pipeline, program.model.graph, program.batch_dims
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
    if not dims_of_inputs and not problems:
        problems = [Problem(rules.where, "no input has a dim for the records of a batch", law, "leave out `pipeline`")]
    symbols: dict[str, SymbolInfo] = {}
    for value, dim in dims_of_inputs.items():
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
            symbols[name] = replace(info, facts=part, parts=count)
    if problems:
        raise CompileError(problems)
    return symbols


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


def _refuse(program: Annotated, flow: Flow) -> None:
    """Raises CompileError for nodes before an output that cannot run by microbatches, and for outputs whose records are not contiguous."""
    rules, graph = program.plan.pipeline, program.model.graph
    assert rules is not None
    wanted = set(graph.outputs)
    named = []
    for node in reversed(list(graph)):
        if wanted.isdisjoint(node.outputs):
            continue
        wanted.update(program.reads[node])
        if node in flow.mixing:
            named.append(f"{program.paths[node]} ({node.op_type}) {flow.mixing[node]}")
    apart = [value.name for value in graph.outputs if (one := flow.shard(value)) is not None and one.stride != 1]
    named = [*named[::-1], *(f"output '{name}' has no dim of records alone" for name in apart)]
    if not named:
        return
    shown = "; ".join(named[:_SHOWN])
    more = f", and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    first, dim = next(iter(program.batch_dims.items()))
    raise CompileError(
        Problem(
            rules.where,
            f"not all of the model can run by microbatches: {shown}{more}",
            f"a microbatch knows its own records alone; records are along dim {dim} of '{first.name}'",
            "leave out `pipeline`, or have the model give what each record has, and reduce that outside of it",
        )
    )


def _smaller(program: Annotated, flow: Flow, count: int) -> Annotated:
    """Returns the program with the local form of every node that reads or makes records, and with constants of records cut."""
    work = Rewriting(program)
    for value, shard in flow.same_records.items():
        tensor = None if value.is_graph_input() else ir.convenience.get_const_tensor(value)
        if tensor is None or flow.shard(value) is None:
            continue
        array = tensor.numpy()
        less = array.take(range(array.shape[shard.dim] // count), shard.dim)
        made = work.constant(_free(work, name_of(value)), less)
        value.replace_all_uses_with(made)
        if (producer := value.producer()) is not None:
            work.drop([producer])
    for node, (rule, letter) in flow.cut.items():
        if rule.local is not None:
            _localize(work, node, rule, letter, count)
    return work.done()


def _localize(work: Rewriting[Annotated], node: ir.Node, rule: Rule, letter: str, count: int) -> None:
    """Rewrites a node to its local form: nodes before it, its own operands and attributes, nodes after it."""
    local = local_in_time(work.before, node, rule, letter, count)
    itself = local.itself
    if itself is None:  # of an op that each rank writes as others, as it will those of a microbatch
        assert node.domain == OWN
        return
    there = {name_of(value): value for value in node.inputs if value is not None}
    there |= {name: work.constant(_free(work, name), array) for name, array in local.constants.items()}
    own = local.nodes.index(itself)
    for local_node in local.nodes[:own]:
        _put(work, node, local_node, there)
    node.resize_inputs(len(itself.inputs))
    for k, value in enumerate(itself.inputs):
        node.replace_input_with(k, None if value is None else there[name_of(value)])
    for attribute in itself.attributes.values():
        node.attributes.add(attribute)
    if itself is local.nodes[-1]:
        return
    out = node.outputs[0]
    name = name_of(out)
    made = work.like(out, name)
    there[name_of(itself.outputs[0])], there[name] = out, made
    out.name = _free(work, name_of(itself.outputs[0]))
    out.replace_all_uses_with(made, replace_graph_outputs=True)
    at = node
    for local_node in local.nodes[own + 1 :]:
        at = _put(work, at, local_node, there, behind=True)


def _free(work: Rewriting[Annotated], name: str) -> str:
    """Returns a free name for a value of a microbatch; the plain words are left for the local forms of ranks."""
    return first_free(f"{name}.of_microbatch", work.before.own_names.__contains__)


def _put(
    work: Rewriting[Annotated], at: ir.Node, local_node: ir.Node, there: dict[str, ir.Value], behind: bool = False
) -> ir.Node:
    """Inserts a node of a local form before another, or after it; `there` maps names to its operands, and gets its results."""
    outputs = [
        there.setdefault(name, ir.Value(name=_free(work, name))) for name in map(operand_name, local_node.outputs)
    ]
    inputs = [None if value is None else there[name_of(value)] for value in local_node.inputs]
    name = name_of(outputs[0]) + (".of_batch" if behind else "")
    node = ir.Node(
        local_node.domain, local_node.op_type, inputs, local_node.attributes.values(), outputs=outputs, name=name
    )
    node.metadata_props.update(at.metadata_props)
    node.meta.update(at.meta)
    work.paths[node] = name
    (work.graph.insert_after if behind else work.graph.insert_before)(at, node)
    return node


def _hold(part: Annotated, found: Flow, before: Mapping[ir.Value, Shape | None], count: int) -> None:
    """Raises CompileError for the first values whose shape in a microbatch is not that of the batch with fewer records."""
    dims = BatchDims(part.symbols, count)
    for node in part.model.graph:
        for out in node.outputs:
            whole, less, shard = before.get(out), part.values[out].shape, found.shard(out)
            if whole is None or less is None:
                continue
            have = dims.shape(less, None if shard is None else shard.dim)
            if dims.normal(have) == dims.normal(whole):
                continue
            assert part.plan.pipeline is not None
            told = f"'{out.name}' is ({', '.join(map(str, whole))}) of a batch, and ({', '.join(map(str, less))}) of a microbatch"
            fact = f"{node.op_type} ({part.paths[node]}) has no records to cut: {told}"
            law = "a value has the records of its microbatch, or is the same in all of them"
            raise CompileError(Problem(part.plan.pipeline.where, fact, law, "export the model with a dynamic batch"))
