"""Updates that are late, over real MPI or in one process: what ranks train is what a queue of gradients in numpy does.

    python tests/fuzz/late_updates.py                          all plans, about 8 s each where four ranks share two cores
    python tests/fuzz/late_updates.py "dp stages" served
    python tests/fuzz/late_updates.py --in-process one         by ranks that are threads of this process

A table that is looked up and two layers, by `partc train -n`: data parallel, pulled, on servers, in stages, with tensor parallel layers; by
plain SGD, whose updates are on time, or one or two steps late.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.checkpoint import Checkpoint

RATE, STEPS, BATCH, ROWS = 0.3, 7, 24, 36
MODEL = f"""
from partc.compiler import Input, nn
nn.seed(3)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding({ROWS}, 6, init=nn.init.normal(0.5))
        self.up, self.act, self.down = nn.Linear(18, 10), nn.Tanh(), nn.Linear(10, 4)
    def forward(self, op, ids):
        rows = op.Reshape(self.table(op, ids), op.Constant(value_ints=[0, 18]))
        return {{"y": self.down(op, self.act(op, self.up(op, rows)))}}
model, inputs = Net(), {{"ids": Input(["batch", 3], "int64")}}
"""
DP = "dataset: data_parallel\n"
PLANS = {
    "one": "ranks: 1\n",
    "dp": f"ranks: 2\n{DP}",
    "pulled": f"ranks: 3\n{DP}sharding: {{table: pull}}\n",
    "served": f"ranks: 3\nroles: {{ps: 2}}\nplacement: {{table: {{role: ps}}}}\n{DP}",
    "all served": f"ranks: 4\nroles: {{ps: [0, 3]}}\nplacement: {{'*': {{role: ps}}}}\n{DP}",
    "layers served": f"ranks: 3\nroles: {{ps: 1}}\nplacement: {{'{{up,down}}': {{role: ps}}}}\n{DP}",
    "stages": "ranks: 4\nroles: {ps: [2, 3]}\nplacement: {'{table,up,act}': 0, down: 1, table: {role: ps}}\n"
    "pipeline: {microbatches: 4}\n",
    "dp stages": "ranks: 6\nroles: {ps: [4, 5]}\npipeline: {microbatches: 3}\n"
    f"placement: {{'{{table,up,act}}': [0, 1], down: [2, 3], '{{table,up,down}}': {{role: ps}}}}\n{DP}",
    "dp tp": "ranks: 5\nmesh: {dp: 2, tp: 2}\nroles: {ps: [4]}\nplacement: {'*': {role: ps}}\n"
    f"sharding: {{up: colwise, down: rowwise}}\n{DP}",
}
TRAIN = f"""symbols: {{batch: {{divisor: {BATCH}, max: {BATCH}}}}}
train:
  loss: {{type: mean_squared, prediction: y, target: t}}
  optimizer: {{type: sgd, lr: {RATE}}}
  parameters: {{LATE}}
  batch: {BATCH}
  shuffle: false
  log: 1
"""


def queue(
    start: dict[str, np.ndarray], ids: np.ndarray, target: np.ndarray, late: dict[str, int]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of all steps, and the parameters after them, with gradients that wait."""
    now = {name: value.astype(np.float64) for name, value in start.items()}
    waiting = {name: [np.zeros_like(value)] * late[name.split(".")[0]] for name, value in now.items()}
    losses = []
    for rows, t in zip(np.split(ids, STEPS), np.split(target.astype(np.float64), STEPS), strict=True):
        x = now["table.weight"][rows].reshape(BATCH, -1)
        h = np.tanh(x @ now["up.weight"].T + now["up.bias"])
        off = h @ now["down.weight"].T + now["down.bias"] - t
        losses.append(float((off**2).mean()))
        dy = 2 * off / off.size
        dz = dy @ now["down.weight"] * (1 - h * h)
        table = np.zeros_like(now["table.weight"])
        np.add.at(table, rows.reshape(-1), (dz @ now["up.weight"]).reshape(-1, 6))
        made = {"table.weight": table, "up.weight": dz.T @ x, "up.bias": dz.sum(0)}
        made |= {"down.weight": dy.T @ h, "down.bias": dy.sum(0)}
        for name, gradient in made.items():
            waiting[name].append(gradient)
            now[name] = now[name] - RATE * waiting[name].pop(0)
    return losses, now


def trained(folder: Path, plan: str, steps: int, here: bool) -> tuple[list[float], dict[str, np.ndarray]]:
    """What `partc train` does, over MPI in processes of its own, or in this one."""
    (folder / "plan.yaml").write_text(plan)
    at, kept = str(folder / "plan.yaml"), folder / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    lines = folder / "metrics.jsonl"
    lines.unlink(missing_ok=True)
    given = ["-n", plan.split()[1], "--steps", str(steps), "--data", str(folder / "data.npz")]
    given += ["--checkpoint", str(kept), "--metrics", str(lines)]
    compile_model(folder / "model.py", folder / "plan.yaml", folder / "build")
    asked = ["train", str(folder / "build"), "--plan", at, *given]
    if here:
        with contextlib.redirect_stdout(io.StringIO()):
            assert invoke([*asked, "--in-process"]) == 0
    else:
        subprocess.run([sys.executable, "-m", "partc.cli", *asked], check=True, timeout=120, stdout=subprocess.DEVNULL)
    found = Checkpoint.open(kept / f"step_{steps:08d}")
    parameters = [f"{layer}.{one}" for layer in ("up", "down") for one in ("weight", "bias")]
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    losses = [line["loss"] for line in told if line["kind"] == "train"]
    return losses, {name: np.array(found.read(name)) for name in ("table.weight", *parameters)}


def main() -> int:
    """1 where a plan is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", default=list(PLANS), help="their names; without one all")
    parser.add_argument("--in-process", action="store_true", help="all ranks as threads of this process, without MPI")
    options = parser.parse_args()
    random, wrong = np.random.default_rng(1), 0
    ids = random.integers(-ROWS, ROWS, (STEPS * BATCH, 3)) // 2
    target = random.standard_normal((STEPS * BATCH, 4)).astype(np.float32)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "model.py").write_text(MODEL)
        np.savez(folder / "data.npz", ids=ids, t=target)
        applies_zeros = "ranks: 1\n" + TRAIN.replace("LATE", "'*': {staleness: 1}")
        _, start = trained(folder, applies_zeros, 1, options.in_process)
        for table, up in ((0, 0), (1, 0), (2, 1)):
            want, parameters = queue(start, ids, target, {"table": table, "up": up, "down": 0})
            for name in options.plans:
                late = f"table: {{staleness: {table}}}, up: {{staleness: {up}}}"
                losses, have = trained(folder, PLANS[name] + TRAIN.replace("LATE", late), STEPS, options.in_process)
                off = max(float(np.abs(have[one] - parameters[one]).max()) for one in have)
                apart = max(abs(one - other) for one, other in zip(losses, want, strict=True))
                wrong += max(off, apart) > 1e-6
                told = f"table {table}, up {up} steps late"
                print(f"{name}: {told}: losses {apart:.1e}, parameters {off:.1e}", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    sys.exit(main())
