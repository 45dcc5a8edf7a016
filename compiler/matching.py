"""Finds the rule that decides for a node or an output: the last one that matches, and the plan's over the model's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import StoredUnit
from partc.compiler.ir.declared import Declared
from partc.compiler.ir.graph import OWN_NAME, SERVED, UNKNOWN_TURNS, name_of
from partc.compiler.ir.program import Annotated, Loaded, Prepared
from partc.compiler.ir.sharded import Group
from partc.compiler.plan.groups import Frame, group_of, ranks_text
from partc.compiler.plan.pattern import compile_pattern, wider
from partc.compiler.plan.pipeline import RecomputeRule
from partc.compiler.plan.rules import FULL_BATCH, PlacementRule, Plan, ShardingRule
from partc.runtime.options import Refused
from partc.runtime.spellings import nearest


@dataclass(frozen=True)
class Rule:
    """A line that places nodes; prints as `plan.yaml:8 'conv1'`, without the folder, which differs by machine."""

    pattern: str
    ranks: tuple[int, ...]
    where: str

    def __str__(self) -> str:
        return f"{PurePath(self.where).name} '{self.pattern}'"


def modules_of(paths: Iterable[str]) -> list[str]:
    """Returns every module on the nodes' paths, in order of first appearance."""
    found: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        for end in range(1, len(parts)):
            found[".".join(parts[:end])] = None
    return list(found)


def placement_rules(program: Loaded) -> tuple[dict[ir.Node, Rule], list[Problem]]:
    """Maps each placed node to the rule that decides; also a problem for each rule that matches nothing or names a rank that does not
    exist.

    The model's annotations place nothing before they are followed. A line of the model that decides nothing, since the plan places its
    nodes, may name any rank.
    """
    problems: list[Problem] = []
    decided = _annotated(program) if isinstance(program, Annotated) else {}
    declared, outside = _declared(program)
    of_plan = [Rule(p.pattern, p.ranks, p.where) for p in program.plan.placement if not p.serves]
    for rule in (*declared, *of_plan):
        ranks = program.plan.ranks
        if wrong := [rank for rank in rule.ranks if not 0 <= rank < ranks]:
            outside[rule] = Problem(
                rule.where,
                f"rank {wrong[0]} is outside of 0..{ranks - 1}",
                f"{program.plan.file} says `ranks: {ranks}`",
                "raise `ranks`, or place it on another rank",
            )
        hit = matched_nodes(program, rule.pattern)
        decided.update(dict.fromkeys(hit, rule))
        if not hit and not is_unneeded(program, rule.pattern):
            problems.append(nothing_matched(program, rule.pattern, rule.where))
    deciding = {*decided.values(), *of_plan}
    return decided, [problem for rule, problem in outside.items() if rule in deciding] + problems


def stage_rules(program: Loaded) -> tuple[dict[ir.Node, int], dict[ir.Node, Rule], list[Problem]]:
    """Returns the number and the rule of the stage of each node that the plan names in one, and the problems.

    A problem is of a pattern that matches nothing, or another stage's nodes.
    """
    stages = program.plan.pipeline.stages if program.plan.pipeline is not None else ()
    problems: list[Problem] = []
    decided: dict[ir.Node, int] = {}
    rules: dict[ir.Node, Rule] = {}
    for k, stage in enumerate(stages):
        for pattern, where in stage.patterns:
            hit = matched_nodes(program, pattern)
            if not hit and not is_unneeded(program, pattern):
                problems.append(nothing_matched(program, pattern, where))
            if twice := [node for node in hit if decided.get(node, k) != k]:
                first = twice[0]
                also = f" and {len(twice) - 1:,} more nodes" if len(twice) > 1 else ""
                verb = "are" if also else "is"
                fact = (
                    f"stage {k}: '{program.paths[first]}'{also} {verb} in stage {decided[first]} by {rules[first]}, too"
                )
                problems.append(Problem(where, fact, "a node is in one stage", "leave it out of one of the two"))
            for node in hit:
                decided.setdefault(node, k)
                rules.setdefault(node, Rule(pattern, stage.ranks, where))
    return decided, rules, problems


