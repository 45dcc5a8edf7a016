"""Stages on ranks in the usual ways."""

from __future__ import annotations

from partc.compiler.schedule.stages import Stages, chain


def one_each(ranks: int) -> Stages:
    """Stage s on rank s."""
    return chain(range(ranks))


def loop(ranks: int, turns: int) -> Stages:
    """Stage s on rank s mod p, `turns` stages a rank."""
    return chain([*range(ranks)] * turns)


def vee(ranks: int) -> Stages:
    """Two stages a rank, there and back."""
    return chain([*range(ranks), *reversed(range(ranks))])
