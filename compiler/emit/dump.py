"""The texts of an artifact's `ir/` folder: written to be read before a run, searched by op or path, and diffed in CI.

Stable and deterministic: no counters, times, machine paths or hash order; a line changes only where the program does. The grammar is
described in `compiler/README.md`, section "The dumps".

    %conv1.Conv = Conv(%x, %conv1.weight) {kernel_shape: [5, 5]} {rank: 3}
        : (<tensor(float), (batch, 1, 32, 32)>, <tensor(float), (6, 1, 5, 5)>) -> (<tensor(float), (batch, 6, 28, 28)>)
        # Scope: conv1.Conv   Rule: plan.yaml:6 'conv1'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.dims.expression import facts_of
from partc.compiler.emit.names import Names
from partc.compiler.emit.rank_text import RankTexts, cut_text, node_text, strategies, value_text
from partc.compiler.ir.program import Complete, Loaded, Lowered, Placed, Prepared, Sharded, Targeted, Typed
from partc.compiler.ir.programs import Event, RankProgram
from partc.compiler.ir.sharded import facts_of as group_facts
from partc.compiler.ir.sized import sized_inputs
from partc.compiler.ir.value_info import bytes_text
from partc.runtime.artifact.format import SEND

GRAMMAR = 4
_NAMED = 8
"""So many lists of a group, or ranks of one, are listed."""


def begin_text(program: Loaded, title: str = "step_parallel_begin") -> str:
    """`step_parallel_begin.ir`: the whole model in global shapes, each op with its ranks, its strategy and the rule that decided.

    Before the passes that decide them have run, ranks, strategies and rules are left out.
    """
    graph = program.model.graph
    lines = _head(program, title)
    symbols = program.symbols if isinstance(program, Typed) else {}
    lines += _listing("Symbols", [f"{name} : {info.facts}   {info.where}" for name, info in sorted(symbols.items())])
    lines += _listing("Dims", _dim_facts(program) if isinstance(program, Typed) else [])
    values = program.values if isinstance(program, Typed) else {}
    readers, holders = _holders(program) if isinstance(program, Lowered) else ({}, {})
    lines += _listing("Inputs", [f"{_typed(program, v)}   ranks: {_ranks(readers.get(v, []))}" for v in graph.inputs])
    lines += _listing(
        "Parameters",
        [
            f"{_typed(program, value)}   {bytes_text(values[value], values[value].shape) if value in values else 'unknown'} bytes"
            f"   ranks: {_ranks(holders.get(value, []))}"
            for value in graph.initializers.values()
        ],
    )
    training = program.training if isinstance(program, Prepared) else None
    if training is not None and training.notes.tables:
        lines += _listing("Tables", training.notes.tables)
    lines.append(f"graph @main({', '.join(f'%{value.name}' for value in graph.inputs)}) {{")
    placement = program.placement if isinstance(program, Placed) else {}
    targets = program.targets if isinstance(program, Targeted) else {}
    for node in graph:
        placed = placement.get(node)
        suffix = f" {{{'rank' if len(placed.ranks) == 1 else 'ranks'}: {_ranks(placed.ranks)}}}" if placed else ""
        suffix += f" {{target: {targets[node]}}}" if node in targets else ""
        suffix += "".join(strategies(program, node) if isinstance(program, Sharded) else ())
        lines.append(f"  {node_text(node, '  ')}{suffix}")
        lines.append(f"      : {_signature(program, node.inputs)} -> {_signature(program, node.outputs)}")
        lines.append(f"      # Scope: {program.paths[node]}" + (f"   Rule: {placed.rule}" if placed else ""))
        cuts = cut_text(program, node) if isinstance(program, Sharded) else ()
        lines += [f"      # Sharded: {text}" for text in cuts]
    lines.append(f"  Return({', '.join(f'%{value.name}' for value in graph.outputs)})")
    lines.append(f"      : {_signature(program, graph.outputs)}")
    return "\n".join([*lines, "}", ""])


def end_text(
    program: Complete, names: Names | None = None, bodies: Iterable[tuple[Sequence[int], str]] | None = None
) -> str:
    """`step_parallel_end.ir`: all ranks' programs with their communication, after a table of all of it.

    `bodies`: by ranks that share a program its text (`RankTexts`), where that was made already.
    """
    names = names or Names(program)
    if bodies is None:
        texts = RankTexts(program, names)
        bodies = [(ranks, texts.of(part, ranks)) for part, ranks in program.distinct_programs]
    lines = _head(program, "step_parallel_end")
    lines += _listing("Communication", [_event_text(names, event) for event in program.events])
    for ranks, body in bodies:
        lines += ["", *([f"# Ranks: {_ranks(ranks)}"] if len(ranks) > 1 else []), body]
    return "\n".join([*lines, ""])


def rank_text(program: Complete, part: RankProgram, body: str) -> str:
    """`rank_0000.ir`: the program of a rank, whose text (`RankTexts`) is `body`."""
    return "\n".join([*_head(program, f"rank_{part.rank:04d}"), body, ""])


def _head(program: Loaded, title: str) -> list[str]:
    return [f"# partc {title}, grammar {GRAMMAR}", f"# Model: {program.name}   Ranks: {program.plan.ranks}"]


def _listing(title: str, rows: Sequence[str]) -> list[str]:
    return [f"# {title}: {len(rows)}", *[f"#   {row}" for row in rows]]


def _holders(program: Lowered) -> tuple[dict[ir.Value, list[int]], dict[ir.Value, list[int]]]:
    """Maps each input to the ranks that read it, and each weight to the ranks that hold it, ascending."""
    readers: dict[ir.Value, list[int]] = {}
    holders: dict[ir.Value, list[int]] = {}
    sized = sized_inputs(program)
    for part, alike in program.distinct_programs:
        alone = sized.get(part.rank, ())
        for value in dict.fromkeys([one.version.value for one in part.inputs if one.value not in alone]):
            readers.setdefault(value, []).extend(alike)
        for value in dict.fromkeys([one.version.value for one in part.weights]):
            holders.setdefault(value, []).extend(alike)
    for found in (readers, holders):
        for ranks in found.values():
            ranks.sort()
    return readers, holders


def _event_text(names: Names, event: Event) -> str:
    if event.op_type == SEND:
        (source, target), *more = event.ranks if event.group else [(event.ranks[0][0], event.ranks[1][0])]
        where = f"{source} -> {target}{f' and {len(more)} more' if more else ''}"
    else:
        many = max(len(event.ranks), len(event.ranks[0])) > _NAMED
        lists = event.group if many else ", ".join("-".join(map(str, ranks)) for ranks in event.ranks)
        where = f"{event.op_type} {lists}"
    return f"{event.tag}: %{names[event.output]} {where}   {event.bytes} bytes   {event.cause}"


def _dim_facts(program: Typed) -> list[str]:
    """Every compound dim once, with what is known of it."""
    known = {name: info.facts for name, info in program.symbols.items()}
    dims = {
        dim for info in program.values.values() for dim in info.shape or () if isinstance(dim, str) and dim not in known
    }
    return [f"{dim} : {facts_of(dim, known)}" for dim in sorted(dims)]


def _ranks(ranks: Sequence[int]) -> str:
    """`3`, `[0, 2]`, and more than eight as rows: `[0..511]`, `[0..504:8]`."""
    if len(ranks) > _NAMED:
        return f"[{group_facts(tuple(ranks)).rows.replace('-', '..').replace(',', ', ')}]"
    return ", ".join(map(str, ranks)) if len(ranks) == 1 else f"[{', '.join(map(str, ranks))}]"


def _signature(program: Loaded, values: Sequence[ir.Value | None]) -> str:
    return f"({', '.join([_type(program, value) for value in values])})"


def _typed(program: Loaded, value: ir.Value) -> str:
    return f"%{value.name} : {_type(program, value)}"


def _type(program: Loaded, value: ir.Value | None) -> str:
    if value is None or not value.name:
        return "<>"
    if not isinstance(program, Typed) or value not in program.values:
        return f"<{type_text(value.type)}>"
    return value_text(program, value, program.values[value].shape)