def against_stages(
    program: Loaded, decided: Mapping[ir.Node, Rule], stages: Mapping[ir.Node, int]
) -> Iterator[Problem]:
    """Yields a problem for each line of `placement` that puts a node of a stage on other ranks than the stage's."""
    assert program.plan.pipeline is not None
    lines = {rule.where for rule in program.plan.placement}
    reported = set[str]()
    for node, rule in decided.items():
        if node not in stages or rule.where not in lines or rule.where in reported:
            continue
        stage = program.plan.pipeline.stages[stages[node]]
        if rule.ranks != stage.ranks:
            reported.add(rule.where)
            placed, own = ranks_text(rule.ranks), ranks_text(stage.ranks)
            fact = f"'{program.paths[node]}' is placed on {placed}, and its stage {stages[node]} runs on {own}"
            law = f"all nodes of a stage run on its ranks ({PurePath(stage.where).name})"
            yield Problem(
                rule.where, fact, law, "remove the line, or give the ranks of all stages: {nodes: ..., on: 0}"
            )


def matched_nodes(program: Loaded, pattern: str) -> list[ir.Node]:
    """Returns the nodes whose paths the pattern matches; if there are none, those whose ONNX names, as Netron shows them, it matches.

    A node that replaces another has a path within that of the old node, `bn.shifted` in `bn`, and is found by the old node's name.
    """
    compiled = compile_pattern(pattern)
    if hit := compiled.among(program.paths):
        return hit
    named = set(compiled.among(program.file_names))
    return [node for node, path in program.paths.items() if not named.isdisjoint((path, *modules_of([path])))]


def is_unneeded(program: Loaded, pattern: str) -> bool:
    """Whether a pattern names a node that the program does not need: a second head in training, or the encoder in a decoder."""
    matches, generation = compile_pattern(pattern).matches, program.generation
    has_others = program.plan.train is not None or (generation is not None and generation.record.encoder is not None)
    return has_others and any(map(matches, (*program.file_names, *program.file_names.values())))


def _declared(program: Loaded) -> tuple[list[Rule], dict[Rule, Problem]]:
    """Returns the placements of the model, and the problems of those whose groups do not fit the plan's ranks and mesh."""
    plan, rules, wrong = program.plan, list[Rule](), dict[Rule, Problem]()
    lists = [rule.ranks for rule in plan.placement] + [p.on for p in program.declared.placements]
    lists += [stage.ranks for stage in plan.pipeline.stages] if plan.pipeline is not None else []
    sizes = tuple(len(ranks) for ranks in lists if isinstance(ranks, tuple) and len(ranks) > 1)
    for placed in program.declared.placements:
        if placed.role:
            continue
        if isinstance(placed.on, int):
            rules.append(Rule(placed.pattern, (placed.on,), placed.where))
            continue
        try:
            group = group_of(placed.on, Frame(plan.ranks, plan.mesh, sizes, roles=plan.roles))
            rules.append(Rule(placed.pattern, group.ranks, placed.where))
        except Refused as violation:
            rules.append(Rule(placed.pattern, (), placed.where))
            wrong[rules[-1]] = Problem.of(violation, placed.where, f"place of '{placed.pattern}'")
    return rules, wrong


def placed_on_roles(program: Loaded) -> list[PlacementRule]:
    """Returns the model's lines that place parameters on ranks of a role; raises CompileError for roles that the plan does not have."""
    frame, problems, rules = Frame(program.plan.ranks, roles=program.plan.roles), [], []
    for placed in program.declared.placements:
        try:
            if placed.role:
                ranks = group_of({"role": placed.role}, frame).ranks
                rules.append(PlacementRule(placed.pattern, ranks, placed.where, serves=True))
        except Refused as violation:
            problems.append(Problem.of(violation, placed.where, f"place of '{placed.pattern}'"))
    if problems:
        raise CompileError(problems)
    return rules


