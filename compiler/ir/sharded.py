"""Where nodes run and values lie: groups of ranks, and each value's versions on them.

x on 0-3 [2, 1]    the version of x whose first dim is cut in 2, on ranks 0 to 3
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.layout.layout import Layout

Group = tuple[int, ...]
"""Ranks in order that share values; a group of one is a rank."""


@dataclass(frozen=True)
class Placed:
    """Where a node runs, and the rule that decided: `plan.yaml:8 'conv1'`; `follows`: wherever it is read, as constants do."""

    groups: tuple[Group, ...]
    rule: str
    follows: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that run the node."""
        return _members(self.groups)


@functools.lru_cache(maxsize=1024)
def _members(groups: tuple[Group, ...]) -> Group:
    return tuple(dict.fromkeys(rank for group in groups for rank in group))


@dataclass(frozen=True)
class ShardedValue:
    """One version of a value: its layout on a group."""

    value: ir.Value
    group: Group
    layout: Layout

    def __hash__(self) -> int:
        """Of the first rank and the number only: a group may have hundreds, and one that is looked up is nearly always the same object."""
        return hash((self.value, self.group[0], len(self.group), self.layout.cuts))

    @property
    def holders(self) -> tuple[tuple[int, Group], ...]:
        """Of each shard the place of the first rank that holds it, and all ranks that do."""
        return _holders(self.group, self.layout)


@functools.lru_cache(maxsize=1024)
def _holders(group: Group, layout: Layout) -> tuple[tuple[int, Group], ...]:
    """Computed once for all values with this layout: there may be thousands of ranks."""
    return tuple((held[0], tuple(group[index] for index in held)) for held in layout.holders.values())
