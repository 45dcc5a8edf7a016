"""Whole models by every schedule, number of microbatches, loss and optimizer: they learn what one rank learns of whole batches.

    python tests/fuzz/pipeline_models.py [--models mlp,lenet,gpt,dlrm,resnet] [--microbatches 1,2,4,8] [--steps 3]

Each model is laid out in stages as a chain, the GPT also as a loop and a V, with every schedule that fits, with and without `recompute`.
Losses and all tensors after the steps are compared with those of one rank that takes each batch whole, within `TOLERANCE`.
Losses ignore labels that are unevenly spread, of the first microbatch all of them; the GPT has one table for tokens and head, and dropout.
The ResNet's statistics are those of microbatches, so it is compared with a loop over microbatches in PyTorch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from partc.compiler.frontend.source import Source
from partc.runtime.checker.check import check_artifact

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from training_equivalence import run, source_of
from training_models import Model, dlrm, gpt, lenet, mlp, resnet

TOLERANCE, DIVIDED = 1e-6, 1e-5
"""Of a loss, and of the largest element of a tensor; more where an optimizer divides by the root of a gradient's square."""
RECORDS = 16
CHAIN, LOOP, VEE = ("gpipe", "1f1b", "zb_h1", "auto"), ("interleaved", "auto"), ("zbv", "auto")
RATE = 0.01
MOMENTUM = f"type: momentum, lr: {RATE}, momentum: 0.9"
OPTIMIZERS = (
    "type: sgd, lr: 0.1",
    MOMENTUM,
    "type: nesterov, lr: 0.1",
    "type: adam, lr: 0.01, eps: 0.001",
    "type: adamw, lr: 0.01, eps: 0.001",
    "type: lamb, lr: 0.01, eps: 0.001",
    "type: adagrad, lr: 0.01, initial_accumulator: 0.1",
)
ENTROPY = "type: softmax_cross_entropy, logits: y, labels: labels"
LOSSES = {
    "mean": f"{{{ENTROPY}}}",
    "ignored": f"{{{ENTROPY}, ignore_index: 3}}",
    "weights": f"{{{ENTROPY}, weights: [0.1, 3, 1, 0.5, 2, 1, 1, 0.2, 1, 1], ignore_index: 3}}",
    "sum": f"{{{ENTROPY}, ignore_index: 3, reduction: sum}}",
}


@dataclass(frozen=True)
class Layout:
    """A placement with the schedules that fit it."""

    plan: str
    schedules: Sequence[str]
    recompute: str


def layouts(name: str) -> list[Layout]:
    """The placements of a model."""
    if name == "mlp":
        return [Layout("ranks: 3\nplacement: {layers.0: 0, layers.1: 1, layers.2: 2}\n", CHAIN, "layers.[0-1]")]
    if name == "gpt":
        nodes = "tokens: {}, positions: {}, 'layers.0': {}, 'layers.1': {}, 'layers.2': {}, 'layers.3': {}, norm: {}, head: {}"
        return [
            Layout("ranks: 4\n" + placed(nodes, "0 0 0 1 2 3 3 3"), CHAIN, "layers.*"),
            Layout("ranks: 2\n" + placed(nodes, "0 0 0 1 0 1 1 1"), LOOP, "layers.*.attention"),
            Layout("ranks: 2\n" + placed(nodes, "0 0 0 1 1 0 0 0"), VEE, "layers.[1-2]"),
        ]
    if name == "lenet":
        return [Layout("ranks: 5\nplacement: {conv1: 3, conv2: 4, fc1: 0, fc2: 1, fc3: 2}\n", CHAIN, "conv*")]
    if name == "dlrm":
        return [Layout("ranks: 2\nplacement: {top: 1}\n", CHAIN, "bottom")]
    blocks = "ranks: 2\nplacement: {'stages.[2-3]': 1, avgpool: 1, flatten: 1, fc: 1}\n"
    return [Layout(blocks, ("1f1b", "zb_h1"), "stages.*")]


def placed(nodes: str, ranks: str) -> str:
    return f"placement: {{{nodes.format(*ranks.split())}}}\n"


