"""What is known of a step of every sample before it runs: the size of each value, or how large those become that grow with a decoder's
sequences, the bytes that ranks give the transport, and of a pipeline the time of its schedule; and that the minimal runtime of the samples
computes what partc's computes. A plan is compiled once for all of these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from machines import curve, machine
from minimal_ranks import minimal_runtime, run, same_as_partc
from partc.cli.job.inputs import open_inputs
from partc.cli.output.pipeline import pipeline_of
from partc.compiler.cost.machine import Link, Machine
from partc.compiler.cost.memory import rank_memory
from partc.compiler.cost.play import Compute
from partc.compiler.cost.step import simulated
from partc.compiler.schedule.costs import unit_costs, with_times
from partc.compiler.schedule.simulate import simulate
from partc.runtime import load, load_trainer
from partc.runtime.artifact.comm.collectives import LOOKUPS
from partc.runtime.artifact.format import Manifest
from partc.runtime.artifact.legal_sizes import is_legal, typical_sizes
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.tensors.dtypes import Bytes
from partc.runtime.communication.in_process import LocalTransport, LocalWorld
from partc.runtime.communication.transport import CollectiveArgs, Request
from partc.runtime.execution.inputs import shard
from rows import of_today
from sample_plans import PLANS, compiled

THREADS = {"threads": 1, "devices": {"cuda": "cpu"}}
PIPELINES = ("lenet/train_pipeline", "gpt/train_pipeline")


@pytest.fixture(scope="module", params=of_today(PLANS, 12))
def plan(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def artifact(plan: str, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return compiled(plan, tmp_path_factory.mktemp("sample") / "build")


class Counted(LocalTransport):
    """Ranks as threads, which count the bytes that they give messages and collectives."""

    given = 0

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Request:
        self.given += buffer.size
        return super().isend(buffer, peer, tag)

    def prepare(self, args: CollectiveArgs) -> Callable[[], Request]:
        begin = super().prepare(args)

        def counted() -> Request:
            self.given += args.source.size if len(args.ranks) > 1 else 0
            return begin()

        return counted


def counted(folder: Path, manifest: Manifest, sizes: dict[str, int]) -> list[int]:
    """By rank the bytes that it gives in a step, on random inputs."""
    world = LocalWorld(manifest.ranks)
    record = manifest.training
    scalars = {*record.scalars} if record is not None else set()
    ports = [port for port in manifest.inputs if port.name not in scalars]
    reader = open_inputs(manifest, [], 7, sizes)
    whole = reader.read([port.name for port in ports])

    def run(rank: int) -> int:
        transport = Counted(world, rank)
        opened = load_trainer if record is not None else load
        with opened(folder, transport, **THREADS) as one:
            batch = {port.name: shard(port, rank, whole[port.name]) for port in ports if rank in port.ranks}
            before = transport.given
            one.train(batch) if record is not None else one(**batch)
            return transport.given - before

    with ThreadPoolExecutor(manifest.ranks) as threads:
        return list(threads.map(run, range(manifest.ranks)))


def test_no_value_of_a_sample_is_left_out(artifact: Artifact) -> None:
    sizes = typical_sizes(artifact.manifest)
    for program in artifact.programs:
        beside = artifact if program == artifact.programs[0] else artifact.program_named(program)
        needed = [rank_memory(beside, rank, sizes) for rank in range(artifact.manifest.ranks)]
        assert not any(one.unknown for one in needed)
        assert all(one.peak > 0 for one in needed)


def test_bytes_of_a_sample_are_counted(artifact: Artifact) -> None:
    manifest = artifact.manifest
    sizes = typical_sizes(manifest)
    found = simulated(artifact, machine(), sizes)
    pairs = zip(found.played.classes, found.bytes, strict=True)
    predicted = {rank: bytes for one, bytes in pairs for rank in one.ranks}
    measured = dict(enumerate(counted(artifact.folder, manifest, sizes)))
    if any(one.op in LOOKUPS for one in manifest.collectives):
        assert all(0 < measured[rank] <= predicted[rank] for rank in measured), "distinct rows travel, at most all"
    else:
        assert predicted == measured


def test_the_minimal_runtime_equals_partc(artifact: Artifact, plan: str) -> None:
    """Two steps of small sizes. In float16 values depend on where sessions begin, and first steps of Adam on the sign of a gradient."""
    manifest = artifact.manifest
    scalars = {*manifest.training.scalars} if manifest.training is not None else set()
    sizes = {
        name: next(size for size in range(3, 999) if is_legal(size, law)) for name, law in manifest.symbols.items()
    }
    names = [port.name for port in manifest.inputs if port.name not in scalars]
    steps = [open_inputs(manifest, [], seed, sizes).read(names) for seed in (7, 8)]
    if lookups := sorted({one.op for one in manifest.collectives if one.op in LOOKUPS}):
        with pytest.raises(minimal_runtime.Refused, match=f"not done here: {' and '.join(lookups)}"):
            run(artifact.folder, manifest.ranks, steps)
        return
    is_half = plan == "gpt/train_offload"
    same_as_partc(
        artifact.folder, manifest.ranks, steps, rtol=1e-3 if is_half else 1e-6, of_state=0.1 if is_half else None
    )


@pytest.mark.parametrize("plan", PIPELINES, indirect=True)
def test_a_step_takes_what_its_schedule_takes(artifact: Artifact, plan: str) -> None:
    """Played action by action, and task by task with the same times."""
    none = curve(1e18)
    fast = Machine("", 0, machine().processors, [Link("default", 2, 1, 1.0, 0.0, none, none)])
    found = simulated(artifact, fast, {"seq": 64} if plan.startswith("gpt") else {})
    times: dict[str, float] = defaultdict(float)
    begins, ends = [], []
    for some in found.played.intervals:
        for one in some:
            if isinstance(one.action, Compute) and one.action.task:
                times[one.action.task] += one.end - one.begin
                begins.append(one.begin)
                ends.append(one.end)
    pipeline = pipeline_of(artifact)
    assert pipeline is not None
    schedule = pipeline.schedule
    assert {*times} == {str(task) for row in schedule.rows for task in row}
    timing = simulate(schedule, with_times(unit_costs(schedule.stages), times))
    assert max(ends) - min(begins) == pytest.approx(timing.total, rel=1e-3)
