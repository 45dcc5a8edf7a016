"""Measures the tasks of a rank: the time of every action of every step, with two readings of the clock for each.

    profiler = program.record_times()        from the next step on
    profiler.text()                          JSON: a rank's part of the file that `--profile` writes
    profiler.trace(offset, error)            JSON: when each action of each step began, and how long it took
    profiler.stop()                          from the next step on nothing is measured, at no cost

The times of the last steps are stored. The first few steps, which touch memory for the first time, are left out if there are later ones.

A trace shows for each action of a step plan: a name, a kind, the task and module, bytes, and the other end of a message.
"""

from __future__ import annotations

import json
import math
import re
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from ...artifact.tensors.dtypes import dense
from ...files.regular import open_regular
from ...program.ort import Session
from ...program.sessions import SegmentSession
from ...program.steps import Border, Collective, Copy, LookUp, Segment, Send, Step, Update, WaitCollective, WaitRecv
from ..memory.roles import ActionKind
from ..step_plan import StepPlan
from ..targets.lanes import lanes_of
from ..targets.workers import Action

KEPT = 100
"""The number of steps whose times are stored."""
_BETWEEN = 4
"""The number of notes between steps that are stored, per step."""
_WARM = 3
"""The number of first steps that are left out."""
COMPUTE, UPDATE, BEGIN, WAIT = "compute", "update", "begin", "wait"
KINDS = (COMPUTE, UPDATE, BEGIN, WAIT)


@dataclass(frozen=True)
class _Action:
    """The label of an action: its kind, the task to which it counts, and whether it is a wait inside that task."""

    kind: str
    task: str
    inside: bool = False


@dataclass(frozen=True)
class _Steps:
    """The times of one step, with the labels of its actions.

    `starts` and `seconds` are those of each action, `whole` the seconds of the step, `targets` those of each target's computation, and
    `overlap` those in which more than one target computed.
    """

    number: int
    said: list[_Action]
    starts: list[float]
    seconds: list[float]
    whole: float
    targets: dict[str, float]
    overlap: float
    plan: StepPlan


