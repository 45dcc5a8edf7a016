"""`partc diff`: what changed between two artifacts, in numbers that `partc inspect` shows, too, and its limits for CI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from machines import machine
from partc.cli.difference import Change, grouped_changes
from partc.cli.main import invoke
from partc.compiler.cost.machine_file import machine_text
from partc.compiler.pipeline import compile_model
from partc.runtime.units import seconds

SAMPLES = Path(__file__).parents[2] / "samples"
LENET, GPT = SAMPLES / "lenet", SAMPLES / "gpt"


def built(folder: Path, model: Path, plan: str, name: str) -> Path:
    """An artifact by a plan's text."""
    file = folder / f"{name}.yaml"
    file.write_text(plan)
    compile_model(model, file, folder / name)
    return folder / name


@pytest.fixture(scope="module")
def lenets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """LeNet, and LeNet with its last layer on another rank."""
    folder, plan = tmp_path_factory.mktemp("lenets"), (LENET / "plan.yaml").read_text()
    after = plan.replace("fc3: 2", "fc3: 1")
    return built(folder, LENET / "model.py", plan, "before"), built(folder, LENET / "model.py", after, "after")


def document(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What the command prints for machines."""
    capsys.readouterr()
    invoke([*map(str, arguments), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_moved_layer_is_its_node_its_weight_and_its_messages(
    lenets: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, "diff", *lenets)
    changes = {
        (one["kind"], one["name"]): (one["before"], one["after"]) for one in found["programs"]["infer"]["changes"]
    }
    assert changes == {
        ("placement", "fc3.Gemm"): ("2", "1"),
        ("shards", "fc3.weight"): ("float[10, 84] on 2", "float[10, 84] on 1"),
        ("communication", "message relu.Relu_3: 1 to 2"): ("336 B", ""),
        ("communication", "message logits: 2 to 0"): ("40 B", ""),
        ("communication", "message logits: 1 to 0"): ("", "40 B"),
    }


@pytest.mark.parametrize("batch", [1, 64])
def test_measures_are_those_of_inspect(
    lenets: tuple[Path, Path], batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--set", f"batch={batch}")
    measures = document(capsys, "diff", *lenets, *sizes)["programs"]["infer"]["measures"]
    for side, folder in zip(("before", "after"), lenets, strict=True):
        inspected = document(capsys, "inspect", folder, *sizes)
        assert measures["bytes"][side] == sum(one["sent"]["bytes"] for one in inspected["ranks"])
        assert measures["memory"][side] == max(one["peak"] for one in inspected["memory"])
        assert measures["messages"][side] == len(inspected["transfers"])
        assert measures["weights"][side] == max(one["weights"] for one in inspected["ranks"])


def test_collectives_count_for_each_rank_and_layers_are_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = (GPT / "dp_tp.yaml").read_text()
    before = built(tmp_path, GPT / "model.py", plan, "before")
    after = built(
        tmp_path,
        GPT / "model.py",
        plan.replace('  "layers.*.*.out": rowwise\n', "").replace('  "layers.*.*.project": colwise\n', ""),
        "after",
    )
    found = document(capsys, "diff", before, after)["programs"]["infer"]
    for side, folder in (("before", before), ("after", after)):
        ranks = document(capsys, "inspect", folder)["ranks"]
        assert found["measures"]["bytes"][side] == sum(one["sent"]["bytes"] for one in ranks)
    cut = {one["name"]: (one["before"], one["after"]) for one in found["changes"] if one["kind"] == "layouts"}
    assert cut["layers.0.mlp.out.MatMul"] == ("a in 2, k in 2", "a in 2")
    assert invoke(["diff", str(before), str(after), "--all"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "layers.*.mlp.out.MatMul  " in line)
    assert row.split()[:3] == ["~", "4", "layers.*.mlp.out.MatMul"]


def test_equal_artifacts_differ_in_nothing(lenets: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    limits = [f"--fail-if={name}>0" for name in ("bytes", "messages", "memory", "weights", "placement", "layouts")]
    assert invoke(["diff", str(lenets[0]), str(lenets[0]), *limits]) == 0
    assert "nothing is placed, cut or sent otherwise" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limit", "beyond"),
    [
        ("placement>0", "placement>0: 1 changed"),
        ("placement>1", ""),
        ("communication>2", "communication>2: 3 changed"),
        ("bytes>5%", ""),
        ("bytes>4%", "bytes>4%: 6,824 became 7,160, +4.92 %"),
        ("bytes>336", ""),
        ("bytes>0.3KB", "bytes>0.3KB: 6,824 became 7,160, +4.92 %"),
        ("messages>0", "messages>0: 4 became 5, +25 %"),
    ],
)
def test_a_limit_ends_with_1_beyond_it(
    lenets: tuple[Path, Path], limit: str, beyond: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = reversed(lenets)
    assert invoke(["diff", str(before), str(after), "--fail-if", limit]) == bool(beyond)
    assert capsys.readouterr().err == (f"exceeded: {beyond}\n" if beyond else "")


def test_the_time_of_a_step_is_that_of_simulate(
    lenets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "machine.yaml"
    written.write_text(machine_text(machine()))
    on = ["--set", "batch=64", "--machine", str(written)]
    found = document(capsys, "diff", *lenets, *on)["programs"]["infer"]["measures"]["time"]
    steps = [document(capsys, "simulate", one, *on)["seconds"] for one in lenets]
    assert [found["before"], found["after"]] == [round(1e9 * one) for one in steps]
    assert found["before"] != found["after"]
    grown = 100 * (found["before"] / found["after"] - 1)
    for limit, code in ((grown - 1, 1), (grown + 1, 0)):
        assert invoke(["diff", *map(str, reversed(lenets)), *on, "--fail-if", f"time>{max(limit, 0):.3f}%"]) == code
    shown = capsys.readouterr()
    assert "time of a step on the machine" in shown.out
    assert f"{seconds(steps[1])} became {seconds(steps[0])}" in shown.err
    assert invoke(["diff", *map(str, lenets), "--fail-if", "time>5%"]) == 2
    assert "the time of a step is not known without a machine" in capsys.readouterr().err


def test_programs_that_one_side_lacks_are_new(
    lenets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = built(tmp_path, LENET / "model.py", (LENET / "train.yaml").read_text(), "trained")
    found = document(capsys, "diff", lenets[0], trained)["programs"]
    assert list(found) == ["infer", "train", "evaluate"]
    rows = found["evaluate"]["changes"]
    assert rows
    assert all(not one["before"] and one["after"] for one in rows if one["kind"] == "placement")


def test_wrong_limits_sizes_and_folders_are_named_all_at_once(
    lenets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--fail-if=byts>5%", "--fail-if=placement>5%", "--fail-if=memory", "--fail-if=bytes>soon"]
    assert invoke(["diff", *map(str, lenets), *wrong]) == 2
    told = capsys.readouterr().err
    for words in (
        "'byts' is not compared",
        "'5%' is not an amount of placement",
        "'memory' is not NAME>AMOUNT",
        "'soon' is not",
    ):
        assert words in told
    assert invoke(["diff", *map(str, lenets), "--set", "batch=0", "--set", "seq=2"]) == 2
    told = capsys.readouterr().err
    assert "neither artifact has a symbol 'seq'" in told
    assert "--set batch=0" in told
    assert invoke(["diff", str(lenets[0]), str(tmp_path / "nowhere")]) in (1, 2)
    assert "there is no such folder" in capsys.readouterr().err


def test_only_numbers_that_differ_become_a_star() -> None:
    changes = [Change("layouts", f"layers.{k}.norm2.{kind}", "a", "b", f"by {k}") for kind in "xy" for k in range(3)]
    assert grouped_changes(changes) == [
        (Change("layouts", "layers.*.norm2.x", "a", "b", "by *"), 3),
        (Change("layouts", "layers.*.norm2.y", "a", "b", "by *"), 3),
    ]


def test_the_workflow_of_the_samples_compares_a_pull_request_with_its_base(tmp_path: Path) -> None:
    """Its steps but the installation, in a repository with a base and a change."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    workflow = yaml.safe_load((SAMPLES / "ci" / "plans.yml").read_text())
    steps = {one["name"]: one["run"] for one in workflow["jobs"]["plans"]["steps"] if "name" in one}
    for file in ("model.py", "plan.yaml"):
        shutil.copy(LENET / file, tmp_path)
    summary = tmp_path / "summary.md"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "GITHUB_BASE_REF": "main", "GITHUB_STEP_SUMMARY": str(summary)}
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        environment[name] = "someone"

    def shell(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-e", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True)

    made = shell(
        "git init -q -b main && git add . && git commit -qm one && git update-ref refs/remotes/origin/main HEAD"
        " && git checkout -qb other && sed -i 's/fc3: 2/fc3: 1/' plan.yaml && git commit -qam two"
    )
    assert made.returncode == 0, made.stderr
    compiled = shell(steps["compile both sides"])
    assert compiled.returncode == 0, compiled.stderr
    compared = shell(steps["compare"])
    assert compared.returncode == 0, compared.stderr
    assert "fc3.Gemm" in summary.read_text()
    assert shell(f'partc() {{ [ "$1" != diff ]; }}\n{steps["compare"]}').returncode == 1, "of a diff beyond a limit"