def model_of(name: str) -> tuple[Model, dict[str, int]]:
    """A model of its kind, small, and the sizes of a batch."""
    sizes = {"batch": RECORDS}
    if name == "gpt":
        return gpt(32, 4, 2, 30, 8), {**sizes, "seq": 6}
    made = {"mlp": lambda: mlp(24, 12), "lenet": lenet, "dlrm": lambda: dlrm(3, 50, 8, 13, 16)}
    return (resnet(8, 96) if name == "resnet" else made[name]()), sizes


def batches(model: Model, sizes: Mapping[str, int], steps: int, labels: str) -> list[dict[str, np.ndarray]]:
    """The batches of the steps; of the first quarter of the records every label is ignored."""
    rng = np.random.default_rng(0)
    found = [model.feeds(rng, **sizes) for _ in range(steps)]
    for one in found:
        if labels in one and one[labels].dtype == np.int64:
            one[labels][: RECORDS // 8] = 3
    return found


def cases(name: str) -> Iterator[tuple[str, str, str]]:
    """Loss, optimizer and what else a training has: all of each with the others plain."""
    losses = {"own": "loss"} if name == "dlrm" else {"mean": LOSSES["mean"]} if name == "resnet" else dict(LOSSES)
    if name == "gpt":
        del losses["weights"]  # one for each of ten classes
    first = losses["ignored"] if "ignored" in losses else next(iter(losses.values()))
    yield first, MOMENTUM, ""
    yield from ((loss, MOMENTUM, "  clip: {norm: 0.5}\n") for loss in losses.values() if loss != first)
    if name == "mlp":
        yield from ((first, optimizer, "") for optimizer in OPTIMIZERS)


def main() -> None:
    """Runs all cases, prints the largest difference of each, and ends with an error where one is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,lenet,gpt,dlrm,resnet")
    parser.add_argument("--microbatches", default="1,2,4,8")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--most", type=int, help="so many cases of a model; without it all")
    options = parser.parse_args()
    counts, total, wrong = [int(one) for one in options.microbatches.split(",")], 0, 0
    for name in options.models.split(","):
        begin, worst, number = time.perf_counter(), 0.0, 0
        for found, said in itertools.islice(results(name, counts, options.steps), options.most):
            number, worst = number + 1, max(worst, found)
            if found > 1:
                wrong += 1
                print(f"{name}: {found:.2f} times the tolerance\n{said}", flush=True)
        total += number
        seconds = time.perf_counter() - begin
        print(f"{name}: {number} cases, at most {worst:.2f} times the tolerance, {seconds:.0f} s", flush=True)
    print(f"{total} cases, {wrong} differ")
    sys.exit(bool(wrong))


def results(name: str, counts: Sequence[int], steps: int) -> Iterator[tuple[float, str]]:
    """By case how many times the tolerance it is off, and its plan."""
    model, sizes = model_of(name)
    labels = "clicked" if name == "dlrm" else "labels"
    source, feeds = source_of(model), batches(model, sizes, steps, labels)
    for loss, optimizer, more in cases(name):
        train = f"train:\n  loss: {loss}\n  optimizer: {{{optimizer}}}\n{more}"
        tolerance = DIVIDED if any(word in optimizer for word in ("adam", "lamb", "adagrad")) else TOLERANCE
        whole = None if name == "resnet" else taken(source, f"ranks: 1\n{train}", feeds)
        for layout, count in itertools.product(layouts(name), counts):
            references = {count: by_torch(source, feeds, count)} if whole is None else {count: whole}
            for schedule, again in itertools.product(layout.schedules, (False, True)):
                rules = f"microbatches: {count}, schedule: {schedule}" + (
                    ", statistics: microbatch" if whole is None else ""
                )
                rules += f", recompute: ['{layout.recompute}']" if again else ""
                plan = f"{layout.plan}pipeline: {{{rules}}}\n{train}"
                yield apart(taken(source, plan, feeds), references[count]) / tolerance, plan


Taken = tuple[list[float], dict[str, np.ndarray]]
"""The losses, and all tensors after the steps."""


def taken(source: Source, plan: str, feeds: Sequence[Mapping[str, Any]]) -> Taken:
    """What steps by a plan give on in-process ranks; the artifact is sound."""
    with tempfile.TemporaryDirectory() as place:
        found = run(Source(source.model.clone()), plan, Path(place) / "build", feeds)
        faults = check_artifact(Path(place) / "build")
        assert not faults, faults[0]
        return [float(one["loss"]) for one in found.outputs], dict(found.after)


def apart(have: Taken, want: Taken) -> float:
    """The largest difference of losses, relative, and of tensors, of the largest element of each."""
    losses = [abs(one - other) / abs(other) for one, other in zip(have[0], want[0], strict=True)]
    floats = {name: array for name, array in want[1].items() if np.issubdtype(array.dtype, np.floating)}
    tensors = [
        float(np.abs(have[1][name] - array).max() / max(np.abs(array).max(), 1e-30)) for name, array in floats.items()
    ]
    return max(*losses, *tensors)


def by_torch(source: Source, feeds: Sequence[Mapping[str, np.ndarray]], count: int) -> Taken:
    """A ResNet's steps with the statistics of microbatches, which running ones follow once a step by their mean."""
    import torch
    from torch.nn import functional as nn

    first = {
        name: value.const_value.numpy().copy()
        for name, value in source.model.graph.initializers.items()
        if value.const_value is not None
    }
    running = {name for name in first if name.rpartition(".")[2] in ("running_mean", "running_var")}
    learned = [name for name in first if name.rpartition(".")[2] in ("weight", "bias")]
    state = {name: torch.tensor(first[name], requires_grad=name in learned) for name in (*learned, *running)}
    slots = {name: torch.zeros_like(state[name]) for name in learned}
    moved: list[dict[str, torch.Tensor]] = []

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        for word, value in (("running_mean", mean), ("running_var", var)):
            moved[-1][f"{name}.{word}"] = 0.9 * state[f"{name}.{word}"] + 0.1 * value.detach()
        scale, shift = state[f"{name}.weight"], state[f"{name}.bias"]
        return nn.batch_norm(x, None, None, scale, shift, True, 0.1)

    def block(x: torch.Tensor, name: str, stride: int) -> torch.Tensor:
        y = torch.relu(norm(nn.conv2d(x, state[f"{name}.conv1.weight"], None, stride, 1), f"{name}.bn1"))
        y = norm(nn.conv2d(y, state[f"{name}.conv2.weight"], None, 1, 1), f"{name}.bn2")
        if f"{name}.downsample.0.weight" in state:
            x = norm(nn.conv2d(x, state[f"{name}.downsample.0.weight"], None, stride), f"{name}.downsample.1")
        return torch.relu(x + y)

    def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(norm(nn.conv2d(x, state["conv1.weight"], None, 2, 3), "bn1"))
        x = nn.max_pool2d(x, 3, 2, 1)
        for stage, stride in enumerate((1, 2, 2, 2)):
            x = block(block(x, f"stages.{stage}.0", stride), f"stages.{stage}.1", 1)
        x = x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]
        return nn.cross_entropy(x, labels)

    losses = []
    for feed in feeds:
        moved.clear()
        losses.append(0.0)
        for part in range(count):
            moved.append({})
            rows = slice(part * RECORDS // count, (part + 1) * RECORDS // count)
            loss = loss_of(torch.tensor(feed["x"][rows]), torch.tensor(feed["labels"][rows])) / count
            loss.backward()
            losses[-1] += float(loss.detach())
        with torch.no_grad():
            for name in running:
                state[name] = torch.stack([one[name] for one in moved]).mean(0)
            for name in learned:
                slots[name] = 0.9 * slots[name] + state[name].grad
                state[name] -= RATE * slots[name]
                state[name].grad = None
    return losses, {name: value.detach().numpy() for name, value in state.items()}


if __name__ == "__main__":
    os.environ.setdefault("PARTC_FILL_FREED", "1")
    main()
