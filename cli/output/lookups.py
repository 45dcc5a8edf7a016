"""The lookups of a step in tables that are sharded over ranks, as counted by the ranks of a job.

lookups: in a step and on a rank up to 3,328 ids, 1,012 rows pulled (64.8 KiB received), 1,012 rows pushed (31.3 KiB received)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partc.runtime.units import size_text

if TYPE_CHECKING:
    from partc.runtime.lookups.lookup import Moved

_PULL, _PUSH = "pull", "push"
_WORDS = {_PULL: "pulled", _PUSH: "pushed", "route": "routed", "return": "returned"}


def counts_json(lookups: Mapping[str, Moved]) -> str:
    """Returns a rank's counts as JSON; `lookups` maps an op and path to its counts."""
    counts: dict[str, list[int]] = {}
    for name, one in lookups.items():
        sums = counts.setdefault(name.partition(" ")[0].lower(), [0, 0, 0, 0])
        for k, number in enumerate((one.ids, one.distinct, one.received)):
            sums[k] += number
        sums[3] = max(sums[3], one.steps)
    return json.dumps(counts)


def looked_up(ranks: Sequence[str]) -> dict[str, Any]:
    """Maps each op to the largest counts of a rank in a step: ids, distinct rows, bytes received; empty without such tables."""
    largest: dict[str, dict[str, float]] = {}
    for counts in map(json.loads, ranks):
        for op, (ids, rows, received, steps) in counts.items():
            most = largest.setdefault(op, {"ids": 0.0, "rows": 0.0, "bytes": 0.0})
            for name, number in (("ids", ids), ("rows", rows), ("bytes", received)):
                most[name] = max(most[name], round(number / max(steps, 1), 1))
    return dict(sorted(largest.items()))


def line(counts: Mapping[str, Any]) -> str:
    """Returns the same counts as a line."""
    some = [
        f"{one['rows']:,.0f} rows {_WORDS.get(op, op)} ({size_text(round(one['bytes']))} received)"
        for op, one in counts.items()
    ]
    ids = max(one["ids"] for one in counts.values())
    return f"lookups: in a step and on a rank up to {ids:,.0f} ids, {', '.join(some)}"
