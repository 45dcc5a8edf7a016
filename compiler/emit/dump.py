"""The texts of an artifact's `ir/` folder: made to be read before a run, searched by op or path, and diffed in CI.

Stable and deterministic: no counters, times, machine paths or hash order; a line changes only where the program does. The grammar
is described in `compiler/README.md`, section "The dumps".

    %conv1.Conv = Conv(%x, %conv1.weight) {kernel_shape: [5, 5]} {rank: 3}
        : (<tensor(float), (batch, 1, 32, 32)>, <tensor(float), (6, 1, 5, 5)>) -> (<tensor(float), (batch, 6, 28, 28)>)
        # Scope: conv1.Conv   Rule: plan.yaml:6 'conv1'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.dims.expression import facts_of
from partc.compiler.emit.choice_text import cut_text, strategies
from partc.compiler.emit.node_text import node_text
from partc.compiler.emit.rank_text import RankTexts
from partc.compiler.emit.value_text import value_text
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import Event, LocalTensor, RankProgram
from partc.compiler.ir.sized import sized_inputs
from partc.compiler.ir.value_bytes import bytes_text
from partc.runtime.artifact.format import SEND
from partc.runtime.artifact.ranks import order_text

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
    sized = sized_inputs(program)
    readers = _holders(program, lambda part: [one for one in part.inputs if one.name not in sized.get(part.rank, ())])
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
        suffix += "".join(strategies(program, node))
        lines.append(f"  {node_text(node, '  ')}{suffix}")
        lines.append(f"      : {_signature(program, node.inputs)} -> {_signature(program, node.outputs)}")
        lines.append(f"      # Scope: {program.paths[node]}" + (f"   Rule: {placed.rule}" if placed else ""))
        lines += [f"      # Sharded: {text}" for text in cut_text(program, node)]
    lines.append(f"  Return({', '.join(f'%{value.name}' for value in graph.outputs)})")
    lines.append(f"      : {_signature(program, graph.outputs)}")
    return "\n".join([*lines, "}", ""])


def end_text(program: Program, bodies: Iterable[tuple[Sequence[int], str]] | None = None) -> str:
    """`step_parallel_end.ir`: all ranks' programs with their communication, after a table of all of it.

    `bodies`: by ranks that share a program its text (`RankTexts`), where that was made already.
    """
    if bodies is None:
        texts = RankTexts(program)
        bodies = [(ranks, texts.of(part, ranks)) for part, ranks in program.alike]
    lines = _head(program, "step_parallel_end")
    lines += _listing("Communication", [_event_text(event) for event in program.events])
    for ranks, body in bodies:
        lines += ["", *([f"# Ranks: {_ranks(ranks)}"] if len(ranks) > 1 else []), body]
    return "\n".join([*lines, ""])


def rank_text(program: Program, part: RankProgram, body: str) -> str:
    """`rank_0000.ir`: the program of a rank, whose text (`RankTexts`) is `body`."""
    return "\n".join([*_head(program, f"rank_{part.rank:04d}"), body, ""])


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
    return value_text(program, value, program.values[value].shape)
