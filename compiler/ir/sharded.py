"""The ranks of nodes and values: groups of ranks, and each value's versions on them.

x on 0-3 [2, 1]    the version of x whose first dim is sharded in 2, on ranks 0 to 3
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir
from partc.compiler.layout.layout import Layout
from partc.runtime.artifact.ranks import order_text

Group = tuple[int, ...]
"""Ranks that share values, in order; a group of length one is a single rank."""
Ranks: TypeAlias = int
"""A set of ranks as the bits of an integer: intersections of thousands of ranks are a few machine operations."""


@dataclass(frozen=True, eq=False)
class GroupFacts:
    """Facts about the ranks of a group, which may be thousands; computed once. Equal groups share one object (`facts_of`)."""

    group: Group

    @functools.cached_property
    def ranks(self) -> Ranks:
        """The set of the ranks."""
        bits = bytearray(max(self.group, default=0) // 8 + 1)
        for rank in self.group:
            bits[rank >> 3] |= 1 << (rank & 7)
        return int.from_bytes(bits, "little")

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """Maps each rank to its index in the group."""
        return {rank: place for place, rank in enumerate(self.group)}

    @functools.cached_property
    def rows(self) -> str:
        """The ranks in order, as rows: `0-7`, `0-56:8`."""
        return order_text(self.group)

    @functools.cached_property
    def text(self) -> str:
        """The ranks in order: `0-2-1`."""
        return "-".join(map(str, self.group))


_KNOWN: dict[tuple[int, int, int], list[GroupFacts]] = {}


def facts_of(group: Group) -> GroupFacts:
    """Returns the facts of a group. Looks it up by its ends and size, then compares: hashing all of its ranks would cost more."""
    key = (group[0], group[-1], len(group)) if group else (0, 0, 0)
    for one in _KNOWN.get(key, ()):
        if one.group is group or one.group == group:
            return one
    found = GroupFacts(group)
    _KNOWN.setdefault(key, []).append(found)
    return found


def ranks_of(group: Group | Ranks) -> Ranks:
    """The set of the ranks of a group."""
    if isinstance(group, int):
        return group
    if len(group) < 2:
        return 1 << group[0] if group else 0
    return facts_of(group).ranks


def all_ranks(count: int) -> Ranks:
    """Returns the set of the ranks 0 to `count` - 1."""
    return (1 << count) - 1


def lowest(ranks: Ranks) -> int:
    """The lowest rank of a set."""
    return (ranks & -ranks).bit_length() - 1


def split(ranks: Ranks, sets: Iterable[Ranks]) -> list[Ranks]:
    """Splits a set of ranks into parts, each of them inside or disjoint from every set of `sets`; sorted by lowest rank."""
    parts = [ranks]
    for some in sets:
        parts = [one for part in parts for one in (part & some, part & ~some) if one]
    return sorted(parts, key=lowest)


def members(ranks: Ranks) -> Group:
    """The ranks of a set, ascending."""
    return tuple(rank for rank, bit in enumerate(f"{ranks:b}"[::-1]) if bit == "1")


@dataclass(frozen=True)
class NodePlacement:
    """The groups that run a node, and the rule that chose them: `plan.yaml:8 'conv1'`. `follows`: it runs at its readers, as constants."""

    groups: tuple[Group, ...]
    rule: str
    follows: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that run the node."""
        return self.groups[0] if len(self.groups) == 1 else _members(self.groups)


@functools.lru_cache(maxsize=1024)
def _members(groups: tuple[Group, ...]) -> Group:
    return tuple(dict.fromkeys(rank for group in groups for rank in group))


Way: TypeAlias = tuple[tuple[Group, Layout], tuple[Group, Layout]]
"""A reshard of a value: its group and layout before, and its group and layout after."""


@dataclass(frozen=True)
class ShardedValue:
    """One version of a value: its layout on a group."""

    value: ir.Value
    group: Group
    layout: Layout

    def __hash__(self) -> int:
        """Hashes only the first rank: groups may have hundreds, and a value has few versions on those that begin with it."""
        return hash(self.value) ^ self.group[0]

    @property
    def across(self) -> tuple[str | None, Group, Layout]:
        """The version's identity across the programs of a plan: each program has its own values, with the names of the model."""
        return self.value.name, self.group, self.layout

    @property
    def places(self) -> dict[int, int]:
        """Maps each rank to its index in the group."""
        return facts_of(self.group).places

    @property
    def holders(self) -> tuple[tuple[int, Group], ...]:
        """Lists for each shard the index of the first rank that holds it, and all ranks that hold it."""
        return _holders(facts_of(self.group), self.layout)


@functools.lru_cache(maxsize=1024)
def _holders(facts: GroupFacts, layout: Layout) -> tuple[tuple[int, Group], ...]:
    """Same as `ShardedValue.holders`; cached for all values with this group and layout, as there may be thousands of ranks."""
    group = facts.group
    return tuple([(held[0], tuple([group[index] for index in held])) for held in layout.holders.values()])
