"""Reads the rows of an artifact's rank files as a schedule that can be simulated, with times from the user or from a profile.

A profile's file has the seconds of every task in every step for each rank; `partc run --profile` and `partc train --profile` write it.

    {"profile": 1, "ranks": [{"rank": 0, "step": [0.031, ...], "tasks": {"0F0": [0.004, ...], ...}, "waits": {}, ...}, ...]}

Starts of communication, actions that run once, and the update count to the task before them, or to the first one. Waits for other ranks
count to no task, except waits inside of a task, which are in `waits`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from partc.runtime.artifact.format import SCHEDULE, dump_file
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.tasks.rows import Row, row_of, stage_reads
from partc.runtime.artifact.tasks.task import Kind
from partc.runtime.errors import UsageError, one_line, reason_of
from partc.runtime.files.counted import PROFILE, read_json
from partc.runtime.units import parse_duration
from pydantic import BaseModel, ConfigDict, FailFast, Field, NonNegativeFloat, ValidationError

if TYPE_CHECKING:
    from partc.compiler.schedule.costs import Costs
    from partc.compiler.schedule.schedule import Schedule
    from partc.runtime.artifact.tasks.saved import Saved


Seconds = list[NonNegativeFloat]


class _Record(BaseModel):
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False)


class RankTimes(_Record):
    """The seconds of each step of one rank: `step` from its first action to its last, `tasks` by cell, `waits` inside of a task.

    `kinds`: of `compute`, `update`, `begin` (of communication) and `wait`. `arena`: the bytes planned for values between segments.
    Where several targets compute, `targets`: the seconds in which each computed or copied; `overlap`: those in which more than one did.
    """

    rank: int = Field(ge=0)
    step: Seconds
    tasks: dict[str, Seconds]
    waits: dict[str, Seconds]
    kinds: dict[str, Seconds]
    arena: int = Field(ge=0)
    targets: dict[str, Seconds] = Field(default_factory=dict)
    overlap: Seconds = Field(default_factory=list)


class Profile(_Record):
    """A profile of all ranks, in the same steps."""

    profile: Literal[1]
    ranks: Annotated[list[RankTimes], FailFast()] = Field(min_length=1)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return min(len(one.step) for one in self.ranks)

    def measured(self, step: int | None = None) -> float:
        """Returns the seconds of a step on the slowest rank, by default the median."""
        return max(_of(one.step, step) for one in self.ranks)

    def times(self, step: int | None = None) -> dict[str, float]:
        """Maps each task to its seconds in a step, by default the median.

        For the ranks of a stage the slowest one counts. Where they wait for each other inside of a task, their common time is that of the
        rank that arrived last, which waited least.
        """
        together: dict[str, float] = {}
        alone: dict[str, float] = {}
        for one in self.ranks:
            for cell, seconds in one.tasks.items():
                busy = _of(seconds, step)
                whole = busy + (_of(one.waits[cell], step) if cell in one.waits else 0.0)
                alone[cell] = max(alone.get(cell, 0.0), busy)
                together[cell] = min(together.get(cell, whole), whole)
        return {cell: max(busy, together[cell]) for cell, busy in alone.items()}


def _of(seconds: Seconds, step: int | None) -> float:
    return statistics.median(seconds) if step is None else seconds[step]


def read_profile(path: Path) -> Profile:
    """Reads the profile in a file. Raises UsageError where the file is not a profile."""
    try:
        profile = Profile.model_validate(read_json(path, PROFILE))
    except OSError as error:
        raise UsageError(f"{path}: it {reason_of(error)}\n  help: use a file that --profile has written") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{path}: it is not a profile: {place}: {first['msg']}\n  help: use a file that --profile has written"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"{path}: it is not a profile: {error}\n  help: use a file that --profile has written"
        ) from None
    for one in profile.ranks:
        columns = [one.step, *one.tasks.values(), *one.waits.values(), *one.kinds.values(), *one.targets.values()]
        columns += [one.overlap] if one.targets else []
        if not one.step or len({len(column) for column in columns}) > 1:
            raise UsageError(
                f"{path}: the times of rank {one.rank} are of different numbers of steps\n  help: measure again"
            )
    for step in range(profile.steps):
        if not profile.measured(step):
            raise UsageError(f"{path}: step {step} took no time on any rank\n  help: measure again")
    return profile


@dataclass(frozen=True)
class Pipeline:
    """The rows of an artifact's ranks: `stage_ranks` are lists of ranks that share one row, and `rows` are these rows."""

    artifact: Artifact
    stage_ranks: tuple[tuple[int, ...], ...]
    rows: tuple[Row, ...]

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule. Raises UsageError for rows that `partc check` refuses."""
        from partc.compiler.schedule.schedule import Schedule
        from partc.compiler.schedule.simulate import precedence
        from partc.compiler.schedule.stages import Edge, Stages

        rows = [tuple(task for task in row.tasks if task is not None) for row in self.rows]
        tasks = {task for row in rows for task in row}
        count = 1 + max((task.stage for task in tasks), default=0)
        reads = stage_reads(list(self.rows))
        homes = tuple(tuple(h for h, row in enumerate(self.rows) if s in row.stages) for s in range(count))
        backward = {task.stage for task in tasks if task.kind is not Kind.FORWARD}
        edges = tuple(Edge(one, other, (one, other) in reads.gradients) for one, other in sorted(reads.forward))
        microbatches = 1 + max((task.microbatch for task in tasks), default=0)
        try:
            stages = Stages(homes, edges, self.stage_ranks, tuple(s in backward for s in range(count)))
        except ValueError as error:
            raise UsageError(f"{self.artifact.folder}: its rows are not sound: {error}\n{_CHECK}") from None
        found = Schedule(self._name, stages, microbatches, tuple(rows))
        if cycle := precedence(found).cycle:
            fact = f"tasks of its rows wait for each other: {' '.join(map(str, cycle))}"
            raise UsageError(f"{self.artifact.folder}: {fact}\n{_CHECK}")
        return found

    @property
    def _name(self) -> str:
        """The name of the schedule in the artifact's text of it."""
        file = dump_file(SCHEDULE, self.artifact.manifest.prefix)
        lines = self.artifact.text(file).splitlines()[:4] if file in self.artifact.manifest.files else []
        found = next((line.split() for line in lines if line.startswith("# Schedule: ")), [])
        return found[2] if len(found) > 2 else "rows"


