"""A real MPI job of partc's, or of a script of one's own, to which something is to happen; `kill_case.py` judges its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from artifact_edit import chain
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.job.status_board import read_board, read_pids, states
from small_training import PERCEPTRON, compiled

MODES = ("run", "train", "pipeline", "lookup", "eval", "script")
"""Commands, trainings whose batches run through stages, or that look rows up on other ranks, and a script of one's own."""
SERVERS = {
    2: "sharding: {look: pull}",
    3: "roles: {ps: 2}\nplacement: {look: {role: ps}}",
    4: "roles: {ps: [0, 3]}\nplacement: {look: {role: ps}}",
}
LOOKUP = """<ir_version: 10, opset_import: ["" : 21]>
lookup (float[batch, 6] x) => (float[batch, 3] y)
<float[24, 3] table, int64[6] places = {0, 5, 23, 11, 12, 6}, int64[1] axes = {1}>
{ ones = Cast <to = 7> (x) ids = Mul(ones, places) [look] rows = Gather(table, ids) y = ReduceMean <keepdims = 0> (rows, axes) }"""
STAGES = {
    2: "{one: 0, plus: 0, turn: 0, two: 1}",
    3: "{one: 0, plus: 1, turn: 1, two: 2}",
    4: "{one: 0, plus: 1, turn: 2, two: 3}",
}
MOMENTS = ("starting", "stepping", "saving", "ending")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSEGV", "SIGABRT")
"""What ends a rank; Open MPI catches SIGHUP there, and goes on."""
USER = {
    "exit": ("sys.exit(3)", r"records.py:\d+: it ends the process: SystemExit\(3\)[\s\S]* rank {rank}"),
    "interrupt": ("raise KeyboardInterrupt", r"records.py:\d+: KeyboardInterrupt[\s\S]* rank {rank}"),
    "os._exit": (
        "os._exit(0)",
        r"rank {rank} ended with exit code 0[^\n]*\n  while it ran \S*records.py, reading records",
    ),
    "abort": (
        "os.abort()",
        r"rank {rank} was killed by signal 6 \(SIGABRT\)[^\n]*\n  while it ran \S*records.py, reading records.*, at .*records.py:\d+",
    ),
    "kill": (
        "os.kill(os.getpid(), 9)",
        r"rank {rank} was killed by signal 9 \(SIGKILL\)[^\n]*\n  while it ran \S*records.py, reading records",
    ),
}
_MARK = "PARTC_KILL_CASE"
SHORT, _LONG = 60, 10**7
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


def make(folder: Path, wanted: Collection[tuple[str, int]]) -> dict[tuple[str, int], Path]:
    """The artifacts for modes and numbers of ranks."""
    works: dict[tuple[str, int], Path] = {}
    made = ("run", "pipeline", "lookup")
    for mode, ranks in sorted({(mode if mode in made else "train", ranks) for mode, ranks in wanted}):
        place = folder / f"{mode}{ranks}"
        if mode == "train":
            text = f"ranks: {ranks}\nsymbols: {{batch: {{divisor: {ranks}}}}}\ndataset: data_parallel\n"
            built = compiled(place, PERCEPTRON, text)
            works |= {(one, ranks): built for one in ("train", "eval", "script")}
        elif mode == "pipeline":
            text = f"ranks: {ranks}\nsymbols: {{batch: {{divisor: 4}}}}\nplacement: {STAGES[ranks]}\npipeline: {{microbatches: 4}}\n"
            works[mode, ranks] = compiled(place, PERCEPTRON, text)
        elif mode == "lookup":
            text = f"ranks: {ranks}\nsymbols: {{batch: {{divisor: 2}}}}\ndataset: data_parallel\n{SERVERS[ranks]}\n"
            works[mode, ranks] = compiled(place, LOOKUP, text)
        else:
            works[mode, ranks] = chain(place) if ranks == 3 else _cut(place)
    return works


def _cut(place: Path) -> Path:
    """A model with a collective, on two ranks."""
    model = onnx.parser.parse_model(PERCEPTRON)
    for port in model.graph.value_info:
        shape = [dim.dim_value for dim in port.type.tensor_type.shape.dim]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), port.name))
    del model.graph.value_info[:]
    plan = "ranks: 2\nsharding: {one: {in: [[2, 1], [1, 1]]}}\nsymbols: {batch: {divisor: 2}}\n"
    compile_source(Source(from_proto(model, Path("model.onnx"))), parse_plan(plan, "plan.yaml"), place)
    return place


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
        case, steps = self.case, SHORT if self.case.moment == "ending" else _LONG
        self._write_records()
        options = ["--stall", str(stall), "--threads", "1"]
        command = "train" if case.mode in ("pipeline", "lookup") else case.mode
        partc = [sys.executable, "-m", "partc.cli", command, str(self.work), *options]
        data = ["--data", "records.py", "--batch", "8" if case.mode == "pipeline" else str(2 * case.ranks)]
        match case.mode:
            case "run":
                two = {"x": np.ones((6, 6), np.float32)}
                three = {"x": np.ones((6, 5), np.float32), "index": np.array([0, 5])}
                np.savez(self.folder / "in.npz", **(two if case.ranks == 2 else three))
                return [*partc, "--input", "in.npz", "--repeat", str(steps)]
            case "train" | "pipeline" | "lookup":
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
            rows=SHORT * len(ranks) if user or self.case.moment == "ending" else 4_000_000 * len(ranks),
            call=3 + int(self.case.delay * SHORT / 4) if user else -1,
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
        lines = {pid: read(pid, "cmdline") for pid in self.alive()}
        job = b"script.py" if self.case.mode == "script" else b"partc.cli.job"
        own = [pid for pid, line in lines.items() if b"prterun" in line.split(b"\0")[0] and job in line]
        return min(own, default=0)

    def alive(self) -> list[int]:
        """All processes of the job, and of what it started, that run."""
        word = f"{_MARK}={self.mark}".encode()
        every = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return sorted(pid for pid in every if word in read(pid, "environ") and states([pid])[0] not in ("", "Z", "X"))

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
            send(pid, "SIGKILL")
        self.process.wait()
        self.out.close()

    def said(self) -> str:
        """All that was printed."""
        self.out.flush()
        return (self.folder / "out").read_text(errors="replace")

    def _is_rank(self, pid: int) -> bool:
        return b"script.py" in read(pid, "cmdline") and self._variable(pid, "OMPI_COMM_WORLD_RANK") != ""

    def _variable(self, pid: int, name: str) -> str:
        found = re.search(rb"(?:^|\0)" + name.encode() + rb"=(\d+)", read(pid, "environ"))
        return found[1].decode() if found else ""


def read(pid: int, name: str) -> bytes:
    """A file of a process in /proc; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def send(pid: int, name: str) -> None:
    """Sends a signal, where the process is still there."""
    with contextlib.suppress(OSError):
        os.kill(pid, getattr(signal, name))
