"""Runs seeded cases in processes that are forked once their libraries are loaded, each with limits on time and memory.

A case is a number: what it does follows from the seed and that number alone, so `--case N` replays one. It ends well if it ends within
the limit, by itself, without a traceback: what it says is either that all is well or a message that was made for the user.

    python tests/fuzz/plans.py --minutes 5 --seed 1            as many as five minutes have room for
    python tests/fuzz/plans.py --cases 5000                    so many
    python tests/fuzz/plans.py --case 17 --seed 1              one, in this process, with all that it prints
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeAlias

os.environ.setdefault("PARTC_FILL_FREED", "1")  # memory that no value has holds no number
sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from partc.cli.main import invoke
from partc.cli.output.failures import INTERRUPTED

SECONDS = 20.0
MEMORY = 3 << 30
ROUNDING = "rounding"
"""How a case ends whose results differ by rounding alone."""
_ROUND = 250
_LONG = 4_000
_PATIENCE = 20

Work: TypeAlias = Callable[[random.Random, Path], str]
"""Makes what chance says in an empty folder, and gives what partc says of it: '' where all is well."""


class Wrong(Exception):
    """A case found a fault that no message tells: what kind of fault, and what there is to say of it."""

    def __init__(self, end: str, text: str) -> None:
        super().__init__(end, text)
        self.end, self.text = end, text


@dataclass
class Told:
    """How the cases of a run ended, and the ones that did not end well."""

    ends: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)
    reasons: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {end}" for end, count in sorted(self.ends.items()))
        slow = f"slowest {self.slowest[0]:.1f} s (case {self.slowest[1]})"
        why = [f"refused {count:,}: {reason}" for reason, count in self.reasons.most_common()]
        return "\n".join([*self.bad, *why, f"{sum(self.ends.values()):,} cases: {counts}; {slow}"])


def command(*arguments: str) -> str:
    """What `partc ARGUMENTS` says, in this process, where it fails; '' where it does not."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code: object = invoke(list(arguments))
        except SystemExit as error:
            code = error.code
    if code in (0, INTERRUPTED):
        return ""
    return said.getvalue() or f"exit code {code} and no message"


def judge(text: str) -> str:
    """'' for a message that was made for the user, else what is wrong with it."""
    if "Traceback (most recent call last)" in text or "a bug in partc" in text:
        return "traceback"
    if "the check itself failed" in text:
        return "fault of the checker"
    lines = text.strip().splitlines()
    if not lines or text.startswith("exit code"):
        return "no message"
    return "endless message" if len(text) > 10 * _LONG else ""


