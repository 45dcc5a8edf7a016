"""Where ranks are on the plan's mesh: coordinates of ranks, and the axes that lists of ranks are along.

{"pp": 2, "dp": 2, "tp": 2}:    rank 5 is at pp 1, dp 0, tp 1; the lists [0, 2], [1, 3] are along dp
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from partc.runtime.artifact.ranks import ranks_text


def coordinates(mesh: Mapping[str, int], ranks: Sequence[int]) -> dict[str, str]:
    """By axis the coordinates that these ranks have: `0`, or `0-1`."""
    found = [_place(mesh, rank) for rank in ranks]
    return {name: ranks_text(sorted({place[k] for place in found})) for k, name in enumerate(mesh)}


def axes_of(mesh: Mapping[str, int], lists: Sequence[Sequence[int]]) -> str:
    """The axes along which the ranks of each list differ and are all of a row: `dp`, or `dp, tp`; empty for other lists."""
    found = {_along(mesh, ranks) for ranks in lists}
    return found.pop() if len(found) == 1 else ""


def _along(mesh: Mapping[str, int], ranks: Sequence[int]) -> str:
    places = [_place(mesh, rank) for rank in ranks]
    axes = [name for k, name in enumerate(mesh) if len({place[k] for place in places}) > 1]
    return ", ".join(axes) if math.prod(mesh[name] for name in axes) == len(ranks) > 1 else ""


def _place(mesh: Mapping[str, int], rank: int) -> tuple[int, ...]:
    """The coordinates of a rank, the last axis fastest."""
    found = []
    for size in reversed([*mesh.values()]):
        rank, at = divmod(rank, size)
        found.append(at)
    return tuple(reversed(found))
