"""The texts of an artifact's `ir/` folder: made to be read before a run, searched by op or path, and diffed in CI.

Stable and deterministic: no counters, times, machine paths or hash order; a line changes only where the program does. The grammar
is described in `compiler/README.md`, section "The dumps".

    %conv1.Conv = Conv(%x, %conv1.weight) {kernel_shape: [5, 5]} {rank: 3}
        : (<tensor(float), (batch, 1, 32, 32)>, <tensor(float), (6, 1, 5, 5)>) -> (<tensor(float), (batch, 6, 28, 28)>)
        # Scope: conv1.Conv   Rule: plan.yaml:6 'conv1'
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import onnx_ir as ir
from partc.compiler.facts import facts_of
from partc.compiler.program import Part, Program, Recv, Send, Step
from partc.compiler.shapes import type_text
from partc.compiler.transfer_bytes import bytes_text

GRAMMAR = 1
_LONG = 16


def begin_text(program: Program, title: str = "step_parallel_begin") -> str:
    """`step_parallel_begin.ir`: the whole model in global shapes, each op with its ranks and the rule that decided.

    Before the passes that decide them have run, ranks and rules are left out.
    """
    graph = program.model.graph
    lines = _head(program, title)
    lines += _listing(
        "Symbols", [f"{name} : {info.facts}   {info.where}" for name, info in sorted(program.symbols.items())]
    )
    lines += _listing("Dims", _dim_facts(program))
    readers = {value: [part.rank for part in program.parts if value in part.inputs] for value in graph.inputs}
    lines += _listing(
        "Inputs", [f"{_typed(program, value)}   ranks: {_ranks(readers[value])}" for value in graph.inputs]
    )
    holders = {
        value: [part.rank for part in program.parts if value in part.weights] for value in graph.initializers.values()
    }
    lines += _listing(
        "Parameters",
        [
            f"{_typed(program, value)}   {bytes_text(program.values[value])} bytes   ranks: {_ranks(ranks)}"
            for value, ranks in holders.items()
        ],
    )
    lines.append(f"graph @main({', '.join(f'%{value.name}' for value in graph.inputs)}) {{")
    for node in graph:
        placed = program.placement.get(node)
        key = "rank" if placed and len(placed.ranks) == 1 else "ranks"
        lines += _node_lines(program, node, f" {{{key}: {_ranks(placed.ranks)}}}" if placed else "")
    lines += _return_lines(program, graph.outputs)
    return "\n".join([*lines, "}", ""])


def end_text(program: Program) -> str:
    """`step_parallel_end.ir`: all ranks' programs with their communication, after a table of every transfer."""
    lines = _head(program, "step_parallel_end")
    lines += _listing(
        "Transfers",
        [
            f"{t.tag}: %{t.value.name} {t.source} -> {t.target}   {bytes_text(program.values[t.value])} bytes   {t.cause}"
            for t in program.transfers
        ],
    )
    for part in program.parts:
        lines += ["", *_part_lines(program, part)]
    return "\n".join([*lines, ""])


def rank_text(program: Program, part: Part) -> str:
    """`rank_0000.ir`: one rank's program."""
    return "\n".join([*_head(program, f"rank_{part.rank:04d}"), *_part_lines(program, part), ""])


def _head(program: Program, title: str) -> list[str]:
    return [f"# partc {title}, grammar {GRAMMAR}", f"# Model: {program.name}   Ranks: {program.plan.ranks}"]


def _listing(title: str, rows: Sequence[str]) -> list[str]:
    return [f"# {title}: {len(rows)}", *(f"#   {row}" for row in rows)]


def _dim_facts(program: Program) -> list[str]:
    """Every compound dim once, with what is known of it."""
    known = {name: info.facts for name, info in program.symbols.items()}
    dims = {
        dim for info in program.values.values() for dim in info.shape or () if isinstance(dim, str) and dim not in known
    }
    return [f"{dim} : {facts_of(dim, known)}" for dim in sorted(dims)]


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) == 1 else f"[{', '.join(map(str, ranks))}]"


def _part_lines(program: Program, part: Part) -> Iterator[str]:
    yield f"program @rank_{part.rank:04d}({', '.join(f'%{value.name}' for value in part.inputs)}) {{"
    for value in part.weights:
        yield f"  # Parameter: {_typed(program, value)}   {bytes_text(program.values[value])} bytes"
    for step in part.steps:
        yield from _step_lines(program, step)
    yield from _return_lines(program, part.outputs)
    yield "}"


