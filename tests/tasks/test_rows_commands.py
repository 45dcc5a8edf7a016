"""The rows of an artifact in `partc inspect` and `partc simulate`, with times in units, given ones, and those that a training measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from mutation_kinds import KINDS, build
from partc.cli.main import invoke
from partc.cli.output.pipeline import read_profile
from partc.runtime.artifact.dim_expression import parse
from partc.runtime.artifact.format import SCHEDULE
from partc.runtime.errors import UsageError

Capture = pytest.CaptureFixture[str]
ROWS = """\
rank 0: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(KINDS["pipeline"], tmp_path_factory.mktemp("rows") / "build")


def said(capsys: Capture, *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert invoke(list(arguments)) == code
    heard = capsys.readouterr()
    return heard.err if code else heard.out


def test_inspect_shows_rows_and_what_they_keep(built: Path, capsys: Capture) -> None:
    text = said(capsys, "inspect", str(built), "--set", "n=8")
    assert "pipeline: 1f1b, 4 microbatches" in text
    assert re.search(r"\n0 +0 +8 +3 +2 +24\*n +192 B\n", text)
    assert ROWS in text
    assert "total 15, bubble 20%" in text
    assert "rank 0 |0F0 0F1 .   .   0B0 --- 0F2 0B1 --- 0F3 0B2 --- .   0B3 --- |" in text
    found = json.loads(said(capsys, "inspect", str(built), "--json"))["pipeline"]
    assert [row["microbatches"] for row in found["rows"]] == [2, 1]


def test_what_is_kept_is_what_the_compiler_says(built: Path, capsys: Capture) -> None:
    """Two computations: of ops and their places, and of the files alone."""
    text = (built / SCHEDULE).read_text()
    stated = re.findall(r"keeps .*microbatch\w*: (.*?) bytes", text)
    kept = json.loads(said(capsys, "check", str(built), "--json"))["kept"]
    for one, other in zip(kept, stated, strict=True):
        assert parse(one["bytes"])({"n": 20}) == parse(other)({"n": 20})


def test_rows_of_an_artifact_in_units(built: Path, capsys: Capture) -> None:
    text = said(capsys, "simulate", str(built))
    assert "# Schedule: 1f1b   Stages: 2   Microbatches: 4\n" in text
    assert "# Total: 15 units   Bubble: 20%" in text
    assert ROWS in text
    assert text.endswith("critical path: 0F0 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 0B3\n")


def test_times_that_are_given(built: Path, capsys: Capture, tmp_path: Path) -> None:
    """0.5 + 4 * (1 + 2) + 1 milliseconds on the longest way, and two messages on it of a tenth each."""
    given = [text for one in ("0F=0.5ms", "0B=1ms", "1F=1e-3s", "1B=2000us") for text in ("--times", one)]
    assert "# Total: 13.5 ms" in said(capsys, "simulate", str(built), *given)
    assert "# Total: 13.7 ms" in said(capsys, "simulate", str(built), *given, "--message", "1e-4")
    file = tmp_path / "times.json"
    file.write_text('{"0F": 0.0005, "0B": 0.001, "1F": 0.001, "1B": 0.002, "1F2": 0.011}')
    assert "# Total: 23.5 ms" in said(capsys, "simulate", str(built), "--times", str(file))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--times", "0F=1ms"], "0B, 1B, 1F: no time is given\n  help: give the times of all tasks"),
        (["--times", "0F=fast"], "'fast' is not a duration\n  help: write it as 0F=1.2ms"),
        (["--times", "7F=1ms"], "7F: the stages are 0 to 1"),
        (["--times", "none.json"], "none.json: No such file or directory"),
        (["-m", "8"], "the artifact has its rows and stages"),
    ],
)
def test_what_a_simulation_refuses(options: list[str], words: str, built: Path, capsys: Capture) -> None:
    assert words in said(capsys, "simulate", str(built), *options, code=2)


def test_an_artifact_without_tasks(capsys: Capture, tmp_path: Path) -> None:
    folder = build(KINDS["placed"], tmp_path / "build")
    assert "it has no tasks" in said(capsys, "simulate", str(folder), code=2)


def test_a_training_measures_its_tasks(built: Path, capsys: Capture, tmp_path: Path) -> None:
    """Every task of every rank in every step but the first three, and the simulation with these times beside the measured steps."""
    rng = np.random.default_rng(1)
    data, file = tmp_path / "data.npz", tmp_path / "times.json"
    np.savez(data, x=rng.normal(size=(16, 6)).astype(np.float32), label=rng.integers(0, 5, 16))
    given = ["--data", str(data), "--batch", "8", "--steps", "6", "--in-process", "--profile", str(file)]
    assert f"wrote {file}: times of 2 ranks" in said(capsys, "train", str(built), *given)
    profile = read_profile(file)
    assert [" ".join(sorted(one.tasks)) for one in profile.ranks] == [
        " ".join(sorted(line.split()[2:])) for line in ROWS.splitlines()
    ]
    assert profile.steps == 3
    for one in profile.ranks:
        for step, whole in enumerate(one.step):
            assert 0.5 * whole <= sum(seconds[step] for seconds in one.kinds.values()) <= whole
            inside = sum(seconds[step] for seconds in one.tasks.values())
            assert inside == pytest.approx(sum(one.kinds[kind][step] for kind in ("compute", "update", "begin")))
    text = said(capsys, "simulate", str(built), "--times", str(file))
    assert " ms   Bubble: " in text
    assert re.search(r"3 steps, medians: measured .* ms, simulated .* ms, measured/simulated \d", text)
    found = json.loads(said(capsys, "simulate", str(built), "--times", str(file), "--json"))
    assert found["measured"]["simulated"] > 0


def test_a_profile_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    one = {"rank": 0, "step": [1.0], "tasks": {"0F0": [1.0]}, "waits": {}, "kinds": {}, "arena": 0}
    for ranks, words in (
        ([], "it is not a profile: ranks"),
        ([{**one, "tasks": {"0F0": [-1.0]}}], "ranks.0.tasks.0F0.0"),
        ([{**one, "tasks": {"0F0": [1.0, 2.0]}}], "times of rank 0 are of different numbers of steps"),
        ([{**one, "step": [0.0]}], "step 0 took no time on any rank"),
    ):
        file.write_text(json.dumps({"profile": 1, "ranks": ranks}))
        with pytest.raises(UsageError, match=words):
            read_profile(file)


def test_ranks_of_a_stage_that_wait_for_each_other(tmp_path: Path) -> None:
    """The slowest counts; with waits inside, the time of all is that of the one that came last."""
    file = tmp_path / "times.json"
    base = {"step": [9.0], "kinds": {}, "arena": 0}
    ranks = [
        {"rank": 0, "tasks": {"0F0": [2.0], "0F1": [2.0]}, "waits": {"0F1": [5.0]}, **base},
        {"rank": 1, "tasks": {"0F0": [3.0], "0F1": [3.0]}, "waits": {"0F1": [1.0]}, **base},
    ]
    file.write_text(json.dumps({"profile": 1, "ranks": ranks}))
    assert read_profile(file).times() == {"0F0": 3.0, "0F1": 4.0}
