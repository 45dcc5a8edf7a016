"""What must hold of the end of a job of real MPI ranks to which something is done at some moment.

    case = Case("train", 2, "stepping", Act("SIGKILL", "rank", 1), 0.3)
    verdict = judged(case, work, tmp_path, stall=2.0, start=3.0)

It must have ended within 10 seconds, with an exit code that says so and the rank named, and nothing may be left: no process, nothing in
its temporary folder, nothing in shared memory. A rank that is stopped must be told of first.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kill_job import SHORT, USER, Case, Running, read, send
from waiting import comes

WITHIN = 10.0
_OF_ONNXRUNTIME = ".ses"
"""A file that every program leaves which imports onnxruntime."""


@dataclass
class Verdict:
    """What was seen: the seconds until all had ended, and what is wrong."""

    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    over: bool = False
    """The job had ended by itself before."""


def memory_of(pids: list[int]) -> set[str]:
    """The files in shared memory that processes have open."""
    return {
        line.split()[-1] for pid in pids for line in read(pid, "maps").decode().splitlines() if " /dev/shm/" in line
    }


def judged(case: Case, work: Path, folder: Path, stall: float, start: float) -> Verdict:
    """Runs the case; `start`: seconds until the first step of an undisturbed job."""
    running = Running(case, work, folder, stall)
    try:
        return _judged(running, stall, start)
    finally:
        running.end()


def _judged(running: Running, stall: float, start: float) -> Verdict:
    case, verdict = running.case, Verdict()
    memory: set[str] = set()
    user = case.act.target.startswith("user")
    if not user:
        reached = _wait_for_moment(running, start)
        memory = memory_of(running.ranks())
        if not reached:
            verdict.problems.append("the moment never came")
        targets = _targets(running)
        verdict.over = running.process.poll() is not None or not targets
        for pid in targets:
            send(pid, case.act.what)
    else:
        comes(lambda: running.process.poll() is not None, 6 * start + WITHIN)
    if case.act.what == "SIGSTOP" and not verdict.over:
        _judge_stop(running, verdict, stall)
    begun = time.monotonic()
    comes(lambda: not running.alive(), 6 * start + WITHIN)
    verdict.seconds = time.monotonic() - begun
    left = running.alive()
    verdict.problems += [f"still there: {read(pid, 'cmdline')[:60]!r}" for pid in left]
    if not left:
        code = running.process.wait()
        verdict.over = code == 0 and not user and (verdict.over or case.moment == "ending")
        verdict.problems += [] if verdict.over else list(_wrong_words(case, code, running.said()))
        verdict.problems += _leftovers(running, memory)
    return verdict


def _wait_for_moment(running: Running, start: float) -> bool:
    """Whether the moment came within a long time."""
    case, over = running.case, lambda: running.process.poll() is not None
    if case.moment == "starting":
        time.sleep(case.delay * start)
        return comes(lambda: over() or _targets(running))
    if case.moment == "saving":
        reached = comes(lambda: over() or any(running.folder.glob("kept/.step_*")) or running.steps() > 40)
    else:
        near = SHORT - 20 if case.moment == "ending" and case.mode in ("run", "train", "pipeline", "lookup") else 2
        reached = comes(lambda: over() or running.steps() > near)
    time.sleep(case.delay * (0.3 if case.moment == "ending" else 1.0) * (case.moment != "saving"))
    return reached


def _targets(running: Running) -> list[int]:
    act = running.case.act
    ranks = running.ranks()
    match act.target:
        case "partc":
            return [running.process.pid]
        case "launcher":
            return [pid for pid in [running.launcher()] if pid]
        case "all":
            return [pid for pid in ranks if pid]
        case _:
            return [pid for pid in ranks[act.rank : act.rank + 1] if pid]


def _judge_stop(running: Running, verdict: Verdict, stall: float) -> None:
    """A stopped rank is told of; then the job is ended, which must be possible."""
    if running.case.act.target != "partc":
        before = len(running.said()) if running.case.moment != "starting" else 0
        told = r"partc: (rank \d+|the job) has waited \d+ s: "
        if not comes(
            lambda: re.search(told, running.said()[before:]) or running.process.poll() is not None, stall + 60.0
        ):
            verdict.problems.append("not told of after `stall` seconds")
        named = rf"rank {running.case.act.rank} \(process \d+\) is stopped"
        if (
            running.case.act.target == "rank"
            and running.case.moment != "starting"
            and not re.search(named, running.said())
        ):
            verdict.problems.append("the stopped rank is not named")
    if running.case.mode == "script" or running.case.act.target == "partc":
        send(running.process.pid, "SIGKILL")
    else:
        send(running.process.pid, "SIGKILL" if running.case.delay > 0.5 else "SIGTERM")


def _wrong_words(case: Case, code: int, said: str) -> Iterator[str]:
    """What is wrong with an exit code and a message."""
    act, rank = case.act, case.act.rank
    if code == 0:
        yield "exit code 0"
    if "Traceback" in said and case.mode != "script" and (act.what, case.moment) != ("SIGINT", "starting"):
        yield "a traceback"
    if "bug in partc" in said:
        yield "called a bug in partc"
    if case.mode == "script" or act.what == "SIGSTOP":
        return
    if act.target == "user" and not re.search(USER[act.what][1].format(rank=rank), said):
        yield "the rank and what it did are not told"
    if act.target == "users" and not re.search(USER[act.what][1].format(rank=r"\d+"), said):
        yield "no rank and what it did are told"
    if act.target == "partc":
        wanted = (
            128 + getattr(signal, act.what)
            if act.what in ("SIGTERM", "SIGINT", "SIGHUP")
            else -getattr(signal, act.what)
        )
        if code != wanted and (case.moment != "starting" or code != -getattr(signal, act.what)):
            yield f"exit code {code}, not {wanted}"
    if act.target == "rank" and not re.search(rf"rank {rank} (was killed by signal|has left the job|ended with)", said):
        yield f"rank {rank} is not named"
    if act.target == "rank" and act.what in ("SIGKILL", "SIGSEGV", "SIGABRT"):
        if f"({act.what})" not in said:
            yield "its signal is not named"
        if not re.search(r"(in step \d+, at .+|after step \d+|before its first step)", said):
            yield "its action is not named"
        between = re.search(r"in step \d+, at ((?:Send|Recv) .+)", said)
        if case.mode == "pipeline" and between and not re.search(r"\b\d[FB]\d", between[1]):
            yield "its task and microbatch are not named"
    if act.target in ("launcher", "all") and not re.search(
        r"the launcher (was killed|ended)|rank \d+ (was|has|ended)", said
    ):
        yield "nothing is told"


def _leftovers(running: Running, memory: set[str]) -> Iterator[str]:
    """What lies in the temporary folder or in shared memory; a user's own launcher that was killed outright leaves its own."""
    act = running.case.act
    if running.case.mode == "script" and (act.target == "launcher" or act.what == "SIGSTOP"):
        return
    yield from (f"left: {path.name}" for path in running.temporary.iterdir() if path.name != _OF_ONNXRUNTIME)
    yield from (f"left: {name}" for name in memory if Path(name).exists())
