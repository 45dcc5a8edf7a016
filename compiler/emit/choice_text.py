"""The texts of what was chosen for a node: how its inputs are cut, and who decided each cut."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.program import Program


def strategies(program: Program, node: ir.Node, rank: int | None = None) -> Iterator[str]:
    """How a node's inputs are cut, per group, or of the groups that a rank is in: ` {in_strategy: ((2, 4), (4, 1))}`."""
    return (f" {{in_strategy: {choice.strategy()}}}" for choice in _choices(program, node, rank))


def _choices(program: Program, node: ir.Node, rank: int | None) -> Iterator[NodeSharding]:
    placed = program.placement.get(node)
    for group in placed.groups if placed else ():
        choice = program.choices.get(NodeOnGroup(node, group)) if rank is None or rank in group else None
        if choice is not None:
            yield choice


def cut_text(program: Program, node: ir.Node, rank: int | None = None) -> Iterator[str]:
    """Who decided each cut of a node, per group that cuts it: `m in 2 by plan.yaml:4, k in 4 by plan.yaml:4`.

    With `rank` of the groups that it is in.
    """
    for choice in _choices(program, node, rank):
        if choice.cut:
            yield ", ".join(
                f"{factor} in {shards} by {choice.why.get(factor, '?')}" for factor, shards in choice.cut.items()
            )
