"""The plan as the compiler sees it: what a plan file says, with the place of every rule.

`where` is `file:line` for messages. Placement and output rules are in the order of the file: where two match, the later
wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partc.compiler.symbol import Symbol


@dataclass(frozen=True)
class SymbolRule:
    """The declaration of a symbol."""

    symbol: Symbol
    where: str


@dataclass(frozen=True)
class InputRule:
    """The dims of an input: a size, a symbol or the name of a free dim, or None for a dim of which nothing is said."""

    dims: tuple[int | str | None, ...]
    where: str


@dataclass(frozen=True)
class PlacementRule:
    """What matches the pattern runs on this rank."""

    pattern: str
    rank: int
    where: str


@dataclass(frozen=True)
class OutputRule:
    """Outputs whose names match are delivered to these ranks, in rising order; None: they stay where they are made."""

    pattern: str
    ranks: tuple[int, ...] | None
    where: str


@dataclass(frozen=True)
class Plan:
    """A valid plan: every rank is in 0 .. ranks - 1, every pattern compiles, every symbol has a legal size."""

    file: str
    ranks: int
    symbols: Mapping[str, SymbolRule]
    inputs: Mapping[str, InputRule]
    placement: tuple[PlacementRule, ...]
    outputs: tuple[OutputRule, ...]

    @staticmethod
    def whole() -> Plan:
        """The plan of a model that nobody cuts: one rank, nothing placed."""
        return Plan(file="", ranks=1, symbols={}, inputs={}, placement=(), outputs=())
