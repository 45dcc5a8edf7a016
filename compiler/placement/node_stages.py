"""The stage of every node where the plan names stages.

The law. What the plan names is in that stage. Any other node is in the latest of the stages that it reads from, through whatever lies
between; one that reads from none is in the earliest stage that reads it; and what neither reads from a stage nor is read by one is with
its producers, else in the first stage.

    stages: [a, c]     x -> a -> b -> c -> d        b: stage 0, as a      d: stage 1, as c
                  labels -> e -----------> d        e: stage 1, as d

So only nodes that are named can be before what they read, which is refused: microbatches pass through stages in order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir
from partc.compiler.errors import Problem
from partc.compiler.ir.program import Annotated
from partc.compiler.plan.stages import StageRule

Stages = Mapping[ir.Node, int]


def stages_of(program: Annotated, named: Stages, floating: Collection[ir.Node]) -> dict[ir.Node, int]:
    """The stage of every node but `floating` ones, which run wherever they are read."""
    latest = _latest(program, named)
    readers: dict[ir.Node, list[ir.Node]] = {}
    for node in program.model.graph:
        for value in program.reads[node]:
            if (producer := value.producer()) is not None:
                readers.setdefault(producer, []).append(node)
    stages = dict(latest)
    for node in reversed(list(program.model.graph)):
        if node not in stages and (after := [stages[reader] for reader in readers.get(node, ()) if reader in stages]):
            stages[node] = min(after)
    for node in program.model.graph:
        if node not in stages:
            stages[node] = max((stages[p] for v in program.reads[node] if (p := v.producer()) in stages), default=0)
    return {node: stage for node, stage in stages.items() if node not in floating}


def _latest(program: Annotated, named: Stages) -> dict[ir.Node, int]:
    """The latest stage from which a node reads, or its own where it is named; without those that read from none."""
    latest: dict[ir.Node, int] = {}
    for node in program.model.graph:
        before = [latest[p] for value in program.reads[node] if (p := value.producer()) in latest]
        if node in named or before:
            latest[node] = named[node] if node in named else max(before)
    return latest


def backward_edges(program: Annotated, named: Stages, rules: tuple[StageRule, ...]) -> list[Problem]:
    """A problem for each pair of stages of which the earlier reads a value of the later."""
    latest, edges = _latest(program, named), dict[tuple[int, int], tuple[ir.Value, ir.Node, ir.Node, int]]()
    for node in program.model.graph:
        for value in program.reads[node] if node in named else ():
            producer = value.producer()
            if producer is not None and latest.get(producer, -1) > named[node]:
                key = named[node], latest[producer]
                first = edges.get(key, (value, producer, node, 0))
                edges[key] = *first[:3], first[3] + 1
    problems = []
    for (stage, later), (value, producer, node, count) in edges.items():
        reader, maker = program.paths[node], program.paths[producer]
        more = f", and {count - 1} more edges like it" if count > 1 else ""
        problems.append(
            Problem(
                rules[stage].where,
                f"'{reader}' of stage {stage} reads '{value.name}', which '{maker}' makes in stage {later}{more}",
                "a stage reads from earlier stages only; one group may run several stages",
                f"name '{reader}' in stage {later} or a later one, or '{maker}' in stage {stage} or an earlier one",
            )
        )
    return problems
