"""Losses and metrics: values and gradients are torch's, the same whatever the cut, and made of as few passes as can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_shape_inference
import partc.compiler.ops  # noqa: F401
import pytest
from gradient_case import evaluate
from partc.compiler.errors import CompileError
from partc.compiler.ops.gradient import Backward, differentiate_nodes
from partc.compiler.training.losses import add_loss, loss
from partc.compiler.training.metrics import add_metric, metric

Array = np.ndarray[Any, np.dtype[Any]]
RANDOM = np.random.default_rng(11)
FLOAT = onnx.TensorProto.FLOAT


def model(dims: Sequence[int | str | None], kind: int = FLOAT, opset: int = 21) -> ir.Model:
    """y = 2 x."""
    x = onnx.helper.make_tensor_value_info("x", kind, list(dims))
    y = onnx.helper.make_tensor_value_info("y", kind, None)
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "x"], ["y"], "double")], "m", [x], [y])
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10))


def backward_of(made: ir.Model, scalar: str = "loss") -> tuple[Backward, list[str]]:
    onnx_shape_inference.infer_symbolic_shapes(made, warn_on_missing=False)
    return differentiate_nodes(list(made.graph), {scalar: "seed"}, ["x"]), [node.op_type for node in made.graph]


def run(made: ir.Model, feeds: Mapping[str, Array], scalar: str = "loss") -> tuple[Array, Array]:
    """A loss and its gradient by x."""
    backward, _ = backward_of(made, scalar)
    nodes = [*backward.forward, *backward.early, *backward.nodes]
    out = evaluate(nodes, {**feeds, "seed": np.array(1, np.float32)}, backward.constants, [scalar, backward.gradients["x"]], False)
    return out[scalar], out[backward.gradients["x"]]


SHAPES: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((7, 5), None),
    ((3, 4, 6), None),
    ((2, 5, 3), 1),
    ((2, 6, 3, 4), None),
)
WEIGHTS = [0.5, 2.0, 0.0, 1.5, 3.0, 0.25]


def numbers(shape: Sequence[int], axis: int | None, ignored: int | None = None) -> tuple[Array, Array, int]:
    at = axis if axis is not None else 1 if len(shape) > 3 else len(shape) - 1
    x = RANDOM.normal(0, 2, shape).astype(np.float32)
    t = RANDOM.integers(0, shape[at], [n for k, n in enumerate(shape) if k != at])
    if ignored is not None:
        t.ravel()[::3] = ignored
    return x, t, at


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [None, -100, 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True], ids=["even", "weighted"])
def test_cross_entropy_is_torchs(
    shape: tuple[int, ...],
    axis: int | None,
    reduction: str,
    ignored: int | None,
    smoothing: float,
    weighted: bool,
    dynamic: bool,
) -> None:
    torch = pytest.importorskip("torch")
    x, t, at = numbers(shape, axis, ignored)
    weights = WEIGHTS[: shape[at]] if weighted else None
    options = {"reduction": reduction, "ignore_index": ignored, "label_smoothing": smoothing, "weights": weights}
    made = model(dims_of(shape, at, dynamic))
    add_loss(made, loss({"type": "softmax_cross_entropy", "logits": "y", "labels": "t", "axis": axis, **options}))
    value, gradient = run(made, {"x": x, "t": t})
    given = torch.tensor(x, requires_grad=True)
    want = torch.nn.functional.cross_entropy(
        (2 * given).movedim(at, 1),
        torch.tensor(t),
        weight=None if weights is None else torch.tensor(weights),
        ignore_index=-100 if ignored is None else ignored,
        label_smoothing=smoothing,
        reduction=reduction,
    )
    want.backward()
    np.testing.assert_allclose(value, want.item(), rtol=2e-6)
    np.testing.assert_allclose(gradient, given.grad.numpy(), rtol=2e-5, atol=3e-6)


def dims_of(shape: Sequence[int], axis: int, dynamic: bool) -> list[int | str]:
    return [f"n{k}" if dynamic and k != axis else size for k, size in enumerate(shape)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True], ids=["even", "weighted"])
def test_cross_entropy_of_probabilities_is_torchs(
    shape: tuple[int, ...], axis: int | None, reduction: str, smoothing: float, weighted: bool, dynamic: bool
) -> None:
    torch = pytest.importorskip("torch")
    x, _, at = numbers(shape, axis)
    t = RANDOM.uniform(0, 1, shape).astype(np.float32)
    weights = WEIGHTS[: shape[at]] if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing, "weights": weights, "probabilities": True}
    made = model(dims_of(shape, at, dynamic))
    add_loss(made, loss({"type": "softmax_cross_entropy", "logits": "y", "labels": "t", "axis": axis, **options}))
    value, gradient = run(made, {"x": x, "t": t})
    given = torch.tensor(x, requires_grad=True)
    want = torch.nn.functional.cross_entropy(
        (2 * given).movedim(at, 1),
        torch.tensor(t).movedim(at, 1),
        weight=None if weights is None else torch.tensor(weights),
        label_smoothing=smoothing,
        reduction=reduction,
    )
    want.backward()
    np.testing.assert_allclose(value, want.item(), rtol=3e-6)
    np.testing.assert_allclose(gradient, given.grad.numpy(), rtol=2e-5, atol=3e-6)


@pytest.mark.parametrize("dynamic", ["none", "some", "all"])
@pytest.mark.parametrize("shape", [(7,), (7, 5), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["mean_squared", "l1", "binary_cross_entropy", "pos_weight"])
def test_losses_of_numbers_are_torchs(kind: str, reduction: str, shape: tuple[int, ...], dynamic: str) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    x = RANDOM.normal(0, 3, shape).astype(np.float32)
    t = RANDOM.uniform(0, 1, shape).astype(np.float32)
    p = [2.5] if kind == "pos_weight" and dynamic != "none" else RANDOM.uniform(0.5, 3, shape[-1:]).tolist()
    names = {"prediction": "y", "target": "t"} if kind in ("mean_squared", "l1") else {"logits": "y", "labels": "t"}
    more = {"pos_weight": p} if kind == "pos_weight" else {}
    given_type = "binary_cross_entropy" if kind == "pos_weight" else kind
    first = {"none": 0, "some": 1, "all": len(shape)}[dynamic]
    made = model([f"n{k}" if k < first else size for k, size in enumerate(shape)])
    add_loss(made, loss({"type": given_type, "reduction": reduction, **names, **more}))
    value, gradient = run(made, {"x": x, "t": t})
    given, wanted = torch.tensor(x, requires_grad=True), torch.tensor(t)
    want = {
        "mean_squared": lambda: functional.mse_loss(2 * given, wanted, reduction=reduction),
        "l1": lambda: functional.l1_loss(2 * given, wanted, reduction=reduction),
        "binary_cross_entropy": lambda: functional.binary_cross_entropy_with_logits(
            2 * given, wanted, reduction=reduction
        ),
        "pos_weight": lambda: functional.binary_cross_entropy_with_logits(
            2 * given, wanted, pos_weight=torch.tensor(p), reduction=reduction
        ),
    }[kind]()
    want.backward()
    np.testing.assert_allclose(value, want.item(), rtol=3e-6)
    np.testing.assert_allclose(gradient, given.grad.numpy(), rtol=2e-5, atol=3e-6)