_CHECK = "  help: see what `partc check` says of it"


def pipeline_of(artifact: Artifact) -> Pipeline | None:
    """Returns the rows of an artifact; None for one without tasks."""
    ranks_of_row: dict[str, tuple[list[int], Row]] = {}
    for file, ranks in artifact.manifest.by_file(range(artifact.manifest.ranks)).items():
        row = row_of(artifact.model(ranks[0]), file)
        if row is not None:
            ranks_of_row.setdefault(str(row), ([], row))[0].extend(ranks)
    if not ranks_of_row:
        return None
    ordered = sorted(ranks_of_row.values(), key=lambda one: min(one[0]))
    return Pipeline(artifact, tuple(tuple(sorted(ranks)) for ranks, _ in ordered), tuple(row for _, row in ordered))


def saved_by_group(pipeline: Pipeline) -> list[Saved]:
    """Returns, for each list of ranks, the most that its row saves for backward passes."""
    from partc.runtime.artifact.tasks.saved import saved
    from partc.runtime.checker.graph.declared import declared_types

    models = (pipeline.artifact.model(ranks[0]) for ranks in pipeline.stage_ranks)
    return [saved(row, declared_types(model)) for row, model in zip(pipeline.rows, models, strict=True)]


def rows_text(pipeline: Pipeline) -> Iterator[str]:
    """Yields the bubble, rows and grid of a pipeline in unit times, unless they are too long to read."""
    from partc.compiler.schedule.costs import unit_costs
    from partc.compiler.schedule.grid import grid, percent
    from partc.compiler.schedule.simulate import simulate

    schedule = pipeline.schedule
    timing = simulate(schedule, unit_costs(schedule.stages))
    yield f"rows in units, F = B = W = 1 of a rank: total {timing.total:.6g}, bubble {percent(timing.bubble)}"
    if len(schedule.rows) > _ROWS or max(map(len, schedule.rows)) > _CELLS:
        yield f"`partc simulate {pipeline.artifact.folder}` shows the rows, which are long"
        return
    yield str(schedule)
    yield ""
    yield from grid(schedule, timing).splitlines()
    yield ""


_ROWS, _CELLS = 16, 96
"""The most rows, and the most tasks of a row, that are shown together with other output."""


