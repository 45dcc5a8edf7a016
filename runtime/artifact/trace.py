"""A trace of a job in the format that Perfetto and chrome://tracing open: a process for each rank, a span for each action.

Steps are spans too, around their actions; between steps are the spans of a training's data, evaluations and checkpoints. An arrow goes
from each Send to its Recv. Times are microseconds since the first span. Each event is a line, so that a file cut short can be read as
far as it goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError, reason_of
from ..files.counted import TRACE, parse_json
from ..files.regular import open_regular

SUFFIX = ".trace.json"
STEP, COMPUTE, UPDATE, COPY, COMMUNICATION, MEMORY = "step", "compute", "update", "copy", "communication", "memory"
CATEGORIES = (COMPUTE, UPDATE, COPY, COMMUNICATION, MEMORY)
"""The categories of the actions of a step."""
DATA, EVALUATION, CHECKPOINT = "data", "evaluation", "checkpoint"
BETWEEN = {DATA: "next batch", EVALUATION: "evaluation", CHECKPOINT: "checkpoint"}
"""Maps the categories of spans between a training's steps to their names: the wait for data comes before a step, the others after it."""
OP = "op"
"""The category of an op's span, measured by onnxruntime, within the span of an action; its `about` has `op` and `module`."""
_OF_STEPS = {"Segment": COMPUTE, "Update": UPDATE, "Copy": COPY, "Memory": MEMORY}


@dataclass(frozen=True)
class Span:
    """A step or an action: its begin in seconds since the trace's first span, its length in seconds, and `about`, the event's `args`."""

    rank: int
    category: str
    name: str
    begin: float
    seconds: float
    lane: int = 0
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """The spans of all ranks. `is_complete`: whether the file has its end. `error`: the error of other hosts' clocks, in seconds.

    `ranks`: the number of ranks; a rank without actions has no spans.
    """

    spans: list[Span]
    is_complete: bool
    error: float
    ranks: int
    has_ops: bool = False
    """Whether onnxruntime's own times of ops were measured, which slows the steps."""


_SLOWER = "onnxruntime was profiled, which slows the steps"


def trace_text(ranks: Sequence[str]) -> str:
    """Returns the text of the file, one event per line, from the JSON text of each rank's profiler."""
    rows = [json.loads(text) for text in ranks]
    of_steps = (min(starts) for row in rows for _, _, starts, _ in row["steps"])
    begun = min((*of_steps, *(start for row in rows for _, _, start, _ in row["between"])), default=0.0)
    arrows: dict[tuple[int, ...], int] = {}
    lines = [json.dumps(event) for row in rows for event in _events(row, begun, arrows)]
    error = max((row["error"] for row in rows), default=0.0)
    said = {"producer": "partc", "ranks": len(rows), "clock_error_us": _us(error)}
    if any("ops" in row for row in rows):
        said["ops"] = _SLOWER
    about = json.dumps(said)
    return '{"displayTimeUnit": "ms", "otherData": ' + about + ', "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n"


