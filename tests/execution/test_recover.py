"""A step that fails on one rank is given up by all with one error, nothing stays under way, and the next step gives what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from artifact_text import write
from collectives_mpi_case import MPIEXEC, every_op
from partc.runtime import InputError, StepError, UsageError, load, load_local
from partc.runtime.execution.in_process import LocalProgram
from partc.runtime.execution.step_plan import StepPlan
from partc.runtime.program.steps import Segment
from small_training import DATA_PARALLEL, PERCEPTRON, compiled

UNKNOWN = [
    """rank0 (float[n, 3] x, int64[k] index) => (float[k, 3] y, string[k] t)
    <float[n, 3] h, float[k, 3] g, int64[two, many] z, int64[two, few] w>
    { h = Neg(x)
      = partc.comm.Send <peer = 1, tag = 0> (h)
      = partc.comm.Send <peer = 1, tag = 1> (index)
      z = NonZero(x)
      = partc.comm.Send <peer = 1, tag = 2> (z)
      w = partc.comm.Recv <peer = 1, tag = 3> ()
      g = partc.comm.Recv <peer = 1, tag = 4> ()
      t = partc.comm.Recv <peer = 1, tag = 5> ()
      first = ReduceMax <keepdims = 0> (w)
      part = Cast <to = 1> (first)
      y = Add(g, part) }""",
    """rank1 () => () <float[n, 3] h, int64[k] index, int64[two, many] z, int64[two, few] w, float[k, 3] g, string[k] t,
    int64[1] axis = {1}>
    { h = partc.comm.Recv <peer = 0, tag = 0> ()
      index = partc.comm.Recv <peer = 0, tag = 1> ()
      z = partc.comm.Recv <peer = 0, tag = 2> ()
      w = Neg(z)
      = partc.comm.Send <peer = 0, tag = 3> (w)
      g = Gather(h, index)
      = partc.comm.Send <peer = 0, tag = 4> (g)
      m = ReduceSum <keepdims = 0> (g, axis)
      t = Cast <to = 8> (m)
      = partc.comm.Send <peer = 0, tag = 5> (t) }""",
]
X = np.arange(30, dtype=np.float32).reshape(5, 6)
OF_EVERY = {"x": X, "index": np.arange(5), "half": X[:3, :4].astype(np.float16)}
OF_UNKNOWN = {"x": X[:, :3].copy(), "index": np.array([1, 4])}

SCRIPT = """
import json, sys
import numpy as np
from mpi4py import MPI
import partc.runtime as runtime
from partc.runtime.communication.mpi import MpiTransport
world = MPI.COMM_WORLD
x = np.arange(30, dtype=np.float32).reshape(5, 6)
unknown = {"x": x[:, :3].copy(), "index": np.array([1, 4])}
every_op = {"x": x, "index": np.arange(5), "half": x[:3, :4].astype(np.float16)}
told = {2: [], 4: []}

def steps(folder, comm, good, told, spins):
    rank, size = comm.rank, comm.size
    transport = MpiTransport(comm)
    transport.has_own_core = spins
    with runtime.load(folder, transport, threads=1, on_error="recover") as program:
        whole = program(good)
        for step in range(4):
            bad = (step * 3) % size
            wrong = np.where(np.arange(len(good["index"])) == 1, 77, good["index"])
            try:
                program({**good, "index": wrong} if rank == bad or size == 2 else good)
                told.append("not raised")
            except runtime.StepError as error:
                told.append(str(error))
            if step == 1:
                try:
                    program({**good, "index": np.zeros((2, 2), np.int64)})
                except runtime.InputError:
                    pass
            again = program(good)
            assert again.keys() == whole.keys()
            for name, array in whole.items():
                np.testing.assert_array_equal(again[name], array)

