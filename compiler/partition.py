"""Pass: one program per rank, cut out of one global order, with a transfer per (value, rank that reads it elsewhere).

The global order is the model's own topological order; a value's transfers stand right behind the node that makes it, as one event
that both ranks see: its Send in one program, its Recv in the other. Since every rank follows this one order, and a receive is
waited for no earlier than its Recv stands, the programs cannot deadlock, even if a send waited for its receiver.

    order:   conv1.Conv@3   h: 3->4   conv2.Conv@4
    rank 3:  conv1.Conv  Send(h, 4)
    rank 4:  Recv(h, 3)  conv2.Conv
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import onnx_ir as ir
from partc.compiler.pattern_rules import output_ranks
from partc.compiler.program import Part, Program, Recv, Send, Step, Transfer


def partition(program: Program) -> Program:
    """Fills `transfers` and `parts`; warns of ranks with nothing to do."""
    graph = program.model.graph
    delivered, _ = output_ranks(program)
    needs = _needs(program)
    for value, ranks in delivered.items():
        for rank in ranks or ():
            needs.setdefault(value, {}).setdefault(rank, f"output '{value.name}' is delivered to rank {rank}")
    drafts = [_Draft() for _ in range(program.plan.ranks)]
    transfers: list[Transfer] = []
    for node in graph:
        homes = program.placement[node].ranks
        for rank in homes:
            drafts[rank].steps.append(node)
        for value in node.outputs:
            for rank in sorted(set(needs.get(value, ())) - set(homes)):
                transfer = Transfer(len(transfers), value, homes[0], rank, needs[value][rank])
                transfers.append(transfer)
                drafts[homes[0]].steps.append(Send(transfer))
                drafts[rank].steps.append(Recv(transfer))
    for value, ranks in delivered.items():
        producer = value.producer()
        home = program.placement[producer].ranks[:1] if producer is not None else (0,)
        for rank in ranks if ranks is not None else home:
            drafts[rank].outputs.append(value)
    inputs, weights = set(graph.inputs), set(graph.initializers.values())
    for draft in drafts:
        for step in draft.steps:
            if isinstance(step, ir.Node):
                draft.reads.update(program.reads[step])
        draft.reads.update(draft.outputs)
    parts = tuple(
        Part(
            rank=rank,
            steps=tuple(draft.steps),
            inputs=tuple(value for value in graph.inputs if value in draft.reads and value in inputs),
            weights=tuple(value for value in graph.initializers.values() if value in draft.reads and value in weights),
            outputs=tuple(value for value in graph.outputs if value in set(draft.outputs)),
        )
        for rank, draft in enumerate(drafts)
    )
    idle = [part.rank for part in parts if not part.steps and not part.outputs]
    warnings = (f"{_ranks(idle)} nothing to do; place nodes there, or lower `ranks`",) if idle else ()
    return replace(program, transfers=tuple(transfers), parts=parts, warnings=program.warnings + warnings)


@dataclass
class _Draft:
    steps: list[Step] = field(default_factory=list)
    outputs: list[ir.Value] = field(default_factory=list)
    reads: set[ir.Value] = field(default_factory=set)


def _needs(program: Program) -> dict[ir.Value, dict[int, str]]:
    """Per value the ranks that read it, each with its first reader as the cause; nodes that follow theirs come last."""
    needs: dict[ir.Value, dict[int, str]] = {}
    for node in sorted(program.model.graph, key=lambda node: program.placement[node].follows):
        placed = program.placement[node]
        cause = f"read by {program.paths[node]} ({placed.rule})"
        for value in program.reads[node]:
            for rank in placed.ranks:
                needs.setdefault(value, {}).setdefault(rank, cause)
    return needs


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
