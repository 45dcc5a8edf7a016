"""The locations of the values of a rank's program: their table, the memory of its updates, and at given sizes the arena of each target.

What runs a program and what tells its memory without running it lay it out by the same functions, here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...artifact import dim_expression as expression
from ...artifact.format import CPU, Shape, SymbolRecord
from ...program.copy_runs import copied_buffers
from ...program.flat_buffers import coalesced_buffers
from ...program.memory_plan import Arena, Lifetime, assign
from ...program.rank_file import RankFile
from ...program.value_table import ValueTable, value_table
from ...updates.fusion import UpdatePlan, planned_updates

MOST_PLANS = 8
"""The most plans of steps of other sizes that are there at once."""


def lay_out(
    file: RankFile,
    types: Mapping[str, str],
    shapes: Mapping[str, Shape],
    promises: Mapping[int, Shape],
    weights: Mapping[str, object],
    targets: Mapping[str, str],
    begins: bool,
) -> tuple[ValueTable, UpdatePlan]:
    """The table of a rank's values, and how its updates run. `weights`: those that are values by themselves.

    `begins`: whether the program lays out what the rank keeps; another one of the same rank finds it laid out.
    """
    buffers, plan = coalesced_buffers(file, shapes), UpdatePlan()
    if begins:
        plan = planned_updates(file, shapes, types, buffers)
        buffers += plan.buffers
        buffers += copied_buffers(file, [*buffers, *plan.state], shapes, types) if targets else []
    return value_table(file, types, shapes, promises, buffers, {*weights}, targets), plan


def at_sizes(shape: Shape, symbols: Mapping[str, SymbolRecord], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A known shape with the symbols bound."""
    return tuple(dim if isinstance(dim, int) else expression.parse(dim, symbols)(sizes) for dim in shape or ())


def arenas(lives: Sequence[Lifetime], targets: Mapping[str, str], others: Iterable[str]) -> dict[str, Arena]:
    """The arena of the host and of each other target; `targets`: of values that do not lie on the host."""
    return {
        target: assign([life for life in lives if targets.get(life.name, CPU) == target]) for target in (CPU, *others)
    }
