"""The texts of an artifact's `ir/` folder: made to be read before a run, searched by op or path, and diffed in CI.

Stable and deterministic: no counters, times, machine paths or hash order; a line changes only where the program does. The grammar
is described in `compiler/README.md`, section "The dumps".

    %conv1.Conv = Conv(%x, %conv1.weight) {kernel_shape: [5, 5]} {rank: 3}
        : (<tensor(float), (batch, 1, 32, 32)>, <tensor(float), (6, 1, 5, 5)>) -> (<tensor(float), (batch, 6, 28, 28)>)
        # Scope: conv1.Conv   Rule: plan.yaml:6 'conv1'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.dims.facts import facts_of
from partc.compiler.emit.helper_types import helper_types
from partc.compiler.emit.node_text import node_text
from partc.compiler.emit.shard_text import part_of
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.drawn import law_of
from partc.compiler.ir.program import Program, Shape
from partc.compiler.ir.rank_program import (
    CommOp,
    ComputeOp,
    Constant,
    CopyOp,
    Event,
    LocalTensor,
    RankConstant,
    RankOp,
    RankProgram,
    TaskBody,
    TaskCall,
)
from partc.compiler.ir.value_bytes import bytes_text
from partc.runtime.artifact.format import SEND, order_text
from partc.runtime.artifact.law import law_text

GRAMMAR = 4
_NAMED = 8
"""So many lists of a group, or ranks of one, are listed."""


def begin_text(program: Program, title: str = "step_parallel_begin") -> str:
    """`step_parallel_begin.ir`: the whole model in global shapes, each op with its ranks, its strategy and the rule that decided.

    Before the passes that decide them have run, ranks, strategies and rules are left out.
    """
    graph = program.model.graph
    lines = _head(program, title)
    lines += _listing(
        "Symbols", [f"{name} : {info.facts}   {info.where}" for name, info in sorted(program.symbols.items())]
    )
    lines += _listing("Dims", _dim_facts(program))
    readers = _holders(program, lambda part: part.inputs)
    lines += _listing("Inputs", [f"{_typed(program, v)}   ranks: {_ranks(readers.get(v, []))}" for v in graph.inputs])
    holders = _weight_holders(program)
    lines += _listing(
        "Parameters",
        [
            f"{_typed(program, value)}   {_bytes(program, value)} bytes   ranks: {_ranks(holders.get(value, []))}"
            for value in graph.initializers.values()
        ],
    )
    if program.training is not None and program.training.tables:
        lines += _listing("Tables", program.training.tables)
    lines.append(f"graph @main({', '.join(f'%{value.name}' for value in graph.inputs)}) {{")
    for node in graph:
        placed = program.placement.get(node)
        suffix = f" {{{'rank' if len(placed.ranks) == 1 else 'ranks'}: {_ranks(placed.ranks)}}}" if placed else ""
        suffix += f" {{target: {program.targets[node]}}}" if node in program.targets else ""
        suffix += "".join(_strategies(program, node))
        lines.append(f"  {node_text(node, '  ')}{suffix}")
        lines.append(f"      : {_signature(program, node.inputs)} -> {_signature(program, node.outputs)}")
        lines.append(f"      # Scope: {program.paths[node]}" + (f"   Rule: {placed.rule}" if placed else ""))
        lines += [f"      # Sharded: {text}" for text in cut_text(program, node)]
    lines.append(f"  Return({', '.join(f'%{value.name}' for value in graph.outputs)})")
    lines.append(f"      : {_signature(program, graph.outputs)}")
    return "\n".join([*lines, "}", ""])


def end_text(program: Program, bodies: Iterable[tuple[Sequence[int], str]] | None = None) -> str:
    """`step_parallel_end.ir`: all ranks' programs with their communication, after a table of all of it.

    `bodies`: by ranks that share a program its `part_text`, where that was made already.
    """
    if bodies is None:
        bodies = [(ranks, part_text(program, part, ranks)) for part, ranks in program.alike]
    lines = _head(program, "step_parallel_end")
    lines += _listing("Communication", [_event_text(event) for event in program.events])
    for ranks, body in bodies:
        lines += ["", *([f"# Ranks: {_ranks(ranks)}"] if len(ranks) > 1 else []), body]
    return "\n".join([*lines, ""])


def rank_text(program: Program, part: RankProgram, body: str) -> str:
    """`rank_0000.ir`: the program of a rank, whose `part_text` is `body`."""
    return "\n".join([*_head(program, f"rank_{part.rank:04d}"), body, ""])


def part_text(program: Program, part: RankProgram, ranks: Sequence[int]) -> str:
    """A program as the dumps show it, of the ranks that share it."""
    return "\n".join(_part_lines(program, part, ranks))


def _head(program: Program, title: str) -> list[str]:
    return [f"# partc {title}, grammar {GRAMMAR}", f"# Model: {program.name}   Ranks: {program.plan.ranks}"]


def _listing(title: str, rows: Sequence[str]) -> list[str]:
    return [f"# {title}: {len(rows)}", *(f"#   {row}" for row in rows)]


def _holders(program: Program, held: Callable[[RankProgram], Sequence[LocalTensor]]) -> dict[ir.Value, list[int]]:
    """Per value the ranks that read or hold it, rising."""
    found: dict[ir.Value, list[int]] = {}
    for part in program.parts:
        for value in dict.fromkeys(one.version.value for one in held(part)):
            found.setdefault(value, []).append(part.rank)
    return found


def _weight_holders(program: Program) -> dict[ir.Value, list[int]]:
    found: dict[ir.Value, list[int]] = {}
    for part, ranks in program.alike:
        for value in dict.fromkeys(one.version.value for one in part.weights):
            found.setdefault(value, []).extend(ranks)
    return {value: sorted(ranks) for value, ranks in found.items()}


def _event_text(event: Event) -> str:
    if event.op_type == SEND:
        (source,), (target,) = event.ranks
        where = f"{source} -> {target}"
    else:
        many = max(len(event.ranks), len(event.ranks[0])) > _NAMED
        lists = event.group if many else ", ".join("-".join(map(str, ranks)) for ranks in event.ranks)
        where = f"{event.op_type} {lists}"
    return f"{event.tag}: %{event.name} {where}   {event.bytes} bytes   {event.cause}"


def _dim_facts(program: Program) -> list[str]:
    """Every compound dim once, with what is known of it."""
    known = {name: info.facts for name, info in program.symbols.items()}
    dims = {
        dim for info in program.values.values() for dim in info.shape or () if isinstance(dim, str) and dim not in known
    }
    return [f"{dim} : {facts_of(dim, known)}" for dim in sorted(dims)]


def _ranks(ranks: Sequence[int]) -> str:
    """`3`, `[0, 2]`, and more than eight as rows: `[0..511]`, `[0..504:8]`."""
    if len(ranks) > _NAMED:
        return f"[{order_text(ranks).replace('-', '..').replace(',', ', ')}]"
    return ", ".join(map(str, ranks)) if len(ranks) == 1 else f"[{', '.join(map(str, ranks))}]"


def _strategies(program: Program, node: ir.Node, rank: int | None = None) -> Iterator[str]:
    """How a node's inputs are cut, per group, or of the groups that a rank is in: ` {in_strategy: ((2, 4), (4, 1))}`."""
    return (f" {{in_strategy: {choice.strategy()}}}" for choice in _choices(program, node, rank))


