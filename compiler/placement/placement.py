"""Pass: assigns to every node the ranks that run it, with the reason.

The law, in order; the first that decides holds:

1. A node that depends on no input (a constant) runs on every rank that reads it, wherever the plan puts its module.
2. Shape arithmetic (from `Shape` and `Size` to integers of rank 0 or 1; where the plan is silent, to anything) runs on every
   rank that reads it. `Shape(x)` is taken where x is; a rank without x is sent the shape, never x.
   So does what is cheap to compute from inputs of the model where the plan is silent, a mask for instance, if that takes fewer bytes
   than sending it (`computed_at_readers.py`). If the plan places a module around such a node, and does not name the node, it runs
   there, and on other ranks that read it.
3. The plan's last matching rule, else the model's own last `place`; what a sharding rule matches and no placement does runs on
   the group of all ranks.
4. A node follows the producer that has most bytes of its inputs; at a tie, the earliest input's.
5. Without a placed producer it follows its first consumer, else the rank its output goes to, else rank 0. In a plan that cuts
   operators, the group of all ranks stands for rank 0.
   Ranks that only serve draw nothing to them by (4) and (6), and "all ranks" are the others.
6. Nodes that (4) or (5) placed move to their consumers, alone or with the producers that serve them only, where that saves a
   transfer, never to a smaller group.

Where the plan names stages, these are (3), and `node_stages.py` has the law for (4) to (6).

Lines of a plan that decide for no node, since later lines match all that they do: mostly exceptions that stand before the general line.

placement: {conv1: 0, "**": 1}      conv1 runs on rank 1, and rank 0 has nothing to do
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Protocol

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import PINNED
from partc.compiler.ir.program import Annotated, Placed
from partc.compiler.ir.sharded import Group, NodePlacement, facts_of
from partc.compiler.ir.training import ProgramKind
from partc.compiler.matching import (
    Rule,
    against_stages,
    default_group,
    matched_nodes,
    modules_of,
    output_ranks,
    placement_rules,
    recomputed,
    sharding_rules,
    stage_rules,
)
from partc.compiler.ops.registry import draws
from partc.compiler.placement.computed_at_readers import following, is_large_weight, repeatable, worth_repeating
from partc.compiler.placement.infer import REPEATED, Delivered, Inferred, infer_placement
from partc.compiler.placement.node_stages import backward_edges
from partc.compiler.plan.pattern import compile_pattern
from partc.runtime.artifact import format as fmt


class _Line(Protocol):
    @property
    def pattern(self) -> str: ...
    @property
    def where(self) -> str: ...


def shadowed_lines(program: Annotated) -> Iterator[str]:
    """A warning for each line of `placement`, `target` and of styles in `sharding` that decides for no node."""
    plan = program.plan
    if program.kind is ProgramKind.STEP:
        yield from _of(program, "placement", [rule for rule in plan.placement if not rule.serves])
        yield from _of(program, "target", plan.target)
        yield from _of(program, "sharding", [rule for rule in plan.sharding if rule.style])


def _of(program: Annotated, key: str, lines: Sequence[_Line]) -> Iterator[str]:
    hits = [matched_nodes(program, line.pattern) for line in lines]
    decided: dict[ir.Node, int] = {node: k for k, hit in enumerate(hits) for node in hit}
    for k, (line, hit) in enumerate(zip(lines, hits, strict=True)):
        later = dict.fromkeys(decided[node] for node in hit)
        if hit and k not in later:
            names = ", ".join(f"'{lines[at].pattern}' ({PurePath(lines[at].where).name})" for at in later)
            yield (
                f"{line.where}: {key} of '{line.pattern}' decides nothing: {names} matches all that it does, and the last match wins\n"
                "  help: write general lines first, then exceptions"
            )


def place(program: Annotated) -> Placed:
    """Fills `placement`. Raises CompileError for patterns that match nothing; warns of lines that decide nothing."""
    graph = program.model.graph
    default = default_group(program.plan, program.declared)
    rules, problems = placement_rules(program)
    staged, in_stages, stage_problems = stage_rules(program)
    delivered, output_problems = output_ranks(program)
    cut, cut_problems = sharding_rules(program)
    problems += [*stage_problems, *output_problems, *cut_problems]
    problems += recomputed(program)[1] if program.kind is ProgramKind.STEP else []
    if problems:
        raise CompileError(problems)
    said = rules
    rules = in_stages if staged else {n: Rule(r.pattern, default, r.where) for n, r in cut.items()} | rules
    floating = _floating(program, rules)
    fixed = {node: rule.ranks for node, rule in rules.items() if node not in floating}
    named = {node: stage for node, stage in staged.items() if node not in floating} if staged else None
    if named is not None:
        _check_order(program, named)
    to = {value: ranks for value, (ranks, _) in delivered.items()}
    inferred = _infer(program, fixed, _by_module(program, said, in_stages), floating, to, default, named)
    lines = {rule: str(rule) for rule in dict.fromkeys(rules.values())}
    reasons = inferred.reasons | {node: lines[rule] for node, rule in rules.items()} | floating
    groups = {node: tuple([facts_of(group).group for group in some]) for node, some in inferred.groups.items()}
    placement = {node: NodePlacement(groups[node], reasons[node], follows=node in floating) for node in graph}
    if problems := list(against_stages(program, said, inferred.stages)) if staged else []:
        raise CompileError(problems)
    warnings = (*program.warnings, *shadowed_lines(program))
    return program.into(Placed, placement=placement, stages=inferred.stages, warnings=warnings)


def _check_order(program: Annotated, named: dict[ir.Node, int]) -> None:
    """CompileError where a stage has no node that runs there, or reads from a later one."""
    assert program.plan.pipeline is not None
    stages = program.plan.pipeline.stages
    used = set(named.values())
    problems = [
        Problem(
            stage.where,
            f"stage {k} has no nodes of its own",
            "constants and shape arithmetic run wherever they are read",
            "name a node that computes with the data, or remove the stage",
        )
        for k, stage in enumerate(stages)
        if k not in used and program.kind is ProgramKind.STEP
    ]
    if problems := problems + backward_edges(program, named, stages):
        raise CompileError(problems)


def _by_module(program: Annotated, *given: dict[ir.Node, Rule]) -> set[ir.Node]:
    """The nodes that a line places with a module around them, rather than by a name of their own; none that read a large weight."""
    placed, matching, modules = set[ir.Node](), dict[str, set[str]](), modules_of(program.paths.values())
    for rules in given:
        for node, rule in rules.items():
            path = program.paths[node]
            if rule.pattern == path or any(map(is_large_weight, program.reads[node])):
                continue
            if rule.pattern not in matching:
                matches = compile_pattern(rule.pattern).matches
                matching[rule.pattern] = {module for module in modules if matches(module)}
            if path.rpartition(".")[0] in matching[rule.pattern]:
                placed.add(node)
    return placed


def _infer(
    program: Annotated,
    fixed: dict[ir.Node, Group],
    by_module: set[ir.Node],
    floating: dict[ir.Node, str],
    delivered: Delivered,
    default: Group,
    staged: dict[ir.Node, int] | None,
) -> Inferred:
    """Settles all nodes; `floating` is given the nodes that are repeated wherever they are read."""
    named = {node: group for node, group in fixed.items() if node not in by_module}
    basis, chosen = dict(floating), repeatable(program, named, floating, following(program))
    while True:
        floating.clear()
        floating.update(basis | dict.fromkeys(chosen, REPEATED))
        there = {node: group for node, group in fixed.items() if node not in floating}
        stages = None if staged is None else {node: stage for node, stage in staged.items() if node not in floating}
        inferred = infer_placement(program, there, floating, delivered, default, stages)
        kept = worth_repeating(program, chosen, inferred, basis)
        kept = [node for node in kept if node not in fixed or fixed[node] in inferred.groups[node]]
        if kept == chosen:
            return inferred
        chosen = kept


def _floating(program: Annotated, rules: dict[ir.Node, Rule]) -> dict[ir.Node, str]:
    """Nodes that run wherever they are read, with the reason: constants and shape arithmetic."""
    constant: set[ir.Value] = set(program.model.graph.initializers.values())
    known = set(constant)
    """Constants and what is made of these and of shapes."""
    floating: dict[ir.Node, str] = {}
    for node, values in program.reads.items():
        if not known.issuperset(values) and not (node.op_type in ("Shape", "Size") and node.domain in ("", "ai.onnx")):
            continue
        if draws(node) or PINNED in node.meta or node.domain not in ("", "ai.onnx", "com.microsoft"):
            continue
        if constant.issuperset(values):
            constant.update(node.outputs)
            floating[node] = fmt.CONSTANT
        elif node in rules and not all(
            out.shape is not None and out.shape.rank() <= 1 and out.dtype is not None and out.dtype.is_integer()
            for out in node.outputs
        ):
            continue
        else:
            floating[node] = fmt.SHAPE_ARITHMETIC
        known.update(node.outputs)
    return floating
