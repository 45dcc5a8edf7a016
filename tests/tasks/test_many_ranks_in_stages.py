"""Stages of many ranks: messages between two groups are one op, so that ranks share programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from batch_in_parts import LOSSES, NET, WEIGHTS, close, numbers, start_of, train, trained, trained_whole
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check
from partc.runtime.errors import ArtifactError
from partc.runtime.execution.collective_plans import wire_tags
from pipelines_case import pipeline
from training_equivalence import from_text

STAGES = """ranks: 16
mesh: {pp: 2, dp: 8}
symbols: {batch: {divisor: 16}}
dataset: {x: [dp, null], label: [dp]}
placement: {up: {pp: 0}, bend: {pp: 0}, down: {pp: 1}, add: {pp: 1}}
"""
CLIP = "  clip: {norm: 0.3}\n"


def test_many_ranks_in_stages_train_as_the_whole(tmp_path: Path) -> None:
    """Eight messages from each task to the next are one record; the checker takes them, and refuses pairs that are none."""
    loss = LOSSES["both, smoothed"]
    text = train(loss, 1, "{type: momentum, lr: 0.3}", CLIP)
    steps = [numbers(loss)] * 2
    whole = trained_whole(from_text(NET, WEIGHTS), "ranks: 1\n" + text, steps)
    have = trained(tmp_path / "build", from_text(NET, WEIGHTS), STAGES + text + pipeline(2, "1f1b"), steps)
    close(have, whole, start_of(), 2e-6)
    manifest = open_artifact(tmp_path / "build").manifest
    assert [(one.value, one.source, one.target, one.group) for one in manifest.transfers if one.shape] == [
        ("b.0", 0, 8, "0-8+7"),
        ("b.1", 0, 8, "0-8+7"),
        ("b.grad.0", 8, 0, "8-0+7"),
        ("b.grad.1", 8, 0, "8-0+7"),
    ]
    assert len({*manifest.rank_files}) <= 4, "ranks of a stage share a program but for the one that gives the loss"
    assert [one.target for one in manifest.messages_of(3) if one.source == 3 and one.shape] == [11, 11]
    few = wire_tags(manifest, 3)
    apart = {(one.source, one.target, few[one.tag]) for one in manifest.messages}
    assert (len(apart), max(few.values())) == (len(manifest.messages), 4), (
        "few tags tell the messages of each pair apart"
    )
    text = (tmp_path / "build/ir/step_parallel_end.ir").read_text()
    assert "%b.0 0 -> 8 and 7 more" in text
    assert "{group: 0-8+7, tag: " in text
    path = tmp_path / "build/manifest.json"
    said = json.loads(path.read_text())
    said["groups"]["0-8+7"][3] = [3]
    path.write_text(json.dumps(said))
    assert "is not pairs of a source and a target" in str(check(tmp_path / "build").violations[0])
    with pytest.raises(ArtifactError, match="is not pairs of a source and a target"):
        open_artifact(tmp_path / "build", trust=True)
