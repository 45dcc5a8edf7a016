"""Losses and metrics under the names that other frameworks have for them."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.training.add_training import add_metric
from plan_values import loss, metric

NUMBERS = {"prediction": "y", "target": "t"}
CLASSES = {"logits": "y", "labels": "t"}


@pytest.mark.parametrize(
    ("usual", "here", "options"),
    [
        ("mse", "mean_squared", NUMBERS),
        ("mean_squared_error", "mean_squared", NUMBERS),
        ("mae", "l1", NUMBERS),
        ("cross_entropy", "softmax_cross_entropy", CLASSES),
        ("bce_with_logits", "binary_cross_entropy", CLASSES),
        ("BCEWithLogitsLoss", "binary_cross_entropy", CLASSES),
        ("nn.CrossEntropyLoss", "softmax_cross_entropy", CLASSES),
        ("MSELoss", "mean_squared", NUMBERS),
        ("mse_loss", "mean_squared", NUMBERS),
    ],
)
def test_a_loss_by_its_usual_name_is_the_same_loss(usual: str, here: str, options: dict[str, str]) -> None:
    assert loss({"type": usual, **options}) == loss({"type": here, **options})


def test_a_metric_by_the_name_of_a_loss_is_that_metric() -> None:
    assert metric("error", {"type": "mean_squared", **NUMBERS}) == metric("error", {"type": "mse", **NUMBERS})
    assert metric("mae", {"type": "l1", **NUMBERS}) == metric("mae", {"type": "mae", **NUMBERS})


def model(output: str) -> onnx.ModelProto:
    text = f"float[4, 2] {output}" if output == "y" else f"float[4, 2] y, float {output}"
    made = "" if output == "y" else f"{output} = ReduceSum <keepdims: int = 0> (x)"
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> main (float[4, 2] x) => ({text}) {{ y = Neg(x) {made} }}'
    )


@pytest.mark.parametrize(("usual", "k"), [("top5", 5), ("top_1", 1), ("top10_accuracy", 10)])
def test_a_metric_whose_name_says_its_k(usual: str, k: int) -> None:
    assert metric("best", {"type": usual, **CLASSES}) == metric("best", {"type": "top_k", "k": k, **CLASSES})
    model_of_classes = from_proto(model("y"), Path("m.onnx"))
    of = loss({"type": "cross_entropy", **CLASSES})
    add_metric(model_of_classes, usual, metric(usual, {}), of=of)
    (compared,) = [node for node in model_of_classes.graph if node.op_type == "LessOrEqual"]
    number = ir.convenience.get_const_tensor(compared.inputs[1])
    assert number is not None
    assert number.numpy() == k


@pytest.mark.parametrize(
    ("usual", "words"),
    [
        ("nll_loss", "it takes logarithms of probabilities\n  help: write softmax_cross_entropy"),
        ("bce", "it takes probabilities\n  help: write binary_cross_entropy, and give it the logits"),
        ("BinaryCrossentropy", "it takes probabilities\n  help: write binary_cross_entropy"),
        ("SmoothL1Loss", "help: compute it in the model as an output of one float"),
        ("huber", "help: compute it in the model as an output of one float"),
        ("l2", "help: write mean_squared"),
        ("cros_entropy", "help: say 'softmax_cross_entropy'"),
    ],
)
def test_a_loss_that_means_something_else_elsewhere_is_refused_with_what_to_write(usual: str, words: str) -> None:
    with pytest.raises(CompileError) as caught:
        loss({"type": usual, **CLASSES})
    assert f"there is no type '{usual}'" in str(caught.value)
    assert words in str(caught.value)


def test_a_key_of_another_type_is_told_by_its_counterpart() -> None:
    with pytest.raises(CompileError, match=r"unknown key 'labels'\n  help: write 'target'"):
        loss({"type": "mse", "prediction": "y", "labels": "t"})
    with pytest.raises(CompileError, match="leave it out: the loss itself is reported"):
        metric("error", {"type": "cross_entropy", **CLASSES})


def test_a_name_in_the_list_of_metrics_is_first_of_all_an_output_of_the_model() -> None:
    """`metrics: [l1]` of a model with an output `l1` is that output; of another one it is the mean absolute error."""
    of = loss({"type": "mse", **NUMBERS})
    own = from_proto(model("l1"), Path("m.onnx"))
    assert add_metric(own, "l1", metric("l1", {}), of=of) is next(one for one in own.graph.outputs if one.name == "l1")
    other = from_proto(model("y"), Path("m.onnx"))
    add_metric(other, "l1", metric("l1", {}), of=of)
    assert [one.name for one in other.graph.outputs] == ["y", "l1"]


def test_a_name_that_is_neither_is_refused_with_what_there_is() -> None:
    with pytest.raises(CompileError) as caught:
        add_metric(from_proto(model("y"), Path("m.onnx")), "accurcy", metric("accurcy", {}), "p:3")
    assert str(caught.value) == (
        "p:3: 'accurcy' is no metric and no output of the model\n"
        "  the metrics are accuracy, top_k, mse, mae, auc, perplexity, precision, recall, f1, confusion, r2, formula; "
        "the model's outputs are 'y'\n"
        "  help: say 'accuracy'"
    )