def one_case(work: Work, seed: int, case: int) -> tuple[str, str]:
    """How a case ends: `ok`, `refused` or what is wrong, and what was said."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            text = work(random.Random(f"{seed} {case}"), Path(folder))
        except Wrong as wrong:
            return wrong.end, wrong.text
    return (judge(text) or "refused") if text else "ok", text


def sweep(
    work: Work,
    seed: int,
    cases: int,
    minutes: float | None = None,
    jobs: int = 1,
    *,
    seconds: float = SECONDS,
    reason: Callable[[str], str] | None = None,
    log: Path | None = None,
) -> Told:
    """Runs so many cases, or as many as there is time for. With `reason`, refusals are counted by what it makes of their text.

    `log`: a file that has each case as soon as it is done, with what was said of those that did not end well.
    """
    told, todo = Told(), iter(range(cases))
    end = None if minutes is None else time.monotonic() + 60 * minutes
    workers = [_Worker(work, seed, seconds) for _ in range(jobs)]
    try:
        while True:
            late = end is not None and time.monotonic() > end
            for worker in workers:
                if worker.case is None and not late and (case := next(todo, None)) is not None:
                    worker.start(case)
            busy = [worker for worker in workers if worker.case is not None]
            if not busy:
                return told
            wait([worker.pipe for worker in busy], timeout=0.5)
            for worker in busy:
                for one in worker.finished():
                    _note(told, *one)
                    if log is not None:
                        _append(log, *one)
                    if reason is not None and one[1] == "refused":
                        told.reasons[reason(one[2])] += 1
    finally:
        for worker in workers:
            worker.stop()


def _note(told: Told, case: int, end: str, text: str, spent: float) -> None:
    told.ends[end] += 1
    told.slowest = max(told.slowest, (spent, case))
    if end not in ("ok", "refused", ROUNDING):
        told.bad.append(f"--- case {case}: {end}\n{text[-_LONG:]}")


def _append(log: Path, case: int, end: str, text: str, spent: float) -> None:
    first = text.strip().partition("\n")[0]
    with log.open("a") as file:
        file.write(f"{case} {spent:.1f} s {end}: {first if end == 'refused' else text[-_LONG:]}\n")


class _Worker:
    """A process that runs one case after the other; another takes its place after many, and when one takes too long."""

    def __init__(self, work: Work, seed: int, seconds: float) -> None:
        self.work, self.seed, self.seconds = work, seed, seconds
        self.case: int | None = None
        self.done = 0
        self.begun = self.worked = 0.0
        self.pipe, self.process = self._fork()

    def _fork(self) -> tuple[Connection, multiprocessing.process.BaseProcess]:
        context = multiprocessing.get_context("fork")
        mine, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, self.work, self.seed), daemon=True)
        process.start()
        other.close()
        self.done = 0
        return mine, process

    def start(self, case: int) -> None:
        """Begins a case."""
        if self.done == _ROUND:
            self.stop()
            self.pipe, self.process = self._fork()
        self.case, self.begun, self.worked = case, time.monotonic(), self._work_done()
        self.done += 1
        self.pipe.send(case)

    def finished(self) -> Iterator[tuple[int, str, str, float]]:
        """The case that is done: its number, how it ended, what it said and how long it took."""
        assert self.case is not None
        spent, end, text = time.monotonic() - self.begun, "", ""
        if self.pipe.poll():
            try:
                end, text = self.pipe.recv()
            except EOFError:
                self.process.join()
                end, text = "died", f"exit code {self.process.exitcode}"
        elif self._work_done() - self.worked > self.seconds or spent > _PATIENCE * self.seconds:
            end, text = "too long", f"more than {self.seconds:.0f} s of work, or {_PATIENCE} times as long without"
        if end:
            case, self.case = self.case, None
            if end in ("died", "too long"):
                self.stop()
                self.pipe, self.process = self._fork()
            yield case, end, text, spent

    def _work_done(self) -> float:
        """Seconds that a processor has worked for the process: a busy machine makes no case too long."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        if not stat.exists():
            return time.monotonic() - self.begun
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, work: Work, seed: int) -> None:
    """The cases that the pipe names; what libraries print by themselves goes nowhere."""
    _limit()
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.dup2(quiet, 0)
    with contextlib.suppress(EOFError):
        while True:
            case = pipe.recv()
            try:
                pipe.send(one_case(work, seed, case))
            except Exception as error:
                pipe.send(("fault of the fuzzer", f"{type(error).__name__}: {error}"))


def _limit() -> None:
    """So much memory beyond what this process has already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    size = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(work: Work, about: str, *, seconds: float = SECONDS, reason: Callable[[str], str] | None = None) -> None:
    """The command line of a module that makes cases; `seconds` and `reason` are as `sweep` takes them."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--cases", type=int, default=10**9, help="so many; without it and --minutes: 200")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=seconds, help="of work for one case")
    parser.add_argument("--case", type=int, help="this one only, in this process")
    parser.add_argument("--log", type=Path, help="a file to which each case is added when it is done")
    given = parser.parse_args()
    if given.case is not None:
        end, text = one_case(work, given.seed, given.case)
        print(end, text, sep="\n")
        sys.exit(0 if end in ("ok", "refused") else 1)
    cases = 200 if given.cases == 10**9 and given.minutes is None else given.cases
    told = sweep(
        work, given.seed, cases, given.minutes, given.jobs, seconds=given.seconds, reason=reason, log=given.log
    )
    print(told)
    sys.exit(1 if told.bad else 0)
