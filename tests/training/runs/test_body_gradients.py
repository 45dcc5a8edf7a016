"""Trainings through bodies whose turns or branch only the run knows, with ops that are sharded: losses and weights of one device."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from body_models import BRANCHES, NESTED, SCAN, WEIGHTS, WHILE, WIDTH, plan, weighed
from equivalence import compiled, counted, whole_outputs
from mutated import change_file, change_manifest, texts
from onnx import helper, numpy_helper
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from rows import of_today
from training_equivalence import run, same_training

ADAM = "{type: adamw, lr: 0.01}"


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def number(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def scan_steps() -> list[dict[str, np.ndarray]]:
    return [{"x": drawn(4, WIDTH, seed=t), "xs": drawn(4, t, WIDTH, seed=t)} for t in (3, 1, 5)]


CASES = {
    "both branches": (
        BRANCHES,
        "choose",
        "y",
        [{"h": drawn(4, WIDTH, seed=k), "limit": number(limit)} for k, limit in enumerate((-9, 9, -9))],
    ),
    "a while": (
        WHILE,
        "refine",
        "y",
        [{"x": drawn(4, WIDTH, seed=k), "tolerance": number(limit)} for k, limit in enumerate((9, 0.3, 0.01))],
    ),
    "a branch in a loop": (
        NESTED,
        "outer.body.inner",
        "b",
        [
            {"x": drawn(4, WIDTH, seed=k), "turns": np.array(turns), "limit": number(limit)}
            for k, (turns, limit) in enumerate(((3, -9), (1, 0), (5, 0.5), (0, 9)))
        ],
    ),
    "a scan": (SCAN.replace("DIRECTION", "0"), "rnn", "y", scan_steps()),
    "a scan from the end, with the loss of all it gives": (SCAN.replace("DIRECTION", "1"), "rnn", "all", scan_steps()),
}


@pytest.mark.parametrize(
    ("case", "ranks"),
    of_today([(case, 2 << (k + day) % 2) for day in range(2) for k, case in enumerate(CASES)], len(CASES)),
)
def test_a_training_through_a_body_is_that_of_one_device(case: str, ranks: int, tmp_path: Path) -> None:
    text, module, prediction, steps = CASES[case]
    steps = [{**step, "goal": drawn(*_shape(step, prediction), seed=7)} for step in steps]
    ports = {"x": "[dp, null]", "h": "[dp, null]", "xs": "[dp, null, null]"}
    inputs = ", ".join(f"{name}: {ports[name]}" for name in steps[0] if name in ports)
    target = "[dp, null, null]" if prediction == "all" else "[dp, null]"
    text_of_plan = plan(module, ranks).replace("x: [dp, null]", f"{inputs}, goal: {target}")
    train = f"train: {{loss: {{type: mse, prediction: {prediction}, target: goal}}, optimizer: {ADAM}}}\n"
    proto = weighed(text, WEIGHTS)

    def source() -> Source:
        return Source(from_proto(proto, Path("model.onnx")))

    whole = None
    if text is NESTED:  # on one rank no gradient is known of a Loop whose body has an If
        whole = run(
            source(), f"ranks: 1\n{text_of_plan[text_of_plan.index('sharding') :]}{train}", tmp_path / "one", steps
        )
    program = same_training(source, text_of_plan + train, tmp_path, steps, rtol=1e-5, atol=1e-3, whole=whole)
    assert counted(program)["Begin"] >= 2


def _shape(step: dict[str, np.ndarray], prediction: str) -> tuple[int, ...]:
    return step["xs"].shape if prediction == "all" else (4, WIDTH)


@pytest.mark.parametrize("case", ["both branches", "a branch in a loop", "a scan"])
def test_a_gradient_is_that_of_finite_differences(case: str, tmp_path: Path) -> None:
    """Of a random direction of the weights, on one rank, against the whole model in onnxruntime."""
    text, module, prediction, (step, *_) = CASES[case]
    proto = weighed(text, WEIGHTS)
    goal, start = drawn(4, WIDTH, seed=7), {one.name: numpy_helper.to_array(one) for one in proto.graph.initializer}
    random = np.random.default_rng(5)
    directions = {name: random.normal(size=start[name].shape).astype(np.float32) for name in WEIGHTS}

    def loss_at(distance: float) -> float:
        moved = onnx.ModelProto()
        moved.CopyFrom(proto)
        for tensor in moved.graph.initializer:
            if tensor.name in directions:
                array = start[tensor.name] + np.float32(distance) * directions[tensor.name]
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        return float(np.mean((whole_outputs(moved, step)[prediction].astype(np.float64) - goal) ** 2))

    rules = plan(module, 2)
    train = f"train: {{loss: {{type: mse, prediction: {prediction}, target: goal}}, optimizer: {{type: sgd, lr: 1}}}}\n"
    text_of_plan = f"ranks: 1\n{rules[rules.index('sharding') :]}{train}"
    found = run(Source(from_proto(proto, Path("model.onnx"))), text_of_plan, tmp_path, [{**step, "goal": goal}])
    slope = sum(float(np.sum((found.before[name] - found.after[name]) * directions[name])) for name in WEIGHTS)
    distance = 2e-3
    assert slope == pytest.approx((loss_at(distance) - loss_at(-distance)) / (2 * distance), rel=5e-3)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The training of the while, by its number of ranks."""
    folder = tmp_path_factory.mktemp("while")
    train = f"train: {{loss: {{type: mse, prediction: y, target: goal}}, optimizer: {ADAM}}}\n"
    for ranks in (2, 4):
        compiled(weighed(WHILE, WEIGHTS), plan("refine", ranks, "x goal") + train, folder / str(ranks), check=False)
        change_manifest(folder / str(ranks), unlisted)
        assert texts(folder / str(ranks)) == ""
    return {ranks: folder / str(ranks) for ranks in (2, 4)}


