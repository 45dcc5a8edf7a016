"""Assigns onnxruntime's own times to ops and modules, for a trace: a run of a session belongs to the segment around it.

Segments that are equal have one session: of those, a run belongs to the one in whose time its middle lies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

from ...program.sessions import SegmentSession
from ..step_plan import StepPlan
from .session_runs import SessionRuns


@dataclass(frozen=True)
class _Call:
    """A segment of a step that ran: the step's and the action's places, when it began and ended, and its session."""

    step: int
    action: int
    begin: float
    end: float
    runner: SegmentSession


def ops_of(steps: Sequence[tuple[StepPlan, list[float], list[float]]], runs: SessionRuns) -> dict[str, Any]:
    """The ops of steps, each a plan with the begins and the seconds of its actions.

    `names` are pairs of op type and module; in `spans` stand the place of the step, that of the action, that of the name, begin and
    seconds. What onnxruntime made of several nodes may have the name of none (`BiasGelu`): it stands after the module before it.
    """
    names: dict[tuple[str, str], int] = {}
    known: dict[tuple[int, str], str] = {}
    spans = []
    for calls in _by_session(steps):
        begins = [call.begin for call in calls]
        for run in runs.of(calls[0].runner.session):
            middle = run.begin + run.seconds / 2
            call = calls[max(0, bisect_right(begins, middle) - 1)]
            if not call.begin <= middle <= call.end:
                continue  # of a step that is not kept, or of no step
            before = ""
            for one in run.nodes:
                key = id(call.runner.segment), one.name
                if key not in known:
                    known[key] = call.runner.module(one.name)
                module = known[key] or (f"after {before}" if before else one.name)
                before = known[key] or before
                which = names.setdefault((one.op, module), len(names))
                spans.append((call.step, call.action, which, one.begin, one.seconds))
    return {"names": [*names], "spans": sorted(spans, key=itemgetter(0, 1, 3))}


def _by_session(steps: Iterable[tuple[StepPlan, list[float], list[float]]]) -> Iterator[list[_Call]]:
    """Maps each session to its calls, in order of time."""
    found: dict[int, list[_Call]] = {}
    for at, (plan, starts, seconds) in enumerate(steps):
        for place, (index, _) in enumerate(plan.actions):
            runner = plan.program.runners.get(index) if plan.is_step(place) else None
            if runner is not None:
                call = _Call(at, place, starts[place], starts[place] + seconds[place], runner)
                found.setdefault(id(runner.session), []).append(call)
    return (sorted(calls, key=attrgetter("begin")) for calls in found.values())
