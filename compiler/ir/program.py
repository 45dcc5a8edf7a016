"""The program that passes take and give: the model, the plan, and what each pass found out.

    load -> Program -> shapes -> place -> shard -> localize -> lower -> Program

A pass gives a new program with its own fields filled, and changes nothing of the one that it is given; only the rewrites, up to `unpack`,
edit its model. Decisions are bound to the graph's objects, not to names.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from partc.compiler.ir.global_view import GlobalView
from partc.compiler.ir.sharded import Group, ShardedValue

if TYPE_CHECKING:
    from partc.compiler.ir.rank_program import Event, RankProgram
    from partc.compiler.layout.layout import Layout
    from partc.compiler.lower.local_view import LocalView
    from partc.compiler.schedule.costs import Costs
    from partc.compiler.schedule.schedule import Schedule

_OF_THE_MODEL = ("parameter", "statistics")


@dataclass(frozen=True)
class Program(GlobalView):
    """A model on its way to ranks: the global view, and what ranks do; `begun` is the program of the step, where this is another one."""

    has_copies: bool = False
    """Whether ranks' programs have their targets, and the copies between them."""
    local: LocalView | None = None
    """From `localize` until `lower`: what every rank does, task by task."""
    events: tuple[Event, ...] = ()
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    parts: tuple[RankProgram, ...] = ()
    names: Mapping[ShardedValue, str] = field(default_factory=dict)
    """What every copy of a value is called on the ranks of its group, for those who look inside."""
    begun: Program | None = None
    totals: Program | None = None
    """Of a step in microbatches the program that makes what they are given of the whole batch, where there is such."""
    schedule: Schedule | None = None
    """The order of its tasks."""
    costs: Costs | None = None
    """What the tasks of the schedule take and keep."""

    @cached_property
    def alike(self) -> tuple[tuple[RankProgram, tuple[int, ...]], ...]:
        """Every distinct rank program once, as its lowest rank has it, with all ranks that share it."""
        found: dict[Hashable, tuple[RankProgram, list[int]]] = {}
        for part in self.parts:
            found.setdefault(part.likeness, (part, []))[1].append(part.rank)
        return tuple((part, tuple(ranks)) for part, ranks in found.values())

    @cached_property
    def lying(self) -> dict[str, dict[tuple[Group, Layout], str]]:
        """Per input and parameter the groups and layouts in which ranks get it, each with its name there."""
        found: dict[str, dict[tuple[Group, Layout], str]] = {}
        there: dict[ShardedValue, str] = {held.version: held.name for part in self.parts for held in part.inputs}
        kept = (one for part, _ in self.alike for one in part.kept if one.kind in _OF_THE_MODEL)
        there |= {one.version: one.name for one in kept}
        for copy, name in there.items():
            found.setdefault(copy.value.name or "", {})[copy.group, copy.layout] = name
        return found
