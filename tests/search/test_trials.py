"""`partc plan --try`: the fastest plans run on this host, and the fastest of those is taken; one that fails is not."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from partc.cli.machine import trials
from partc.cli.machine.job import result_of_module
from partc.cli.main import invoke
from partc.cli.simulation.search import Options, searched
from partc.compiler.search.candidate import Candidate, Fixed
from partc.compiler.search.search_state import SearchState
from partc.runtime.errors import RankError
from perceptrons import TRAIN, layers
from proposal_case import source
from rows import of_today

OPTIONS = Options(2, Fixed(), {"batch": 64}, tries=2)


@pytest.mark.parametrize("train", of_today(["", TRAIN], 1))
def test_plans_run_before_one_is_taken(
    train: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_TURNS", 1)
    onnx.save(layers(8), tmp_path / "model.onnx")
    (tmp_path / "train.yaml").write_text(train)
    options = ["--plan", str(tmp_path / "train.yaml")] if train else ["--batch", "64"]
    command = ["plan", str(tmp_path / "model.onnx"), "--ranks", "2", "--try", "2", *options]
    assert invoke([*command, "-o", str(tmp_path / "plan.yaml")]) == 0
    told = capsys.readouterr()
    head, *rows = (line.split() for line in told.out.splitlines()[1:] if line)
    assert head[:3] == ["plan", "measured", "step"]
    assert sum(row[-1] == "found" for row in rows) == 1
    assert "did not run" not in told.err
    assert "on this host, and by simulation" in (tmp_path / "plan.yaml").read_text()
    assert (
        invoke(
            ["compile", str(tmp_path / "model.onnx"), "--plan", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "b")]
        )
        == 0
    )


def chosen(measured: dict[int, float], failed: dict[int, str]) -> tuple[list[Candidate], str, tuple[str, ...]]:
    """Candidates in the order of their simulated steps; the report and the warnings where some of them were measured so, or have failed."""
    order = list[Candidate]()

    def run(plays: SearchState) -> None:
        order.extend(one.candidate for one in plays.fitting)
        plays.measured = {order[k]: time for k, time in measured.items()}
        plays.failed = {order[k]: fact for k, fact in failed.items()}

    found = searched(source(layers(8)), "model.onnx", OPTIONS, run)
    return order, found.report, found.warnings


def test_the_fastest_that_ran_is_taken() -> None:
    """Whatever was simulated of it."""
    order, report, warnings = chosen({0: 3e-3, 1: 2e-3}, {})
    first, second = report.splitlines()[2:4]
    assert first.startswith(str(order[1]))
    assert "2 ms" in first
    assert first.endswith("found")
    assert second.startswith(str(order[0]))
    assert not any("did not run" in line for line in warnings)
    assert "found 2 ms, by simulation" in report


def test_one_that_fails_is_not_taken() -> None:
    order, report, warnings = chosen({1: 2e-3}, {0: "no memory"})
    first, second = report.splitlines()[2:4]
    assert first.startswith(str(order[1]))
    assert first.endswith("found")
    assert "failed" in second
    assert f"{order[0]} did not run: no memory" in warnings


def test_where_none_runs_the_simulation_decides() -> None:
    order, report, warnings = chosen({}, {0: "no memory", 1: "no launcher"})
    assert report.splitlines()[2].startswith(str(order[0]))
    assert report.splitlines()[2].rstrip().endswith("found")
    assert sum("did not run" in line for line in warnings) == 2


def test_a_plan_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    with pytest.raises(RankError, match=r"the ranks failed: .*manifest"):
        result_of_module("partc.cli.machine.trial_rank", tmp_path, 2)


def test_other_hosts_are_not_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(layers(8), tmp_path / "model.onnx")
    command = ["plan", str(tmp_path / "model.onnx"), "--ranks", "4", "--batch", "64", "--hosts", "2", "--try", "2"]
    assert invoke(command) == 2
    assert "--try is for the ranks of one host" in capsys.readouterr().err
