"""Plans of whole models with targets, of every kind of parallelism: what `target_models.py` trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from training_models import Model, dlrm, gpt, lenet, resnet

Sizes = dict[str, tuple[int, int, int]]
"""Of each dynamic dim the sizes in three steps."""


@dataclass(frozen=True)
class Layout:
    """The head of a plan: ranks, layout and targets.

    `shard`: what its optimizer has besides; `train`: lines of the training; `accumulated`: those that the whole has not; `rows`: tables
    have row-wise optimizers. `statistics`: those of a batch are of microbatches, so the whole has as many; `shares`: by how many ranks the
    batch is shared then.
    """

    name: str
    plan: str
    shard: str = ""
    train: str = ""
    accumulated: str = ""
    rows: bool = False
    microbatches: int = 1
    statistics: bool = False
    shares: int = 1

    @property
    def order(self) -> tuple[int, int]:
        """What the order of records of the whole follows from."""
        return (self.microbatches, self.shares) if self.statistics else (1, 1)

    def ordered(self, array: np.ndarray) -> np.ndarray:
        """The records of a batch, those of a microbatch of all ranks side by side."""
        count, shares = self.order
        parts = array.reshape(shares, count, len(array) // shares // count, *array.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(array.shape)


def model_of(name: str) -> tuple[Model, Sizes]:
    """A model of its kind, small, and the sizes of three batches."""
    sizes = {"batch": (16, 8, 16)}
    match name:
        case "gpt":
            return gpt(24, 4, 4, 36, 8), {**sizes, "seq": (6, 5, 8)}
        case "dlrm":
            return dlrm(3, 24, 6, 13, 12), sizes
        case "resnet":
            return resnet(4, 32), sizes
        case _:
            return lenet(), sizes


def layouts(targets: str, heads: dict[str, str], more: Sequence[Layout]) -> tuple[Layout, ...]:
    """Layouts of a model: all with its targets."""
    every = [*(Layout(name, plan) for name, plan in heads.items()), *more]
    return tuple(replace(one, plan=f"{one.plan}target: {targets}\n") for one in every)


ZERO = ", shard: dp"
SHARED = "symbols: {batch: {divisor: 8}}\n"
DATA = f"ranks: 2\nmesh: {{dp: 2}}\n{SHARED}dataset: data_parallel\n"
CLIP = "  clip: {norm: 0.3}\n  bucket_mb: 0.002\n"


def piped(head: str, count: int, schedule: str, more: str = "") -> str:
    """A plan with a pipeline."""
    return f"{head}{SHARED}pipeline: {{microbatches: {count}, schedule: {schedule}{more}}}\n"


LENET_STAGES = "placement: {conv1: 0, 'pool*': 0, conv2: 1, fc1: 1, fc2: 1, fc3: 1}\n"
LENET = layouts(
    "{'**': cuda, conv2: cpu, fc2: cpu}",
    {
        "one rank": "ranks: 1\n",
        "placed on 5": "ranks: 5\nplacement: {conv1: 3, conv2: 4, fc1: 0, fc2: 1, fc3: 2}\n",
        "dp 2": DATA,
        "tp 2": "ranks: 2\nmesh: {tp: 2}\nsharding: {fc1: colwise, fc2: rowwise}\n",
        "placed, tp and dp": f"ranks: 5\n{SHARED}placement: {{conv2: [3, 4], fc1: [0, 1], fc2: [0, 1], fc3: 2}}\n"
        "sharding: {conv2: {in: [[2, 1, 1, 1]]}, fc1: colwise, fc2: rowwise}\n",
        "pipeline 1f1b of 5, 4 microbatches": piped(
            "ranks: 5\nplacement: {conv1: 3, conv2: 4, fc1: 0, fc2: 1, fc3: 2}\n", 4, "1f1b"
        ),
    },
    [
        Layout("zero over 2", DATA, ZERO, CLIP),
        Layout("accumulate 4, zero over 2", DATA, ZERO, accumulated="  accumulate: 4\n"),
        Layout(
            "pipeline of 2 x zero over 2",
            piped(
                "ranks: 4\nmesh: {pp: 2, dp: 2}\ndataset: {x: [dp, null, null, null], labels: [dp]}\n"
                "placement: {conv1: {pp: 0}, conv2: {pp: 0}, fc1: {pp: 1}, fc2: {pp: 1}, fc3: {pp: 1}}\n",
                4,
                "zb_h1",
            ),
            ZERO,
            CLIP,
        ),
    ],
)

NODES = "tokens: {}, positions: {}, 'layers.0': {}, 'layers.1': {}, 'layers.2': {}, 'layers.3': {}, norm: {}, head: {}"
BLOCKS = "sharding: {'layers.*.*.project': colwise, 'layers.*.*.out': rowwise}\n"
BOTH = (
    f"ranks: 4\nmesh: {{dp: 2, tp: 2}}\n{SHARED}dataset: {{x: [dp, null], labels: [dp, null]}}\n"
    "sharding: {'layers.*.*.project': colwise, 'layers.*.*.out': rowwise, tokens: {parameters: {weight: [tp, null]}}, head: colwise}\n"
)


def placed(ranks: str) -> str:
    """The GPT's modules on these ranks."""
    return f"placement: {{{NODES.format(*ranks.split())}}}\n"