def readers_of(program: Loaded, pattern: str) -> list[ir.Node]:
    """Returns the nodes that compute with a weight whose name the pattern matches, directly or after a Transpose, Cast or the like."""
    matches = compile_pattern(pattern).matches
    graph = program.model.graph
    named = {value for name, value in graph.initializers.items() if matches(name)}
    constant = set(graph.initializers.values())
    readers = []
    for node in graph if named else ():
        reads = program.reads[node]
        of_weights = any(value in named for value in reads)
        if all(value in constant for value in reads):
            constant.update(node.outputs)
            named.update(node.outputs if of_weights else ())
        elif any(value in named for value in node.inputs):  # and not in its bodies alone
            readers.append(node)
    return readers


def _annotated(program: Annotated) -> dict[ir.Node, Rule]:
    """Maps nodes to the placements of the model's own annotations, which every rule overrides."""
    return {
        node: Rule(program.paths[node], one.group, program.name)
        for node, one in program.followed.items()
        if one.group and not one.follows
    }


def default_group(plan: Plan, declared: Declared) -> Group:
    """Returns the group of operators that no rule places: rank 0, or all ranks in a plan that shards operators."""
    if declared.annotations is not None and declared.annotations.several:
        return plan.workers
    asked = plan.sharding or declared.sharding or plan.mesh or plan.dataset.style != FULL_BATCH or plan.dataset.specs
    return plan.workers if asked else plan.workers[:1]


def sharding_rules(program: Loaded) -> tuple[dict[ir.Node, ShardingRule], list[Problem]]:
    """Maps each node to the sharding rule that decides, the plan's over the model's; also a problem for each rule that matches nothing."""
    problems: list[Problem] = []
    decided: dict[ir.Node, ShardingRule] = {}
    for rule in (*program.declared.sharding, *program.plan.sharding):
        hit = matched_nodes(program, rule.pattern) or (readers_of(program, rule.pattern) if rule.style else [])
        decided.update(dict.fromkeys(hit, rule))
        if not hit and not is_unneeded(program, rule.pattern):
            problems.append(nothing_matched(program, rule.pattern, rule.where))
    return decided, problems


@dataclass(frozen=True)
class Region:
    """Nodes that are recomputed together: only the values that they read from outside are saved.

    These are the nodes inside of the module that a pattern matches, the single nodes that it matches in one module, or all that several
    patterns match: `name` is the module, or the patterns.
    """

    name: str
    kind: Literal["module", "nodes", "patterns"]


def recomputed(program: Loaded) -> tuple[dict[ir.Node, tuple[Region, RecomputeRule]], list[Problem]]:
    """Maps each recomputed node to its region and its rule, the last that matches; also a problem for each rule that matches nothing."""
    problems: list[Problem] = []
    decided: dict[ir.Node, tuple[Region, RecomputeRule]] = {}
    for rule in program.plan.pipeline.recompute if program.plan.pipeline else ():
        for pattern in rule.patterns:
            hit = matched_nodes(program, pattern)
            decided.update({node: (_region(program.paths[node], pattern, rule), rule) for node in hit})
            if not hit and not is_unneeded(program, pattern):
                problems.append(nothing_matched(program, pattern, rule.where))
    return decided, problems


def _region(path: str, pattern: str, rule: RecomputeRule) -> Region:
    """Returns the region of a node that a pattern of a rule matches; for a single pattern the outermost matching module, if any."""
    if len(rule.patterns) > 1:
        return Region(rule.text, "patterns")
    outer = next(filter(compile_pattern(pattern).matches, modules_of([path])), None)
    return Region(path.rpartition(".")[0], "nodes") if outer is None else Region(outer, "module")


def stored_units(program: Prepared) -> tuple[dict[ir.Value, StoredUnit], list[Problem]]:
    """Maps each parameter that ranks store in shards to its unit, by the last rule that matches; also a problem for each unmatched rule.

    Without training these are the floating-point weights, and with adapters all of them, too. A table that other ranks serve stays with
    these.
    """
    training, weights = program.training, program.model.graph.initializers.values()
    served = {node.inputs[0] for node in program.model.graph if SERVED in node.meta}
    stored = dict.fromkeys(training.parameters if training is not None else ())
    if training is None or program.plan.adapters:
        stored |= dict.fromkeys([one for one in weights if one.dtype is not None and one.dtype.is_floating_point()])
    named = {name_of(value): value for value in stored if value not in served and value.shape}
    problems: list[Problem] = []
    units: dict[ir.Value, StoredUnit] = {}
    for rule in program.plan.stored.rules:
        found = {value: StoredUnit(unit, rule) for name, value in named.items() if (unit := rule.unit_of(name))}
        units |= found
        there = any(map(compile_pattern(rule.pattern).matches, program.paths.values()))
        if not found and (there or not is_unneeded(program, rule.pattern)):
            names = [*modules_of(named), *named]
            problems.append(_nothing(rule.pattern, rule.where, names, "module with parameters"))
    return units, problems


