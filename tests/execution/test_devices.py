"""Programs of several targets: the same numbers wherever nodes run, values and state in each target's memory, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from artifact_text import write
from onnx import ModelProto, NodeProto
from partc.cli.comparison.variant import variant
from partc.runtime import Trainer, load_local, load_trainer
from partc.runtime.artifact.format import OPTIMIZER, TARGET, Manifest
from partc.runtime.devices.device_memory import Remote
from partc.runtime.devices.devices import Device, Devices, devices_from, parse_devices
from partc.runtime.errors import ArtifactError, UsageError
from partc.runtime.execution.targets.counts import Copies
from partc.runtime.program import kernels, sessions
from small_training import DATA_PARALLEL, MOMENTUM, PERCEPTRON, compiled
from stub_gpu import stub_gpu as stub_gpu
from targeted import ON_CPU, perceptron_steps, scattered, targeted


def updates_on_cpu(node: NodeProto) -> str:
    return "cpu" if node.domain == OPTIMIZER else "cuda"


def updates_on_cuda(node: NodeProto) -> str:
    return "cuda" if node.domain == OPTIMIZER else "cpu"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that trains on two ranks."""
    return compiled(tmp_path_factory.mktemp("trained") / "build", PERCEPTRON, DATA_PARALLEL, MOMENTUM)


@pytest.fixture(scope="module")
def expected(trained: Path) -> tuple[list[bytes], dict[str, np.ndarray]]:
    with load_local(trained) as ranks:
        return perceptron_steps(ranks)


@pytest.mark.parametrize("choose", [scattered, updates_on_cpu, updates_on_cuda])
def test_a_step_is_the_same_wherever_its_nodes_run(
    choose: object, trained: Path, expected: tuple[list[bytes], dict[str, np.ndarray]], tmp_path: Path
) -> None:
    folder = targeted(trained, tmp_path / "targeted", choose)  # type: ignore[arg-type]
    with load_local(folder, trust=True, devices=ON_CPU) as ranks:
        losses, after = perceptron_steps(ranks)
        remote = {
            name for one in ranks.ranks for name, tensor in one.state.tensors.items() if isinstance(tensor, Remote)
        }
        counts = ranks.ranks[0].counts
    assert losses == expected[0]
    assert {name: array.tobytes() for name, array in after.items()} == {
        name: array.tobytes() for name, array in expected[1].items()
    }
    assert bool(remote) == (choose is not updates_on_cpu)
    if choose is updates_on_cpu:
        # Three gradients go to the host to be reduced, three parameters come to the device, and the loss goes out.
        assert counts.steps == 3
        sizes = 6 * 5 + 5 + 5 * 3
        assert counts.copies["cuda"].bytes >= 3 * 4 * sizes
        assert counts.copies["cpu"].bytes >= 3 * 4 * sizes


@pytest.mark.parametrize("choose", [scattered, updates_on_cuda, None])
def test_a_gpu_of_stubs_gives_the_same(
    choose: object,
    trained: Path,
    expected: tuple[list[bytes], dict[str, np.ndarray]],
    tmp_path: Path,
    stub_gpu: list[Device],
) -> None:
    """Also of an artifact without targets: its values lie on the host between sessions."""
    folder = trained if choose is None else targeted(trained, tmp_path / "targeted", choose)  # type: ignore[arg-type]
    with load_local(folder, trust=True, devices={"device": "cuda"}) as ranks:
        losses, after = perceptron_steps(ranks)
    assert losses == expected[0]
    assert all(array.tobytes() == expected[1][name].tobytes() for name, array in after.items())
    assert {str(one) for one in stub_gpu} == {"cuda:0"}


DYNAMIC = """rank0 (float[n, 3] x, string[m] s) => (float[k, 3] y, float[n, 3] z, string[m] t)
<float[n, 3] h, int64[1] axis = {1}, float half = {0.5}>
{   h = Relu(x)
    big = ReduceMax <keepdims = 0> (h, axis)
    over = Greater(big, half)
    kept = Compress <axis = 0> (h, over)
    y = Neg(kept)
    sizes = Shape(h)
    flat = Reshape(h, sizes)
    z = Neg(flat)
    t = Identity(s) }"""


