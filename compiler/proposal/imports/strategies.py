"""A plan of operators' strategies: each becomes a rule of `sharding` of the node that reads its weight, stages become `placement`.

    MatMul_net.dense.weight  [[2, 4], [1, 4]], weight [64, 32]    dense.Gemm: {in: [[2, 4], [1, 4]]}       weight [64, 32]
                                                                  dense.MatMul: {in: [[2, 4], [4, 1]]}     weight [32, 64]

An operator that has no node of its own here, such as the BiasAdd of a Gemm, says nothing that the node's rule does not. What the compiler
refuses is left out, with its reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir
from partc.compiler.analysis.shapes import shapes
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Typed
from partc.compiler.matching import readers_of
from partc.compiler.pipeline import run_passes, step_program
from partc.compiler.plan.pattern import literal_pattern
from partc.compiler.proposal.batch import batch_of
from partc.compiler.proposal.imports.imported import Imported, Strategy
from partc.compiler.proposal.propose import parsed
from partc.compiler.proposal.starting_plan import Proposed, key, starting_plan
from partc.compiler.start import start

_ONNX = {
    "MatMul": ("MatMul", "Gemm"),
    "BatchMatMul": ("MatMul",),
    "Dense": ("Gemm", "MatMul"),
    "BiasAdd": ("Add",),
    "Conv2D": ("Conv",),
    "Conv3D": ("Conv",),
    "LayerNorm": ("LayerNormalization",),
    "BatchNorm": ("BatchNormalization",),
    "RmsNorm": ("RMSNormalization",),
    "EmbeddingLookup": ("Gather",),
}
"""Maps each operator of MindSpore to the ops of ONNX that compute it; an operator that is not listed has the same name."""
_WEIGHTS = {"gamma": "weight", "beta": "bias", "embedding_table": "weight", "moving_mean": "running_mean"}
_INSIDE = {"BiasAdd": ("Gemm", "Conv"), "Add": ("Gemm", "Conv")}
"""Operators that an op of ONNX has within it."""


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A line of `sharding` of a node, and the strategy that it is of."""

    path: str
    shards: tuple[tuple[int, ...] | None, ...]
    stage: int
    ranks: int

    @property
    def text(self) -> str:
        shown = ("null" if one is None else f"[{', '.join(map(str, one))}]" for one in self.shards)
        return f"{key(literal_pattern(self.path))}: {{in: [{', '.join(shown)}]}}"


def plan_of_strategies(source: Source, name: str, imported: Imported) -> str:
    """The text of the plan for the model called `name`. CompileError where no strategy is of one of its weights."""
    program = run_passes(start(*parsed(source, "ranks: 1\n", name)), shapes)
    rules: dict[str, _Rule] = {}
    left = list(imported.ignored)
    for strategy in imported.strategies:
        found = _rule(program, strategy)
        if isinstance(found, _Rule):
            rules[found.path] = found
        elif found:
            left.append(f"{strategy.op}_{strategy.weight}: {found}")
    if not rules:
        fact = f"none of its {len(imported.strategies)} strategies is of a weight of {name}"
        help = "the model's weights are listed by `partc plan MODEL`; MindSpore's parameters need the same names"
        raise CompileError(Problem(imported.source, fact, "\n  ".join(left[:4]), help))
    each = imported.degrees.get("ranks") or max(rule.ranks for rule in rules.values())
    stages = 1 + max(rule.stage for rule in rules.values())
    batch = batch_of(source, max((rule.shards[0] or (1,))[0] for rule in rules.values()))
    symbols, paths = {**source.declared.symbols, **batch.symbols}, node_paths(source.model)
    while True:
        sections = (
            *_placement(rules.values(), stages, each),
            "sharding:",
            *(f"  {one.text}" for one in rules.values()),
            "",
        )
        told = (
            f"# Imported from {imported.source}: {len(rules)} of its strategies; all other shards are derived.",
            *(["# Not taken:"] if left else []),
            *(f"#   {line}" for line in dict.fromkeys(left)),
        )
        given = Proposed(told, (f"ranks: {stages * each}",), sections, batch.names)
        text = starting_plan(source.model, paths, name, symbols, given)
        try:
            step_program(*parsed(source, text, name))
        except CompileError as error:
            refused = list(_refused(text, rules, error.problems))
            if not refused:
                raise
            for path, fact in refused:
                left.append(f"{path}: {fact}")
                rules.pop(path, None)
            continue
        return text


