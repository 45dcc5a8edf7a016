"""Steps of one rank on one thread while a checkpoint is written in the background, against steps without, in turns.

    python tests/benchmarks/save_beside.py [--width 2048 --turns 9]

Prints the medians of: a step alone, a step beside a save, the call of `save` that begins it, and a save in the foreground.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from partc.compiler.pipeline import compile_model
from partc.runtime import load_trainer

MODEL = """
from partc.compiler import Input, Symbol, nn
nn.seed(3)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
    def forward(self, op, x):
        return self.b(op, op.Tanh(self.a(op, op.Tanh(self.a(op, op.Tanh(self.a(op, x)))))))
model = Net()
inputs = {"x": Input([Symbol(), WIDTH], "float32")}
outputs = ["y"]
"""
PLAN = """
ranks: 1
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: adam, lr: 0.0001}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "model.py").write_text(MODEL.replace("WIDTH", str(given.width)))
        (folder / "plan.yaml").write_text(PLAN)
        compile_model(folder / "model.py", folder / "plan.yaml", folder / "build")
        rng = np.random.default_rng(1)
        x = rng.standard_normal((given.batch, given.width)).astype(np.float32)
        batch = {"x": x, "label": rng.integers(0, 8, given.batch)}
        times: dict[str, list[float]] = {name: [] for name in ("alone", "beside", "begins", "foreground")}
        with load_trainer(folder / "build", threads=1) as trainer:

            def timed(name: str, act: object, *words: object, **more: object) -> None:
                begun = time.perf_counter()
                act(*words, **more)  # type: ignore[operator]
                times[name].append(time.perf_counter() - begun)

            trainer.train(batch)
            for _ in range(given.turns):
                for _ in range(3):
                    timed("alone", trainer.train, batch)
                timed("begins", trainer.save, folder / "runs", keep=2, background=True)
                while trainer.is_saving:
                    timed("beside", trainer.train, batch)
                trainer.finish_saving()
                timed("foreground", trainer.save, folder / "runs", keep=2)
            size = sum(file.stat().st_size for file in next((folder / "runs").glob("step*")).iterdir())
    found = {name: statistics.median(some) if some else float("nan") for name, some in times.items()}
    print(f"{size / 1e6:.0f} MB; " + ", ".join(f"{name} {1000 * one:.1f} ms" for name, one in found.items()))
    print(
        f"a step beside a save: {found['beside'] / found['alone']:.2f} times one alone ({len(times['beside'])} of them)"
    )


if __name__ == "__main__":
    main()
