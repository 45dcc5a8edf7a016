"""One job of real MPI ranks to which something is done at some moment, and what must hold of its end.

    case = Case("train", 2, "stepping", Act("SIGKILL", "rank", 1), 0.3)
    problems = judged(case, works, tmp_path, stall=2.0)

It must have ended within 10 seconds, with an exit code that says so and the rank named, and nothing may be left: no process, nothing in
its temporary folder, nothing in shared memory. A rank that is stopped must be told of first.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from handmade import chain
from partc.compiler.load.onnx_file import from_proto
from partc.compiler.load.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.board import read_board, read_pids, states
from small_training import PERCEPTRON, compiled

WITHIN = 10.0
MODES = ("run", "train", "eval", "script")
MOMENTS = ("starting", "stepping", "saving", "ending")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGABRT", "SIGHUP")
USER = {
    "exit": ("sys.exit(3)", r"records.py:\d+: it ends the process: SystemExit\(3\)[\s\S]* rank {rank}"),
    "interrupt": ("raise KeyboardInterrupt", r"records.py:\d+: KeyboardInterrupt[\s\S]* rank {rank}"),
    "os._exit": ("os._exit(0)", r"rank {rank} ended with exit code 0"),
    "abort": ("os.abort()", r"rank {rank} was killed by signal 6 \(SIGABRT\)"),
    "kill": ("os.kill(os.getpid(), 9)", r"rank {rank} was killed by signal 9 \(SIGKILL\)"),
}
_MARK = "PARTC_KILL_CASE"
_SHORT, _LONG = 60, 10**7
_OF_ONNXRUNTIME = ".ses"
"""A file that every program leaves which imports onnxruntime."""
_SOURCE = """
import os, sys, time
import numpy as np

class source:
    calls = 0
    def __len__(self):
        return {rows}
    def __getitem__(self, at):
        source.calls += 1
        if source.calls == {call} and os.environ.get("OMPI_COMM_WORLD_RANK") in {ranks}:
            {what}
        return {{"x": np.ones((len(at), 6), np.float32), "t": np.ones((len(at), 3), np.float32)}}
"""
_SCRIPT = """
import itertools, os, sys, time
import numpy as np
from partc.runtime import load_trainer

folder, steps, stall = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with load_trainer(folder, stall=stall, threads=1) as trainer:
    for step in range(steps):
        outputs = trainer.train({port.name: np.ones((1, *port.shape[1:]), np.float32) for port in trainer.inputs})
        if step == 2 and trainer.rank == 0:
            open("stepping", "w").close()
        if step % 10 == 0:
            trainer.save("kept", keep=2)