def _choices(program: Program, node: ir.Node, rank: int | None) -> Iterator[NodeSharding]:
    placed = program.placement.get(node)
    for group in placed.groups if placed else ():
        choice = program.choices.get(NodeOnGroup(node, group)) if rank is None or rank in group else None
        if choice is not None:
            yield choice


def cut_text(program: Program, node: ir.Node, rank: int | None = None) -> Iterator[str]:
    """Who decided each cut of a node, per group that cuts it: `m in 2 by plan.yaml:4, k in 4 by plan.yaml:4`.

    With `rank` of the groups that it is in.
    """
    for choice in _choices(program, node, rank):
        if choice.cut:
            yield ", ".join(
                f"{factor} in {shards} by {choice.why.get(factor, '?')}" for factor, shards in choice.cut.items()
            )


def _part_lines(program: Program, part: RankProgram, ranks: Sequence[int]) -> Iterator[str]:
    kinds = _kinds(program, part)
    yield f"program @rank_{part.rank:04d}({', '.join(f'%{held.name}' for held in part.inputs)}) {{"
    yield from (_weight_line(program, part, held, ranks) for held in part.weights)
    for one in part.kept:
        after = f"   next: %{one.next}" if one.next else ""
        kind = _type_text(program, *part.types[one.name])
        on = f"   on: {one.target}" if one.target else ""
        yield f"  # State: %{one.name} : {kind}{part_of(program, one.version, ranks)}{after}{on}"
    if part.scalars:
        yield f"  # Scalars: {', '.join(f'%{name}' for name in part.scalars)}"
    for step in part.steps:
        yield from _step_lines(program, part, step, kinds)
    yield from _return_lines([held.name for held in part.outputs], kinds)
    for body in part.bodies:
        inside, inner = _kinds(program, part, body), replace(part, types=body.types)
        yield ""
        yield f"task @{body.name}({', '.join(f'%{name}' for name in body.inputs)}) {{"
        for step in body.steps:
            yield from _step_lines(program, inner, step, inside)
        yield from _return_lines(body.outputs, inside)


def _weight_line(program: Program, part: RankProgram, held: LocalTensor, ranks: Sequence[int]) -> str:
    """A weight, with the law of one whose numbers the artifact does not have."""
    value, shape = part.types[held.name]
    law = law_of(held.version.value)
    size = (
        f"{bytes_text(program.values[value], shape)} bytes{part_of(program, held.version, ranks if law else ranks[:1])}"
    )
    initial = f"   Initial: {law_text(law)}" if law else ""
    return f"  # Parameter: %{held.name} : {_type_text(program, value, shape)}   {size}{initial}"


