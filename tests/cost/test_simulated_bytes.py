"""The bytes that a simulation has are those that ranks give the transport in a step, for every plan of the samples."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from machines import machine
from partc.cli.job.inputs import open_inputs
from partc.cli.output.stats import typical_sizes
from partc.cli.simulation.step import simulated
from partc.runtime import load, load_trainer
from partc.runtime.artifact.comm.lookup_ops import LOOKUPS
from partc.runtime.artifact.format import Manifest
from partc.runtime.artifact.tensors.dtypes import Bytes
from partc.runtime.communication.in_process import LocalTransport, LocalWorld
from partc.runtime.communication.transport import CollectiveArgs, Request
from partc.runtime.execution.inputs import shard
from sample_plans import PLANS, compiled

THREADS = {"threads": 1, "devices": {"cuda": "cpu"}}


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


@pytest.mark.parametrize("plan", PLANS)
def test_bytes_of_a_sample_are_counted(plan: str, tmp_path: Path) -> None:
    artifact = compiled(plan, tmp_path / "build")
    manifest = artifact.manifest
    sizes = typical_sizes(manifest)
    found = simulated(artifact, machine(), sizes)
    pairs = zip(found.played.classes, found.bytes, strict=True)
    predicted = {rank: bytes for one, bytes in pairs for rank in one.ranks}
    measured = dict(enumerate(counted(tmp_path / "build", manifest, sizes)))
    if any(one.op in LOOKUPS for one in manifest.collectives):
        assert all(0 < measured[rank] <= predicted[rank] for rank in measured), "distinct rows travel, at most all"
    else:
        assert predicted == measured