def _events(row: dict[str, Any], begun: float, arrows: dict[tuple[int, ...], int]) -> Iterator[dict[str, Any]]:
    """Yields a rank's events; `arrows` maps each step and message to the number of its arrow, since trace readers accept no other id."""
    rank = row["rank"]
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    place = {"pid": rank, "tid": 0}
    for kind, number, start, taken in row["between"]:
        begin, end = _us(start - begun), _us(start - begun + taken)
        about = {"kind": kind, "step": number}
        span = {"ph": "X", "name": BETWEEN[kind], "cat": kind, **place, "ts": begin}
        yield {**span, "dur": _us_between(begin, end), "args": about}
    ops = _ops_by_action(row, begun)
    for at_step, (number, plan, starts, seconds) in enumerate(row["steps"]):
        begins = [_us(start - begun) for start in starts]
        ends = [_us(start - begun + taken) for start, taken in zip(starts, seconds, strict=True)]
        whole = {"ts": min(begins), "dur": _us_between(min(begins), max(ends))}
        yield {"ph": "X", "name": f"step {number}", "cat": STEP, **place, **whole, "args": {"step": number}}
        for action, (span, begin, end) in enumerate(zip(row["plans"][plan], begins, ends, strict=True)):
            at = {"pid": rank, "tid": span["lane"]}
            category = _OF_STEPS.get(span["kind"], COMMUNICATION)
            said = {key: value for key, value in span.items() if key not in ("name", "lane", "link", "sends")}
            event = {"cat": category, **at, "ts": begin, "ph": "X", "name": span["name"]}
            yield {**event, "dur": _us_between(begin, end), "args": {**said, "step": number}}
            for op, module, start, stop in ops.get((at_step, action), ()):
                first, last = min(max(start, begin), end), min(max(stop, begin), end)
                told = {"ph": "X", "name": f"{op} ({module})", "cat": OP, **at, "ts": first}
                args = {"op": op, "module": module, "step": number}
                yield {**told, "dur": _us_between(first, last), "args": args}
            if link := span.get("link"):
                arrow = {"name": "message", "cat": "message", **at, "args": {"step": number}}
                arrow["id"] = arrows.setdefault((number, *link), len(arrows) + 1)
                yield {**arrow, "ph": "s", "ts": begin} if span["sends"] else {**arrow, "ph": "f", "bp": "e", "ts": end}


def _ops_by_action(row: dict[str, Any], begun: float) -> dict[tuple[int, int], list[tuple[str, str, float, float]]]:
    """Maps the indices of a step and an action to the op type, module, begin and end, in microseconds, of each op in that action."""
    found: dict[tuple[int, int], list[tuple[str, str, float, float]]] = {}
    if ops := row.get("ops"):
        for step, action, which, start, taken in ops["spans"]:
            times = _us(start - begun), _us(start - begun + taken)
            found.setdefault((step, action), []).append((*ops["names"][which], *times))
    return found


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _us_between(begin: float, end: float) -> float:
    return round(end - begin, 3)


def read_trace(path: Path) -> Trace:
    """Reads a file that `trace_text` wrote; UsageError, with the line, where it is not a trace."""
    try:
        with open_regular(path) as file:
            lines = file.read(TRACE.bytes + 1).split(b"\n")
    except OSError as error:
        raise UsageError(f"{path}: {reason_of(error)}") from None
    if not lines[0].startswith(b'{"displayTimeUnit": "ms", "otherData": {"producer": "partc"'):
        raise UsageError(
            f"{path}: not a trace of partc\n  help: partc run --profile x{SUFFIX}, or partc train, writes one"
        )
    spans, whole, clocks, ranks, ops = [], lines[-2:] == [b"]}", b""], 0.0, 0, False
    data: Any
    for number, line in enumerate(lines, 1):
        if line == b"]}":
            break
        try:
            if number == 1:
                data = parse_json(line.partition(b', "traceEvents"')[0] + b"}", TRACE)
                clocks = float(data["otherData"]["clock_error_us"]) / 1e6
                ranks = int(data["otherData"]["ranks"])
                ops = "ops" in data["otherData"]
                continue
            data = parse_json(line.rstrip(b","), TRACE)
            if data["ph"] == "X":
                spans.append(_span_of(data))
        except (ValueError, KeyError, TypeError) as problem:
            if number == len(lines):  # it was cut short there
                break
            raise UsageError(f"{path}:{number}: not an event of a trace: {problem!r}") from None
    return Trace(spans, whole, clocks, ranks, ops)


def _span_of(event: dict[str, Any]) -> Span:
    about = event["args"]
    if (
        not isinstance(about, dict)
        or not isinstance(about["step"], int)
        or event["cat"] not in (STEP, OP, *CATEGORIES, *BETWEEN)
    ):
        raise ValueError(f"a span of {event['cat']!r}, {about!r}")
    begin, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    if not (begin >= 0 and seconds >= 0):
        raise ValueError(f"a time of {begin:g} s, {seconds:g} s")
    return Span(int(event["pid"]), event["cat"], str(event["name"]), begin, seconds, int(event["tid"]), about)
