"""Values that go from device to device: the steps without copies, the same numbers, and the calls of NCCL, of which a stand-in is tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_in_parts import LOSSES, NET, WEIGHTS, numbers, train
from mpi_ranks_case import MPIEXEC, job
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from partc.runtime.communication.nccl import gpu
from partc.runtime.devices.devices import Device, Devices
from partc.runtime.execution import linked_file
from partc.runtime.execution.in_process import LocalProgram
from partc.runtime.program.device_messages import DeviceEnds, agreed
from partc.runtime.program.steps import Copy, PostRecv, Send, StartCollective
from targets_case import ADAM, ON_CPU
from training_equivalence import fed, from_text, tensors

MEAN = LOSSES["mean"]
DATA = "ranks: 2\ndataset: data_parallel\nsymbols: {batch: {divisor: 2}}\ntarget: cuda\n"
STAGES = "ranks: 2\nplacement: {up: 0, bend: 0, down: 1, add: 1}\ntarget: cuda\n"
PARTS = "symbols: {batch: {divisor: 16}}\n"
PLANS = {
    "stages": STAGES + train(MEAN, 1, ADAM),
    "cut": "ranks: 2\nmesh: {tp: 2}\nsharding: {up: colwise, down: rowwise}\ntarget: cuda\n" + train(MEAN, 1, ADAM),
    "data": DATA + train(MEAN, 1, ADAM),
    "ZeRO": DATA + train(MEAN, 1, ADAM.replace("{", "{shard: true, ", 1)),
    "ZeRO, a message each": DATA
    + train(MEAN, 1, ADAM.replace("{", "{shard: true, ", 1)).replace("train:\n", "train:\n  bucket_mb: 0.00001\n"),
    "microbatches": STAGES + PARTS + train(MEAN, 1, ADAM) + "pipeline: {microbatches: 4}\n",
    "update on cpu": STAGES + train(MEAN, 1, ON_CPU),
}
CALLS = {
    "stages": {"message"},
    "cut": {"AllReduce"},
    "data": {"AllReduce"},
    "ZeRO": {"AllReduce", "ReduceScatter", "AllGather"},
    "ZeRO, a message each": {"AllReduce", "ReduceScatter", "AllGather"},
    "microbatches": {"message"},
    "update on cpu": {"message"},
}
STEPS = [numbers(MEAN)] * 2


def artifact(name: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    compile_source(from_text(NET, WEIGHTS), parse_plan(PLANS[name], "plan.yaml"), folder / "build")
    return folder / "build"


def learned(ranks: LocalProgram) -> tuple[list[dict[str, Any]], dict[str, np.ndarray], int]:
    """What some steps give, the tensors after them, and the copies of all ranks."""
    given = [ranks({**fed(ranks, k), **step}) for k, step in enumerate(STEPS)]
    counts = [ranks.counts.copies_to(target).number for ranks in ranks.ranks for target in ("cpu", "cuda")]
    return given, tensors(ranks), sum(counts)


@pytest.mark.parametrize("name", PLANS)
def test_values_stay_on_their_devices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ends = artifact(name, tmp_path), dict[str, Any]()
    assert check_artifact(folder) == []
    for way in ("0", "1"):
        monkeypatch.setenv(linked_file.VARIABLE, way)
        with load_local(folder, devices={"cuda": "cpu"}) as ranks:
            ends[way] = learned(ranks)
            steps = [step for one in ranks.ranks for step in one._program.steps]
    kinds = [step for step in steps if isinstance(step, Send | PostRecv | StartCollective)]
    assert any(step.target == "cuda" for step in kinds)
    assert any(isinstance(step, Copy) and step.source == step.result for step in steps)
    (losses, after, copies), (same_losses, same_after, fewer) = ends["0"], ends["1"]
    assert fewer < copies
    assert [one["loss"].tobytes() for one in losses] == [one["loss"].tobytes() for one in same_losses]
    assert {key: one.tobytes() for key, one in after.items()} == {key: one.tobytes() for key, one in same_after.items()}


def test_messages_in_another_order_go_through_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's messages have no tags: two ranks that begin them in other orders would take one for the other."""
    monkeypatch.setenv(linked_file.VARIABLE, "1")
    with load_local(artifact("microbatches", tmp_path), devices={"cuda": "cpu"}) as ranks:
        program = ranks.ranks[0]._program
        file = linked_file.read_rank_file(ranks.ranks[0].artifact, 0)
    ends = linked_file._ends(file, Devices())
    sent = ends.sends[1]
    assert len(sent) > 1
    assert {*sent} <= {step.tag for step in program.steps if isinstance(step, Send) and step.target}
    for order, common in ((sent, {*sent}), (sent[::-1], set()), (sent[1:], {*sent[1:]})):
        peer = DeviceEnds("cpu", {}, {0: order})
        assert agreed(0, [ends, peer], file) == common
    assert agreed(0, [ends, DeviceEnds("a GPU", {}, {0: sent})], file) == set()
    assert agreed(0, [ends, DeviceEnds()], file) == set()


