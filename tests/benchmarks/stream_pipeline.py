"""Inference by microbatches, a stage per MPI rank: against one rank, and against the same stages with one batch at a time.

    python tests/benchmarks/stream_pipeline.py [--model gpt] [--layers 12 --width 512 --batch 8 --seq 64] [--microbatches 8]
    python tests/benchmarks/stream_pipeline.py --model mlp --layers 8 --width 1024 --batch 512

One thread a rank. A step is from the batch in hand to the output in hand on rank 0. The sides are measured in one run, in turns, and
their first outputs compared. The ideal is that of stages of one time, with messages of none: m p / (m + p - 1).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))

from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from train_data_parallel import in_turns
from training_equivalence import source_of
from training_models import FLOAT, Perceptron, gpt
from transformer import HERE, ROOT, mpi_command
from turns import Side

ONE, STAGES, STREAM = "one rank", "stages alone", "stream"
CLOSE = 1e-4


def source(options: argparse.Namespace) -> Source:
    """The network of the options, from `x` to `y`."""
    if options.model == "gpt":
        return source_of(gpt(options.width, options.layers, 8, 8000, max(128, options.seq)))
    net = Perceptron(*[options.width] * (options.layers + 1))
    return Source(trace(net, [Spec("x", ("batch", options.width), FLOAT)], ["y"], "mlp"))


def numbers(options: argparse.Namespace) -> np.ndarray:
    """A batch."""
    rng = np.random.default_rng(0)
    if options.model == "gpt":
        return rng.integers(0, 8000, (options.batch, options.seq))
    return rng.standard_normal((options.batch, options.width)).astype(np.float32)


def plan(options: argparse.Namespace, count: int) -> str:
    """Equal numbers of layers on each rank, in so many microbatches."""
    last = options.ranks - 1
    homes = {"tokens": 0, "positions": 0, "norm": last, "head": last} if options.model == "gpt" else {}
    homes |= {f"layers.{k}": ((k + 1) * options.ranks - 1) // options.layers for k in range(options.layers)}
    placement = "".join(f"  {name}: {rank}\n" for name, rank in homes.items())
    head = f"ranks: {options.ranks}\nsymbols: {{batch: {{divisor: {count}}}}}\nplacement:\n{placement}"
    return f"{head}outputs: 0\npipeline: {{microbatches: {count}}}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt", "mlp"], default="gpt")
    sizes = {"layers": 12, "width": 512, "batch": 8, "seq": 64, "ranks": 2, "microbatches": 8, "steps": 3, "turns": 5}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    count, ranks = options.microbatches, options.ranks
    plans = {ONE: "ranks: 1\n", STAGES: plan(options, 1), STREAM: plan(options, count)}
    model, x = source(options).model, numbers(options)
    with tempfile.TemporaryDirectory() as name:
        sides = {}
        for side, text in plans.items():
            folder = Path(name) / side.replace(" ", "_")
            folder.mkdir()
            np.save(folder / "x.npy", x)
            compile_source(Source(model.clone()), parse_plan(text, "plan.yaml"), folder / "build")
            command = mpi_command(1 if side == ONE else ranks, str(HERE / "transformer_partc.py"), str(folder))
            sides[side] = Side(side, [command], [ROOT])
        in_turns([*sides.values()], options.steps, options.turns)
        made = {side: np.load(Path(name) / side.replace(" ", "_") / "partc.npy") for side in plans}
        for side, one in sides.items():
            apart = float(np.abs(made[side] - made[ONE]).max() / np.abs(made[ONE]).max())
            print(
                f"  {side:14}{1e3 * statistics.median(one.times):10.2f} ms, fastest {1e3 * min(one.times):.2f}, off by {apart:.1e}"
            )
            assert apart < CLOSE
            one.close()
    for other in (ONE, STAGES):
        middle = statistics.median(sides[other].times) / statistics.median(sides[STREAM].times)
        fastest = min(sides[other].times) / min(sides[STREAM].times)
        print(
            f"stream: {middle:.2f} times as fast as {other} (fastest {fastest:.2f}); ideal {count * ranks / (count + ranks - 1):.2f}"
        )


if __name__ == "__main__":
    main()
