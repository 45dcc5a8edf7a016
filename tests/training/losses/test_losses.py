"""Losses and metrics: values and gradients are torch's, the same whatever the cut, and made of as few passes as can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_shape_inference
import pytest
from equivalence import whole_outputs
from gradient_case import evaluate
from losses_case import model
from partc.compiler.autodiff.engine import Backward, differentiate_nodes
from partc.compiler.errors import CompileError
from partc.compiler.training.add_training import add_loss, add_metric
from plan_values import loss, metric
from rows import pairwise, rows

Array = np.ndarray[Any, np.dtype[Any]]
RANDOM = np.random.default_rng(11)


def backward_of(made: ir.Model, scalar: str = "loss") -> tuple[Backward, list[str]]:
    onnx_shape_inference.infer_symbolic_shapes(made, warn_on_missing=False)
    return differentiate_nodes(list(made.graph), {scalar: "seed"}, ["x"]), [node.op_type for node in made.graph]


def run(made: ir.Model, feeds: Mapping[str, Array], scalar: str = "loss") -> tuple[Array, Array]:
    """A loss and its gradient by x."""
    backward, _ = backward_of(made, scalar)
    nodes = [*backward.forward, *backward.early, *backward.nodes]
    out = evaluate(
        nodes, {**feeds, "seed": np.array(1, np.float32)}, backward.constants, [scalar, backward.gradients["x"]], False
    )
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


@rows(
    "weighted, smoothing, ignored, shape_axis, reduced",
    pairwise([False, True], [0.0, 0.1], [None, 1], SHAPES, [("mean", False), ("mean", True), ("sum", True)]),
)
def test_cross_entropy_is_torchs(
    weighted: bool,
    smoothing: float,
    ignored: int | None,
    shape_axis: tuple[tuple[int, ...], int | None],
    reduced: tuple[str, bool],
) -> None:
    torch = pytest.importorskip("torch")
    (shape, axis), (reduction, dynamic) = shape_axis, reduced
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


@rows(
    "weighted, smoothing, shape_axis, reduced",
    pairwise([False, True], [0.0, 0.2], SHAPES, [("mean", False), ("mean", True), ("sum", True)]),
)
def test_cross_entropy_of_probabilities_is_torchs(
    weighted: bool, smoothing: float, shape_axis: tuple[tuple[int, ...], int | None], reduced: tuple[str, bool]
) -> None:
    torch = pytest.importorskip("torch")
    (shape, axis), (reduction, dynamic) = shape_axis, reduced
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


@rows(
    "kind, reduction, shape, dynamic",
    pairwise(
        ["mean_squared", "l1", "binary_cross_entropy", "pos_weight"],
        ["mean", "sum"],
        [(7,), (7, 5), (2, 3, 4, 5)],
        ["none", "some", "all"],
    ),
)
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


@pytest.mark.parametrize("kind", ["mean_squared", "l1"])
def test_means_of_large_records_are_exact(kind: str) -> None:
    """Rows are added first: onnxruntime adds 500,000 elements at once with errors of 1e-5 and 2e-4."""
    shape = (2, 700, 750)
    x, t = (RANDOM.standard_normal(shape, np.float32) for _ in range(2))
    made = model(["n", *shape[1:]])
    add_loss(made, loss({"type": kind, "prediction": "y", "target": "t"}))
    value, gradient = run(made, {"x": x, "t": t})
    off = (2 * x - t).astype(np.float64)
    expected, slopes = ((off**2).mean(), 2 * off) if kind == "mean_squared" else (np.abs(off).mean(), np.sign(off))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * slopes / off.size, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
@pytest.mark.parametrize("ignored", [None, -100, 2])
def test_hits_are_counted(shape: tuple[int, ...], axis: int | None, ignored: int | None, dynamic: bool) -> None:
    x, t, at = numbers(shape, axis, ignored)
    made = model(dims_of(shape, at, dynamic))
    of = loss({"type": "softmax_cross_entropy", "logits": "y", "labels": "t", "axis": axis, "ignore_index": ignored})
    add_loss(made, of)
    wanted = {"accuracy": {}, "top_k": {"k": 3}, "second": {"type": "top_k", "k": 2}}
    for name, options in wanted.items():
        add_metric(made, name, metric(name, options), of=of)
    have = whole_outputs(ir.to_proto(made), {"x": x, "t": t})
    order = np.argsort(-x, axis=at, kind="stable")
    counted = t != ignored if ignored is not None else np.ones(t.shape, bool)
    for name, k in (("accuracy", 1), ("top_k", 3), ("second", 2)):
        hits = (np.take(order, range(k), axis=at) == np.expand_dims(t, at)).any(axis=at)
        np.testing.assert_allclose(have[name], hits[counted].mean(), rtol=1e-6)
        assert have[name].dtype == np.float32
        assert have[name].shape == ()


def test_a_model_that_says_the_same_of_all_classes_knows_none() -> None:
    made = model(["batch", 6])
    add_metric(made, "accuracy", metric("accuracy", {"logits": "y", "labels": "t"}))
    feeds = {"x": np.zeros((4, 6), np.float32), "t": np.array([0, 0, 5, 1])}
    assert whole_outputs(ir.to_proto(made), feeds)["accuracy"] == 0
    feeds["x"][0, 0], feeds["x"][1] = 1, np.nan
    assert whole_outputs(ir.to_proto(made), feeds)["accuracy"] == 0.25


def test_metrics_of_numbers_and_of_probabilities() -> None:
    made = model(["batch", 5])
    of = loss({"type": "softmax_cross_entropy", "logits": "y", "labels": "t", "probabilities": True})
    add_loss(made, of)
    for name in ("mse", "mae", "accuracy"):
        add_metric(made, name, metric(name, {}), of=of)
    x, t = RANDOM.normal(size=(7, 5)).astype(np.float32), RANDOM.uniform(size=(7, 5)).astype(np.float32)
    have = whole_outputs(ir.to_proto(made), {"x": x, "t": t})
    np.testing.assert_allclose(have["mse"], ((2 * x - t) ** 2).mean(), rtol=1e-6)
    np.testing.assert_allclose(have["mae"], np.abs(2 * x - t).mean(), rtol=1e-6)
    np.testing.assert_allclose(have["accuracy"], (x.argmax(1) == t.argmax(1)).mean(), rtol=1e-6)


@pytest.mark.parametrize("size", [1.0, 300.0, 1e6])
def test_large_logits_overflow_nowhere(size: float) -> None:
    x = (size * np.array([[1, -1, 0.5], [-1, 1, 1], [0, 0, 0]])).astype(np.float32)
    t, exact = np.array([1, 2, 0]), 2 * x.astype(np.float64)
    made = model([3, 3])
    add_loss(made, loss({"type": "softmax_cross_entropy", "logits": "y", "labels": "t"}))
    value, gradient = run(made, {"x": x, "t": t})
    shifted = exact - exact.max(1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    np.testing.assert_allclose(value, -log[range(3), t].mean(), rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * (np.exp(log) - np.eye(3)[t]) / 3, atol=1e-6)
    other = model([3, 3])
    add_loss(other, loss({"type": "binary_cross_entropy", "logits": "y", "labels": "u"}))
    u = np.array([[0, 1, 0.5], [1, 1, 0], [1, 0, 0.25]], np.float32)
    value, gradient = run(other, {"x": x, "u": u})
    np.testing.assert_allclose(value, (np.logaddexp(0, exact) - exact * u).mean(), rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * (0.5 * (1 + np.tanh(exact / 2)) - u) / 9, atol=1e-6)


def test_all_labels_ignored_is_no_number() -> None:
    made = model([2, 3])
    add_loss(made, loss({"type": "softmax_cross_entropy", "logits": "y", "labels": "t", "ignore_index": 1}))
    assert np.isnan(run(made, {"x": np.zeros((2, 3), np.float32), "t": np.array([1, 1])})[0])


@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE])
@pytest.mark.parametrize("this", ["softmax_cross_entropy", "mean_squared", "binary_cross_entropy"])
def test_losses_of_other_types_are_float32(this: str, kind: int) -> None:
    made = model([4, 3], kind)
    of_classes = this == "softmax_cross_entropy"
    names = {"prediction": "y", "target": "t"} if this == "mean_squared" else {"logits": "y", "labels": "t"}
    assert add_loss(made, loss({"type": this, **names})).dtype == ir.DataType.FLOAT
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
    x = RANDOM.normal(size=(4, 3)).astype(dtype)
    given = next(value.dtype for value in made.graph.inputs if value.name == "t")
    assert given is not None
    t = RANDOM.integers(0, 3, 4) if of_classes else RANDOM.uniform(size=(4, 3)).astype(given.numpy())
    have = whole_outputs(ir.to_proto(made), {"x": x, "t": t})["loss"]
    plain = model([4, 3])
    add_loss(plain, loss({"type": this, **names}))
    single = t if of_classes else t.astype(np.float32)
    want = whole_outputs(ir.to_proto(plain), {"x": x.astype(np.float32), "t": single})["loss"]
    assert have.dtype == np.float32
    np.testing.assert_allclose(have, want, rtol=2e-3)


def inputs_of(made: ir.Model) -> dict[str, str]:
    return {value.name or "": f"{value.dtype}{value.shape}" for value in made.graph.inputs}


def test_labels_are_an_input_with_the_dims_of_the_logits() -> None:
    made = model(["batch", 6, 4, None])
    add_loss(made, loss({"type": "softmax_cross_entropy", "logits": "y", "labels": "t"}))
    assert inputs_of(made) == {"x": "FLOAT[batch,6,4,x_dim_3]", "t": "INT64[batch,4,x_dim_3]"}
    assert [value.name for value in made.graph.outputs] == ["y", "loss"]
    assert {node.op_type for node in made.graph if node.name.startswith("loss.")} >= {"ReduceMax", "GatherElements"}
    assert not made.graph.initializers


def test_an_input_of_the_labels_name_is_taken() -> None:
    made = model(["batch", 6])
    made.graph.inputs.append(ir.Value(name="t", shape=ir.Shape(["n"]), type=ir.TensorType(ir.DataType.INT32)))
    of = loss({"type": "softmax_cross_entropy", "logits": "y", "labels": "t"})
    add_loss(made, of)
    add_metric(made, "accuracy", metric("accuracy", {}), of=of)
    assert inputs_of(made) == {"x": "FLOAT[batch,6]", "t": "INT32[n]"}
    feeds = {"x": RANDOM.normal(size=(3, 6)).astype(np.float32), "t": np.array([1, 5, 0], np.int32)}
    assert whole_outputs(ir.to_proto(made), feeds)["loss"] > 0


def test_the_classes_are_on_the_last_axis_of_language_models_and_on_axis_1_of_images() -> None:
    for dims, labels in ((["b"], "[]"), (["b", 5], "[b]"), (["b", "s", 5], "[b,s]"), (["b", 5, "h", "w"], "[b,h,w]")):
        made = model(dims)
        add_loss(made, loss({"type": "softmax_cross_entropy", "logits": "y", "labels": "t"}))
        assert inputs_of(made)["t"] == f"INT64{labels}"


def test_a_text_is_an_output_of_the_model() -> None:
    made = model([])
    assert add_loss(made, loss("y")) is made.graph.outputs[0]
    assert add_metric(made, "y", metric("y", {})) is made.graph.outputs[0]
    assert len(made.graph) == 1


def test_weights_may_be_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.array([1, 2, 0.5], np.float32))
    this = {"type": "softmax_cross_entropy", "logits": "y", "labels": "t", "weights": "w.npy"}
    assert loss(this, folder=tmp_path).weights == (1.0, 2.0, 0.5)
    with pytest.raises(CompileError, match=r"is no \.npy file"):
        loss({**this, "weights": "v.npy"}, folder=tmp_path)


def test_all_that_is_wrong_with_a_loss_is_said_at_once() -> None:
    with pytest.raises(CompileError) as error:
        loss({"type": "softmax_cross_entropy", "logit": "y", "labels": 3, "label_smoothing": 1, "weights": [1, -2]})
    assert [line.removeprefix("plan.yaml: ") for line in str(error.value).splitlines()] == [
        "loss: 'logits' is missing",
        "  help: logits: The output of the model with the logits.",
        "loss.labels: expected a text, but got the number 3",
        "loss.label_smoothing: expected a number below 1, but got 1",
        "loss.weights: -2 is not a weight; a weight is 0 or more, and finite",
        "loss: unknown key 'logit'",
        "  help: the nearest is 'logits'",
    ]


CLASSES = {"type": "softmax_cross_entropy", "logits": "y", "labels": "t"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"type": "softmax"}, "there is no type 'softmax'.*\n.*\n  help: say 'softmax_cross_entropy'"),
        ({}, "no 'type' is given"),
        ({**CLASSES, "probabilities": True, "ignore_index": 1}, "`ignore_index` and `probabilities` are both given"),
        (
            {**CLASSES, "reduction": "max"},
            "reduction: expected 'mean', 'sum' or 'sum_over_ranks', but got the string 'max'",
        ),
    ],
)
def test_options_that_no_loss_has(options: dict[str, Any], says: str) -> None:
    with pytest.raises(CompileError, match=says):
        loss(options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({**CLASSES, "logits": "yy"}, "the model has no output 'yy'\n  its outputs are 'y'\n  help: say 'y'"),
        ({**CLASSES, "weights": [1, 2]}, "`weights` has 2 numbers, and 'y' has 6 classes on axis 1"),
        ({**CLASSES, "axis": 2}, "'y' has no axis 2\n  it has 2 dims\n  help: say an axis of -2 to 1"),
        ({**CLASSES, "labels": "x"}, "the input 'x' is of type float\n  it must be of int64 or int32"),
        ({**CLASSES, "labels": "y"}, "'y' is no input of the model but a value inside of it"),
        ({**CLASSES, "labels": "z"}, r"the input 'z' is \[batch, 1\] in the model, and \[batch\] is expected"),
        (
            {"type": "binary_cross_entropy", "logits": "y", "labels": "t", "pos_weight": [1, 2]},
            "the last dim of 'y' is 6",
        ),
        ({"type": "output", "output": "y"}, "the output 'y' is .*a loss or metric of the model's own is one float"),
    ],
)
def test_losses_that_the_model_does_not_have(options: dict[str, Any], says: str) -> None:
    made = model(["batch", 6])
    made.graph.outputs[0].shape = ir.Shape(["batch", 6])
    made.graph.inputs.append(ir.Value(name="z", shape=ir.Shape(["batch", 1]), type=ir.TensorType(ir.DataType.INT64)))
    with pytest.raises(CompileError, match=f"(?s){says}"):
        add_loss(made, loss(options))


def test_names_that_are_taken_and_opsets_that_are_too_old() -> None:
    made = model(["batch", 6])
    add_loss(made, loss(CLASSES))
    with pytest.raises(CompileError, match=r"the model has a value 'loss\.class_axis' already"):
        add_loss(made, loss(CLASSES))
    with pytest.raises(CompileError, match="the model has opset 13"):
        add_loss(model(["batch", 6], opset=13), loss(CLASSES))
    with pytest.raises(CompileError, match="the metric 'accuracy' lacks logits and labels"):
        add_metric(made, "accuracy", metric("accuracy", {}))
