"""A node's annotation after it was checked against the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from partc.compiler.annotations.spread import Spread
from partc.compiler.ir.sharded import Group
from partc.compiler.layout.layout import Mesh


@dataclass(frozen=True)
class Followed:
    """What a node's annotation asks for: its ranks in order, its operands' spreads, and what metadata adds.

    `cuts`: per group the mesh and the axes by factor; `reduced`: outputs that are reduced where they are made.
    """

    group: Group
    inputs: Mapping[int, Spread]
    outputs: Mapping[int, Spread]
    where: str
    follows: bool = False
    cuts: Mapping[Group, tuple[Mesh, Mapping[str, tuple[int, ...]]]] = field(default_factory=dict)
    reduced: frozenset[str] = frozenset()
