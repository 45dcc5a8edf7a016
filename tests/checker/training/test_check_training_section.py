"""The checker on what a manifest says of a training: names, scalars, the optimizer's numbers, the schedule, symbols of a batch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutated import change_file, change_manifest, texts
from mutation_kinds import KINDS, build
from onnx import ModelProto, NodeProto

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build(KINDS["parts of a batch"], tmp_path_factory.mktemp("sound") / "build")
    assert texts(folder) == ""
    return folder


def _with(**fields: object) -> Change:
    return lambda data: data["training"].update(fields)


def _in(part: str, **fields: object) -> Change:
    return lambda data: data["training"][part].update(fields)


CASES: dict[str, tuple[Change, str]] = {
    "no loss": (_with(loss="none"), "training: the loss 'none' is not an output"),
    "a metric": (_with(metrics=["none"]), "training: the metric 'none' is not an output"),
    "a formula": (
        _with(metrics=["loss"], formulas={"loss": "area"}),
        "has the formula 'area'; the runtime knows roc_auc",
    ),
    "a formula of none": (
        _with(formulas={"loss": "roc_auc"}),
        "the formula 'roc_auc' is of 'loss', which is not a metric",
    ),
    "no counts": (
        _with(metrics=["loss"], formulas={"loss": "roc_auc"}),
        "the metric 'loss' has the shape []; of 'roc_auc' it is 2 counts for each of 2 bins or more, and 2 besides",
    ),
    "a denominator": (_with(denominators={"loss": "none"}), "the denominator 'none' of 'loss' is not an output"),
    "a denominator of none": (
        _with(denominators={"none": "loss"}),
        "the denominator 'loss' is of 'none', which is neither the loss nor a metric",
    ),
    "a sum": (_with(sums=["none"]), "'none' is a sum over records, and neither the loss nor a metric"),
    "a fixed input": (_with(fixed=["none"]), "the fixed input 'none' is not an input"),
    "no guard": (_in("settings", on_nonfinite="skip"), "there is no guard, and 'on_nonfinite' is 'skip'"),
    "a guard": (_with(guard="loss"), "the guard is 'loss', and 'on_nonfinite' is 'stop'"),
    "on_nonfinite": (
        _in("settings", on_nonfinite="go"),
        "training.settings.on_nonfinite: expected 'stop', 'warn' or 'skip', but got the string 'go'",
    ),
    "an unknown scalar": (_with(scalars=["lr", "x"]), "the runtime knows no scalar 'x'"),
    "a scalar less": (_with(scalars=["lr", "bias1"]), "it reads 'bias2', which is not a scalar of the training"),
    "a scalar twice": (_with(scalars=["lr", "lr", "bias1", "bias2"]), "each is listed once"),
    "no beta": (
        lambda data: data["training"]["optimizer"]["hyper"].pop("beta1"),
        "the scalar 'bias1' is computed from 'beta1', which the optimizer does not have",
    ),
    "another beta": (
        lambda data: data["training"]["optimizer"]["hyper"].update(beta2=0.5),
        "Adam 'c.update': its beta2 is 0.999, and that of the training's optimizer 0.5",
    ),
    "a rate": (_in("optimizer", lr=-1), "training.optimizer.lr: Input should be greater than or equal to 0"),
    "a schedule": (_in("settings", schedule={"type": "cosin"}), "training.settings.schedule: there is no type 'cosin'"),
    "a schedule's option": (
        _in("settings", schedule={"type": "step", "every": 0, "factor": 1}),
        "training.settings.schedule.every: expected at least 1, but got 0",
    ),
    "a schedule's rate": (
        _in("settings", schedule={"type": "linear", "steps": 9, "minimum": 9}),
        "schedule: 'minimum' 9 is above the optimizer's rate",
    ),
    "no training": (
        lambda data: data.update(training=None),
        "'c.next' takes its place, and the manifest has no training",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_field_is_held_against_the_rest(sound: Path, tmp_path: Path, case: str) -> None:
    change, expected = CASES[case]
    shutil.copytree(sound, tmp_path / "build")
    change_manifest(tmp_path / "build", change)
    found = texts(tmp_path / "build")
    assert expected in found, found


def _another_number(node: NodeProto) -> None:
    next(one for one in node.attribute if one.name == "one_minus_beta1").f = 0.2


def _another_scalar(node: NodeProto) -> None:
    node.input[6] = "bias1"


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (_another_number, "its one_minus_beta1 is 0.2, and that of the training's optimizer 0.1"),
        (_another_scalar, "it reads 'bias1' as 'bias2', which is the scalar 'bias2'"),
    ],
)
def test_updates_have_the_optimizers_numbers(
    sound: Path, tmp_path: Path, change: Callable[[NodeProto], None], fact: str
) -> None:
    shutil.copytree(sound, tmp_path / "build")
    for path in sorted((tmp_path / "build").glob("rank_*.onnx")):
        change_file(tmp_path / "build", path.name, lambda model: change(update(model)))
    assert fact in texts(tmp_path / "build")


def update(model: ModelProto) -> NodeProto:
    """The node that updates c, of the graph or of a task."""
    bodies = (model.graph.node, *(one.node for one in model.functions))
    return next(node for nodes in bodies for node in nodes if node.name.startswith("c.update"))