def _step_lines(
    program: Program, part: RankProgram, step: RankOp, kinds: Callable[[Sequence[str]], str]
) -> Iterator[str]:
    match step:
        case ComputeOp():
            yield from _op_lines(program, part, step, kinds)
        case CommOp():
            yield from _comm_lines(program, step, kinds)
        case CopyOp():
            yield f"  %{step.made} = Copy(%{step.source}) {{to: {step.target}}}"
            yield f"      : {kinds([step.source])} -> {kinds([step.made])}"
            yield f"      # Scope: {step.path}   Bytes: {step.bytes}   Cause: {step.cause}"
        case TaskCall():
            outs, ins = (", ".join(f"%{name}" for name in names) for names in (step.outputs, step.inputs))
            yield f"  {outs + ' = ' if outs else ''}{step.body.name}({ins}) {{microbatch: {step.microbatch}}}"
            yield f"      # Task: {step.cell}"


def _return_lines(names: Sequence[str], kinds: Callable[[Sequence[str]], str]) -> Iterator[str]:
    yield f"  Return({', '.join(f'%{name}' for name in names)})"
    yield f"      : {kinds(names)}"
    yield "}"


def _kinds(program: Program, part: RankProgram, body: TaskBody | None = None) -> Callable[[Sequence[str]], str]:
    """The types of a rank's values, or of those in the body of a task, by their names: `(<tensor(float), (batch, 8)>, <>)`."""
    helpers = helper_types(program, part, body)
    types = part.types if body is None else body.types

    def kind(name: str) -> str:
        if name in part.scalars:
            return "<tensor(float), ()>"
        if name in types:
            return _type_text(program, *types[name])
        return f"<{_constant(part.constants[name])}>" if name in part.constants else helpers.get(name, "<>")

    return lambda names: f"({', '.join(kind(name) if name else '<>' for name in names)})"


def _op_lines(
    program: Program, part: RankProgram, step: ComputeOp, kinds: Callable[[Sequence[str]], str]
) -> Iterator[str]:
    """A node of a rank; strategy and cuts stand at the one that makes the outputs of the model's own node."""
    node, source = step.node, step.source
    outs, ins = [v.name or "" for v in node.outputs], [v.name or "" if v else "" for v in node.inputs]
    made = {part.types[name][0] for name in outs if name in part.types}
    itself = not made.isdisjoint(source.outputs)
    target = f" {{target: {step.target}}}" if step.target else ""
    yield f"  {node_text(node, '  ')}" + "".join(_strategies(program, source, part.rank) if itself else ()) + target
    yield f"      : {kinds(ins)} -> {kinds(outs)}"
    placed = program.placement.get(source)
    path = program.paths.get(source, node.name or "")
    again = f"   Recomputed: {step.again}" if step.again else ""
    yield f"      # Scope: {path}" + (f"   Rule: {placed.rule}" if placed else "") + again
    if itself:
        yield from (f"      # Sharded: {text}" for text in cut_text(program, source, part.rank))


def _comm_lines(program: Program, step: CommOp, kinds: Callable[[Sequence[str]], str]) -> Iterator[str]:
    outs, ins = (", ".join(f"%{name}" if name else "_" for name in names) for names in (step.outputs, step.inputs))
    attributes = ", ".join(f"{key}: {_plain(value)}" for key, value in {**step.attributes, "tag": step.tag}.items())
    yield f"  {outs + ' = ' if outs else ''}{step.op_type}({ins}) {{{attributes}}}"
    yield f"      : {kinds(step.inputs)} -> {kinds(step.outputs)}"
    producer = step.value.producer()
    path = program.paths[producer] if producer is not None else step.value.name
    yield f"      # Scope: {path}   Bytes: {step.bytes}   Cause: {step.cause}"


def _plain(value: int | str | tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _constant(constant: Constant) -> str:
    if isinstance(constant, RankConstant):
        text = f"[{', '.join(constant.items)}]" if constant.shape else constant.items[0]
        return f"{constant.dtype}, {text} in {constant.group}"
    return f"{constant.dtype}, {constant.tolist()}"


def _signature(program: Program, values: Sequence[ir.Value | None]) -> str:
    return f"({', '.join(_type(program, value) for value in values)})"


def _typed(program: Program, value: ir.Value) -> str:
    return f"%{value.name} : {_type(program, value)}"


def _bytes(program: Program, value: ir.Value) -> str:
    return bytes_text(program.values[value], program.values[value].shape) if value in program.values else "unknown"


def _type(program: Program, value: ir.Value | None) -> str:
    if value is None or not value.name:
        return "<>"
    if value not in program.values:  # before `shapes`
        return f"<{type_text(value.type)}>"
    return _type_text(program, value, program.values[value].shape)


def _type_text(program: Program, value: ir.Value, shape: Shape | None) -> str:
    info = program.values[value]
    if not info.is_tensor:
        return f"<{info.type}>"
    if shape is not None:
        return f"<{info.type}, ({', '.join(map(str, shape))})>"
    if value.shape is None:
        return f"<{info.type}, ?>"
    dims = ", ".join(str(d) if isinstance(d, int) else "?" for d in value.shape.dims)
    return f"<{info.type}, ({dims})>"
