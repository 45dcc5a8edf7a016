"""A schedule as text: its rows, and a grid of ranks over time. The same schedule gives the same bytes.

    # partc schedule, grammar 2
    # Schedule: 1f1b   Stages: 2   Microbatches: 2
    # Stage 0: rank 0   read by 1
    # Stage 1: rank 1
    # Total: 9 units   Bubble: 33.33%   Overhead: 50%
    # rank 0: idle 3 (33.33%), keeps 2 microbatches
    # rank 1: idle 3 (33.33%), keeps 1 microbatch
    # rank 0 - rank 1: 4 messages

    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

    # time  0                   5
    rank 0 |0F0 0F1 .   .   0B0 --- .   0B1 --- |
    rank 1 |.   1F0 1B0 --- 1F1 1B1 --- .   .   |

Columns are equal where a column of few characters can hold every task: then one is the greatest time of which all times are multiples. Else
a column begins where some rank begins a second task, so that every task has a cell of its own, and times stand above. `---` continues
the task before, `.` is idle.

Messages of a schedule: which stages read what a task made on other homes, and how many go between homes in a step.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from partc.compiler.schedule.costs import BYTES, MICROBATCHES, Costs, unit_costs
from partc.compiler.schedule.memory import TOLERANCE, amount_text, peak_counts, peaks
from partc.compiler.schedule.schedule import Row, Schedule
from partc.compiler.schedule.simulate import Timing, simulate
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


def readers(task: Task, stages: Stages) -> tuple[int, ...]:
    """The stages to which a message goes with what a task made."""
    if task.kind is Kind.FORWARD:
        there = {edge.target for edge in stages.edges if edge.source == task.stage}
    elif task.kind is Kind.BACKWARD:
        there = {edge.source for edge in stages.gradient_edges if edge.target == task.stage}
    else:
        there = set()
    return tuple(stage for stage in sorted(there) if stages.crosses(task.stage, stage))


def message_counts(schedule: Schedule) -> dict[tuple[str, str], int]:
    """Between which homes how many messages go in a step, both ways together: 2m over an edge of a chain, 4m in a V."""
    stages = schedule.stages
    counts: Counter[tuple[int, ...]] = Counter()
    pairs: dict[tuple[int, ...], tuple[str, str]] = {}
    for task in {task for row in schedule.rows for task in row}:
        for reader in readers(task, stages):
            ends = sorted([stages.stage_ranks[task.stage], stages.stage_ranks[reader]])
            key = (*ends[0], -1, *ends[1])
            counts[key] += 1
            pairs[key] = (stages.label(*ends[0]), stages.label(*ends[1]))
    return {pairs[key]: counts[key] for key in sorted(counts)}


GRAMMAR = 2
_WIDTH = 120
_FINEST = 8
"""Columns that an average task may take before columns are made coarser."""


class Columns(NamedTuple):
    """The time at which each column begins, and each task's column."""

    begins: list[float]
    of: dict[Task, int]


def schedule_text(schedule: Schedule, costs: Costs | None = None) -> str:
    """The text of `ir/schedule.txt`; unit times where no costs are given."""
    costs = costs or unit_costs(schedule.stages)
    timing = simulate(schedule, costs)
    return "\n".join([*_head(schedule, costs, timing), "", str(schedule), "", *_grid(schedule, timing), ""])


def grid(schedule: Schedule, timing: Timing) -> str:
    """The ranks over time."""
    return "\n".join(_grid(schedule, timing))


def _head(schedule: Schedule, costs: Costs, timing: Timing) -> Iterator[str]:
    stages = schedule.stages
    yield f"# partc schedule, grammar {GRAMMAR}"
    yield f"# Schedule: {schedule.name}   Stages: {len(stages)}   Microbatches: {schedule.microbatches}"
    if costs.sizes:
        yield f"# Costs: {costs.clock} of the model's sizes, with {costs.sizes}"
    trains = any(stages.backward)
    for s, homes in enumerate(stages.stage_ranks):
        ends = [(e.target, "" if e.gradient or not trains else " (no gradient)") for e in stages.edges if e.source == s]
        read = " ".join(f"{target}{remark}" for target, remark in ends)
        cost = f"   {_cost_text(s, schedule, costs)}" if costs.unit == BYTES else ""
        yield f"# Stage {s}: {stages.label(*homes)}{cost}{f'   read by {read}' if read else ''}"
    yield f"# Total: {timing.total:.6g} {costs.clock}   Bubble: {percent(timing.bubble)}   Overhead: {percent(timing.overhead)}"
    counts = peaks(schedule, costs.in_microbatches(stages) if costs.unit == BYTES else costs)
    for home, (idle, peak) in enumerate(zip(timing.idle, counts, strict=True)):
        share = percent(idle / timing.total if timing.total else 0.0)
        more = _bytes_text(schedule, home, costs) if costs.unit == BYTES else ""
        kept = f", keeps {amount_text(peak, MICROBATCHES)}" if trains else ""
        yield f"# {stages.label(home)}: idle {idle:.6g} ({share}){kept}{more}"
    for (one, other), count in message_counts(schedule).items():
        yield f"# {one} - {other}: {count} {'message' if count == 1 else 'messages'}"


