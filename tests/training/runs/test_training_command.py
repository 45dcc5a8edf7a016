"""`partc train` as a user has it: over MPI, killed and resumed, under other plans, and told what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.checkpoint import Checkpoint
from rows import of_today
from training_command_case import AS_ROOT, MODEL, ONE, PARALLEL, PLACED, built, command, folder, tensors, train

__all__ = ["folder"]

SAMPLES = Path(__file__).parents[3] / "samples"


@pytest.mark.parametrize("checkpoints", of_today((1, 2, 5), 1))  # the next one is being written
def test_killed_at_any_moment_it_goes_on_as_if_it_never_was(
    folder: Path, capsys: pytest.CaptureFixture[str], checkpoints: int
) -> None:
    build = str(built(folder, PLACED))
    whole = folder / "whole"
    assert train(build, "--checkpoint", str(whole), "--save", "1") == 0
    kept = folder / "kept"
    words = [build, "--plan", f"{build}.yaml", "--threads", "1", "--checkpoint", str(kept), "--save", "1"]
    process = subprocess.Popen(
        command(*words),
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **AS_ROOT},
    )
    assert process.stdout is not None
    for line in process.stdout:
        checkpoints -= line.startswith("wrote")
        if not checkpoints:
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    capsys.readouterr()
    assert train(build, "--checkpoint", str(kept), "--save", "1", "--resume") == 0
    said = capsys.readouterr().out
    assert "resumes after step" in said or "20 of 20" in said
    assert tensors(kept) == tensors(whole)


def test_a_checkpoint_goes_on_under_any_plan(folder: Path) -> None:
    kept = folder / "kept"
    one = str(built(folder, ONE, "one"))
    assert train(one, "--checkpoint", str(folder / "whole"), "--save", "10") == 0
    for plan, name, steps in ((PARALLEL, "parallel", 10), (PLACED, "placed", 15), (ONE, "last", 20)):
        build = str(built(folder, plan, name))
        resume = ["--resume"] if kept.exists() else []
        words = [
            "train",
            "--plan",
            f"{build}.yaml",
            build,
            "--in-process",
            "--threads",
            "1",
            "--steps",
            str(steps),
            "--checkpoint",
            str(kept),
            *resume,
        ]
        assert invoke(words) == 0
    have, want = (Checkpoint.open(folder / name / "step_00000020") for name in ("kept", "whole"))
    for tensor in want.index.tensors:
        np.testing.assert_allclose(have.read(tensor), want.read(tensor), rtol=1e-4, atol=1e-5, err_msg=tensor)


def test_equal_seeds_are_equal_runs_bit_by_bit(folder: Path) -> None:
    build = str(built(folder, PARALLEL))
    for name, options in (("a", []), ("b", []), ("c", ["--seed", "5"])):
        assert train(build, "--checkpoint", str(folder / name), *options) == 0
    assert tensors(folder / "a") == tensors(folder / "b") != tensors(folder / "c")


def test_sharing_out_and_accumulating_change_nothing_but_the_last_bits(folder: Path) -> None:
    text = PARALLEL.replace("lr: 0.01", "lr: 0.01, shard: dp").replace("log: 5", "log: 5\n  accumulate: 3")
    without = MODEL.replace("self.drop(op, op.Tanh(self.a(op, x)))", "op.Tanh(self.a(op, x))")
    (folder / "model.py").write_text(without)
    for name, plan in (("one", ONE), ("many", text)):
        build = str(built(folder, plan, name))
        kept = str(folder / f"{name}.kept")
        assert train(build, "--checkpoint", kept) == 0
    have, want = (Checkpoint.open(folder / f"{name}.kept" / "step_00000020") for name in ("many", "one"))
    assert len(have.index.tensors["a.weight.exp_avg"].pieces) == 2
    assert have.index.tensors.keys() == want.index.tensors.keys()
    for tensor in want.index.tensors:
        np.testing.assert_allclose(have.read(tensor), want.read(tensor), rtol=1e-3, atol=1e-4, err_msg=tensor)


def test_shares_over_mpi_are_those_of_the_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two values are scattered and gathered as one message; `a.bias` and `b.weight` have odd places in it."""
    (folder / "shared.yaml").write_text(PARALLEL.replace("lr: 0.01", "lr: 0.01, shard: dp") + "  clip: {norm: 0.3}\n")
    assert invoke(["verify", "model.py", "--plan", "shared.yaml", "--set", "batch=6", "--mpi"]) == 0
    assert "22 tensors on 2 MPI ranks equal to the unsharded model's" in capsys.readouterr().out
    compile_model(folder / "model.py", folder / "shared.yaml", folder / "shared")
    assert invoke(["check", "shared"]) == 0
    told = (folder / "shared" / "ir" / "step_parallel_end.ir").read_text()
    assert told.count("gradients of 4 parameters") == told.count("updates of 4 parameters") > 0