class Profiler:
    """The times of one rank; `number` is that of the next step. With `has_ops` onnxruntime also measures the nodes of its sessions."""

    def __init__(self, rank: int, number: int = 1, has_ops: bool = False) -> None:
        self.rank = rank
        self._steps: deque[_Steps] = deque(maxlen=KEPT)
        self._between: deque[tuple[str, int, float, float]] = deque(maxlen=_BETWEEN * KEPT)
        self._first = number
        self._count = number - 1
        self._arena = 0
        self._plans: list[Iterable[StepPlan]] = []
        self._runs = SessionRuns() if has_ops else None
        self.has_stopped = False
        """Whether measuring has ended."""

    def add(self, plans: Iterable[StepPlan]) -> None:
        """Measures the step plans of a program. `plans` may grow; when the profiler stops, all plans in it get their own actions back."""
        self._plans.append(plans)
        for plan in plans:
            self.watch(plan)

    def watch(self, plan: StepPlan) -> None:
        """Measures the actions of a step plan, unless the profiler was stopped."""
        if self.has_stopped:
            return
        said = _labels([(plan.program.steps[index], plan.is_step(at)) for at, (index, _) in enumerate(plan.actions)])
        seconds, starts = [0.0] * len(said), [0.0] * len(said)
        plan.actions[:] = [
            (index, _timed(action, seconds, starts, at)) for at, (index, action) in enumerate(plan.actions)
        ]
        busy = _busy(plan)
        if not said:
            return
        begun = [0.0]
        first, action = plan.actions[0]
        last, ending = plan.actions[-1]

        def begin() -> None:
            begun[0] = time.perf_counter()
            action()

        def end() -> None:
            (begin if len(said) == 1 else ending)()
            self._count += 1
            self._arena = int(plan.program.arenas.host.size)
            whole = time.perf_counter() - begun[0]
            spans = {
                target: [(starts[at], starts[at] + seconds[at]) for at in places] for target, places in busy.items()
            }
            targets = {target: sum(end - begin for begin, end in some) for target, some in spans.items()}
            both = overlap(spans.values())
            self._steps.append(_Steps(self._count, said, [*starts], [*seconds], whole, targets, both, plan))

        begin.plain = action  # type: ignore[attr-defined]
        end.plain = action if len(said) == 1 else ending  # type: ignore[attr-defined]
        plan.actions[0] = first, begin
        plan.actions[-1] = last, end

    def stop(self) -> None:
        """Ends measuring with the next step: step plans get their own actions back."""
        self.has_stopped = True
        for plan in (one for plans in self._plans for one in plans):
            plan.actions[:] = [(index, _plain(action)) for index, action in plan.actions]

    def note(self, kind: str, number: int, start: float, seconds: float) -> None:
        """Notes work between two steps: its category in a trace, the number of its step, its start and its seconds."""
        self._between.append((kind, number, start, seconds))

    def trace(self, offset: float = 0.0, error: float = 0.0) -> str:
        """Returns the last steps as JSON: the spans of each step plan (`spans_of`), and for each step its actions' starts and seconds.

        Where onnxruntime's own times are measured it has also the `ops` (`ops_of`), of steps until the first trace.

        `offset`: the seconds by which the clock of rank 0 is ahead of this rank's, and the largest `error` of that, in seconds.
        """
        plans = {id(step.plan): step.plan for step in self._steps}
        places = {one: place for place, one in enumerate(plans)}
        spans = [spans_of(plan) for plan in plans.values()]
        steps = [
            [one.number, places[id(one.plan)], [start + offset for start in one.starts], one.seconds]
            for one in self._steps
        ]
        first = self._steps[0].number if self._steps else 0
        between = [(kind, step, start + offset, taken) for kind, step, start, taken in self._between if step >= first]
        told = {"rank": self.rank, "error": error, "plans": spans, "steps": steps, "between": between}
        if self._runs is not None:
            measured = ops_of([(one.plan, one.starts, one.seconds) for one in self._steps], self._runs)
            ops = [(*place, begin + offset, seconds) for *place, begin, seconds in measured["spans"]]
            told["ops"] = {**measured, "spans": ops}
        return json.dumps(told)

    def text(self) -> str:
        """Returns the measurements as JSON."""
        steps = [one for one in self._steps if one.number >= self._first + _WARM] or [*self._steps]
        tasks: dict[str, list[float]] = {}
        waits: dict[str, list[float]] = {}
        kinds: dict[str, list[float]] = {kind: [0.0] * len(steps) for kind in KINDS}
        for k, step in enumerate(steps):
            for one, seconds in zip(step.said, step.seconds, strict=True):
                kinds[one.kind][k] += seconds
                if one.task and (one.inside or one.kind != WAIT):
                    column = (waits if one.inside else tasks).setdefault(one.task, [0.0] * len(steps))
                    column[k] += seconds
        whole = [step.whole for step in steps]
        told = {"rank": self.rank, "step": whole, "tasks": tasks, "waits": waits, "kinds": kinds, "arena": self._arena}
        if targets := {target for step in steps for target in step.targets}:
            told["targets"] = {target: [step.targets.get(target, 0.0) for step in steps] for target in sorted(targets)}
            told["overlap"] = [step.overlap for step in steps]
        return json.dumps(told)


def _labels(steps: list[tuple[Step, bool]]) -> list[_Action]:
    """Returns the labels of actions: of steps, and of other actions, such as a wait for a send or the end of a value."""
    cells = [step.task if isinstance(step, Segment | Copy | Collective | LookUp) else "" for step, _ in steps]
    at = next(filter(None, cells), "")
    labels = []
    for (step, is_step), cell in zip(steps, cells, strict=True):
        at = cell if cell and is_step else at
        if not is_step or isinstance(step, WaitRecv | WaitCollective | LookUp):
            labels.append(_Action(WAIT, at, inside=is_step and bool(cell)))
        elif isinstance(step, Segment | Copy):
            labels.append(_Action(COMPUTE, at))
        else:
            labels.append(_Action(UPDATE if isinstance(step, Update) else BEGIN, at))
    return labels


def _busy(plan: StepPlan) -> dict[str, list[int]]:
    """Maps each target to the places of the actions that compute or copy there; empty where only one target computes."""
    if plan.lanes is None:
        return {}
    found: dict[str, list[int]] = {}
    for target, lane in lanes_of(plan.program).items():
        places = [at for at in plan.lanes.order.lanes[lane] if plan.is_step(at)]
        computes = (Segment, Update, Copy)
        found[target] = [at for at in places if isinstance(plan.program.steps[plan.actions[at][0]], computes)]
    return found