def unlisted(manifest: dict[str, Any]) -> None:
    """Takes the operands of communication out of the manifest, by which it would tell most of these faults."""
    for record in manifest["collectives"]:
        record["sources"] = []


def bypassed(graph: onnx.GraphProto, at: int = 0) -> None:
    """What the AllReduce at this place makes is not read, but what it is given."""
    node = [node for node in graph.node if node.op_type == "AllReduce"][at]
    for other in graph.node:
        for k, name in enumerate(other.input):
            if name in node.output:
                other.input[k] = node.input[[*node.output].index(name)]


def turn(model: onnx.ModelProto, at: int) -> onnx.GraphProto:
    """The body of a Loop: of the forward pass, or of the backward pass."""
    return [node for node in model.graph.node if node.op_type == "Loop"][at].attribute[0].g


def of_shard(model: onnx.ModelProto) -> None:
    """The backward Loop takes as many turns as the largest number of a shard says."""
    nodes = [
        helper.make_node("ReduceMax", ["W"], ["planted.most"], "planted.most", keepdims=0),
        helper.make_node("Cast", ["planted.most"], ["planted"], "planted", to=onnx.TensorProto.INT64),
    ]
    loop = [node for node in model.graph.node if node.op_type == "Loop"][1]
    loop.input[0] = "planted"
    for node in nodes:
        model.graph.node.insert([*model.graph.node].index(loop), node)


FAULTS: dict[str, tuple[int, Callable[[onnx.ModelProto], object], str]] = {
    "no reduction in a turn of the forward pass": (4, lambda m: bypassed(turn(m, 0)), "no collective has reduced"),
    "no reduction in a turn of the backward pass": (2, lambda m: bypassed(turn(m, 1)), "no collective has reduced"),
    "no reduction of weights' gradients": (4, lambda m: bypassed(m.graph, -1), "no collective has reduced"),
    "turns that a shard counts": (2, of_shard, "all ranks of a body take the same branch, and the same turns"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, built: dict[int, Path], tmp_path: Path) -> None:
    ranks, change, said = FAULTS[fault]
    shutil.copytree(built[ranks], tmp_path / "build")
    for file in sorted(built[ranks].glob("rank_*.onnx")):
        change_file(tmp_path / "build", file.name, change)
    assert said in texts(tmp_path / "build")