def on_axis(stages: str) -> str:
    """The GPT's modules on these places of the mesh axis pp."""
    return f"placement: {{{NODES.format(*(f'{{pp: {one}}}' for one in stages.split()))}}}\n"


SEQ = "dataset: {x: [dp, null], labels: [dp, null]}\n"
GPT = layouts(
    "{'**': cuda, '{tokens,positions}': cpu, 'layers.1.attention': cpu, layers.2: cpu}",
    {
        "one rank": "ranks: 1\n",
        "placed on 4": "ranks: 4\n" + placed("0 1 0 1 2 3 3 3"),
        "tp 2": "ranks: 2\nmesh: {tp: 2}\n" + BLOCKS,
        "dp 2": DATA,
        "dp 2 x tp 2": BOTH,
        "pipeline 1f1b of 4, 4 microbatches": piped("ranks: 4\n" + placed("0 0 0 1 2 3 3 3"), 4, "1f1b"),
        "pipeline zb_h1 of 4, recompute": piped(
            "ranks: 4\n" + placed("0 0 0 1 2 3 3 3"), 4, "zb_h1", ", recompute: ['layers.*']"
        ),
        "pipeline interleaved of 2": piped("ranks: 2\n" + placed("0 0 0 1 0 1 1 1"), 4, "interleaved"),
        "pipeline zbv of 2": piped("ranks: 2\n" + placed("0 0 0 1 1 0 0 0"), 8, "zbv"),
        "pipeline of 2 x tp 2": piped(
            "ranks: 4\nmesh: {pp: 2, tp: 2}\n" + BLOCKS + on_axis("0 0 0 0 1 1 1 1"), 2, "auto"
        ),
    },
    [
        Layout("zero over 2", DATA, ZERO, CLIP),
        Layout("zero over 2 x tp 2", BOTH, ZERO),
        Layout("accumulate 2, zero over 2 x tp 2", BOTH, ZERO, accumulated="  accumulate: 2\n"),
        Layout(
            "pipeline of 2 x zero over 2",
            piped(f"ranks: 4\nmesh: {{pp: 2, dp: 2}}\n{SEQ}" + on_axis("0 0 0 0 1 1 1 1"), 2, "1f1b"),
            ZERO,
            CLIP,
        ),
        Layout(
            "pipeline of 2 x zero over 2 x tp 2",
            piped(f"ranks: 8\nmesh: {{pp: 2, dp: 2, tp: 2}}\n{SEQ}{BLOCKS}" + on_axis("0 0 0 0 1 1 1 1"), 2, "1f1b"),
            ZERO,
        ),
    ],
)

