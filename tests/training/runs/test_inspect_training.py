"""`partc inspect` of artifacts that train: nodes of each phase, bytes of what is kept, buckets, and what an update replaces."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click.testing
import pytest
from partc.cli.commands.inspect import command
from partc.cli.output.stats import all_rank_stats, rank_stats
from partc.cli.output.training_stats import training_stats
from partc.compiler.cost.memory import rank_memory
from partc.runtime.artifact.manifest import Artifact, open_artifact
from small_training import DATA_PARALLEL, LAMB, NORMALIZED, PERCEPTRON, compiled

FLOATS = 6 * 5 + 5 + 5 * 3


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("inspected") / "build", PERCEPTRON, DATA_PARALLEL)


def printed(*arguments: str) -> str:
    result = click.testing.CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_every_node_is_in_one_phase(build: Path, tmp_path: Path) -> None:
    for folder in (build, compiled(tmp_path / "lamb", PERCEPTRON, DATA_PARALLEL, LAMB)):
        artifact = open_artifact(folder)
        one = training_stats(artifact.manifest, artifact.model(1), 1, {"batch": 4})
        whole = rank_stats(artifact, 1, {"batch": 4})
        assert one.forward + one.backward + one.update == whole.nodes
        assert (one.parameters, one.statistics) == (4 * FLOATS, 0)
        assert (one.buckets, one.bucket_bytes) == (1, 4 * FLOATS)
        # of three gradients the squares, their sum, counted on one rank, that of all ranks in two nodes, the scale; then the optimizer's
        assert one.update == 3 + 2 + 2 + 1 + (3 if folder == build else 12)
        assert one.optimizer == 4 * FLOATS * (1 if folder == build else 2)


def test_a_file_is_read_once_for_all_of_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = compiled(tmp_path / "build", PERCEPTRON, DATA_PARALLEL.replace("2", "4"))
    artifact, read = open_artifact(build), Counter[str]()
    each = [rank_stats(artifact, rank, {"batch": 4}) for rank in range(artifact.manifest.ranks)]
    model = Artifact.model
    monkeypatch.setattr(
        Artifact, "model", lambda self, rank: (read.update([self.manifest.program(rank)]), model(self, rank))[1]
    )
    assert all_rank_stats(artifact, {"batch": 4}) == each
    assert {*read.values()} == {1}
    assert len(read) < len(each)


def test_memory_is_that_of_the_state_and_of_what_lives_beside_it(build: Path) -> None:
    artifact = open_artifact(build)
    (small,), (large,) = (rank_memory(artifact, 0, {"batch": batch}).targets for batch in (2, 200))
    assert (small.parameters, small.optimizer) == (4 * FLOATS, 4 * FLOATS)
    assert small.weights < 100
    # all gradients are alive when the first update begins
    assert 4 * FLOATS <= small.between < 6 * 4 * FLOATS
    # half the batch of the hidden values and what the backward pass makes of them
    assert large.peak - small.peak >= 4 * 99 * (6 + 5 + 5)


def test_the_table_and_the_numbers_for_machines(build: Path) -> None:
    lines = printed(str(build)).splitlines()
    at = lines.index("training")
    assert lines[at + 1].split()[:6] == ["rank", "forward", "backward", "update", "parameters", "optimizer"]
    assert lines[at + 2].split()[4:] == ["200", "B", "200", "B", "1,", "200", "B"]
    data = json.loads(printed(str(build), "--json"))
    assert [one["rank"] for one in data["training"]] == [0, 1]
    assert data["training"][0]["bucket_bytes"] == 200


def test_an_update_says_what_it_replaces(build: Path, tmp_path: Path) -> None:
    assert "next shift, shift.momentum" in printed(str(build), "--node", "shift.update")
    normalized = compiled(tmp_path / "normalized", NORMALIZED, "ranks: 1\n")
    found = printed(str(normalized), "--rank", "0")
    assert "next running_mean, running_var" in found or "next running_mean" in found
    assert "statistics" in printed(str(normalized))


def test_an_evaluation_is_inspected_as_what_runs(build: Path) -> None:
    found = printed(str(build), "--program", "evaluate")
    assert "training" not in found
    whole = rank_stats(open_artifact(build, program="evaluate"), 0, {"batch": 4})
    assert whole.weights >= 4 * FLOATS
