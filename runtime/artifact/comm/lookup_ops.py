"""The lookups: ops by which ranks read and write rows of a table on other ranks; the ids determine the senders and receivers.

    Pull       every rank's ids give it rows of a table, of which the owners have a run each
    Push       rows go back to their owners, who know the ids from the Pull

A lookup is over when it has begun: its sizes are those of the ids, known only at run time.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from partc.runtime.artifact.comm.collectives import COLLECTIVES, Attribute, GroupOp
from partc.runtime.artifact.format import GIVERS, OWNERS, PULL, PUSH, ROW, ROWS

Reference: TypeAlias = Callable[[Sequence[tuple[Any, ...]], int, Mapping[str, Any]], tuple[Any, ...]]
"""The results of one rank: of the operands that each rank gives, None for one that is left out, of its place in the list, of attributes."""


@dataclass(frozen=True)
class LookupOp(GroupOp):
    """A lookup with its numpy reference."""

    reference: Reference = lambda given, place, a: ()


def pulled(given: Sequence[tuple[Any, ...]], place: int, a: Mapping[str, Any]) -> tuple[Any, ...]:
    """The rows that a rank's ids name, of the runs of rows that the owners give; what was asked, by whom, and the ids' places."""
    owners, givers, each = [*a[OWNERS]], [*a.get(GIVERS, ())], a[ROWS] // len(a[OWNERS])
    ids = given[place][1]
    rows = None if ids is None else np.concatenate([given[owner][0] for owner in owners])[ids]
    if not givers:
        return rows, None, None, None
    once = {giver: np.unique(given[giver][1].reshape(-1) % a[ROWS], return_inverse=True) for giver in givers}
    counts = np.zeros(len(owners) + len(givers), np.int64)
    asked = places = None
    if place in givers:
        counts[: len(owners)] = np.bincount(once[place][0] // each, minlength=len(owners))
        places = once[place][1].reshape(ids.shape)
    if place in owners:
        first = owners.index(place) * each
        parts = [one[(first <= one) & (one < first + each)] - first for one, _ in once.values()]
        counts[len(owners) :] = [one.size for one in parts]
        asked = np.concatenate(parts)
    return rows, asked, counts if asked is not None or places is not None else None, places


def pushed(given: Sequence[tuple[Any, ...]], place: int, a: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an owner gets: the ids that it was asked, and of each giver in order the sums of the rows for each."""
    owners = [*a[OWNERS]]
    if place not in owners:
        return None, None
    own, sums = owners.index(place), []
    for giver in a[GIVERS]:
        _, counts, places, rows = given[giver]
        ends = np.cumsum([0, *counts[: len(owners)]])
        total = np.zeros((ends[-1], *a[ROW]), rows.dtype)
        np.add.at(total, places.reshape(-1), rows.reshape(-1, *a[ROW]))
        sums.append(total[ends[own] : ends[own + 1]])
    return given[place][0], np.concatenate(sums)


_OF_TABLES = (
    Attribute(
        OWNERS, "ints", "The places in the list of the ranks that have equal runs of the table's rows, in their order."
    ),
    Attribute(ROWS, "int", "The number of the table's rows in all."),
    Attribute(ROW, "ints", "The shape of a row; none where it is a number.", False),
    Attribute(GIVERS, "ints", "The places in the list of the ranks that give rows back.", False),
)
LOOKUPS = {
    op.name: op
    for op in (
        LookupOp(
            PULL,
            "The rows of a table, of which the owners have equal runs, that each rank's ids name; and what a Push reads of them.",
            _OF_TABLES,
            pulled,
        ),
        LookupOp(
            PUSH,
            "What each giver gives to rows of a table goes to their owners: a row for each of the ids that an owner was asked by a Pull.",
            _OF_TABLES,
            pushed,
        ),
    )
}
GROUP_OPS: Mapping[str, GroupOp] = ChainMap(*cast(list[MutableMapping[str, GroupOp]], [COLLECTIVES, LOOKUPS]))
"""Maps names to all ops of groups: the collectives, including those that are registered later, and the lookups."""
