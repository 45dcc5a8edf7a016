"""CONTRIBUTING.md's sections on collectives and transports: what their diffs add runs, is checked, and has a reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx.defs
import pytest
from artifact_text import write
from onnx.reference import ReferenceEvaluator
from partc.runtime import load
from partc.runtime.artifact.comm import collectives
from partc.runtime.artifact.comm.schemas import register
from partc.runtime.artifact.format import DOMAIN
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check_artifact
from partc.runtime.communication.in_process import LocalTransport, LocalWorld
from reference_ops import reference_ops
from run_collectives import shards, whole

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
RANKS, ROOT = 3, 1
Result = TypeVar("Result")


def added(heading: str) -> str:
    """The lines that the diff below a heading adds to the first file."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    (diff,) = re.findall(r"```diff\n(.*?)```", section, re.S)
    first = re.sub(r"\A--- .*\n\+\+\+ .*\n", "", diff).partition("\n--- ")[0]
    return "\n".join(line[1:] for line in first.splitlines() if line.startswith("+"))


@pytest.fixture
def gather() -> Iterator[None]:
    """The collective that the page adds."""
    before = set(collectives.COLLECTIVES)
    exec(added("Add a collective"), dict(vars(collectives)))
    (name,) = set(collectives.COLLECTIVES) - before
    assert name == "Gather"
    yield
    del collectives.COLLECTIVES[name]
    if onnx.defs.has(name, domain=DOMAIN):
        onnx.defs.deregister_schema(name, 1, DOMAIN)


def artifact(folder: Path) -> Path:
    """Every rank's value, doubled and joined along the second axis on one rank."""
    graphs = []
    for rank in range(RANKS):
        made = "k = " if rank == ROOT else " = "
        node = f'{made}partc.comm.Gather <group = "all", tag = 3, axis = 1, root = {ROOT}> (h)'
        ends = (
            (f"(float[2, {2 * RANKS}] y)", f"<float[2, 2] h, float[2, {2 * RANKS}] k>") if rank == ROOT else ("()", "")
        )
        last = "y = Neg(k)" if rank == ROOT else ""
        values = ends[1] or "<float[2, 2] h>"
        graphs.append(
            f"rank{rank} (float[2, 2] x{rank}) => {ends[0]} {values} {{ h = Add(x{rank}, x{rank}) {node} {last} }}"
        )
    return write(folder, graphs, groups=whole(RANKS))


def on_all(ranks: Callable[[int], Result]) -> list[Result]:
    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(ranks, range(RANKS)))


def test_the_collective_of_the_page_runs_is_checked_and_has_a_reference(tmp_path: Path, gather: None) -> None:
    folder, given, world = artifact(tmp_path / "a"), shards((2, 2), RANKS), LocalWorld(RANKS)
    register()
    onnx.checker.check_model(open_artifact(folder).model(0), full_check=True)
    assert check_artifact(folder) == []

    def run(rank: int) -> list[object]:
        with load(folder, world.transport(rank)) as program:
            return list(program({f"x{rank}": given[rank]}).values())

    def by_reference(rank: int) -> list[object]:
        opened = open_artifact(folder)
        ops = reference_ops(world.transport(rank), opened.manifest.groups_of(rank))
        return list(ReferenceEvaluator(opened.model(rank), new_ops=ops).run(None, {f"x{rank}": given[rank]}))

    wanted = -2 * np.concatenate(given, 1)
    for found in (on_all(run), on_all(by_reference)):
        assert [len(one) for one in found] == [0, 1, 0]
        np.testing.assert_array_equal(found[ROOT][0], wanted)


def test_a_call_of_it_without_its_root_is_refused(tmp_path: Path, gather: None) -> None:
    folder = artifact(tmp_path / "a")
    text = "\n".join(map(str, check_artifact(folder)))
    assert text == ""
    node = next(one for one in open_artifact(folder).model(0).graph.node if one.op_type == "Gather")
    node.ClearField("attribute")
    from partc.runtime.artifact.comm.collective_node import read_call
    from partc.runtime.errors import ArtifactError

    with pytest.raises(ArtifactError, match="its attribute 'root' is missing"):
        read_call(node, "rank_0000.onnx")


def test_the_transport_of_the_page_runs_a_program(tmp_path: Path) -> None:
    names: dict[str, type] = {"LocalTransport": LocalTransport}
    exec(added("Add a transport"), names)
    sends = "rank0 (float[2, 3] x) => () <float[2, 3] h> { h = Neg(x)  = partc.comm.Send <peer = 1, tag = 0> (h) }"
    takes = "rank1 () => (float[2, 3] y) { h = partc.comm.Recv <peer = 0, tag = 0> ()  y = Neg(h) }"
    folder, world = write(tmp_path / "a", [sends, takes]), LocalWorld(2)
    transports = [names["CountedTransport"](world, rank) for rank in range(2)]

    def run(rank: int) -> list[object]:
        with load(folder, transports[rank]) as program:
            return list(program(x=np.ones((2, 3), np.float32)).values())

    with ThreadPoolExecutor(2) as threads:
        _, (y,) = threads.map(run, range(2))
    np.testing.assert_array_equal(y, np.ones((2, 3)))
    assert [one.sent for one in transports] == [24, 0]
