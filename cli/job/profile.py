"""Writes the file with the times of a job's tasks on all ranks, or a trace of every action where its name ends in `.trace.json`.

The clock of a rank is compared with that of rank 0 by collective exchanges: none ends before all ranks have begun it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

from partc.cli.job.job import Job, Reporting
from partc.cli.output import console
from partc.runtime.artifact.trace import SUFFIX, trace_text
from partc.runtime.errors import UsageError
from partc.runtime.files.regular import text_of_system
from partc.runtime.files.replace import refuse_other, write_text
from partc.runtime.units import count, seconds

if TYPE_CHECKING:
    from partc.runtime.execution.times.profiler import Profiler


_ROUNDS = 30


class Gathers(Protocol):
    """A rank that exchanges texts with all other ranks."""

    @property
    def rank(self) -> int:
        """The rank's number."""

    def all_gather_text(self, text: str) -> list[str]:
        """Returns the text of every rank, in the order of the ranks; collective."""


def clock_offset(
    ranks: Gathers, clock: Callable[[], float] = time.perf_counter, host: str | None = None
) -> tuple[float, float]:
    """Returns the seconds to add to this rank's clock to get rank 0's, and the largest error of that number; collective.

    Processes of one host (by default: of one boot) have one clock: both numbers are 0. Otherwise a rank ends each exchange after rank 0 has
    begun it, and rank 0 ends it after the rank has begun it, which bounds the difference from both sides; the result is the middle.
    """
    if host is None:
        host = text_of_system("/proc/sys/kernel/random/boot_id").strip() or "?"
    hosts = ranks.all_gather_text(host)
    if len({*hosts}) == 1:
        return 0.0, 0.0
    times = []
    for _ in range(_ROUNDS):
        begun = clock()
        ranks.all_gather_text("")
        times.append((begun, clock()))
    rows = [json.loads(text) for text in ranks.all_gather_text(json.dumps(times))]
    if hosts[ranks.rank] == hosts[0]:
        return 0.0, 0.0
    least = max(first[0] - own[1] for first, own in zip(rows[0], times, strict=True))
    most = min(first[1] - own[0] for first, own in zip(rows[0], times, strict=True))
    return (least + most) / 2, (most - least) / 2


_STEPS_OF_OPS = 100
"""The most steps whose ops are traced without an explicit choice of steps."""


def refuse_profile(reporting: Reporting, steps: int | None = None) -> None:
    """Raises UsageError where a profile cannot be written, or asks for steps beyond `steps`, the number of steps if it is known."""
    path, traced = reporting.profile, reporting.steps
    if traced and not reporting.traces:
        fact = "steps are chosen of a trace" if path is None else f"{path} is not the file of a trace"
        raise UsageError(f"--trace-steps: {fact}\n  help: give --profile x{SUFFIX}, too")
    if traced and steps is not None and traced[-1] > steps:
        fact = f"--trace-steps {traced[0]}:{traced[-1]}: there are {count(steps, 'step')}"
        raise UsageError(f"{fact}\n  help: choose from 1:{steps}, or give --repeat {traced[-1]}")
    if reporting.ops and not reporting.traces:
        fact = "ops are spans of a trace" if path is None else f"{path} is not the file of a trace"
        raise UsageError(f"--ops: {fact}\n  help: give --profile x{SUFFIX}, too")
    if reporting.ops and not traced and (steps is None or steps > _STEPS_OF_OPS):
        fact = "onnxruntime keeps the times of ops of all steps from the first on in memory"
        raise UsageError(f"--ops: {fact}\n  help: choose early steps, such as --trace-steps 4:13")
    if path is None:
        return
    refuse_other(Path(path))
    if not Path(path).parent.is_dir():
        raise UsageError(f"{path}: the folder {Path(path).parent} does not exist")


@contextmanager
def op_times(job: Job) -> Iterator[Path | None]:
    """A context with the folder for onnxruntime's times of ops while a job runs; None where they are not requested.

    The folder is inside the job's own folder where that is on this host, so that it is removed however the job ends.
    """
    if not job.reporting.ops:
        yield None
        return
    place = job.run_dir if job.run_dir is not None and Path(job.run_dir).is_dir() else None
    with tempfile.TemporaryDirectory(prefix="partc-ops-", dir=place) as folder:
        yield Path(folder)


def measured(profiler: Profiler, path: str, ranks: Gathers | None = None) -> str:
    """Returns a rank's measurements as text, for a profile or a trace; collective where the ranks are processes."""
    if not path.endswith(SUFFIX):
        return profiler.text()
    return profiler.trace(*(clock_offset(ranks) if ranks is not None else (0.0, 0.0)))


def report_not_reached(reporting: Reporting, last: int) -> None:
    """Warns that the steps of a trace were not reached, since `last` was the job's last step."""
    fact = f"the last step was {last}, and --trace-steps {reporting.steps[0]}:{reporting.steps[-1]} wants others"
    console.echo(f"warning: {reporting.profile} was not written: {fact}", err=True)


def write_profile(path: str, ranks: Sequence[str], quiet: bool) -> None:
    """Writes the measurements of all ranks, each as JSON."""
    if path.endswith(SUFFIX):
        write_text(Path(path), trace_text(ranks))
        if not quiet:
            console.echo(f"wrote {path}: a trace of {count(len(ranks), 'rank')}; https://ui.perfetto.dev opens it")
        return
    write_text(Path(path), '{"profile": 1, "ranks": [\n' + ",\n".join(ranks) + "\n]}\n")
    if not quiet:
        console.echo(f"wrote {path}: times of {count(len(ranks), 'rank')}{_targets(ranks)}")


def _targets(ranks: Sequence[str]) -> str:
    """Returns the median times of the targets in a step, and of their overlap, for the slowest rank."""
    told = [one for one in map(json.loads, ranks) if one.get("targets")]
    if not told:
        return ""
    slowest = max(told, key=lambda one: median(one["step"]))
    each = ", ".join(f"{target} {seconds(median(times))}" for target, times in slowest["targets"].items())
    return f"; targets of rank {slowest['rank']}: {each}, at the same time {seconds(median(slowest['overlap']))}"
