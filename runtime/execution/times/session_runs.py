"""onnxruntime's own measurements of the nodes of sessions, on the clock of `time.perf_counter`.

    session = new_session(..., profile="folder/rank0.0")      # from here on onnxruntime notes every node of every run
    SessionRuns().of(session)                                 # ends that, and reads the session's file

onnxruntime can note times from when a session is made to when they are read, once; of one session it keeps a limited number.

For a trace these times are assigned to ops and modules: a run of a session belongs to the segment around it.
Segments that are equal have one session: of those, a run belongs to the one in whose time its middle lies.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from ...files.regular import open_regular
from ...program.ort import Session
from ...program.sessions import SegmentSession
from ..step_plan import StepPlan

_KERNEL = "_kernel_time"
_READINGS = 10
_WITHIN = 0.5e-6
"""Times are of whole microseconds: what begins more than half of one before the end of another lies inside of it."""


@dataclass(frozen=True)
class NodeTime:
    """One call of a kernel: the node's name as onnxruntime has it, its op type, when it began, and its seconds."""

    name: str
    op: str
    begin: float
    seconds: float


@dataclass(frozen=True)
class Run:
    """One run of a session: when it began, its seconds, and its nodes in order, without those inside of an If, Loop or Scan."""

    begin: float
    seconds: float
    nodes: list[NodeTime] = field(default_factory=list)


class SessionRuns:
    """The runs of sessions that were made with a `profile`, read once for each."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[Session, list[Run]]] = {}

    def of(self, session: Session) -> list[Run]:
        """The runs of a session until it was asked for the first time, in order; none where its profile has ended before."""
        if id(session) not in self._runs:
            path, begun = session.end_profiling(), session.get_profiling_start_time_ns()
            # onnxruntime counts from a time of the system's clock, on some systems of the monotonic one, which is far behind it
            ahead = _ahead()
            start = (begun - ahead if begun > ahead else begun) / 1e9
            self._runs[id(session)] = session, _read(Path(path), start) if path else []
        return self._runs[id(session)][1]


def _ahead() -> int:
    """The nanoseconds that the system's clock is ahead, by the quickest of several readings: other processes run in the midst of some."""
    readings = []
    for _ in range(_READINGS):
        before, system, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, system - (before + after) // 2))
    return min(readings)[1]


def _read(path: Path, begun: float) -> list[Run]:
    """The runs in a file of onnxruntime, whose times are microseconds since `begun`."""
    runs: list[Run] = []
    kernels: list[NodeTime] = []
    with open_regular(path) as file:
        for line in file:
            if not line.startswith(b"{"):
                continue
            event: dict[str, Any] = json.loads(line.rstrip(b" \r\n,"))
            begin, seconds = begun + event["ts"] / 1e6, event["dur"] / 1e6
            if event["name"] == "model_run":
                runs.append(Run(begin, seconds))
            elif event["cat"] == "Node" and event["name"].endswith(_KERNEL):
                name = event["name"].removesuffix(_KERNEL)
                kernels.append(NodeTime(name, event["args"]["op_name"], begin, seconds))
    runs.sort(key=lambda run: run.begin)
    kernels.sort(key=lambda one: (one.begin, -one.seconds))
    at, end = -1, 0.0
    for one in kernels:
        while at + 1 < len(runs) and runs[at + 1].begin <= one.begin:
            at, end = at + 1, 0.0
        if at >= 0 and one.begin >= end - _WITHIN:
            runs[at].nodes.append(one)
            end = one.begin + one.seconds
    return runs


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
