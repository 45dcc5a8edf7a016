"""A simulation as people read it, and as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from partc.cli.output import console
from partc.cli.output.table import Table
from partc.compiler.cost.expressions import operations, payload
from partc.compiler.cost.step import Simulation
from partc.compiler.cost.traced import Traced
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.units import count, operations_text, seconds, size_text

_ROWS = 32
"""Classes of ranks that are printed."""


def show(where: str, simulation: Simulation, traced: Traced | None, top: int) -> None:
    """Prints the step, a row for each class of ranks, and the critical path by source names."""
    played = simulation.played
    ranks = sum(len(one.ranks) for one in played.classes)
    at = f" at {', '.join(f'{name}={size}' for name, size in simulation.sizes.items())}" if simulation.sizes else ""
    console.echo(f"{where}: {count(ranks, 'rank')}, a step takes {seconds(played.seconds)}{at}")
    if traced is not None:
        ratio = played.seconds / traced.step if traced.step else float("nan")
        console.echo(
            f"{traced.where}: {count(traced.steps, 'step')}, median {seconds(traced.step)}, simulated/measured {ratio:.3f}"
        )
    console.echo()
    table = Table(["ranks", ">compute", ">idle", ">under way", ">operations", ">bytes given", ">peak memory"])
    rows = zip(played.classes, played.busy, played.communication, simulation.operations, simulation.bytes, strict=True)
    for one, busy, under_way, computed, bytes in itertools.islice(rows, _ROWS):
        memory = simulation.memory[one.ranks[0]]
        peak = size_text(memory.peak) + ("+?" if memory.unknown else "")
        idle = seconds(max(0.0, played.seconds - busy))
        cells = (seconds(busy), idle, seconds(under_way), operations_text(computed), size_text(bytes), peak)
        table.add(ranks_text(one.ranks), *cells)
    table.show()
    if len(played.classes) > _ROWS:
        console.echo(f"and {len(played.classes) - _ROWS:,} more classes of ranks, which --json lists")
    console.echo()
    way, listed = simulation.critical, Table(["on the critical path", ">time", ">share"])
    for name, time in way[:top]:
        listed.add(name or "(no name)", seconds(time), f"{time / played.seconds:.1%}")
    if len(way) > top:
        rest = sum(time for _, time in way[top:])
        listed.add(f"{len(way) - top} more", seconds(rest), f"{rest / played.seconds:.1%}")
    listed.show()
    if simulation.unknown:
        console.echo(f"\nwithout {count(simulation.unknown, 'value')} whose size is known only at run time")


def document(where: str, simulation: Simulation, traced: Traced | None) -> dict[str, object]:
    """All that the simulation says, for other programs: seconds, bytes, operations."""
    played = simulation.played
    rows: Sequence[dict[str, object]] = [
        {
            "ranks": ranks_text(one.ranks),
            "compute": played.busy[k],
            "idle": max(0.0, played.seconds - played.busy[k]),
            "under_way": played.communication[k],
            "operations": simulation.operations[k],
            "bytes": simulation.bytes[k],
            "peak_memory": simulation.memory[one.ranks[0]].peak,
        }
        for k, one in enumerate(played.classes)
    ]
    path = [
        {"rank": played.classes[k].ranks[0], "what": action.what, "path": action.path, "seconds": time}
        for k, action, time in played.critical
    ]
    measured = {"trace": traced.where, "steps": traced.steps, "seconds": traced.step} if traced is not None else None
    return {
        "where": where,
        "sizes": dict(simulation.sizes),
        "seconds": played.seconds,
        "ranks": rows,
        "critical": [{"name": name, "seconds": time} for name, time in simulation.critical],
        "path": path,
        "unknown": simulation.unknown,
        "files": {
            name: {"operations": str(operations(file)), "bytes": str(payload(file))}
            for name, file in simulation.files.items()
        },
        **({"measured": measured} if measured else {}),
    }
