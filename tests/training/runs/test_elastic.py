"""A plan with `elastic`: one artifact for several numbers of ranks, the same losses on each, and the most ranks that hosts allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.compiler.plan.read import parse_plan
from partc.runtime.checker.check import check_artifact
from training_command_case import ONE, PARALLEL, built, folder, run, train

__all__ = ["folder"]

SHARED = PARALLEL.replace("type: adam,", "type: adam, shard: true,")
ELASTIC = SHARED.replace("ranks: 2\nmesh: {dp: 2}", "ranks: 6\nmesh: {dp: 6}\nelastic: {ranks: [6, 4, 3]}")
ELASTIC = ELASTIC.replace("divisor: 2", "divisor: 12")


def losses(file: Path) -> list[float]:
    return [line["loss"] for line in map(json.loads, file.read_text().splitlines()) if "loss" in line]


def test_a_training_continues_on_other_numbers_of_ranks(folder: Path) -> None:
    (folder / "build.yaml").write_text(ELASTIC)
    build, one = folder / "build", built(folder, ONE, "one")
    compile_model(folder / "model.py", folder / "build.yaml", build)  # a copy of an artifact has no links
    assert check_artifact(build) == []
    weights = [build / place / "weights" / "rank_0000.safetensors" for place in ("", "r4", "r3")]
    assert len({file.stat().st_ino for file in weights}) == 1
    assert train(str(one), "--steps", "12", "--log", "1", "--metrics", "one.jsonl") == 0
    ran = ("--resume", "auto", "--checkpoint", "kept", "--log", "1", "--metrics", "elastic.jsonl")
    for ranks, steps in ((6, 3), (4, 6), (3, 9), (6, 12)):
        assert train(str(build), "-n", str(ranks), "--steps", str(steps), *ran) == 0
    assert losses(folder / "elastic.jsonl") == pytest.approx(losses(folder / "one.jsonl"), rel=1e-5)


def test_the_most_ranks_that_hosts_allow_are_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = built(folder, ELASTIC)
    hosts = ("--host", "localhost:3,nowhere.invalid:4", "--steps", "2")
    code, said = run(build, *hosts, "--restarts", "1", "--checkpoint", "kept")
    assert code == 0, said
    assert "3 ranks of 6: the hosts have 3 slots, without nowhere.invalid, which do not answer" in said
    for words, fact in (
        (("--host", "localhost:2"), "compiled for 3 ranks at least, and the hosts have 2 slots"),
        (("--host", "localhost"), "the slots of host 'localhost' are not said"),
        (("-n", "5"), "compiled for 6, 4 or 3 ranks, not 5"),
    ):
        code, said = invoke(["train", str(build), "--plan", f"{build}.yaml", *words]), capsys.readouterr().err
        assert (code, fact in said) == (2, True), said


def test_programs_of_other_tensors_are_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = built(folder, ELASTIC)
    file = build / "r4" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["state"][0]["kind"] = "statistics"
    shape = manifest["state"][0]["shape"]
    manifest["training"]["settings"]["batch"] = 24
    file.write_text(json.dumps(manifest))
    assert invoke(["check", str(build)]) == 1
    said = capsys.readouterr().err
    assert "r4/manifest.json: it has" in said
    assert f"is statistics tensor(float) {shape} on 4 ranks, and parameter tensor(float) {shape} on 6" in said
    assert "its training on 4 ranks is not that on 6" in said


@pytest.mark.parametrize(
    ("elastic", "more", "words"),
    [
        (
            "[6, 5]",
            "",
            ("'elastic', 5 ranks: a batch of 12 records cannot", "12 is not divisible by 5", "multiple of 30"),
        ),
        ("[4, 3]", "", ("the numbers are 4, 3, and 'ranks' is 6", "or set 'ranks' to 4")),
        ("[6, 4]", "mesh: {dp: 2, tp: 3}\n", ("4 ranks are not a mesh dp=2 x tp=3", "take multiples of 3")),
        ("[6, 3]", "mesh: {data: 6}\n", ("the mesh data=6 is not a grid of all ranks with an axis 'dp'",)),
        ("[6, 3], every: 5", "", ("'every' without 'copies'", "write copies: 1")),
        ("[6, 3]", "placement: {a: 5}\n", ("on 3 ranks: placement of 'a': rank 5, but there are 3 ranks",)),
    ],
)
def test_numbers_that_do_not_fit_are_refused(elastic: str, more: str, words: tuple[str, ...]) -> None:
    plan = ONE.replace("ranks: 1", f"ranks: 6\n{more}elastic: {{ranks: {elastic}}}")
    with pytest.raises(CompileError) as refused:
        parse_plan(plan, "plan.yaml")
    for text in words:
        assert text in str(refused.value)
    assert str(refused.value).startswith("plan.yaml:")