print("done", flush=True)
"""


@dataclass(frozen=True)
class Act:
    """What is done: a signal to a rank, all ranks, the launcher or partc, or what the `user`'s code does on one rank, the `users`' on all.

    SIGSTOP is told of first, and then the job is ended.
    """

    what: str
    target: str
    rank: int = 0


@dataclass(frozen=True)
class Case:
    """A job and what happens to it. `delay`: seconds after the moment; before the first step a share of the time until then."""

    mode: str
    ranks: int
    moment: str
    act: Act
    delay: float = 0.0

    def __str__(self) -> str:
        return f"{self.mode} on {self.ranks}, {self.moment} +{self.delay:.2f}: {self.act.what} to {self.act.target} {self.act.rank}"


@dataclass
class Verdict:
    """What was seen: the seconds until all had ended, and what is wrong."""

    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    over: bool = False
    """The job had ended by itself before."""


def make(folder: Path) -> dict[tuple[str, int], Path]:
    """The artifacts, by mode and ranks."""
    works: dict[tuple[str, int], Path] = {("run", 3): chain(folder / "run3")}
    model = onnx.parser.parse_model(PERCEPTRON)
    for port in model.graph.value_info:
        shape = [dim.dim_value for dim in port.type.tensor_type.shape.dim]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), port.name))
    del model.graph.value_info[:]
    plan = "ranks: 2\nsharding: {one: {in: [[1, 1], [1, 1]]}}\nplacement: {two: 1}\n"
    compile_source(Source(from_proto(model, Path("model.onnx"))), parse_plan(plan, "plan.yaml"), folder / "run2")
    works["run", 2] = folder / "run2"
    for ranks in (2, 3, 4):
        text = f"ranks: {ranks}\nsymbols: {{batch: {{divisor: {ranks}}}}}\ndataset: data_parallel\n"
        built = compiled(folder / f"train{ranks}", PERCEPTRON, text)
        works |= {(mode, ranks): built for mode in ("train", "eval", "script")}
    return works


class Running:
    """A started job, with all that belongs to it."""

    def __init__(self, case: Case, work: Path, folder: Path, stall: float) -> None:
        self.case, self.folder, self.work = case, folder, work
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, "TMPDIR": str(self.temporary), _MARK: self.mark}
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
        self.out = (folder / "out").open("wb")
        heard = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            self._command(stall),
            cwd=folder,
            env=environment,
            stdout=self.out,
            stderr=self.out,
            stdin=subprocess.DEVNULL,
        )
        signal.signal(signal.SIGINT, heard)

    def _command(self, stall: float) -> list[str]:
        case, steps = self.case, _SHORT if self.case.moment == "ending" else _LONG
        self._write_records()
        options = ["--stall", str(stall), "--threads", "1"]
        partc = [sys.executable, "-m", "partc.cli", case.mode, str(self.work), *options]
        data = ["--data", "records.py", "--batch", str(2 * case.ranks)]
        match case.mode:
            case "run":
                two = {"x": np.ones((6, 6), np.float32)}
                three = {"x": np.ones((6, 5), np.float32), "index": np.array([0, 5])}
                np.savez(self.folder / "in.npz", **(two if case.ranks == 2 else three))
                return [*partc, "--input", "in.npz", "--repeat", str(steps)]
            case "train":
                every = "1" if case.moment == "saving" else "7"
                return [*partc, *data, "--steps", str(steps), "--checkpoint", "kept", "--save", every, "--keep", "2"]
            case "eval":
                return [*partc, *data]
            case _:
                (self.folder / "script.py").write_text(_SCRIPT)
                launcher = [str(Path(sys.executable).parent / "mpiexec"), "--oversubscribe", "-n", str(case.ranks)]
                return [*launcher, sys.executable, "script.py", str(self.work), str(steps), str(stall)]

    def _write_records(self) -> None:
        """The user's code, which does what the case says in one of its calls."""
        act, ranks = self.case.act, range(self.case.ranks)
        user = act.target.startswith("user")
        chosen = [str(act.rank)] if act.target == "user" else [str(rank) for rank in ranks]
        text = _SOURCE.format(
            rows=_SHORT * len(ranks) if user or self.case.moment == "ending" else 4_000_000 * len(ranks),
            call=3 + int(self.case.delay * _SHORT / 4) if user else -1,
            ranks=chosen,
            what=USER[act.what][0] if user else "pass",
        )
        (self.folder / "records.py").write_text(text)

    def scratch(self) -> Path | None:
        """The job's folder of partc's, where it has begun."""
        return next(iter(self.temporary.glob("partc-run-*")), None)

    def ranks(self) -> list[int]:
        """The process ids of the ranks that have begun, by rank."""
        if self.case.mode != "script":
            try:
                scratch = self.scratch()
                return read_pids(scratch) if scratch else []
            except (OSError, ValueError):
                return []
        found = {self._variable(pid, "OMPI_COMM_WORLD_RANK"): pid for pid in self.alive() if self._is_rank(pid)}
        return [found.get(str(rank), 0) for rank in range(self.case.ranks)]

    def launcher(self) -> int:
        """The launcher's process id; 0 where there is none yet."""
        own = [pid for pid in self.alive() if b"prterun" in _read(pid, "cmdline").split(b"\0")[0]]
        return min(own, default=0)

    def alive(self) -> list[int]:
        """All processes of the job, and of what it started, that run."""
        word = f"{_MARK}={self.mark}".encode()
        every = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return sorted(pid for pid in every if word in _read(pid, "environ") and states([pid])[0] not in ("", "Z", "X"))

    def steps(self) -> int:
        """The step of the rank that is furthest behind."""
        if self.case.mode == "script":
            return 3 if (self.folder / "stepping").exists() else 0
        try:
            scratch = self.scratch()
            return min(step for step, _ in read_board(scratch / "board")) if scratch else 0
        except (OSError, ValueError):
            return 0

    def end(self) -> None:
        """Kills what is left."""
        for pid in self.alive():
            _signal(pid, "SIGKILL")
        self.process.wait()
        self.out.close()

    def said(self) -> str:
        """All that was printed."""
        self.out.flush()
        return (self.folder / "out").read_text(errors="replace")

    def _is_rank(self, pid: int) -> bool:
        return b"script.py" in _read(pid, "cmdline") and self._variable(pid, "OMPI_COMM_WORLD_RANK") != ""

    def _variable(self, pid: int, name: str) -> str:
        found = re.search(rb"(?:^|\0)" + name.encode() + rb"=(\d+)", _read(pid, "environ"))
        return found[1].decode() if found else ""


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def memory_of(pids: list[int]) -> set[str]:
    """The files in shared memory that processes have open."""
    return {
        line.split()[-1] for pid in pids for line in _read(pid, "maps").decode().splitlines() if " /dev/shm/" in line
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
            _signal(pid, case.act.what)
    else:
        _until(lambda: running.process.poll() is not None, 6 * start + WITHIN)
    if case.act.what == "SIGSTOP" and not verdict.over:
        _judge_stop(running, verdict, stall)
    begun = time.monotonic()
    _until(lambda: not running.alive(), WITHIN)
    verdict.seconds = time.monotonic() - begun
    left = running.alive()
    verdict.problems += [f"still there: {_read(pid, 'cmdline')[:60]!r}" for pid in left]
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
        return _until(lambda: over() or _targets(running), 60.0)
    if case.moment == "saving":
        reached = _until(lambda: over() or any(running.folder.glob("kept/.step_*")) or running.steps() > 40, 60.0)
    else:
        near = _SHORT - 20 if case.moment == "ending" and case.mode in ("run", "train") else 2
        reached = _until(lambda: over() or running.steps() > near, 60.0)
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


def _signal(pid: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, getattr(signal, name))


def _judge_stop(running: Running, verdict: Verdict, stall: float) -> None:
    """A stopped rank is told of; then the job is ended, which must be possible."""
    if running.case.act.target != "partc":
        told = r"partc: (rank \d+|the job) has waited \d+ s: "
        if not _until(lambda: re.search(told, running.said()) or running.process.poll() is not None, stall + 8.0):
            verdict.problems.append("not told of after `stall` seconds")
        named = rf"rank {running.case.act.rank} \(process \d+\) is stopped"
        if (
            running.case.act.target == "rank"
            and running.case.moment != "starting"
            and not re.search(named, running.said())
        ):
            verdict.problems.append("the stopped rank is not named")
    if running.case.mode == "script" or running.case.act.target == "partc":
        _signal(running.process.pid, "SIGKILL")
    else:
        _signal(running.process.pid, "SIGTERM")


def _wrong_words(case: Case, code: int, said: str) -> Iterator[str]:
    """What is wrong with an exit code and a message."""
    act, rank = case.act, case.act.rank
    if code == 0:
        yield "exit code 0"
    if "Traceback" in said and case.mode != "script":
        yield "a traceback"
    if "fault of partc" in said:
        yield "called a fault of partc"
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
        if code != wanted:
            yield f"exit code {code}, not {wanted}"
    if act.target == "rank" and not re.search(rf"rank {rank} (was killed by signal|has left the job|ended with)", said):
        yield f"rank {rank} is not named"
    if act.target == "rank" and act.what in ("SIGKILL", "SIGSEGV", "SIGABRT"):
        if f"({act.what})" not in said:
            yield "its signal is not named"
        if not re.search(r"(in step \d+, at .+|after step \d+|before its first step)", said):
            yield "its task is not named"
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


def _until(done: Callable[[], object], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