def _cost_text(s: int, schedule: Schedule, costs: Costs) -> str:
    """The times of a stage's tasks, and what it saves: `F 1.2 B 0.9 W 1.1, saves 4096*batch bytes`."""
    cost = costs.stages[s]
    text = f"F {cost.forward:.4g}"
    if not schedule.stages.backward[s]:
        return text
    if any(stage == s for stage, _ in schedule.split):
        text += f" B {cost.backward:.4g} W {cost.weight:.4g}"
    else:
        text += f" B {cost.full_backward:.4g}"
    saved = f"{costs.expressions[s][0]} bytes" if costs.expressions else amount_text(cost.saved, BYTES)
    return f"{text}, saves {saved}"


def _bytes_text(schedule: Schedule, home: int, costs: Costs) -> str:
    """The bytes of what a home keeps at its peak, and besides."""
    besides = costs.constant_memory(home)
    least = "at least " if costs.unbounded else ""
    if not any(schedule.stages.backward):
        return f", keeps {least}{amount_text(besides, BYTES)}"
    saved, deferred = peak_counts(schedule, home, costs)
    text = amount_text(peaks(schedule, costs)[home], BYTES)
    if costs.expressions:
        some = [(count, costs.expressions[s][0]) for s, count in saved.items()]
        some += [(count, costs.expressions[s][1]) for s, count in deferred.items()]
        text = f"{sum((count * each for count, each in some), start=0)} bytes"
    return f": {text}" + (f"; besides {least}{amount_text(besides, BYTES)}" if besides else "")


def percent(share: float) -> str:
    """A share in percent, with at most two decimals."""
    return f"{round(100 * share, 2):g}%"


def _grid(schedule: Schedule, timing: Timing) -> Iterator[str]:
    columns = _equal_columns(timing) or _own_columns(schedule, timing)
    begins = columns.begins
    wide = max((len(str(task)) for task in timing.spans), default=1)
    labels = [schedule.stages.label(home) for home in range(len(schedule.rows))]
    margin = max(6, *map(len, labels))
    lines = [_cells(row, timing, columns, wide) for row in schedule.rows]
    most = max(5, (_WIDTH - margin - 3) // (wide + 1) // 5 * 5)
    blocks = math.ceil(len(begins) / most)
    block = math.ceil(len(begins) / blocks / 5) * 5
    for begin in range(0, len(begins), block):
        end = min(len(begins), begin + block)
        marks = "".join(f"{begins[k]:<{5 * (wide + 1)}.6g}" for k in range(begin, end, 5))
        yield f"{'# time':<{margin}}  {marks}".rstrip()
        for label, cells in zip(labels, lines, strict=True):
            yield f"{label:<{margin}} |{' '.join(cell.ljust(wide) for cell in cells[begin:end])} |"
        if end < len(begins):
            yield ""


def _cells(row: Row, timing: Timing, columns: Columns, wide: int) -> list[str]:
    cells = ["."] * len(columns.begins)
    for task in row:
        first, end = columns.of[task], timing.spans[task][1] - TOLERANCE * timing.total
        cells[first] = str(task)
        for k in range(first + 1, bisect.bisect_left(columns.begins, end)):
            cells[k] = "-" * wide
    return cells


def _equal_columns(timing: Timing) -> Columns | None:
    """Equal columns, each as long as the greatest common measure of all times; None where these would be too many."""
    lengths = [end - begin for begin, end in timing.spans.values()]
    points = [*lengths, *(begin for begin, _ in timing.spans.values())]
    exact = [Fraction(point).limit_denominator(1000) for point in points]
    near = all(abs(float(e) - point) <= TOLERANCE * timing.total for e, point in zip(exact, points, strict=True))
    if not lengths or not near or min(lengths) <= 0:
        return None
    common = math.lcm(*(e.denominator for e in exact))
    unit = Fraction(math.gcd(*(int(e * common) for e in exact)), common)
    if not unit or sum(lengths) / len(lengths) > _FINEST * unit:
        return None
    of = {task: round(begin / unit) for task, (begin, _) in timing.spans.items()}
    return Columns([float(k * unit) for k in range(round(timing.total / unit))], of)


def _own_columns(schedule: Schedule, timing: Timing) -> Columns:
    """The fewest columns of which each has at most one task of every row that begins there."""
    begins, begun, of = [0.0], set[int](), {}
    for task in sorted(timing.spans, key=lambda task: timing.spans[task][0]):
        homes = schedule.stages.stage_ranks[task.stage]
        if begun.intersection(homes):
            begins.append(timing.spans[task][0])
            begun.clear()
        begun.update(homes)
        of[task] = len(begins) - 1
    return Columns(begins, of)
