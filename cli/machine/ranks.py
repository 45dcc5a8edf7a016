"""One of the ranks that `partc measure` starts: all measure at the same time, as they compute in a job, and rank 0 prints the medians.

It is started once more as the only rank of a job, which then has the host's memory for itself.

The launcher starts it as `python -P -m partc.cli.machine.ranks FOLDER`; `FOLDER/request.json` is the list of measurements.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from partc.cli.machine.job import report
from partc.cli.machine.kernels import (
    clock_of,
    convolutions,
    kernels,
    overhead,
    products,
    session_run,
    thin_products,
    timed,
    undisturbed,
)
from partc.cli.machine.links import collectives, messages, overlap, wake
from partc.cli.machine.segments import segment_times
from partc.compiler.cost.machine import Curve
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.communication.transport import Transport
from partc.runtime.job.machine import usable_cores

REQUEST, TINY = "request.json", "tiny"
_STEPS, _WARM = 60, 10
_LEAST = 1e-8
"""The seconds that replace a time below the resolution of the clock."""


def main() -> int:
    """Runs the measurements; returns the exit code."""
    return report(partial(_found, Path(sys.argv[1])))


def _found(folder: Path, transport: Transport) -> dict[str, Any]:
    request = json.loads((folder / REQUEST).read_text())
    threads = request["threads"] or transport.cores
    found = _measured(transport, request, threads)
    step = _step(folder / TINY, threads)
    return _medians([json.loads(text) for text in transport.all_gather_text(json.dumps({**found, "step": step}))])


def _measured(transport: Transport, request: dict[str, Any], threads: int) -> dict[str, Any]:
    """Measures on this rank; each measurement starts on all ranks at once."""
    working = max(1, len(usable_cores()) // threads)  # more ranks would share cores, which the simulation models
    session, _, _ = overhead(threads)
    in_step, node, view = overhead(threads, apart=True)
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {
        "products": defaultdict(list),
        "kernels": defaultdict(list),
    }
    for table, samples in (("products", products()), ("kernels", kernels())):
        for name, sample in samples:
            run = session_run(sample, threads)
            transport.all_gather_text("")
            taken = timed(run, threads, sample.before) - session if transport.rank < working else 0.0
            each = max(node, taken) / sample.count
            curves[table][name].append((sample.amount, each if transport.rank < working else 0.0))
    product = Curve(tuple(curves["products"]["matmul"]))
    for name, beside in (("unfold", convolutions()), ("pack", thin_products())):
        for sample, operations in beside:
            run = session_run(sample, threads)
            transport.all_gather_text("")
            taken = timed(run, threads) - session - product(operations) if transport.rank < working else 0.0
            curves["kernels"][name].append((sample.amount, max(_LEAST, taken) if transport.rank < working else 0.0))
    curves["kernels"]["view"] = [(1.0, view if transport.rank < working else 0.0)]
    links = []
    lists = [tuple(tuple(ranks) for ranks in one["lists"]) for one in request["links"]]
    transport.create_groups([ranks for some in lists for ranks in some])
    for one, some in zip(request["links"], lists, strict=True):
        own: Sequence[int] = next(ranks for ranks in some if transport.rank in ranks)
        among = tuple(own)
        links.append(
            {
                "name": one["name"],
                "send": messages(transport, among),
                "collectives": collectives(transport, among),
                "overlap": overlap(transport, among, threads),
                "wake": wake(transport, among, threads),
            }
        )
    segments = segment_times(request["artifacts"], transport, threads, max(0.0, in_step - session))
    ranks = min(working, transport.size)
    return {"ranks": ranks, "threads": threads, "session": in_step, **curves, "links": links, "segments": segments}


def _step(folder: Path, threads: int) -> float:
    """Returns the seconds of a step outside of its actions and communication, for a training that does almost no work."""
    from partc.runtime import load_trainer

    with load_trainer(folder, LocalWorld(1).transport(0), threads=threads) as trainer:
        batch = {"x": np.ones((1, 4), np.float32), "label": np.zeros(1, np.int64)}
        profiler = trainer.program.record_times()
        clock, taken = clock_of(threads), list[float]()
        for _ in range(_STEPS):
            begin = clock()
            trainer.train(batch)
            taken.append(clock() - begin)
        kinds = json.loads(profiler.text())["kinds"]
    inside = [sum(some) for some in zip(*kinds.values(), strict=True)]
    beside: float = undisturbed(taken[_WARM:]) - undisturbed(inside)
    return max(0.0, beside)


def _medians(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the medians of all ranks' measurements; segments are divided among the ranks, and their times are merged."""
    first = measured[0]

    def points(*keys: str | int) -> list[list[float]]:
        tables = []
        for one in measured:
            at: Any = one
            for key in keys:
                at = at[key]
            tables.append(
                sorted((float(amount), time) for amount, time in (at.items() if isinstance(at, dict) else at))
            )
        return [[some[0][0], median([time for _, time in some if time] or [0.0])] for some in zip(*tables, strict=True)]

    return {
        "ranks": first["ranks"],
        "threads": first["threads"],
        "session": median(one["session"] for one in measured),
        "step": median(one["step"] for one in measured),
        **{table: {name: points(table, name) for name in first[table]} for table in ("products", "kernels")},
        "links": [
            {
                "name": one["name"],
                **{key: median(each["links"][k][key] for each in measured) for key in ("overlap", "wake")},
                "send": points("links", k, "send"),
                "collectives": {op: points("links", k, "collectives", op) for op in one["collectives"]},
            }
            for k, one in enumerate(first["links"])
        ],
        "segments": {key: time for one in measured for key, time in one["segments"].items()},
    }


if __name__ == "__main__":
    sys.exit(main())