def test_it_learns_is_measured_and_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = str(built(folder, PLACED))
    told, kept = str(folder / "told.jsonl"), str(folder / "kept")
    words = [
        "train",
        build,
        "--plan",
        f"{build}.yaml",
        "--in-process",
        "--epochs",
        "60",
        "--test",
        "data.npz",
        "--evaluate",
        "100",
    ]
    assert invoke([*words, "--metrics", told, "--checkpoint", kept, "--save", "100"]) == 0
    rows = [json.loads(line) for line in Path(told).read_text().splitlines()]
    tests = [row for row in rows if row["kind"] == "test"]
    assert [row["step"] for row in tests] == [100, 200, 300]
    assert tests[-1]["accuracy"] > 0.8 > rows[0]["accuracy"]
    capsys.readouterr()
    assert invoke(["eval", build, "--in-process", "--checkpoint", kept, "--data", "data.npz", "--batch", "60"]) == 0
    assert f"accuracy {tests[-1]['accuracy']:.4f}" in capsys.readouterr().out
    assert invoke(["checkpoint", "export", kept, "-o", str(folder / "w.safetensors")]) == 0
    assert invoke(["checkpoint", "export", kept, "--model", "model.py", "-o", str(folder / "trained.onnx")]) == 0
    assert (
        invoke(
            [
                "train",
                build,
                "--plan",
                f"{build}.yaml",
                "--in-process",
                "--steps",
                "1",
                "--init",
                str(folder / "w.safetensors"),
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert float(lines[-1].split("loss ")[1].split()[0]) < rows[0]["loss"] / 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--batch", "7", "--data", "none.npz"], "none.npz: there is no such file"),
        (["--data", "x=data.npz"], "label"),
        (["--test", "none.npz"], "none.npz: there is no such file"),
        (["--batch", "600"], "600"),
        (["--resume"], "--resume: the folder of the checkpoints is not known"),
        (["--resume", "nowhere"], "there is no such folder"),
        (
            ["--evaluate", "sometimes"],
            "'--evaluate': expected a number of steps, or 'epoch', but got the string 'sometimes'",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert invoke(["train", str(built(folder, ONE)), "--plan", "build.yaml", *words]) in (1, 2)
    said = capsys.readouterr()
    assert told in said.err
    assert "Traceback" not in said.err
    assert "step" not in said.out, "it is told before the first step"


def test_an_artifact_that_runs_does_not_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["train", str(built(folder, "ranks: 1\n")), "--data", "data.npz"]) == 2
    assert "the artifact has no training program" in capsys.readouterr().err


def test_a_batch_that_ranks_cannot_share_is_refused_by_all(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build = built(folder, PARALLEL)
    assert train(str(build), "--batch", "9") != 0
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert "9" in error
    shutil.rmtree(build)


def test_verify_takes_apart_ranks_that_share_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "three.yaml").write_text(PARALLEL.replace("ranks: 2", "ranks: 3").replace(": 2}", ": 3}"))
    assert invoke(["verify", "model.py", "--plan", "three.yaml", "--set", "batch=6"]) == 0
    assert "22 tensors on 3 ranks equal to the unsharded model's" in capsys.readouterr().out


def test_verify_takes_three_steps_and_compares_all_that_is_kept(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built(folder, PARALLEL)
    assert invoke(["verify", "model.py", "--plan", "build.yaml", "--set", "batch=6"]) == 0
    told = capsys.readouterr().out
    assert "22 tensors on 2 ranks equal to the unsharded model's" in told
    assert "a.weight.exp_avg_sq" in told
    assert "loss, step 3" in told
    assert "a.weight.grad" in told
    from partc.compiler.tasks.reduce_gradients import GradientReduction

    summed = GradientReduction.parameter
    monkeypatch.setattr(
        GradientReduction,
        "parameter",
        lambda self, value, given, homes: (
            None if "a.bias" in str(value.name) and len(homes[0].group) > 1 else summed(self, value, given, homes)
        ),
    )
    assert invoke(["verify", "model.py", "--plan", "build.yaml", "--set", "batch=6"]) != 0


def test_an_evaluation_says_what_it_leaves_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(2)
    np.savez(folder / "odd.npz", x=rng.standard_normal((31, 12)).astype(np.float32), label=rng.integers(0, 6, 31))
    build = str(built(folder, PARALLEL))
    assert (
        invoke(["train", build, "--plan", f"{build}.yaml", "--in-process", "--steps", "10", "--test", "odd.npz"]) == 0
    )
    told = capsys.readouterr().out
    assert told.count("the last 7 of 31 evaluation records are left out: the ranks cannot share so small a batch") == 1
    assert told.count("evaluated after step") == 2
    assert invoke(["eval", build, "--in-process", "--data", "odd.npz", "--batch", "30"]) == 0
    assert "the last 1 of 31" in capsys.readouterr().out


def test_weights_of_classes_lie_beside_the_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.array([1, 2, 1, 0.5, 1, 3], np.float32)
    np.save(folder / "weights.npy", weights)
    told = "[" + ", ".join(map(str, weights.tolist())) + "]"
    monkeypatch.chdir(folder.parent)
    kept = []
    for name, said in (("file", "weights.npy"), ("list", told)):
        build = str(built(folder, ONE.replace("labels: label", f"labels: label, weights: {said}"), name))
        kept.append(folder / f"{name}.kept")
        words = ("--data", str(folder / "data.npz"), "--steps", "3", "--checkpoint", str(kept[-1]))
        assert train(build, *words) == 0
    assert tensors(kept[0]) == tensors(kept[1])