for spins in (False, True):
    steps(sys.argv[1], world.Split(world.rank // 2), unknown, told[2], spins)  # two pairs of ranks, each by itself
    steps(sys.argv[2], world, every_op, told[4], spins)
assert world.allgather(told) == [told] * 4
if world.rank == 0:
    print(json.dumps(told))
"""


def artifacts(folder: Path) -> dict[int, Path]:
    """By its number of ranks: messages and values of unknown shape, and every collective."""
    return {2: write(folder / "two", UNKNOWN, shapes={"z": None, "w": None, "t": None}), 4: every_op(folder / "four")}


def test_over_mpi_a_good_step_follows_a_bad_one(tmp_path: Path) -> None:
    """One job for both artifacts: four ranks, and twice two of them."""
    made = artifacts(tmp_path)
    command = [str(MPIEXEC), "--oversubscribe", "-n", "4", sys.executable, "-c", SCRIPT, str(made[2]), str(made[4])]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **root})
    assert done.returncode == 0, done.stderr
    for ranks, told in json.loads(done.stdout).items():
        assert len(told) == 8
        for step, text in enumerate(told):
            failing, op = (1, "Gather (net.g)") if ranks == "2" else (step % 4 * 3 % 4, "Gather (net.h)")
            assert text.startswith(f"rank {failing} failed in {op}: "), text
            assert "77" in text
            assert text.endswith("\n  the step is given up on all ranks; the next one can run")


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_op_of_any_rank_may_fail(tmp_path: Path, ranks: int) -> None:
    inputs = OF_UNKNOWN if ranks == 2 else OF_EVERY
    with load_local(artifacts(tmp_path)[ranks], threads=1, on_error="recover") as program:
        good = program(inputs)
        tried = 0
        for rank, schedule in enumerate(schedules(program)):
            for at in filter(schedule.is_step, range(len(schedule.actions))):
                if isinstance(schedule.program.steps[schedule.actions[at][0]], Segment):
                    kept, tried = schedule.actions[at], tried + 1
                    schedule.actions[at] = (kept[0], planted)
                    with pytest.raises(StepError, match=f"rank {rank} failed in .*planted"):
                        program(inputs)
                    schedule.actions[at] = kept
                    again = program(inputs)
                    for name, value in good.items():
                        np.testing.assert_array_equal(again[name], value)
        assert tried >= 5
        with pytest.raises(InputError):
            program({**inputs, "index": np.zeros((2, 2), np.int64)})
        assert program(inputs).keys() == good.keys()


def planted() -> None:
    raise ValueError("planted")


def schedules(program: LocalProgram) -> list[StepPlan]:
    return [next(iter(one._schedules.values())) for one in program.ranks]


def test_a_value_that_breaks_its_promise_is_no_deadlock(tmp_path: Path) -> None:
    """The sender finds it, after the receiver has posted; the shape holds again in the next step."""
    graphs = [
        """rank0 (float[n, 3] x, int64[k] index) => (float[k, 3] y) <float[n, 3] h>
        { h = Gather(x, index)
          = partc.comm.Send <peer = 1, tag = 0> (h)
          y = partc.comm.Recv <peer = 1, tag = 1> () }""",
        """rank1 () => () <float[n, 3] h, float[n, 3] y>
        { h = partc.comm.Recv <peer = 0, tag = 0> ()
          y = Neg(h)
          = partc.comm.Send <peer = 0, tag = 1> (y) }""",
    ]
    with load_local(write(tmp_path / "a", graphs), threads=1, on_error="recover") as program:
        x = OF_UNKNOWN["x"]
        for index in (np.arange(5), np.arange(4), np.arange(5)):
            if len(index) == len(x):
                np.testing.assert_array_equal(program(x=x, index=index)["y"], -x)
            else:
                with pytest.raises(StepError, match="rank 0 failed in Gather"):
                    program(x=x, index=index)


def test_a_schedule_that_one_rank_cannot_make_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load_local(artifacts(tmp_path)[2], threads=1, on_error="recover") as program:
        good = program(OF_UNKNOWN)
        larger = {**OF_UNKNOWN, "x": np.ones((9, 3), np.float32)}
        with monkeypatch.context() as patch:
            made = StepPlan.__init__

            def fails(self: StepPlan, one: object, *rest: object) -> None:
                if getattr(one, "rank", 0) == 1:
                    raise MemoryError("no room")
                made(self, one, *rest)  # type: ignore[arg-type]

            patch.setattr(StepPlan, "__init__", fails)
            for _ in range(2):
                with pytest.raises(StepError, match="rank 1 failed: MemoryError: no room"):
                    program(larger)
        assert program(larger)["y"].shape == (2, 3)
        np.testing.assert_array_equal(program(OF_UNKNOWN)["y"], good["y"])


def test_a_training_cannot_recover(tmp_path: Path) -> None:
    folder = compiled(tmp_path / "build", PERCEPTRON, DATA_PARALLEL)
    for call in (load, load_local):
        with pytest.raises(UsageError, match="none can be given up once it has begun"):
            call(folder, on_error="recover")