def _step_lines(program: Program, step: Step) -> Iterator[str]:
    if isinstance(step, ir.Node):
        yield from _node_lines(program, step, "")
        return
    transfer = step.transfer
    value = transfer.value
    producer = value.producer()
    assert producer is not None
    match step:
        case Send():
            yield f"  Send(%{value.name}) {{peer: {transfer.target}, tag: {transfer.tag}}}"
            yield f"      : ({_type(program, value)}) -> ()"
        case Recv():
            yield f"  %{value.name} = Recv() {{peer: {transfer.source}, tag: {transfer.tag}}}"
            yield f"      : () -> ({_type(program, value)})"
    yield f"      # Scope: {program.paths[producer]}   Bytes: {bytes_text(program.values[value])}   Cause: {transfer.cause}"


def _node_lines(program: Program, node: ir.Node, suffix: str) -> Iterator[str]:
    yield f"  {_call(node, '  ')}{suffix}"
    ins = ", ".join(_type(program, value) for value in node.inputs)
    outs = ", ".join(_type(program, value) for value in node.outputs)
    yield f"      : ({ins}) -> ({outs})"
    placed = program.placement.get(node)
    yield f"      # Scope: {program.paths[node]}" + (f"   Rule: {placed.rule}" if placed else "")


def _return_lines(program: Program, outputs: Sequence[ir.Value]) -> list[str]:
    return [
        f"  Return({', '.join(f'%{value.name}' for value in outputs)})",
        f"      : ({', '.join(_type(program, value) for value in outputs)})",
    ]


def _typed(program: Program, value: ir.Value) -> str:
    return f"%{value.name} : {_type(program, value)}"


def _type(program: Program, value: ir.Value | None) -> str:
    if value is None or not value.name:
        return "<>"
    info = program.values[value]
    if not info.is_tensor:
        return f"<{info.type}>"
    if info.shape is None:
        dims = (
            ", ".join(str(d) if isinstance(d, int) else "?" for d in value.shape.dims)
            if value.shape is not None
            else None
        )
        return f"<{info.type}, ?>" if dims is None else f"<{info.type}, ({dims})>"
    return f"<{info.type}, ({', '.join(map(str, info.shape))})>"


def _call(node: ir.Node, indent: str) -> str:
    op = f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    outs = ", ".join(f"%{value.name}" if value.name else "_" for value in node.outputs)
    ins = ", ".join("_" if value is None else f"%{value.name}" for value in node.inputs)
    attributes = ", ".join(f"{name}: {_attribute(attr, indent)}" for name, attr in sorted(node.attributes.items()))
    return f"{outs} = {op}({ins})" + (f" {{{attributes}}}" if attributes else "")


def _attribute(attr: ir.Attr, indent: str) -> str:
    match attr.type:
        case ir.AttributeType.GRAPH:
            return _body(attr.as_graph(), indent)
        case ir.AttributeType.GRAPHS:
            return f"[{', '.join(_body(graph, indent) for graph in attr.as_graphs())}]"
        case ir.AttributeType.TENSOR:
            return _tensor(attr.as_tensor())
        case ir.AttributeType.TENSORS:
            return f"[{', '.join(_tensor(tensor) for tensor in attr.as_tensors())}]"
        case ir.AttributeType.TYPE_PROTO:
            return type_text(attr.value.type)
        case ir.AttributeType.STRING:
            return repr(attr.value)
        case ir.AttributeType.INTS | ir.AttributeType.FLOATS | ir.AttributeType.STRINGS:
            return f"[{', '.join(map(repr, attr.value))}]"
        case _:
            return repr(attr.value)


def _tensor(tensor: ir.TensorProtocol) -> str:
    """A short tensor by its items, a long one by its hash."""
    kind = type_text(ir.TensorType(tensor.dtype))
    shape = ", ".join(map(str, tensor.shape.numpy()))
    if tensor.size <= _LONG:
        return f"<{kind}, ({shape})> {tensor.numpy().tolist()}"
    return f"<{kind}, ({shape})> sha256:{hashlib.sha256(tensor.tobytes()).hexdigest()[:16]}"


def _body(graph: ir.Graph, indent: str) -> str:
    inner = indent + "    "
    lines = [f"graph({', '.join(f'%{value.name}' for value in graph.inputs)}) {{"]
    lines += [
        f"{inner}%{name} = {_tensor(value.const_value)}"
        for name, value in graph.initializers.items()
        if value.const_value is not None
    ]
    lines += [f"{inner}{_call(node, inner)}" for node in graph]
    lines.append(f"{inner}Return({', '.join(f'%{value.name}' for value in graph.outputs)})")
    return "\n".join([*lines, f"{indent}}}"])
