"""Random trainings of layers of experts that ranks share, each compared with one rank.

    python tests/fuzz/random_experts.py --cases 200 --seed 1

Meshes, the axes of tokens and experts, microbatches, recomputing, ZeRO, clipping and styles are drawn. A plan may be refused; a training
that is another one than on one rank is a fault. The last line has the numbers of both.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from expert_layers import SGD, batches, kinds, model
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from training_equivalence import run_whole, same_training

MESHES = (
    ("dp: 2", 2),
    ("dp: 3", 3),
    ("dp: 4", 4),
    ("dp: 2, ep: 2", 4),
    ("dp: 2, tp: 2", 4),
    ("dp: 3, ep: 2", 6),
    ("ep: 2, dp: 2", 4),
)
SYMBOLS = "symbols: {batch: {divisor: 72}}\n"


def drawn(seed: int) -> tuple[str, str]:
    """A plan, and the training of one rank."""
    draw = random.Random(seed)
    mesh, ranks = draw.choice(MESHES)
    axes = [part.split(":")[0].strip() for part in mesh.split(",")]
    cut = draw.choice(["", *axes, f"[{', '.join(axes)}]"])
    data = f"dataset: {{x: [{cut}, null], t: [{cut}, null]}}\n" if cut else ""
    rules = {layer: draw.choice(axes) for layer in ("l0_*", "l1_*") if draw.random() < 0.8}
    experts = f"experts: {{{', '.join(f'{one!r}: {{axis: {axis}}}' for one, axis in rules.items())}}}\n"
    parts = draw.choice(
        ["", "", "pipeline: {microbatches: 2}\n", "pipeline: {microbatches: 3, recompute: ['l0_*', 'l1_*']}\n"]
    )
    style = "sharding: {l0_up: colwise, l0_down: rowwise}\n" if "tp" in axes and draw.random() < 0.5 else ""
    clip, shard = draw.choice([("", ""), ("", ""), (", clip: {norm: 0.1}", ""), ("", f", shard: {axes[0]}")])
    trained = [SGD.replace("lr: 0.3}", f"lr: 0.3{one}}}{clip}") for one in ("", shard)]
    return f"ranks: {ranks}\nmesh: {{{mesh}}}\n{SYMBOLS}{data}{experts}{parts}{style}{trained[1]}", trained[0]


def main(count: int, first: int) -> int:
    """Trains so many; the number of faults."""
    source = Source(from_proto(model(2), Path("model.onnx")))
    steps = [
        {**one, "t": np.random.default_rng(k).standard_normal((len(one["x"]), 4)).astype(np.float32)}
        for k, one in enumerate(batches(72, 144))
    ]
    faults = refused = 0
    for seed in range(first, first + count):
        plan, train = drawn(seed)
        whole = run_whole(source, f"ranks: 1\n{SYMBOLS}{train}", steps)
        try:
            with tempfile.TemporaryDirectory() as folder:
                program = same_training(
                    lambda: Source(from_proto(model(2), Path("model.onnx"))),
                    plan,
                    Path(folder) / "a",
                    steps,
                    rtol=2e-5,
                    atol=2e-5,
                    whole=whole,
                )
            print(f"{seed}: equal, {dict(kinds(program))}", flush=True)
        except CompileError as error:
            refused += 1
            print(f"{seed}: refused: {error}\n{plan}", flush=True)
        except Exception as error:
            faults += 1
            print(f"{seed}: {type(error).__name__}: {str(error)[:600]}\n{plan}", flush=True)
    print(f"{count} cases, {faults} wrong, {refused} refused")
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument(
        "--seed", type=int, default=1, help="the number of the first case; with --cases 1 that one again"
    )
    said = parser.parse_args()
    sys.exit(bool(main(said.cases, said.seed)))