def overlap(spans: Iterable[Iterable[tuple[float, float]]]) -> float:
    """Returns the seconds in which at least two of `spans` are active.

    Each item has the (begin, end) pairs of one activity, which do not overlap each other.
    """
    turns = sorted((at, turn) for some in spans for begin, end in some for at, turn in ((begin, 1), (end, -1)))
    total, running, before = 0.0, 0, 0.0
    for at, turn in turns:
        total += at - before if running > 1 else 0.0
        running += turn
        before = at
    return total


def _timed(action: Action, seconds: list[float], starts: list[float], at: int) -> Callable[[], None]:
    clock = time.perf_counter

    def timed() -> None:
        start = starts[at] = clock()
        action()
        seconds[at] = clock() - start

    timed.plain = action  # type: ignore[attr-defined]
    return timed


def _plain(action: Action) -> Action:
    """Returns the action inside a timed one; any other action is returned as it is."""
    while (found := getattr(action, "plain", None)) is not None:
        action = found
    return action


_TASK = re.compile(r"\d+[A-Z](\d+)")
_BESIDE = {ActionKind.SENT: "end of ", ActionKind.DROPPED: "memory after ", ActionKind.FREED: "memory after "}


def spans_of(plan: StepPlan) -> list[dict[str, Any]]:
    """Describes each action, in order: `name`, `kind`, `lane`, and if known `task`, `microbatch`, `module` and `bytes`.

    A message has also `link`, [sender, receiver, tag], and `sends`; a collective has its `ranks`.
    """
    lanes: dict[int, int] = {}
    if plan.lanes is not None:
        for lane in lanes_of(plan.program).values():
            lanes.update(dict.fromkeys(plan.lanes.order.lanes[lane], lane))
    spans = []
    for place, (index, _) in enumerate(plan.actions):
        step = plan.program.steps[index]
        span: dict[str, Any] = {"name": str(step), "kind": type(step).__name__, "lane": lanes.get(place, 0)}
        if not plan.is_step(place):
            kind = plan.roles[place].kind if place < len(plan.roles) else ActionKind.FREED
            spans.append(
                {**span, "name": f"{_BESIDE[kind]}{step}", "kind": "Wait" if kind is ActionKind.SENT else "Memory"}
            )
            continue
        spans.append(span | dict(_details(plan, step)))
    return spans


def _details(plan: StepPlan, step: Step) -> Iterator[tuple[str, Any]]:
    if task := getattr(step, "task", ""):
        yield "task", task
        if number := _TASK.fullmatch(task):
            yield "microbatch", int(number[1])
    if module := _module(step):
        yield "module", module
    if isinstance(step, Send | WaitRecv):
        own, sends = plan.program.rank, isinstance(step, Send)
        yield "link", [own, step.peer, step.tag] if sends else [step.peer, own, step.tag]
        yield "sends", sends
        yield from _bytes(plan, step.value)
    elif isinstance(step, Collective | LookUp):
        yield "ranks", list(step.ranks)
        yield from _bytes(plan, step.call.value)
    elif isinstance(step, Copy):
        yield from _bytes(plan, step.source if step.source in plan.memory.shapes else step.result)


def _module(step: Step) -> str:
    """Returns the dotted path of the step's first node in the model."""
    if isinstance(step, Segment):
        return step.nodes[0].name
    if isinstance(step, Update):
        return ""
    return step.call.path if isinstance(step, Collective | LookUp | Border) else step.path


def _bytes(plan: StepPlan, name: str) -> Iterator[tuple[str, int]]:
    """Yields the bytes of a value, if its type and its shape at this plan's sizes are known."""
    dtype, shape = dense(plan.program.values.types.get(name, "")), plan.memory.shapes.get(name)
    if dtype is not None and shape is not None and all(isinstance(dim, int) for dim in shape):
        yield "bytes", math.prod(int(dim) for dim in shape) * dtype.numpy.itemsize


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
    """The runs of sessions that were made with a `profile`, on the clock of `time.perf_counter`; the file of each session is read once.

        session = new_session(..., profile="folder/rank0.0")      # from here on onnxruntime notes every node of every run
        SessionRuns().of(session)                                 # ends that, and reads the session's file

    For each session onnxruntime stores a limited number of measurements.
    """

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

    A run of a session belongs to the segment that was running at the run's middle: equal segments share one session.

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
