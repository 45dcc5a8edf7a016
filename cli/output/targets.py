"""The work of a job's targets in a step, as counted by the ranks: copies, their bytes, switches.

targets: in a step 6 copies to cpu (1.17 KiB), 4 to cuda (400 B), 2 switches on 2 ranks
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from partc.runtime.units import count, size_text


def counted(ranks: Sequence[str]) -> dict[str, Any]:
    """Returns the sums over the ranks for one step; empty where no rank has copied anything. `ranks`: each rank's counts, as JSON."""
    reports = [one for one in map(json.loads, ranks) if one["steps"]]
    if not any(one["copies"] for one in reports):
        return {}
    copies: dict[str, dict[str, float]] = {}
    for one in reports:
        for target, (number, total) in one["copies"].items():
            sums = copies.setdefault(target, {"copies": 0.0, "bytes": 0.0})
            sums["copies"] += number / one["steps"]
            sums["bytes"] += total / one["steps"]
    devices = sorted({one["device"] for one in reports if one["device"]})
    switches = sum(one["switches"] / one["steps"] for one in reports)
    return {"ranks": len(reports), "devices": devices, "switches": switches, "to": dict(sorted(copies.items()))}


def line(counts: dict[str, Any], memory: str = "") -> str:
    """Returns the counts as a line; `memory`: the result of `mpi_memory`."""
    to = [
        f"{count(round(one['copies']), 'copy', 'copies') if not k else round(one['copies'])} to {target} ({size_text(round(one['bytes']))})"
        for k, (target, one) in enumerate(counts["to"].items())
    ]
    switches = count(round(counts["switches"]), "switch", "switches")
    text = f"targets: in a step {', '.join(to)}, {switches} on {count(counts['ranks'], 'rank')}"
    if any(device != "cpu" for device in counts["devices"]):
        said = f"MPI speaks of {memory}" if memory else "MPI says nothing of other memory"
        text += f"; cuda is {', '.join(counts['devices'])}; operands of MPI lie on the host ({said})"
    return text


def mpi_memory() -> str:
    """Returns the kinds of memory from which MPI claims to take operands; empty where MPI has not started."""
    if "mpi4py.MPI" not in sys.modules:
        return ""
    from partc.runtime.communication.mpi_calls import memory_kinds

    return memory_kinds()
