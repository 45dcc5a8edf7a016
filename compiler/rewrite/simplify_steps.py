"""A rank's program made lean: what `rewrite/simplify.py` finds in its nodes, put in the place of its steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.ir.rank_program import ComputeOp, RankOp, captured_names, read_names
from partc.compiler.ir.value_info import Shape
from partc.compiler.rewrite.simplify import simplify


def simplify_steps(
    steps: Sequence[RankOp], kept: Collection[str], types: Mapping[str, tuple[ir.Value, Shape | None]]
) -> list[RankOp]:
    """The steps, of which some fall away and others read what these read; `kept` is what is read after the last."""
    read = set(kept)
    for step in steps:
        read.update(captured_names(step) if isinstance(step, ComputeOp) else read_names(step))

    def dims(name: str) -> Shape | None:
        return types[name][1] if name in types else None

    changed = simplify([step.node if isinstance(step, ComputeOp) else None for step in steps], read, dims)
    found: list[RankOp] = []
    for index, step in enumerate(steps):
        if index in changed and isinstance(step, ComputeOp):
            found += [replace(step, node=node) for node in changed[index]]
        else:
            found.append(step)
    return found
