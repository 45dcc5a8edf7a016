"""Shardings given to a region's inputs that no op inside takes: the value is resharded, with a warning, or refused with the op's reason.

What enters is cut as the rule says if one op inside takes it so. Where none does, because another value of the region was given a
cut that the op follows, it is resharded at the op; so it is, with a warning, where the op needs the dim whole. Where an op could take
the cut but for a law, such as a size that is not proven to be divisible, that is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir
from partc.compiler.errors import Problem
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding, Pinned
from partc.compiler.ir.program import Placed
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.ops.rule import WHOLE
from partc.compiler.plan.pattern import compile_pattern
from partc.compiler.plan.rules import ShardingRule

Refusal = Callable[[NodeOnGroup, NodeSharding, str, int, str], Problem | None]
"""Why a factor of a node cannot be cut into so many shards, at the line that asks for it; None where nothing forbids it."""


def not_taken(
    program: Placed, choices: Mapping[NodeOnGroup, NodeSharding], given: Pinned, refusal: Refusal
) -> tuple[list[Problem], list[str]]:
    """The problems and warnings of given shards that no op of their region takes."""
    entering: dict[tuple[object, Layout, str], list[tuple[NodeOnGroup, int]]] = {}
    for (instance, k), (layout, where) in given.inputs.items():
        entering.setdefault((instance.node.inputs[k], normal(layout), where), []).append((instance, k))
    problems: list[Problem] = []
    told: list[str] = []
    for (_, layout, where), readers in entering.items():
        if any(have is not None and normal(have) == layout for have in (choices[i].input(k) for i, k in readers)):
            continue
        laws = [why for i, k in readers for why in _laws(choices[i], i, k, given.inputs[i, k][0], where, refusal)]
        problems += laws
        if not laws:
            told += [
                text for i, k in readers[:1] if (text := _needs_replicated(program, choices[i], i, k, layout, where))
            ]
    return problems, told


def _laws(
    choice: NodeSharding, instance: NodeOnGroup, k: int, layout: Layout, where: str, refusal: Refusal
) -> list[Problem]:
    """The reasons why a node cannot take an operand in its layout, one for each dim that it could shard."""
    letters = choice.rule.inputs[k] if k < len(choice.rule.inputs) else None
    wanted = [(letter, layout.num_shards(dim)) for dim, letter in enumerate(letters or "") if dim < len(layout.cuts)]
    cuttable = [(letter, shards) for letter, shards in wanted if shards > 1 and letter in choice.rule.factors]
    found = [refusal(instance, choice, letter, shards, where) for letter, shards in cuttable]
    return [problem for problem in found if problem is not None]


def _needs_replicated(
    program: Placed, choice: NodeSharding, instance: NodeOnGroup, k: int, layout: Layout, where: str
) -> str:
    """A warning if a node reads replicated what enters sharded; empty if it follows another sharding that was given."""
    letters = choice.rule.inputs[k] if k < len(choice.rule.inputs) else None
    value, op = instance.node.inputs[k], f"{instance.node.op_type} ({program.paths[instance.node]})"
    cut = [dim for dim in range(len(layout.cuts)) if layout.num_shards(dim) > 1]
    whole = [dim for dim in cut if letters is None or letters[dim] == WHOLE or letters[dim] not in choice.rule.factors]
    if not whole or value is None:
        return ""
    dims = f"dim {whole[0]}" if len(whole) == 1 else f"dims {', '.join(map(str, whole))}"
    return f"{where}: '{value.name}' enters cut {layout}, but {op} needs {dims} replicated: it is gathered there"


def gathered_inside(
    program: Placed, choices: Mapping[NodeOnGroup, NodeSharding], rules: Mapping[ir.Node, ShardingRule]
) -> Iterator[str]:
    """Warnings of ops inside a module with a strategy or style that need replicated what another op inside makes sharded."""
    is_module = functools.cache(_is_module)
    for instance, choice in choices.items():
        rule = rules.get(instance.node)
        if rule is None or rule.style == "replicate":
            continue
        if not is_module(rule.pattern, program.paths[instance.node].rpartition(".")[0]):
            continue
        for k, value in enumerate(instance.node.inputs):
            producer = value.producer() if value is not None else None
            if value is None or producer is None or rules.get(producer) is not rule:
                continue
            maker = choices.get(NodeOnGroup(producer, instance.group))
            made = maker.output(producer.outputs.index(value)) if maker is not None and maker.axes else None
            text = _needs_replicated(program, choice, instance, k, made, rule.where) if made is not None else ""
            if text:
                yield text.replace(" enters cut ", " is cut ")


def _is_module(pattern: str, path: str) -> bool:
    """Whether a pattern matches the module of this path, or one around it."""
    matches, parts = compile_pattern(pattern).matches, path.split(".") if path else []
    return any(matches(".".join(parts[:end])) for end in range(1, len(parts) + 1))
