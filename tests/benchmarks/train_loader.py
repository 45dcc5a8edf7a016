"""`partc train` on a `DataLoader` against torch's own loop over the same loader, one thread each, in turns; partc on arrays beside it.

    python tests/benchmarks/train_loader.py [--turns 5] [--workers 0 2]

Images of digits, batches of 64, in a perceptron and in LeNet, SGD with momentum. Of a `TensorDataset` partc takes a batch's rows at once;
the same records in a `Dataset` of a class of its own are read one by one on both sides. The throughput is that of the last half of a run,
in records a second: the median of some runs, and its ratio to torch's. Each side is a process of its own. The interpreter has torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np

RECORDS, BATCH, EPOCHS = 9_600, 64, 4
LAYERS = {
    "perceptron": (
        "self.flat = nn.Flatten()\n        self.a, self.b = nn.Linear(784, 256), nn.Linear(256, 10)",
        "self.b(relu(self.a(self.flat(x))))",
    ),
    "lenet": (
        "self.flat, self.p = nn.Flatten(), nn.MaxPool2d(2)\n        self.c, self.d = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)\n"
        "        self.a, self.b = nn.Linear(256, 120), nn.Linear(120, 10)",
        "self.b(relu(self.a(self.flat(self.p(relu(self.d(self.p(relu(self.c(x)))))))))) ",
    ),
}
NET = """
import torch
from torch import nn
from torch.nn.functional import relu
torch.manual_seed(5)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {layers}
    def forward(self, x):
        return {forward}
net = Net()
"""
MODEL = """
import sys
sys.path.insert(0, {folder!r})
from net import net
from partc.compiler import Input, Symbol
model, inputs, outputs = net, {{"x": Input([Symbol(), 1, 28, 28], "float32")}}, ["y"]
"""
SOURCE = """
import numpy as np, torch
from torch.utils.data import DataLoader, TensorDataset
class Digits(TensorDataset):
    pass
images, labels = (torch.from_numpy(np.load(f"{folder}/{{name}}.npy")) for name in ("x", "label"))
source = DataLoader({dataset}(images, labels), {batch}, shuffle=True, drop_last=True, num_workers={workers})
"""
TORCH = """
import sys, time
import torch
torch.set_num_threads(1)
from net import net
from source import source
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
net.train()
for epoch in range({epochs}):
    if epoch == {epochs} // 2:
        begin = time.perf_counter()
    for x, label in source:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), label)
        loss.backward()
        optimizer.step()
    print(loss.item(), file=sys.stderr)
print({records} * ({epochs} - {epochs} // 2) / (time.perf_counter() - begin))
"""
PLAN = """
ranks: 1
train:
  loss: {{type: softmax_cross_entropy, logits: y, labels: label}}
  optimizer: {{type: momentum, lr: 0.01, momentum: 0.9}}
  data: {data}
  batch: {batch}
  epochs: {epochs}
  log: {log}
"""


def written(folder: Path, name: str, dataset: str, workers: int) -> None:
    """The data, both programs, and artifacts on the loader and on the arrays."""
    random = np.random.default_rng(0)
    np.save(folder / "x.npy", random.standard_normal((RECORDS, 1, 28, 28)).astype(np.float32))
    np.save(folder / "label.npy", random.integers(0, 10, RECORDS))
    layers, forward = LAYERS[name]
    (folder / "net.py").write_text(NET.format(layers=layers, forward=forward))
    (folder / "model.py").write_text(MODEL.format(folder=str(folder)))
    (folder / "source.py").write_text(SOURCE.format(folder=str(folder), dataset=dataset, batch=BATCH, workers=workers))
    (folder / "train.py").write_text(TORCH.format(epochs=EPOCHS, records=RECORDS // BATCH * BATCH))
    for kind, data in (("loader", "source.py"), ("arrays", "{x: x.npy, label: label.npy}")):
        half = RECORDS // BATCH * EPOCHS // 2
        (folder / f"{kind}.yaml").write_text(PLAN.format(data=data, batch=BATCH, epochs=EPOCHS, log=half))
        command = [sys.executable, "-m", "partc.cli", "compile", "model.py", "--plan", f"{kind}.yaml", "-o", kind]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


def of_partc(folder: Path, kind: str) -> float:
    """Records a second of the last half, by the log's own number."""
    (folder / "m.jsonl").unlink(missing_ok=True)
    options = ["--plan", f"{kind}.yaml", "--threads", "1", "--metrics", "m.jsonl"]
    command = [sys.executable, "-m", "partc.cli", "train", kind, *options]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    return float([row["records_per_second"] for row in rows if row["kind"] == "train"][-1])


def of_torch(folder: Path) -> float:
    """The same of torch's loop."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, check=True, capture_output=True, text=True, env=environment
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="of each side")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="processes of the DataLoader")
    options = parser.parse_args()
    head = f"{'model':12} {'dataset':14} {'workers':>7} {'partc':>10} {'torch':>10} {'ratio':>7} {'arrays':>10} {'ratio':>7}"
    print(f"{head}   records a second")
    for name, dataset, workers in product(LAYERS, ("TensorDataset", "Digits"), options.workers):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            written(folder, name, dataset, workers)
            turns = [
                (of_partc(folder, "loader"), of_torch(folder), of_partc(folder, "arrays")) for _ in range(options.turns)
            ]
        own, other, arrays = (statistics.median(side) for side in zip(*turns, strict=True))
        ratios = f"{own:10,.0f} {other:10,.0f} {own / other:7.2f} {arrays:10,.0f} {arrays / other:7.2f}"
        print(f"{name:12} {dataset:14} {workers:7} {ratios}", flush=True)


if __name__ == "__main__":
    main()
