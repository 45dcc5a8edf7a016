"""Lays out the values of a rank's program: their table, the memory of its updates, and for given sizes the arena of each target.

Code that runs a program and code that reports its memory without running it use the same functions, those of this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...artifact import dim_expression as expression
from ...artifact.format import CPU, Shape, SymbolRecord
from ...program.flat_buffers import coalesced_buffers, copied_buffers
from ...program.memory_plan import Arena, Lifetime, assign
from ...program.rank_file import RankFile
from ...program.value_table import ValueTable, value_table
from ...updates.fusion import UpdatePlan, planned_updates

MOST_PLANS = 8
"""The most step plans, each for other sizes, that are cached at once."""


def lay_out(
    file: RankFile,
    types: Mapping[str, str],
    shapes: Mapping[str, Shape],
    promises: Mapping[int, Shape],
    weights: Mapping[str, object],
    targets: Mapping[str, str],
    begins: bool,
) -> tuple[ValueTable, UpdatePlan]:
    """Returns the table of a rank's values, and the plan of its updates. `weights`: those that are values by themselves.

    `begins`: whether this program lays out the rank's state; another program of the same rank uses the existing layout.
    """
    buffers, plan = coalesced_buffers(file, shapes), UpdatePlan()
    if begins:
        plan = planned_updates(file, shapes, types, buffers)
        buffers += plan.buffers
        buffers += copied_buffers(file, [*buffers, *plan.state], shapes, types) if targets else []
    return value_table(file, types, shapes, promises, buffers, {*weights}, targets), plan


def at_sizes(shape: Shape, symbols: Mapping[str, SymbolRecord], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns a known shape with the symbols replaced by their sizes."""
    return tuple(dim if isinstance(dim, int) else expression.parse(dim, symbols)(sizes) for dim in shape or ())


def arenas(lives: Sequence[Lifetime], targets: Mapping[str, str], others: Iterable[str]) -> dict[str, Arena]:
    """Returns the arena of the host and of each other target; `targets` maps the values that are not on the host to their targets."""
    return {
        target: assign([life for life in lives if targets.get(life.name, CPU) == target]) for target in (CPU, *others)
    }
