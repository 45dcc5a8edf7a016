"""Reads onnxruntime's own measurements of the nodes of sessions, on the clock of `time.perf_counter`.

    session = new_session(..., profile="folder/rank0.0")      # from here on onnxruntime notes every node of every run
    SessionRuns().of(session)                                 # ends that, and reads the session's file

onnxruntime measures from the creation of a session until its times are read, once; for each session it stores a limited number.

For a trace these times are assigned to ops and modules: a run of a session belongs to the segment that was running at that time. Equal
segments share one session: of those, a run belongs to the one that was running at the run's middle.
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
"""Times have whole microseconds: a node that begins more than half of one before the end of another is inside that one."""


@dataclass(frozen=True)
class NodeTime:
    """A call of a kernel: onnxruntime's name of the node, its op type, its begin, and its seconds."""

    name: str
    op: str
    begin: float
    seconds: float


@dataclass(frozen=True)
class Run:
    """A run of a session: its begin, its seconds, and its nodes in order, without those inside an If, Loop or Scan."""

    begin: float
    seconds: float
    nodes: list[NodeTime] = field(default_factory=list)


class SessionRuns:
    """The runs of sessions that were made with a `profile`; the file of each session is read once."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[Session, list[Run]]] = {}

    def of(self, session: Session) -> list[Run]:
        """Returns the runs of a session until the first call for it, in order; none where its profile had ended before."""
        if id(session) not in self._runs:
            path, begun = session.end_profiling(), session.get_profiling_start_time_ns()
            # onnxruntime counts from a time of the system's clock, on some systems of the monotonic one, which is far behind it
            ahead = _ahead()
            start = (begun - ahead if begun > ahead else begun) / 1e9
            self._runs[id(session)] = session, _read(Path(path), start) if path else []
        return self._runs[id(session)][1]


def _ahead() -> int:
    """Returns the nanoseconds by which the system's clock is ahead of `time.perf_counter`.

    The quickest of several readings counts, because other processes run in the middle of some.
    """
    readings = []
    for _ in range(_READINGS):
        before, system, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, system - (before + after) // 2))
    return min(readings)[1]


def _read(path: Path, begun: float) -> list[Run]:
    """Reads the runs in a file of onnxruntime, whose times are microseconds since `begun`."""
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
    """A segment of a step that ran: the positions of the step and the action, its begin and end, and its session."""

    step: int
    action: int
    begin: float
    end: float
    runner: SegmentSession


def ops_of(steps: Sequence[tuple[StepPlan, list[float], list[float]]], runs: SessionRuns) -> dict[str, Any]:
    """Returns the ops of steps, each step a plan with the starts and the seconds of its actions.

    `names` are pairs of op type and module; `spans` are tuples of the position of the step, of the action, and of the name, the begin and
    the seconds. A node that onnxruntime fused may have a name (`BiasGelu`) without that of any source node: its module is "after" the
    module before it.
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
                continue  # a run of a step whose times are not stored, or outside of steps
            before = ""
            for node_run in run.nodes:
                key = id(call.runner.segment), node_run.name
                if key not in known:
                    known[key] = call.runner.module(node_run.name)
                module = known[key] or (f"after {before}" if before else node_run.name)
                before = known[key] or before
                which = names.setdefault((node_run.op, module), len(names))
                spans.append((call.step, call.action, which, node_run.begin, node_run.seconds))
    return {"names": [*names], "spans": sorted(spans, key=itemgetter(0, 1, 3))}


def _by_session(steps: Iterable[tuple[StepPlan, list[float], list[float]]]) -> Iterator[list[_Call]]:
    """Yields the calls of each session, in order of time."""
    by_session: dict[int, list[_Call]] = {}
    for at, (plan, starts, seconds) in enumerate(steps):
        for place, (index, _) in enumerate(plan.actions):
            runner = plan.program.runners.get(index) if plan.is_step(place) else None
            if runner is not None:
                call = _Call(at, place, starts[place], starts[place] + seconds[place], runner)
                by_session.setdefault(id(runner.session), []).append(call)
    return (sorted(calls, key=attrgetter("begin")) for calls in by_session.values())