@dataclass(frozen=True)
class Times:
    """Seconds of a stage's tasks of a kind (`0F`) or of single tasks (`0F3`), and their profile, if they come from one.

    `where` is the text of the options, for messages.
    """

    seconds: Mapping[str, float]
    where: str
    profile: Profile | None = None


def read_times(texts: Sequence[str]) -> Times:
    """Reads the times in options: `0F=1.2ms`, a JSON file of seconds by stage and kind or by task, or a profile."""
    seconds: dict[str, float] = {}
    profile: Profile | None = None
    for text_or_file in texts:
        cell, equals, text = text_or_file.partition("=")
        if equals and not Path(text_or_file).exists():
            time = parse_duration(text)
            if time is None:
                help = "write it as 0F=1.2ms, with s, ms, us or ns"
                raise UsageError(f"--times {text_or_file}: '{text}' is not a duration\n  help: {help}")
            seconds[cell] = time
            continue
        document = _document(Path(text_or_file))
        if "profile" in document:
            profile = read_profile(Path(text_or_file))
            seconds |= profile.times()
        else:
            seconds |= _numbers(Path(text_or_file), document)
    return Times(seconds, f"--times {' '.join(texts)}", profile)


_LONGEST = 40
_FORM = 'write an object of seconds by stage and kind, or by task: {"0F": 0.01, "1B3": 0.2}'


def _document(path: Path) -> dict[str, object]:
    try:
        content = read_json(path, PROFILE)
    except OSError as error:
        raise UsageError(f"{path}: {reason_of(error)}\n  help: {_FORM}") from None
    except ValueError as error:
        raise UsageError(f"{path}: it is not JSON: {error}\n  help: {_FORM}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: it is not an object\n  help: {_FORM}")
    return content


def _numbers(path: Path, document: Mapping[str, object]) -> dict[str, float]:
    numbers = {}
    for key, value in document.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            shown = one_line(repr(value))
            shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
            raise UsageError(f"{path}: '{one_line(key)}': {shown} is not a duration\n  help: {_FORM}")
        numbers[key] = float(value)
    return numbers


def timed(schedule: Schedule, costs: Costs, seconds: Mapping[str, float], where: str) -> Costs:
    """Returns the costs with these times, in milliseconds.

    Raises UsageError for the time of a task that does not exist, and where only some tasks have a time.
    """
    from partc.compiler.schedule.costs import with_times

    if not seconds:
        return costs
    try:
        costs_in_ms = with_times(replace(costs, message=1e3 * costs.message), _in_ms(seconds), clock="ms")
    except ValueError as error:
        raise UsageError(f"{where}: {error}\n  help: {_FORM}") from None
    tasks = sorted({task for row in schedule.rows for task in row})
    absent = [t for t in tasks if str(t) not in seconds and f"{t.stage}{t.kind}" not in seconds]
    if absent:
        kinds = list(dict.fromkeys(f"{task.stage}{task.kind}" for task in absent))
        fact = f"{', '.join(kinds[:_SHOWN])}{' and more' if len(kinds) > _SHOWN else ''}: no time is given"
        raise UsageError(f"{where}: {fact}\n  help: give the times of all tasks, or of none for unit times")
    return costs_in_ms


def _in_ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {key: 1e3 * time for key, time in seconds.items()}


@dataclass(frozen=True)
class Compared:
    """Medians over the steps of a profile: measured seconds, simulated seconds with the times of the same step, and their ratio."""

    steps: int
    measured: float
    simulated: float
    ratio: float

    def __str__(self) -> str:
        steps = f"{self.steps} {'step' if self.steps == 1 else 'steps'}"
        times = f"measured {1e3 * self.measured:.6g} ms, simulated {1e3 * self.simulated:.6g} ms"
        return f"{steps}, medians: {times}, measured/simulated {self.ratio:.3f}"


def compared(schedule: Schedule, costs: Costs, profile: Profile) -> Compared:
    """Compares each step of a profile with a simulation that uses the times of that step."""
    from partc.compiler.schedule.costs import with_times
    from partc.compiler.schedule.simulate import simulate

    steps = range(profile.steps)
    measured = [profile.measured(step) for step in steps]
    simulated = [simulate(schedule, with_times(costs, _in_ms(profile.times(step)))).total / 1e3 for step in steps]
    ratio = statistics.median(
        one / other if other else math.nan for one, other in zip(measured, simulated, strict=True)
    )
    return Compared(len(steps), statistics.median(measured), statistics.median(simulated), ratio)


_SHOWN = 8
