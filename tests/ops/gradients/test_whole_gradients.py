"""Whole models: the loss and every gradient are those of torch, for several sizes of the dynamic dims with one graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from gradient_case import evaluate
from partc.compiler.autodiff.engine import differentiate_nodes
from training_models import Model, dlrm, gpt, lenet, mlp, resnet

torch = pytest.importorskip("torch", reason="needs partc[torch]")

from training_torch import TorchStep  # noqa: E402
from unsharded_gradient import Step, same_gradients  # noqa: E402

Sizes = dict[str, int]
MODELS: list[tuple[Callable[[], Model], list[Sizes]]] = [
    (lambda: mlp(width=48, inputs=37), [{"batch": 5}, {"batch": 1}]),
    (lenet, [{"batch": 3}, {"batch": 2}]),
    (lambda: resnet(width=12, size=64), [{"batch": 3}, {"batch": 2}]),
    (
        lambda: gpt(width=48, layers=2, heads=3, vocabulary=61, context=32),
        [{"batch": 2, "seq": 9}, {"batch": 1, "seq": 32}],
    ),
    (lambda: dlrm(tables=3, rows=50, width=8, dense=5, inner=12), [{"batch": 7}, {"batch": 2}]),
]


@pytest.mark.parametrize(("make", "sizes"), MODELS, ids=["mlp", "lenet", "resnet", "gpt", "dlrm"])
def test_gradients_are_those_of_torch(make: Callable[[], Model], sizes: list[Sizes]) -> None:
    model = make()
    step = Step(model)
    other = TorchStep(model, step.parameters)
    for own in sizes:
        feeds = model.feeds(np.random.default_rng(7), **own)
        step.bind(feeds)
        step()
        loss = other({name: torch.from_numpy(array) for name, array in feeds.items()})
        assert step.loss == pytest.approx(float(loss), rel=1e-5)
        same_gradients(step.gradients, other.gradients, close=5e-5)


@pytest.mark.parametrize("stride", [2, 3])
def test_of_equal_numbers_the_first_is_the_largest(stride: int) -> None:
    rng = np.random.default_rng(3)
    image = rng.integers(0, 2, (2, 3, 8, 11)).astype(np.float32)
    x = ir.Value(name="x", shape=ir.Shape(["batch", 3, 8, 11]), type=ir.TensorType(ir.DataType.FLOAT))
    sizes = ir.convenience.convert_attributes({"kernel_shape": [2, 2], "strides": [stride, stride]})
    pool = ir.Node("", "MaxPool", [x], sizes, outputs=[ir.Value(name="y")])
    backward = differentiate_nodes([pool], {"y": "dy"}, ["x"])
    assert len(backward.forward[0].outputs) == 1
    given = torch.from_numpy(image).requires_grad_()
    made = torch.nn.functional.max_pool2d(given, 2, stride)
    dy = rng.uniform(1, 2, made.shape).astype(np.float32)
    made.backward(torch.from_numpy(dy))
    nodes = [*backward.forward, *backward.early, *backward.nodes]
    dx = backward.gradients["x"]
    np.testing.assert_array_equal(evaluate(nodes, {"x": image, "dy": dy}, backward.constants, [dx])[dx], given.grad)