@pytest.mark.parametrize("devices", [ON_CPU, {}])
def test_values_of_unknown_shape_and_texts_cross(
    devices: dict[str, str], tmp_path: Path, stub_gpu: list[Device]
) -> None:
    folder = targeted(write(tmp_path / "build", [DYNAMIC]), tmp_path / "targeted", scattered)
    x = np.array([[0.1, -1, 0.2], [3, 0.1, 1], [0.7, 0.2, -2]], np.float32)
    texts = np.array(["a", "ü"], object)
    with load_local(folder, trust=True, devices=devices) as ranks:
        for rows in (3, 2, 3):
            found = ranks(x=x[:rows], s=texts)
            h = np.maximum(x[:rows], 0)
            np.testing.assert_array_equal(found["y"], -h[h.max(axis=1) > 0.5])
            np.testing.assert_array_equal(found["z"], -h)
            assert found["t"].tolist() == ["a", "ü"]


def test_what_devices_may_be() -> None:
    assert parse_devices(["cuda:1"]) == {"device": "cuda", "cuda": "cuda:1"}
    assert devices_from(parse_devices(["cuda", "cuda=cpu"])) == Devices(default="cuda")
    assert str(devices_from({"cuda": "cuda:3"}, 1).of("cuda")) == "cuda:3"
    with pytest.raises(UsageError) as refused:
        parse_devices(["tpu", "tpu=cpu", "cpu=cuda", "cuda=x"])
    assert str(refused.value).split("\n")[:4] == [
        "there is no device 'tpu'; it is cpu or cuda",
        "the target 'tpu' is not a target; a target is cpu or cuda",
        "the target 'cpu' is always the CPU",
        "the target cuda cannot be 'x'; it is cpu, cuda or cuda:N",
    ]


