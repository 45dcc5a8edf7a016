"""A step over time: as `partc simulate` plays it, and one step as a trace measured it.

The measured step is the one whose time is nearest to the median. Times are seconds from the begin of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from partc.cli.simulation.run import instant
from partc.compiler.cost.machine_file import read_machine
from partc.compiler.cost.play import Action, Communicate
from partc.compiler.cost.step import Simulation, simulated
from partc.compiler.cost.traced import read_traced
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.trace import CATEGORIES, STEP, Span, read_trace


def timeline_of(
    artifact: Artifact, machine: Path | None, trace: Path | None, given: Mapping[str, int]
) -> dict[str, object]:
    """The step on a machine, or with a trace alone by its medians; UsageError where the trace is of another artifact, or has no step."""
    traced = read_traced(trace) if trace is not None else None
    if traced is not None:
        traced.refuse_other(artifact.manifest.ranks)
    calibrated = machine is None
    found = simulated(
        artifact,
        read_machine(machine) if machine is not None else instant(),
        given,
        traced=traced if calibrated else None,
    )
    if traced is not None and not calibrated:
        traced.calibrated(found.played.classes)  # refuses the trace of another artifact
    by = "trace" if calibrated else "machine"
    document: dict[str, object] = {"sizes": dict(found.sizes), "by": by, "simulated": _played(found)}
    if trace is None or traced is None:
        return document
    measured = {"trace": trace.name, "steps": traced.steps, "median": traced.step, **_measured(trace, traced.step)}
    return {**document, "measured": measured}


def _played(found: Simulation) -> dict[str, object]:
    played = found.played
    rows = [
        {
            "ranks": ranks_text(one.ranks),
            "first": one.ranks[0],
            "busy": played.busy[k],
            "under_way": played.communication[k],
            "spans": [_span(interval.action, interval.begin, interval.end) for interval in played.intervals[k]],
        }
        for k, one in enumerate(played.classes)
    ]
    critical = [{"name": name, "seconds": seconds} for name, seconds in found.critical]
    return {"seconds": played.seconds, "ranks": rows, "critical": critical}


def _span(action: Action, begin: float, end: float) -> list[object]:
    """An action as the page has it: category, name, module, begin, seconds and bytes."""
    category, bytes = ("communication", action.bytes) if isinstance(action, Communicate) else ("compute", 0)
    return [category, action.what, action.path, begin, end - begin, bytes]


def _measured(path: Path, median: float) -> dict[str, object]:
    """The spans of one step by rank, of the step whose longest rank took closest to the median."""
    trace = read_trace(path)
    wholes: dict[int, list[Span]] = {}
    for one in trace.spans:
        if one.category == STEP:
            wholes.setdefault(one.about["step"], []).append(one)
    ranks = {one.rank for some in wholes.values() for one in some}
    last = trace.spans[-1].about["step"] if not trace.is_complete else None
    ended = [step for step, some in wholes.items() if len(some) == len(ranks) and step != last] or [*wholes]
    chosen = min(ended, key=lambda step: (abs(max(one.seconds for one in wholes[step]) - median), step))
    begin = min(one.begin for one in wholes[chosen])
    rows = []
    for whole in sorted(wholes[chosen], key=lambda one: one.rank):
        spans = [
            [
                one.category,
                one.name,
                str(one.about.get("module") or ""),
                one.begin - begin,
                one.seconds,
                one.about.get("bytes") or 0,
            ]
            for one in trace.spans
            if one.rank == whole.rank and one.about["step"] == chosen and one.category in CATEGORIES
        ]
        rows.append({"rank": whole.rank, "begin": whole.begin - begin, "seconds": whole.seconds, "spans": spans})
    end = max(one.begin + one.seconds for one in wholes[chosen])
    return {"step": chosen, "seconds": end - begin, "whole": trace.is_complete, "error": trace.error, "ranks": rows}