def test_a_machine_without_a_gpu_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    name, lacks = gpu(Device("cuda", 0))
    assert (name, "cupy" in lacks) == ("", True)
    linked_file._report.cache_clear()
    for _ in range(2):
        linked_file._report(lacks)
    said = capfd.readouterr().err
    fact = f"partc: values of GPUs go from rank to rank through the host: {lacks}\n"
    assert said == f'{fact}  help: pip install "partc[nccl]"\n'


TRAINING = """
import json
from cupy.cuda import nccl
from partc.runtime.execution import linked_file
linked_file._named = lambda device: (f"fake GPU {rank}", "")
for name in json.load(open(folder + "/names")):
    batches = [json.loads(text) for text in open(f"{folder}/{name}/batches")]
    nccl.calls.clear()
    with runtime.load(f"{folder}/{name}/build", devices={"cuda": "cpu"}, trust=True, threads=1) as program:
        for batch in batches:
            given = {key: runtime.Whole(np.asarray(*one)) for key, one in batch["inputs"].items()}
            loss = program(given).get("loss")
            assert loss is None or float(loss) == batch["loss"], (rank, name, loss, batch["loss"])
    print(rank, name, sorted(nccl.calls), flush=True)
linked_file._named = lambda device: ("one GPU", "")
with runtime.load(f"{folder}/stages/build", devices={"cuda": "cpu"}, trust=True, threads=1) as program:
    print(rank, "of one GPU", program._program.messages.links, flush=True)
linked_file._named = lambda device: (f"fake GPU {rank}", "")
program = runtime.load(f"{folder}/stages/build", devices={"cuda": "cpu"}, trust=True, threads=1)
try:
    if rank == 0:
        program.leave(KeyError("of rank 0"))
    program(given)
except runtime.PartcError as error:
    print(rank, "ends", nccl.calls["abort"], "KeyError" in str(error), flush=True)
"""
FAKE = Path(__file__).parents[1] / "support" / "fake_gpus"


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python")
def test_ranks_with_a_gpu_each_call_nccl(tmp_path: Path) -> None:
    """The losses are those of the host; ranks that share a GPU go through the host; a failure ends what waits for another rank."""
    for name in PLANS:
        folder = artifact(name, tmp_path / name)
        rows = []
        with load_local(folder, devices={"cuda": "cpu"}) as ranks:
            for k, step in enumerate(STEPS):
                inputs = {key: np.asarray(one) for key, one in {**fed(ranks, k), **step}.items()}
                arrays = {key: (one.tolist(), str(one.dtype)) for key, one in inputs.items()}
                rows.append({"inputs": arrays, "loss": float(ranks(inputs)["loss"])})
        (folder.parent / "batches").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "names").write_text(json.dumps([*PLANS]))
    (tmp_path / "gpus").mkdir()
    found = job(tmp_path, TRAINING, 2, {"PYTHONPATH": f"{FAKE}:{FAKE.parent}", "FAKE_GPUS": str(tmp_path / "gpus")})
    assert found.returncode == 0, found.stderr
    wanted = [f"{rank} {name} {sorted({*CALLS[name], 'destroy'})}" for rank in range(2) for name in PLANS]
    wanted += [f"{rank} of one GPU None" for rank in range(2)] + ["0 ends 0 False", "1 ends 2 True"]
    assert sorted(found.stdout.splitlines()) == sorted(wanted), found.stderr