def test_a_missing_device_is_one_error(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partc.runtime.devices.device_memory._missing", lambda device: "no libcudart")
    with pytest.raises(UsageError) as refused:
        load_local(trained, devices={"device": "cuda"})
    assert str(refused.value) == (
        f"{trained}: there is no device for the target cuda: cuda:0: no libcudart\n"
        "  help: --device cuda=cpu runs the same program on the CPU; a GPU needs onnxruntime-gpu, CUDA and cuDNN"
    )


def test_an_op_without_a_kernel_is_refused_with_its_path(
    trained: Path, tmp_path: Path, stub_gpu: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime says that some node would run on the CPU; which one is asked of a second session."""
    folder = targeted(trained, tmp_path / "targeted", lambda node: "cuda" if node.op_type == "Tanh" else "cpu")
    made = sessions.new_session

    def new_session(model: bytes, threads: int, device: Device, entries: dict[str, str], *rest: bool) -> object:
        if not device.is_host:
            assert entries["session.disable_cpu_ep_fallback"] == "1"
            raise RuntimeError("This session contains graph nodes that are assigned to the default CPU EP")
        return made(model, threads, device, entries, *rest)

    monkeypatch.setattr(sessions, "new_session", new_session)
    monkeypatch.setattr(kernels, "without_kernel", lambda *_: [("Tanh", "of no name")])
    with pytest.raises(ArtifactError) as refused:
        load_local(folder, trust=True)
    assert str(refused.value) == (
        f"{folder / 'rank_0000.onnx'}: onnxruntime has no kernel on cuda for Tanh (turn)\n"
        '  help: target: {"turn": cpu} in the plan runs it on the CPU, with copies that the dump shows'
    )


def test_a_file_with_an_unknown_target_or_without_a_copy_is_refused(trained: Path, tmp_path: Path) -> None:
    folder = targeted(trained, tmp_path / "unknown", lambda node: "tpu" if node.op_type == "Tanh" else "cpu")
    with pytest.raises(ArtifactError, match="'tpu'; a target is one of cpu, cuda, device"):
        load_local(folder, trust=True)
    folder = targeted(trained, tmp_path / "lost", lambda node: "cuda" if node.op_type == "Tanh" else "cpu")

    def lose(rank: int, model: ModelProto, manifest: Manifest) -> Manifest:
        (tanh,) = [node for node in model.graph.node if node.op_type == "Tanh"]
        (there,) = [one for one in tanh.metadata_props if one.key == TARGET]
        there.value = "cpu"
        return manifest

    folder = variant(folder, tmp_path / "without", lose)
    with pytest.raises(ArtifactError, match=r"reads 'hs.cuda', which lies on cuda, and no Copy brings it to cpu"):
        load_local(folder, trust=True, devices=ON_CPU)


@pytest.mark.parametrize("gpu", [False, True])
def test_checkpoints_and_evaluation_work_with_state_on_a_device(
    gpu: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A run goes on bit by bit from a checkpoint, also without targets."""
    devices = {} if gpu else ON_CPU
    if gpu:
        request.getfixturevalue("stub_gpu")
    build = compiled(tmp_path / "cuda", PERCEPTRON, "ranks: 1\ntarget: cuda\n")
    plain = compiled(tmp_path / "cpu", PERCEPTRON, "ranks: 1\n")
    random = np.random.default_rng(5)
    batches = [{"x": random.normal(size=(4, 6)), "t": random.normal(size=(4, 3))} for _ in range(4)]
    batches = [{name: array.astype(np.float32) for name, array in batch.items()} for batch in batches]

    def finished(trainer: Trainer) -> tuple[dict[str, bytes], dict[str, float]]:
        for batch in batches[2:]:
            trainer.train(batch)
        return {record.tensor: array.tobytes() for record, array in trainer.program.state.arrays()}, trainer.evaluate(
            [(batches[0], 4)]
        )

    with load_trainer(build, devices=devices) as trainer:
        assert all(isinstance(tensor, Remote) for tensor in trainer.program.state.tensors.values())
        for batch in batches[:2]:
            trainer.train(batch)
        trainer.save(tmp_path / "kept")
        expected = finished(trainer)
    for folder, asked in ((build, devices), (plain, {})):
        with load_trainer(folder, devices=asked) as trainer:
            trainer.load(tmp_path / "kept")
            assert finished(trainer) == expected


def test_gradients_and_parameters_are_copied_as_one(tmp_path: Path, stub_gpu: list[Device]) -> None:
    """Of an update on the CPU: all gradients come in one move, and all parameters go in another one."""
    whole = compiled(tmp_path / "whole", PERCEPTRON, "ranks: 1\n")
    offloaded = MOMENTUM.replace("{", "{target: cpu, ")
    folder = compiled(tmp_path / "build", PERCEPTRON, "ranks: 1\ntarget: cuda\n", offloaded)
    found = []
    for built in (whole, folder):
        with load_local(built) as ranks:
            found.append(perceptron_steps(ranks))
            copies = ranks.ranks[0].counts.copies
    assert found[0][0] == found[1][0]
    assert all(array.tobytes() == found[1][1][name].tobytes() for name, array in found[0][1].items())
    elements = 6 * 5 + 5 + 5 * 3
    assert copies["cpu"] == Copies(number=3 * 2, bytes=3 * 4 * (elements + 1))  # with the loss
    assert copies["cuda"].number == 3 * 4  # with both inputs and the clip's factor
    assert copies["cuda"].bytes - 3 * 4 * (elements + 8 * (6 + 3)) == 3 * 8


def test_copies_in_one_memory_keep_their_order(tmp_path: Path) -> None:
    """Where `device` is the CPU: the copy of the input may lie where the value was that is copied before it."""
    graph = """rank0 (float[n, 3] x) => (float[n, 3] y) <float[n, 3] h>
    { h = Relu(x)
      y = Add(h, x) }"""
    folder = targeted(
        write(tmp_path / "build", [graph]),
        tmp_path / "targeted",
        lambda node: "device" if node.op_type == "Add" else "cpu",
    )
    x = np.array([[-1, 2, 3]], np.float32)
    with load_local(folder, trust=True) as program:
        np.testing.assert_array_equal(program(x=x)["y"], np.maximum(x, 0) + x)
