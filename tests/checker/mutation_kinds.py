"""Small artifacts of every kind, to be mutated, and what a step of them gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from equivalence import compiled
from onnx import numpy_helper
from partc.runtime import load_local
from partc.runtime.errors import PartcError

Array = np.ndarray


@dataclass(frozen=True)
class Kind:
    """A kind of artifact: a model in ONNX text with the shapes of its weights, a plan, and the inputs of a step."""

    text: str
    weights: Mapping[str, tuple[int, ...]]
    plan: str
    inputs: Mapping[str, tuple[int, ...]]
    classes: Mapping[str, int]


MLP = """g (float[n, 6] x) => (float[n, 5] y) {
    [up] h = MatMul(x, v)  [shift] s = Add(h, b)  [act] t = Tanh(s)  [down] d = MatMul(t, w)  [last] y = Add(d, c) }"""
WEIGHTS = {"v": (6, 12), "b": (12,), "w": (12, 5), "c": (5,)}
LEARN = "train: {loss: {type: softmax_cross_entropy, logits: y, labels: label}, optimizer: %s%s}\n"
TWICE = "symbols: {n: {divisor: 4}}\n"
ADAM, SHARED = "{type: adam, lr: 0.1}", "{type: adam, lr: 0.1, shard: dp}"

KINDS = {
    "placed": Kind(MLP, WEIGHTS, "ranks: 3\nplacement: {up: 0, shift: 1, down: 2, last: 0}\n", {"x": (4, 6)}, {}),
    "sharded": Kind(
        MLP,
        WEIGHTS,
        TWICE + "ranks: 3\nsharding: {up: colwise, down: rowwise, last: {in: [[1, 1], [1]]}}\n",
        {"x": (4, 6)},
        {},
    ),
    "exchanged": Kind(
        MLP,
        WEIGHTS,
        TWICE + "ranks: 4\nsharding: {up: {in: [[4, 1], [1, 1]]}, down: {in: [[1, 4], [4, 1]]}}\n",
        {"x": (4, 6)},
        {},
    ),
    "two groups": Kind(
        MLP,
        WEIGHTS,
        TWICE + "ranks: 4\nplacement: {up: [0, 1], shift: [0, 1], act: [0, 1], down: [2, 3], last: [2, 3]}\n"
        "sharding: {up: colwise, down: {in: [[2, 1], [1, 1]]}}\n",
        {"x": (4, 6)},
        {},
    ),
    "data parallel": Kind(
        MLP, WEIGHTS, TWICE + "ranks: 2\ndataset: data_parallel\n" + LEARN % (ADAM, ""), {"x": (4, 6)}, {"label": 5}
    ),
    "zero": Kind(
        MLP,
        WEIGHTS,
        TWICE + "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\n" + LEARN % (SHARED, ""),
        {"x": (4, 6)},
        {"label": 5},
    ),
    "tensor parallel training": Kind(
        MLP,
        WEIGHTS,
        TWICE
        + "ranks: 4\nmesh: {dp: 2, tp: 2}\ndataset: data_parallel\nsharding: {up: colwise, down: rowwise}\n"
        + LEARN % (ADAM, ""),
        {"x": (4, 6)},
        {"label": 5},
    ),
    "parts of a batch": Kind(
        MLP,
        WEIGHTS,
        TWICE + "ranks: 2\ndataset: data_parallel\n" + LEARN % (ADAM, ", accumulate: 2"),
        {"x": (4, 6)},
        {"label": 5},
    ),
    "pipeline": Kind(
        MLP,
        WEIGHTS,
        TWICE
        + "ranks: 2\nplacement: {up: 0, shift: 0, act: 0, down: 1, last: 1}\n"
        + LEARN % (ADAM, "")
        + "pipeline: {microbatches: 4, schedule: 1f1b}\n",
        {"x": (4, 6)},
        {"label": 5},
    ),
}


def build(kind: Kind, folder: Path) -> Path:
    """The artifact of a kind."""
    rng = np.random.default_rng(5)
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {kind.text}')
    for name, shape in kind.weights.items():
        proto.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    compiled(proto, kind.plan, folder)
    return folder


def run(kind: Kind, folder: Path) -> dict[str, Array] | str:
    """What one step gives and leaves, by name; the reason where it cannot be run."""
    rng = np.random.default_rng(6)
    values: dict[str, Any] = {name: rng.normal(size=shape).astype(np.float32) for name, shape in kind.inputs.items()}
    values |= {name: rng.integers(0, count, 4) for name, count in kind.classes.items()}
    values |= {"lr": np.float32(0.1), "bias1": np.float32(0.1), "bias2": np.float32(0.001), "step": np.int64(0)}
    found: dict[str, Array] = {}
    try:
        with load_local(folder, trust=True, stall=5) as program:
            for _ in range(2):
                given = {port.name: np.asarray(values[port.name]) for port in program.inputs}
                found |= {name: np.asarray(value) for name, value in program(given).items()}
            for rank in program.ranks:
                found |= {f"{record.value} on {rank.rank}": array.copy() for record, array in rank.state.arrays()}
    except (PartcError, ValueError, KeyError, RuntimeError, OSError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return found
