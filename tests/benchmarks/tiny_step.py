"""What the runtime adds to a step in which hardly anything is computed, over the bare sessions of that step; one rank, one thread.

    python tests/benchmarks/tiny_step.py [--rounds 200] [--steps 50] [--calls]

Two MatMuls of 8x8 by `load`, and their training by SGD with `load_trainer`. The bare sessions are the step's own, with all inputs bound.
Both sides run in turns, so many rounds of so many steps; prints the medians of a step in microseconds, their difference, and how many calls
of Python functions and built-in ones a step makes; with `--calls` by function.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import numpy_helper
from partc.compiler import compile_model
from partc.runtime import Program, load, load_trainer
from partc.runtime.program.ort import Binding

Run: TypeAlias = Callable[[], object]

_MODEL = """<ir_version: 10, opset_import: ["": 21]>
tiny (float[8, 8] x) => (float[8, 8] y) { h = MatMul (x, w) y = MatMul (h, v) }"""
_TRAIN = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: sgd, lr: 0.0001}}\n"
_COUNTED = 100


def bare(program: Program, arrays: dict[str, np.ndarray[Any, Any]]) -> list[Run]:
    """The runs of a program's sessions, which has made a step, each bound to `arrays`, to which the numbers of updates are added."""
    (plan,), runs = program._schedules.values(), list[Run]()

    def shared(name: str, binding: Binding, formal: str) -> None:
        number = arrays.setdefault(name, np.full((), 1e-4, np.float32))
        binding.bind_input(formal, "cpu", 0, plan.values.dtype(name).code, number.shape, number.ctypes.data)

    for index in range(len(program._program.steps)):
        if index in program._program.runners:
            binding = plan.sessions.bindings[index]
            for name, readers in plan.sessions.readers.items():
                for other, code, formal in readers:
                    if other is binding:
                        binding.bind_input(formal, "cpu", 0, code, arrays[name].shape, arrays[name].ctypes.data)
            runs.append(partial(program._program.runners[index].session.run_with_iobinding, binding))
        for updater in program._program.replacement.updates.get(index, ()):
            runs += updater.calls(plan.sessions.place, shared, plan.values.is_dynamic)
    return runs


def compare(title: str, step: Run, runs: Sequence[Run], options: argparse.Namespace) -> None:
    def bare_step() -> None:
        for run in runs:
            run()

    took: dict[Run, list[float]] = {step: [], bare_step: []}
    for _ in range(options.rounds):
        for one, times in took.items():
            start = time.perf_counter()
            for _ in range(options.steps):
                one()
            times.append((time.perf_counter() - start) / options.steps)
    own, other = (1e6 * statistics.median(times) for times in took.values())
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(_COUNTED):
        step()
    profile.disable()
    stats = pstats.Stats(profile)
    counts = {key: row[1] / _COUNTED for key, row in stats.stats.items()}  # type: ignore[attr-defined]
    calls = f"{sum(count for (file, _, _), count in counts.items() if file != '~'):.0f} Python"
    built_in = f"{sum(count for (file, _, _), count in counts.items() if file == '~'):.0f} built-in"
    print(f"{title:10} {own:7.1f} us, bare {other:6.1f} us, over it {own - other:6.1f} us; {calls}, {built_in} calls")
    if options.calls:
        stats.sort_stats("tottime").print_stats(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args()
    chance = np.random.default_rng(0)
    numbers = {name: chance.normal(size=(8, 8)).astype(np.float32) for name in "wvxt"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = onnx.parser.parse_model(_MODEL)
        model.graph.initializer.extend(numpy_helper.from_array(numbers[name], name) for name in "wv")
        onnx.save(model, folder / "model.onnx")
        for name, plan in (("infers", "ranks: 1\n"), ("trains", f"ranks: 1\n{_TRAIN}")):
            (folder / f"{name}.yaml").write_text(plan)
            compile_model(folder / "model.onnx", folder / f"{name}.yaml", folder / name)
        with load(folder / "infers", threads=1) as program:
            batch = {"x": numbers["x"]}
            program(batch)
            compare("inference", partial(program, batch), bare(program, batch), options)
        with load_trainer(folder / "trains", threads=1) as trainer:
            batch = {"x": numbers["x"], "t": numbers["t"]}
            trainer.train(batch)
            kept = {**batch}
            compare("training", partial(trainer.train, batch), bare(trainer.program, kept), options)


if __name__ == "__main__":
    main()
