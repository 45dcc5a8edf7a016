"""Rank files of artifacts that train, in other hands: onnx's checker and inference, its numpy reference, a stock onnxruntime."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from partc.runtime import load_local
from partc.runtime.artifact.comm.schemas import register
from partc.runtime.communication.in_process import LocalWorld
from reference_ops import reference_ops
from small_training import DATA_PARALLEL, PERCEPTRON, compiled

ALONE = """ranks: 1
train: {loss: {type: softmax_cross_entropy, logits: y, labels: t}, metrics: [accuracy], optimizer: {type: adam, lr: 0.05}}
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("sound") / "build", PERCEPTRON, DATA_PARALLEL)


def number(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def batches(steps: int, seed: int = 5) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {"x": rng.normal(size=(4, 6)).astype(np.float32), "t": rng.normal(size=(4, 3)).astype(np.float32)}
        for _ in range(steps)
    ]


def test_tools_of_onnx_take_every_file(sound: Path) -> None:
    register()
    for file in sorted(sound.rglob("*.onnx")):
        onnx.checker.check_model(str(file), full_check=True)
        model = onnx.load(file)
        del model.graph.value_info[:]
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
        shapes = {
            one.name: [dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in inferred.graph.value_info
        }
        if not file.name.startswith("evaluate"):
            assert (shapes["first.grad"], shapes["shift.grad"]) == ([6, 5], [5])


def test_the_reference_runs_what_the_runtime_trains(sound: Path) -> None:
    """Both ranks by the numpy reference of ONNX: three steps, losses and weights."""
    steps = batches(3)
    with load_local(sound) as program:
        want = [program({**step, "lr": number(0.1)})["loss"] for step in steps]
        weights = {record.value: array.copy() for record, array in program.ranks[1].state.arrays()}
        manifest = program.manifest
    world = LocalWorld(2)

    def train(rank: int) -> tuple[list[Any], dict[str, np.ndarray]]:
        model = onnx.load(sound / manifest.program(rank))
        ops = reference_ops(world.transport(rank), manifest.groups_of(rank))
        evaluator = ReferenceEvaluator(model, new_ops=ops)
        first = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
        kept = {one.value: first.get(one.value, np.full(one.shape, one.initial, np.float32)) for one in manifest.state}
        losses = []
        for step in steps:
            shards = {name: value[2 * rank : 2 * rank + 2] for name, value in step.items()}
            made = evaluator.run(None, {**kept, **shards, "lr": number(0.1)})
            found = dict(zip(evaluator.output_names, made, strict=True))
            kept = {one.value: found[one.next] for one in manifest.state}
            losses.append(found.get("loss"))
        return losses, kept

    with ThreadPoolExecutor(2) as threads:
        (losses, first), (_, second) = threads.map(train, range(2))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    for name, array in weights.items():
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_stock_onnxruntime_trains_the_file_of_one_rank(tmp_path: Path) -> None:
    """The rank file as it is, every `next` handed back, gives what the runtime gives; the first weights lie in the file."""
    folder = compiled(tmp_path / "build", PERCEPTRON, "", ALONE)
    steps = [{**one, "t": np.arange(4) % 3} for one in batches(4)]
    scalars = [{"lr": number(0.05), "bias1": number(1 - 0.9**n), "bias2": number(1 - 0.999**n)} for n in (1, 2, 3, 4)]
    with load_local(folder) as program:
        want = [program({**step, **numbers}) for step, numbers in zip(steps, scalars, strict=True)]
        weights = {record.value: array.copy() for record, array in program.ranks[0].state.arrays()}
        manifest = program.manifest
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / "rank_0000.onnx", options)
    kept = {one.value: np.full(one.shape, one.initial, np.float32) for one in manifest.state if one.kind == "optimizer"}
    names = [output.name for output in session.get_outputs()]
    for step, numbers, expected in zip(steps, scalars, want, strict=True):
        found = dict(zip(names, session.run(names, {**kept, **step, **numbers}), strict=True))
        kept = {one.value: found[one.next] for one in manifest.state}
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
    assert weights.keys() == kept.keys()
    for name, array in weights.items():
        np.testing.assert_allclose(kept[name], array, rtol=1e-5, atol=1e-7, err_msg=name)
