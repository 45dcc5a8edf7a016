"""Which rule of the plan or of the model decides for a node or an output: the last one that matches, the plan over the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

import onnx_ir as ir
from partc.compiler.errors import Problem
from partc.compiler.plan.pattern import compile_pattern, nearest
from partc.compiler.program import Program


@dataclass(frozen=True)
class Rule:
    """A line that places: prints as `plan.yaml:8 'conv1'`, without the folder, which differs by machine."""

    pattern: str
    rank: int
    where: str

    def __str__(self) -> str:
        return f"{PurePath(self.where).name} '{self.pattern}'"


def modules_of(paths: Iterable[str]) -> list[str]:
    """Every module path that the nodes' paths run through, in order of first appearance."""
    found: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        for end in range(1, len(parts)):
            found[".".join(parts[:end])] = None
    return list(found)


def placement_rules(program: Program) -> tuple[dict[ir.Node, Rule], list[Problem]]:
    """Per placed node the rule that decides, and a problem per rule that matches nothing or names a rank that is not there."""
    problems: list[Problem] = []
    decided: dict[ir.Node, Rule] = {}
    rules = [Rule(p.pattern, p.rank, p.where) for p in program.declared.placements]
    rules += [Rule(p.pattern, p.rank, p.where) for p in program.plan.placement]
    for rule in rules:
        if not 0 <= rule.rank < program.plan.ranks:
            ranks = program.plan.ranks
            problems.append(
                Problem(
                    rule.where,
                    f"rank {rule.rank} is outside of 0..{ranks - 1}",
                    f"{program.plan.file} says `ranks: {ranks}`",
                    "raise `ranks`, or place it on another rank",
                )
            )
            continue
        matches = compile_pattern(rule.pattern).matches
        hit = [node for node, path in program.paths.items() if matches(path)]
        decided.update(dict.fromkeys(hit, rule))
        if not hit:
            problems.append(
                _nothing(
                    rule.pattern,
                    rule.where,
                    [*modules_of(program.paths.values()), *program.paths.values()],
                    "module or node",
                )
            )
    return decided, problems


def output_ranks(program: Program) -> tuple[dict[ir.Value, tuple[int, ...] | None], list[Problem]]:
    """Per output of the model the ranks it is delivered to: rank 0 unless the plan says otherwise, None where it stays."""
    outputs = program.model.graph.outputs
    problems: list[Problem] = []
    decided: dict[ir.Value, tuple[int, ...] | None] = dict.fromkeys(outputs, (0,))
    for rule in program.plan.outputs:
        matches = compile_pattern(rule.pattern).matches
        hit = [value for value in outputs if matches(value.name or "")]
        decided.update(dict.fromkeys(hit, rule.ranks))
        if not hit:
            problems.append(_nothing(rule.pattern, rule.where, [value.name or "" for value in outputs], "output"))
    return decided, problems


def _nothing(pattern: str, where: str, names: list[str], kind: str) -> Problem:
    close = nearest(pattern, names)
    listed = ", ".join(f"'{name}'" for name in close)
    return Problem(
        where,
        f"'{pattern}' matches no {kind} of the model",
        help=f"the nearest names are {listed}" if close else "`partc plan MODEL` lists all names",
    )