def output_ranks(program: Loaded) -> tuple[dict[ir.Value, tuple[tuple[int, ...] | None, bool]], list[Problem]]:
    """Maps each output of the model to its ranks and whether it stays sharded: rank 0 by default, None for ranks if it stays sharded."""
    outputs = program.model.graph.outputs
    problems: list[Problem] = []
    decided: dict[ir.Value, tuple[tuple[int, ...] | None, bool]] = dict.fromkeys(outputs, ((0,), False))
    for rule in program.plan.outputs:
        matches = compile_pattern(rule.pattern).matches
        hit = [value for value in outputs if matches(name_of(value))]
        decided.update(dict.fromkeys(hit, (rule.ranks, rule.sharded)))
        if not hit:
            problems.append(_nothing(rule.pattern, rule.where, [name_of(value) for value in outputs], "output"))
    return decided, problems


def nothing_matched(program: Loaded, pattern: str, where: str) -> Problem:
    """Returns the problem of a pattern that matches no module and no node, or only nodes inside of another node's body."""
    if found := next(_inside(program, pattern), None):
        node, body, inner = found
        path = program.paths[node]
        fact = f"'{pattern}' matches {inner.op_type} '{inner.name}' alone, inside of the {body} of {node.op_type} ('{path}')"
        why, _, help = node.metadata_props.get(UNKNOWN_TURNS, "").partition("\n")
        if not why:
            law = "a node of a body is named within its module: by the number of the turn, or, where only the run knows that, by the body"
            own = inner.name.removeprefix(f"{path}.{body}.") if inner.name else "*"
            return Problem(where, fact, law, f"write '{path}', or '{path}.{'*' if body == 'body' else body}.{own}'")
        law = f"a body runs whole, where its {node.op_type} does, unless it is written out turn by turn: {why}"
        return Problem(where, fact, law, f"write '{path}', or {help or 'take the node out of the body'}")
    return _nothing(pattern, where, [*modules_of(program.paths.values()), *program.paths.values()], "module or node")


def _inside(program: Loaded, pattern: str) -> Iterator[tuple[ir.Node, str, ir.Node]]:
    """Yields the nodes in bodies that a pattern matches by name, each after the node of the main graph and the attribute that have the
    body.

    A node of a turn, `layers.3.up`, matches with any number that the pattern has.
    """
    matches = compile_pattern(pattern).matches
    turns = {"0", *re.findall(r"\d+", pattern)}
    for node, path in program.paths.items():
        module = path.rpartition(".")[0]
        bases = ["", path, module, *(f"{base}.{k}" for base in (path, module) for k in turns)]
        for attribute in node.attributes.values():
            if attribute.type != ir.AttributeType.GRAPH:
                continue
            for inner in ir.traversal.RecursiveGraphIterator(attribute.as_graph()):
                name = inner.name or ""  # a node of a body may have none in its file
                own, name = str(inner.meta.get(OWN_NAME) or name), name.removeprefix(f"{path}.{attribute.name}.")
                if matches(own) or any(matches(f"{base}.{name}".strip(".")) for base in bases):
                    yield node, attribute.name, inner


def _nothing(pattern: str, where: str, names: list[str], kind: str) -> Problem:
    close = nearest(pattern, names)
    listed = ", ".join(f"'{name}'" for name in close)
    if deep := wider(pattern, names):
        return Problem(where, f"'{pattern}' matches no {kind} of the model", help=deep)
    return Problem(
        where,
        f"'{pattern}' matches no {kind} of the model",
        help=f"the nearest names are {listed}" if close else "`partc plan MODEL` lists all names",
    )
