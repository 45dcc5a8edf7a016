"""Two checkouts of partc against each other in one run: compile, load, a step of inference and of training, in turns.

    python tests/benchmarks/two_versions.py BEFORE AFTER [--only train] [--turns 10]

BEFORE and AFTER are interpreters, each with one checkout installed (`pip install -e`). Each compiles its own artifacts and measures them by
its own scripts. Programs run on two MPI ranks of one thread each. Prints medians of both, and the ratio of after to before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from turns import Side

RANKS = 2
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
HERE_OF = "import partc.runtime as r; from pathlib import Path; print(Path(r.__file__).parent.parent / 'tests' / 'benchmarks')"
TRAINED = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from train_cases import CASES, Case, data_parallel, train, write
from training_models import mlp
CASES["small"] = CASES["chain"] = Case(lambda: mlp(width=32, inputs=16), {"batch": 16})
chain = f"ranks: 2\\nplacement: {{layers.0: 0, layers.1: 1, layers.2: 0}}\\n{train()}"
write(Path(sys.argv[2]), CASES[sys.argv[3]], chain if sys.argv[3] == "chain" else data_parallel(2), 2)
"""
GENERATED = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
from network import Sizes, generate, plan
folder, layers, width = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
folder.mkdir()
generate(folder, Sizes(layers, width, 8, 64))
(folder / "plan.yaml").write_text(plan(2))
np.save(folder / "x.npy", np.random.default_rng(1).standard_normal((1, 64, width), dtype=np.float32))
"""
COMPILED = """
import sys, time
from pathlib import Path
from partc.compiler import compile_model
folder = Path(sys.argv[1])
model = next(path for path in folder.iterdir() if path.suffix == ".onnx")
begun = time.perf_counter(), time.process_time()
compile_model(model, folder / "plan.yaml", folder / "build")
print(time.perf_counter() - begun[0], time.process_time() - begun[1])
"""
LOADED = """
import sys, time
from partc.runtime import load_local
import onnxruntime
begun = time.perf_counter(), time.process_time()
with load_local(sys.argv[1], threads=1) as program:
    print(time.perf_counter() - begun[0], time.process_time() - begun[1])
"""
TRAINS, LAYERS, WIDTH = ("small", "chain", "lenet"), 6, 512


def scripts(python: str) -> str:
    """The folder of the benchmarks of the checkout that an interpreter has."""
    return subprocess.run([python, "-c", HERE_OF], capture_output=True, text=True, check=True).stdout.strip()


def measured(python: str, text: str, *arguments: str) -> tuple[float, float]:
    """Seconds by the clock and of the processor that a script prints."""
    done = subprocess.run([python, "-c", text, *arguments], capture_output=True, text=True, check=True)
    wall, cpu = done.stdout.split()[-2:]
    return float(wall), float(cpu)


def show(name: str, before: list[float], after: list[float], unit: str = "ms") -> None:
    """Medians and fastest of both, with their ratios."""
    scale = {"ms": 1e3, "s": 1.0}[unit]
    a, b = statistics.median(before), statistics.median(after)
    least = min(after) / min(before)
    print(
        f"{name:34} before {scale * a:9.3f} {unit}, after {scale * b:9.3f} {unit}, ratio {b / a:.3f}, of the fastest {least:.3f}",
        flush=True,
    )


def one_by_one(name: str, pythons: list[str], text: str, turns: int, arguments: Callable[[int], list[str]]) -> None:
    """The seconds that scripts print, both versions in turns."""
    found: list[list[tuple[float, float]]] = [[], []]
    for turn in range(turns + 1):
        for side, python in enumerate(pythons):
            row = measured(python, text, *arguments(side))
            found[side] += [row] if turn else []
    for which, unit in enumerate(("by the clock", "of the processor")):
        show(f"{name}, {unit}", *([row[which] for row in rows] for rows in found), unit="s")


def in_turns(name: str, sides: list[Side], steps: int, turns: int) -> None:
    """The seconds of steps, both versions in turns; the first turn and the first step of each are not counted."""
    for turn in range(turns + 1):
        for side in sides:
            times = side.turn(steps + 1)
            side.times += times[1:] if turn else []
    for side in sides:
        side.close()
    show(name, sides[0].times, sides[1].times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--only", default="compile,load,infer,train")
    parser.add_argument("--trains", default=",".join(TRAINS), help="the models that are trained")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="of a side in a turn")
    options = parser.parse_args()
    pythons, wanted = [options.before, options.after], options.only.split(",")
    homes = [scripts(python) for python in pythons]
    print(f"{RANKS} ranks on {os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f}", flush=True)

    def mpi(side: int, script: str, folder: str) -> Side:
        launcher = str(Path(pythons[side]).parent / "mpiexec")
        command = [
            launcher,
            "--oversubscribe",
            "-n",
            str(RANKS),
            pythons[side],
            str(Path(homes[side]) / script),
            folder,
        ]
        return Side(["before", "after"][side], [command], [AS_ROOT])

    def run(side: int, text: str, *arguments: str) -> None:
        subprocess.run([pythons[side], "-c", text, homes[side], *arguments], check=True, stdout=sys.stderr)

    with tempfile.TemporaryDirectory() as name:
        folders = [f"{name}/{side}" for side in (0, 1)]
        if {"compile", "load", "infer"} & {*wanted}:
            for side in (0, 1):
                run(side, GENERATED, folders[side], str(LAYERS), str(WIDTH))
            turns = options.turns if "compile" in wanted else 0
            one_by_one(
                "compile, transformer of 6 layers", pythons, COMPILED, max(turns, 1), lambda side: [folders[side]]
            )
        if "load" in wanted:
            one_by_one("load", pythons, LOADED, options.turns, lambda side: [f"{folders[side]}/build"])
        if "infer" in wanted:
            in_turns(
                "step of inference", [mpi(k, "transformer_partc.py", folders[k]) for k in (0, 1)], 20, options.turns
            )
        for case in options.trains.split(",") if "train" in wanted else ():
            places = [f"{folder}-{case}" for folder in folders]
            for side in (0, 1):
                Path(places[side]).mkdir()
                run(side, TRAINED, places[side], case)
            sides = [mpi(side, "train_partc.py", places[side]) for side in (0, 1)]
            in_turns(f"step of training, {case}", sides, options.steps, options.turns)


if __name__ == "__main__":
    main()
