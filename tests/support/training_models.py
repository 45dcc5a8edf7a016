"""Models that are trained in tests and benchmarks: each a module of `nn` that ends in its loss, its inputs, and what to feed.

    one = gpt(width=256, layers=2)
    trace(one.module, one.inputs, ["loss"], one.name)      the graph of the loss
    one.feeds(np.random.default_rng(0), batch=4, seq=64)   numbers for its inputs

`training_torch.py` has the same networks for torch, with the same names of parameters.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from partc.compiler import nn
from partc.compiler.frontend.inputs import Spec

Feeds: TypeAlias = dict[str, np.ndarray]
SAMPLES = Path(__file__).parents[2] / "samples"
FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


@dataclass(frozen=True)
class Model:
    """A network with its loss. `feeds` takes a generator and the sizes of the dynamic dims; `sizes` are those of the network."""

    name: str
    module: nn.Module
    inputs: tuple[Spec, ...]
    feeds: Callable[..., Feeds]
    sizes: dict[str, int]


def sample(path: str) -> ModuleType:
    """A file of `samples` as a module."""
    spec = importlib.util.spec_from_file_location(f"sample_{path.replace('/', '_')}", SAMPLES / f"{path}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its own module up while it is made.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class CrossEntropy(nn.Module):
    """The mean of -log softmax(net(x)) at the labels, whatever dims lie before the classes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, op: Any, x: ir.Value, labels: ir.Value) -> Any:
        logs = op.LogSoftmax(self.net(op, x), axis=-1)
        chosen = op.GatherElements(logs, op.Unsqueeze(labels, [-1]), axis=-1)
        return op.Neg(op.ReduceMean(chosen, keepdims=0))


class Perceptron(nn.Module):
    """Linear layers with Relu between them."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)])

    def forward(self, op: Any, x: ir.Value) -> Any:
        for k, layer in enumerate(self.layers):
            x = layer(op, op.Relu(x) if k else x)
        return x


class ResNet(nn.Module):
    """ResNet-18 of the samples, its first stage `width` channels wide."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        own = sample("resnet/make_model")
        self.conv1, self.bn1 = own.conv(3, width, 7, 2), own.BatchNorm(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        pairs = zip(widths[:-1], widths[1:], (1, 2, 2, 2), strict=True)
        self.stages = nn.ModuleList([own.stage(a, b, stride) for a, b, stride in pairs])
        self.avgpool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, op: Any, x: ir.Value) -> Any:
        x = self.maxpool(op, op.Relu(self.bn1(op, self.conv1(op, x))))
        for stage in self.stages:
            x = stage(op, x)
        return self.fc(op, self.flatten(op, self.avgpool(op, x)))


class Clicks(nn.Module):
    """A recommendation model with its loss: categories are looked up, all pairs multiplied, and perceptrons on both sides.

    M. Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.
    """

    def __init__(self, tables: int, rows: int, width: int, dense: int, inner: int) -> None:
        super().__init__()
        self.width = width
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        self.bottom = Perceptron(dense, inner, inner, width)
        count = tables + 1
        self.top = Perceptron(width + count * (count - 1) // 2, inner, inner, 1)
        self.pairs = [i * count + j for i in range(count) for j in range(i)]

    def forward(self, op: Any, x: ir.Value, ids: ir.Value, clicked: ir.Value) -> Any:
        low = self.bottom(op, x)
        rows = [op.Unsqueeze(low, [1])]
        for k, table in enumerate(self.tables):
            one = op.Gather(ids, op.Constant(value_int=k), axis=1)
            rows.append(op.Unsqueeze(table(op, one), [1]))
        all_rows = op.Concat(*rows, axis=1)
        products = op.Flatten(op.MatMul(all_rows, op.Transpose(all_rows, perm=[0, 2, 1])), axis=1)
        pairs = op.Gather(products, op.Constant(value_ints=self.pairs), axis=1)
        score = op.Squeeze(self.top(op, op.Concat(low, pairs, axis=1)), [1])
        return op.ReduceMean(op.Sub(op.Softplus(score), op.Mul(score, clicked)), keepdims=0)


def mlp(width: int = 512, inputs: int = 784, classes: int = 10) -> Model:
    """Two hidden layers."""

    def feeds(rng: np.random.Generator, batch: int) -> Feeds:
        return {"x": _normal(rng, batch, inputs), "labels": rng.integers(0, classes, batch)}

    net = CrossEntropy(Perceptron(inputs, width, width, classes))
    return Model("mlp", net, _inputs(["batch", inputs], ["batch"]), feeds, {"width": width, "inputs": inputs})


def lenet() -> Model:
    """LeNet of the samples."""

    def feeds(rng: np.random.Generator, batch: int) -> Feeds:
        return {"x": _normal(rng, batch, 1, 32, 32), "labels": rng.integers(0, 10, batch)}

    return Model(
        "lenet", CrossEntropy(sample("lenet/model").LeNet()), _inputs(["batch", 1, 32, 32], ["batch"]), feeds, {}
    )


def resnet(width: int = 64, size: int = 64, classes: int = 10) -> Model:
    """ResNet-18 with batch normalization over the batch, for images of size x size."""

    def feeds(rng: np.random.Generator, batch: int) -> Feeds:
        return {"x": _normal(rng, batch, 3, size, size), "labels": rng.integers(0, classes, batch)}

    net = CrossEntropy(ResNet(width, classes)).train()
    inputs = _inputs(["batch", 3, size, size], ["batch"])
    return Model("resnet", net, inputs, feeds, {"width": width})


def gpt(width: int = 256, layers: int = 2, heads: int = 4, vocabulary: int = 1000, context: int = 128) -> Model:
    """GPT of the samples; every token is to tell a label."""

    def feeds(rng: np.random.Generator, batch: int, seq: int) -> Feeds:
        return {name: rng.integers(0, vocabulary, (batch, seq)) for name in ("x", "labels")}

    own = sample("gpt/model")
    sizes = {"width": width, "layers": layers, "heads": heads, "vocabulary": vocabulary, "context": context}
    inputs = (Spec("x", ("batch", "seq"), INT64), Spec("labels", ("batch", "seq"), INT64))
    return Model("gpt", CrossEntropy(own.GPT(own.Sizes(**sizes))), inputs, feeds, sizes)


def dlrm(tables: int = 8, rows: int = 5000, width: int = 16, dense: int = 13, inner: int = 64) -> Model:
    """Numbers and categories in, the chance of a click out."""

    def feeds(rng: np.random.Generator, batch: int) -> Feeds:
        return {
            "x": _normal(rng, batch, dense),
            "ids": rng.integers(0, rows, (batch, tables)),
            "clicked": rng.integers(0, 2, batch).astype(np.float32),
        }

    inputs = (
        Spec("x", ("batch", dense), FLOAT),
        Spec("ids", ("batch", tables), INT64),
        Spec("clicked", ("batch",), FLOAT),
    )
    sizes = {"tables": tables, "rows": rows, "width": width, "dense": dense, "inner": inner}
    return Model("dlrm", Clicks(**sizes), inputs, feeds, sizes)


def _inputs(x: list[int | str], labels: list[int | str]) -> tuple[Spec, ...]:
    return Spec("x", tuple(x), FLOAT), Spec("labels", tuple(labels), INT64)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)
