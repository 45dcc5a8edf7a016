"""Whether long runs stay flat: memory, descriptors and threads over thousands of steps of changing sizes, on 8 ranks.

    python tests/benchmarks/flat_memory.py [--steps 2000] [--only inference,training] [--where threads,mpi]

Every step has another of 24 batch sizes, more than the runtime keeps schedules of. Training evaluates every 50 steps and saves
every 200. Prints the series, of all ranks together, and a verdict: flat if, after the first quarter, the second half has no more
descriptors and threads than the half before, and at most 1 % more memory. Ends with 1 if something grows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np

HERE = Path(__file__).parent

RANKS, SIZES, POINTS = 8, 24, 20
EVALUATES, SAVES = 50, 200
GROWTH = 0.01
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
TEXT = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 32] x) => (float[batch, 16] y) <float[32, 64] w, float[64, 48] v, float[48, 16] u> {
    [one] a = MatMul (x, w) [r1] b = Relu (a) [two] c = MatMul (b, v) [r2] d = Tanh (c) [three] y = MatMul (d, u) }"""
WEIGHTS = {"w": (32, 64), "v": (64, 48), "u": (48, 16)}
PLAN = """ranks: 8
mesh: {dp: 4, tp: 2}
symbols: {batch: {divisor: 4}}
dataset: {x: [dp, null]TARGET}
sharding: {one: colwise, two: rowwise}
"""
TRAIN = """train:
  loss: {type: mean_squared, prediction: y, target: t}
  optimizer: {type: adam, lr: 0.001, shard: dp}
"""


@dataclass(frozen=True)
class Point:
    """What a process has after some steps: KiB of memory, open descriptors, threads."""

    memory: int
    descriptors: int
    threads: int

    @staticmethod
    def now() -> Point:
        """Those of this process."""
        rows = Path("/proc/self/status").read_text().split("\n")
        found = {key: value.split()[0] for key, _, value in (row.partition(":") for row in rows) if value.strip()}
        return Point(int(found["VmRSS"]), len(os.listdir("/proc/self/fd")), int(found["Threads"]))


def compiled(folder: Path, trains: bool) -> Path:
    """The artifact that is run."""
    from partc.compiler.pipeline import compile_source
    from partc.compiler.plan.read import parse_plan
    from training_equivalence import from_text

    plan = PLAN.replace("TARGET", ", t: [dp, null]" if trains else "") + (TRAIN if trains else "")
    compile_source(from_text(TEXT, WEIGHTS), parse_plan(plan, "plan.yaml"), folder)
    return folder


def batches(steps: int) -> Iterator[dict[str, np.ndarray]]:
    """The whole inputs of each step."""
    random = np.random.default_rng(3)
    for _ in range(steps):
        rows = 4 * int(random.integers(1, SIZES + 1))
        yield {name: random.standard_normal((rows, width)).astype(np.float32) for name, width in (("x", 32), ("t", 16))}


def due(step: int, steps: int) -> bool:
    """Whether a point of the series comes after a step."""
    return (step + 1) % max(1, steps // POINTS) == 0


def train(trainer: Any, folder: Path, steps: int, point: Callable[[], None]) -> None:
    """One rank's training."""
    from partc.runtime.artifact.tensors.boxes import slices

    for step, whole in enumerate(batches(steps)):
        given = {port.name: whole[port.name] for port in trainer.inputs}
        boxes = {port.name: port.box(trainer.rank) for port in trainer.inputs}
        shards = {n: a if boxes[n] is None else a[slices(boxes[n], a.shape)] for n, a in given.items()}
        trainer.train(shards)
        if (step + 1) % EVALUATES == 0:
            trainer.evaluate([(shards, 1)])
        if (step + 1) % SAVES == 0:
            trainer.save(folder / "kept", keep=2)
        if due(step, steps):
            point()


def on_threads(folder: Path, trains: bool, steps: int) -> list[Point]:
    """The series of all ranks in one process."""
    from partc.runtime import load_local, load_trainer
    from partc.runtime.communication.in_process import LocalWorld

    found: list[Point] = []
    if not trains:
        with load_local(folder / "build", threads=1) as program:
            for step, whole in enumerate(batches(steps)):
                program(x=whole["x"])
                if due(step, steps):
                    found.append(Point.now())
        return found
    world, barrier = LocalWorld(RANKS), Barrier(RANKS)

    def point() -> None:
        if barrier.wait() == 0:
            found.append(Point.now())

    def rank(number: int) -> None:
        with load_trainer(folder / "build", world.transport(number), threads=1) as trainer:
            train(trainer, folder, steps, point)

    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(rank, range(RANKS)))
    return found


def on_mpi(folder: Path, trains: bool, steps: int) -> list[Point]:
    """The series of ranks that are processes, summed up; the same on every rank."""
    from mpi4py import MPI
    from partc.runtime import Whole, load, load_trainer

    comm, found = MPI.COMM_WORLD, []

    def point() -> None:
        every = comm.allgather(Point.now())
        rows = zip(*((one.memory, one.descriptors, one.threads) for one in every), strict=True)
        found.append(Point(*(sum(row) for row in rows)))

    if trains:
        with load_trainer(folder / "build", comm, threads=1) as trainer:
            train(trainer, folder, steps, point)
        return found
    with load(folder / "build", comm, threads=1) as program:
        for step, whole in enumerate(batches(steps)):
            program(x=Whole(whole["x"]))
            if due(step, steps):
                point()
    return found


def judged(name: str, points: list[Point]) -> bool:
    """Prints a series and whether it is flat."""
    later = points[len(points) // 4 :]
    early, late = later[: len(later) // 2], later[len(later) // 2 :]
    growth = max(one.memory for one in late) / max(one.memory for one in early) - 1
    print(f"{name}: memory in MiB: " + " ".join(f"{one.memory / 1024:.1f}" for one in points))
    for field in ("descriptors", "threads"):
        print(f"{name}: {field}: " + " ".join(str(getattr(one, field)) for one in points))
    more = [
        f for f in ("descriptors", "threads") if max(getattr(p, f) for p in late) > max(getattr(p, f) for p in early)
    ]
    flat = growth <= GROWTH and not more
    print(
        f"{name}: {'flat' if flat else 'GROWS'}: memory {100 * growth:+.2f} %, more {' and '.join(more) or 'of nothing'}"
    )
    sys.stdout.flush()
    return flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", default="inference,training")
    parser.add_argument("--where", default="threads,mpi")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        name = f"{options.only}, {RANKS} ranks, {options.where}"
        measure = on_threads if options.where == "threads" else on_mpi
        points = measure(options.measure, options.only == "training", options.steps)
        if options.where == "threads" or os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
            sys.exit(not judged(name, points))
        return
    wrong = 0
    for kind in options.only.split(","):
        for where in options.where.split(","):
            with tempfile.TemporaryDirectory() as folder:
                compiled(Path(folder) / "build", kind == "training")
                launcher = [str(Path(sys.executable).parent / "mpiexec"), "--oversubscribe", "-n", str(RANKS)]
                words = [sys.executable, __file__, "--steps", str(options.steps), "--only", kind, "--where", where]
                command = [*(launcher if where == "mpi" else []), *words, "--measure", folder]
                wrong += subprocess.run(command, env={**os.environ, **AS_ROOT}).returncode != 0
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