SERVED = "ranks: 3\nroles: {ps: 2}\nplacement: {'tables*': {role: ps}}\n" + SHARED + "dataset: data_parallel\n"
DLRM = layouts(
    "{'**': cuda, 'tables*': cpu}",
    {
        "one rank": "ranks: 1\n",
        "placed on 5": "ranks: 5\nplacement: {'tables.0': 4, 'tables.1': 3, 'tables.2': [1, 2], bottom: 0, top: 2}\n",
        "dp 2": DATA,
        "tp 2": "ranks: 2\nmesh: {tp: 2}\nsharding: {'{top,bottom}.layers.0': colwise, '{top,bottom}.layers.1': rowwise}\n",
        "dp 2, tables cut": DATA.replace(
            "dataset: data_parallel", "dataset: {x: [dp, null], ids: [dp, null], clicked: [dp]}"
        )
        + "sharding: {'tables.[0-1]': {parameters: {weight: [dp, null]}}}\n",
        "pipeline 1f1b of 2, 4 microbatches": piped(
            "ranks: 2\nplacement: {'tables.*': 0, bottom: 0, top: 1}\n", 4, "1f1b"
        ),
        "pipeline zb_h1 of 2, recompute": piped(
            "ranks: 2\nplacement: {'tables.*': 0, bottom: 0, top: 1}\n", 4, "zb_h1", ", recompute: ['bottom']"
        ),
    },
    [
        Layout("by rows, one rank", "ranks: 1\n", rows=True),
        Layout("by rows, dp 2, pulled", DATA + "sharding: {'tables.[0-1]': pull}\n", rows=True),
        Layout("by rows, server and dp 2", SERVED, rows=True),
        Layout("zero over 2", DATA, ZERO, CLIP),
        Layout(
            "pipeline of 2 x zero over 2",
            piped(
                "ranks: 4\nmesh: {pp: 2, dp: 2}\ndataset: {x: [dp, null], ids: [dp, null], clicked: [dp]}\n"
                "placement: {'tables.*': {pp: 0}, bottom: {pp: 0}, top: {pp: 1}}\n",
                4,
                "1f1b",
            ),
            ZERO,
        ),
    ],
)

HALVES = "placement: {conv1: 0, bn1: 0, 'stages.[0-1]': 0, 'stages.[2-3]': 1, avgpool: 1, flatten: 1, fc: 1}\n"
ON_AXIS = HALVES.replace(": 0", ": {pp: 0}").replace(": 1", ": {pp: 1}")
QUARTERS = (
    "placement: {conv1: 0, bn1: 0, stages.0: 0, stages.1: 1, stages.2: 2, stages.3: 3, avgpool: 3, flatten: 3, fc: 3}\n"
)
OWN = ", statistics: microbatch"
RESNET = layouts(
    "{'**': cuda, bn1: cpu, stages.1: cpu, 'stages.3.1.*': cpu}",
    {
        "one rank": "ranks: 1\n",
        "placed on 2": "ranks: 2\n" + HALVES,
        "dp 2": DATA,
        "placed, channels cut": "ranks: 4\nplacement: {'stages.[0-1]': [0, 1], 'stages.[2-3]': [2, 3], fc: 3}\n"
        "sharding: {'stages.*.*.conv1': {in: [null, [2, 1, 1, 1]]}}\n",
    },
    [
        Layout("zero over 2", DATA, ZERO, CLIP),
        Layout("pipeline gpipe of 4", piped("ranks: 4\n" + QUARTERS, 4, "gpipe", OWN), microbatches=4, statistics=True),
        Layout("pipeline 1f1b of 4", piped("ranks: 4\n" + QUARTERS, 4, "1f1b", OWN), microbatches=4, statistics=True),
        Layout("pipeline zb_h1 of 2", piped("ranks: 2\n" + HALVES, 2, "zb_h1", OWN), microbatches=2, statistics=True),
        Layout(
            "pipeline 1f1b of 2, recompute",
            piped("ranks: 2\n" + HALVES, 2, "1f1b", f"{OWN}, recompute: ['stages.*.*']"),
            microbatches=2,
            statistics=True,
        ),
        Layout(
            "pipeline of 2 x zero over 2",
            piped(
                "ranks: 4\nmesh: {pp: 2, dp: 2}\ndataset: {x: [dp, null, null, null], labels: [dp]}\n" + ON_AXIS,
                2,
                "1f1b",
                OWN,
            ),
            ZERO,
            microbatches=2,
            statistics=True,
            shares=2,
        ),
    ],
)

PLANS = {"lenet": LENET, "gpt": GPT, "dlrm": DLRM, "resnet": RESNET}
