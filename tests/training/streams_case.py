"""A small model of three layers, plans of one to three ranks, and sources of its records, for trainings on streams."""

from __future__ import annotations

from pathlib import Path

from training_command_case import TRAIN, built

MODEL = """
from partc.compiler import Input, Symbol, nn
nn.seed(3)
batch = Symbol()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.m, self.b = nn.Linear(12, 16), nn.Linear(16, 10), nn.Linear(10, 6)
    def forward(self, op, x):
        return self.b(op, op.Tanh(self.m(op, op.Tanh(self.a(op, x)))))
model = Net()
inputs = {"x": Input([batch, 12], "float32")}
outputs = ["y"]
"""
PARALLEL = "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\nsymbols: {batch: {divisor: 2}}\n"
PLANS = {
    "one": "ranks: 1\n",
    "parallel": PARALLEL,
    "three": PARALLEL.replace("ranks: 2", "ranks: 3").replace("dp: 2", "dp: 3").replace("divisor: 2", "divisor: 3"),
    "placed": "ranks: 2\nplacement: {a: 0, m: 1, b: 1}\n",
    "middle": "ranks: 3\nplacement: {a: 1, m: 0, b: 2}\n",
}
"""Of `middle` rank 0, which prints the log, reads nothing."""

ARRAYS = """
import numpy as np, torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
with np.load("data.npz") as arrays:
    x, label = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["label"])
"""
LOADER = ARRAYS + "source = DataLoader(TensorDataset(x, label), batch_size=12, shuffle=True)\n"
COLLATED = LOADER.replace(
    "shuffle=True", "shuffle=True, collate_fn=lambda rows: torch.utils.data.default_collate(rows)"
)
STREAM = ARRAYS + "def source(epoch):\n    yield from zip(x.roll(epoch, 0), label.roll(epoch, 0))\n"
ITERABLE = (
    ARRAYS
    + """
class Records(IterableDataset):
    def __iter__(self):
        return iter({"x": one, "label": other} for one, other in zip(x, label))
source = Records()
"""
)
SOURCES = {"loader": LOADER, "collated": COLLATED, "stream": STREAM, "iterable": ITERABLE}


def prepared(folder: Path, source: str, *names: str, more: str = "") -> None:
    """Compiles the plans of these names, all by default, whose data is a file with this text; `more` ends each plan."""
    (folder / "model.py").write_text(MODEL)
    (folder / "source.py").write_text(source)
    batch = "" if "DataLoader(" in source else "  batch: 12\n"
    train = TRAIN.replace("data.npz", "source.py").replace("  batch: 12\n", batch)
    for name in names or PLANS:
        built(folder, PLANS[name] + train + more, name)