def _rule(program: Typed, strategy: Strategy) -> _Rule | str:
    """The rule of a strategy; else in words why there is none, "" where another one says the same."""
    names = list(program.model.graph.initializers)
    weight = _named(strategy.weight, names)
    if weight is None:
        return "the model has no such weight"
    readers = readers_of(program, literal_pattern(weight))
    kinds = _ONNX.get(strategy.op, (strategy.op,))
    nodes = [node for node in readers if node.op_type in kinds]
    if not nodes:
        if any(node.op_type in _INSIDE.get(strategy.op, ()) for node in readers):
            return ""
        return f"no {' or '.join(kinds)} reads {weight}" + "".join(f", but {node.op_type}" for node in readers[:1])
    shards = [
        _fitted(program, value, sizes) for value, sizes in zip(program.reads[nodes[0]], strategy.inputs, strict=False)
    ]
    if len(shards) > 1 and nodes[0].op_type in ("MatMul", "Gemm") and shards[1] is not None:
        if strategy.inputs[0][-1] not in strategy.inputs[1]:
            return "its two inputs have the dim that is summed over in different shards"
        shards[1] = _turned(program, nodes[0], strategy, shards[1])
    shards += [None] * (len(nodes[0].inputs) - len(shards))
    return _Rule(program.paths[nodes[0]], tuple(shards), strategy.stage, _ranks(nodes[0], shards))


def _named(weight: str, names: Sequence[str]) -> str | None:
    """The model's weight of a parameter: the longest name that both end in, by whole parts, with MindSpore's words for parts."""
    head, _, last = weight.rpartition(".")
    wanted = [weight, f"{head}.{_WEIGHTS[last]}" if head else _WEIGHTS[last]] if last in _WEIGHTS else [weight]
    for one in wanted:
        parts = one.split(".")
        for begin in range(len(parts)):
            if (tail := ".".join(parts[begin:])) in names:
                return tail
    return None


def _fitted(program: Typed, value: ir.Value, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shards by dim of a value; where the value has more dims than the strategy, its first ones are merged there."""
    shape = program.values[value].shape
    if shape is None or len(shape) < len(sizes):
        return None
    return (*sizes[:1], *[1] * (len(shape) - len(sizes)), *sizes[1:])


def _turned(program: Typed, node: ir.Node, strategy: Strategy, shards: tuple[int, ...]) -> tuple[int, ...]:
    """The shards of a product's matrix in the order of its dims here; MindSpore has it transposed or not."""
    shape = program.values[program.reads[node][1]].shape
    summed = strategy.inputs[0][-1]
    if shape is not None and strategy.weight_shape and tuple(shape) != tuple(reversed(tuple(shape))):
        return shards if tuple(shape) == strategy.weight_shape else shards[::-1]
    at = node.attributes.get_int("transB", 0) if node.op_type == "Gemm" else 0
    return shards if shards[at] == summed else shards[::-1]


def _ranks(node: ir.Node, shards: Sequence[tuple[int, ...] | None]) -> int:
    """How many ranks a strategy needs: the shards of the first input, times those of a product's columns or of the ids of a table."""
    first, *others = (one or (1,) for one in shards)
    second = list(others[0]) if others else []
    if node.op_type in ("MatMul", "Gemm"):
        second.remove(first[-1])
    elif node.op_type != "Gather":
        second = second[:1] if node.op_type == "Conv" else []
    return math.prod(first) * math.prod(second)


def _placement(rules: Iterable[_Rule], stages: int, each: int) -> Iterator[str]:
    if stages == 1:
        return
    yield "placement:   # a pipeline stage runs on consecutive ranks"
    for rule in rules:
        yield f"  {key(literal_pattern(rule.path))}: {list(range(rule.stage * each, (rule.stage + 1) * each))}"
    yield ""


def _refused(text: str, rules: dict[str, _Rule], problems: Sequence[Problem]) -> Iterator[tuple[str, str]]:
    """The nodes whose lines the compiler refuses, with the fact."""
    lines = text.splitlines()
    by_line = {f"  {rule.text}": path for path, rule in rules.items()}
    for problem in problems:
        number = problem.where.rpartition(":")[2]
        if number.isdigit() and (path := by_line.get(lines[int(number) - 1])):
            yield path, problem.fact
