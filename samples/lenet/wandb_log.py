"""Logs a training to Weights & Biases where `wandb` is installed, else as JSON lines into `wandb_log.jsonl`.

    train: {callbacks: wandb_log.py, ...}

wandb's own variables hold: WANDB_PROJECT, WANDB_MODE=offline, and for a resumed training WANDB_RUN_ID with WANDB_RESUME=allow. Rank 0
alone calls what is here, so that a job is one run, which begins with the first line of the log.
"""

import json
import math
import os
from pathlib import Path

try:
    import wandb
except ImportError:
    wandb = None

FILE = Path("wandb_log.jsonl")
runs = []


def run():
    if not runs:
        runs.append(wandb.init(project=os.environ.get("WANDB_PROJECT", "partc")))
    return runs[0]


def log(kind, step, numbers):
    numbers = {f"{kind}/{name}": float(value) for name, value in numbers.items()}
    if wandb is not None:
        run().log(numbers, step=step)
    else:
        write(step, {name: value if math.isfinite(value) else None for name, value in numbers.items()})


def write(step, row):
    with FILE.open("a") as file:
        file.write(json.dumps({"_step": step, **row}) + "\n")


def on_step(progress):
    more = {"lr": progress.rate, "records_per_second": progress.speed, "epoch": progress.epoch}
    log("train", progress.step, {**progress.metrics, **progress.more, **more})


def on_evaluate(step, epoch, metrics):
    log("test", step, metrics)


def on_save(step, path):
    if wandb is not None:
        run().summary["checkpoint"] = str(path)
    else:
        write(step, {"checkpoint": str(path)})
