"""A training that is asked to stop saves after the same step on all ranks, and goes on as if it had never stopped."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from partc.cli.main import invoke
from partc.runtime.checkpoint import save
from partc.runtime.checkpoint.background import BackgroundSave
from partc.runtime.checkpoint.newest import latest
from partc.runtime.errors import CheckpointError
from partc.runtime.units import parse_seconds
from trainer_case import PARALLEL, batch, on_all
from trainer_case import built as built_case
from training_command_case import AS_ROOT, PLACED, built, command, folder, tensors, train

__all__ = ["folder"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("11h 50min", 42600), ("1.5h", 5400), ("90 s", 90), ("00:01:30", 90), ("1-12:00:00", 129600), ("soon", None)],
)
def test_times_are_read_as_people_and_slurm_write_them(text: str, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


def test_a_request_of_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    folder = built_case(tmp_path / "build", PARALLEL)

    def act(trainer):  # type: ignore[no-untyped-def]
        own = slice(4 * trainer.rank, 4 * trainer.rank + 4)
        batches = [batch(step, own) for step in range(8)]
        for step, following in zip(batches, [*batches[1:], None], strict=True):
            if trainer.rank == 1 and trainer.step == 3:
                trainer.ask_to_stop(signal.SIGTERM)
            trainer.train(step, following)
            if trainer.stopping:
                break
        return trainer.step, trainer.stopping

    first, second = on_all(folder, 2, act)
    assert first == second == (5, signal.SIGTERM)


def test_a_failed_save_in_the_background_ends_the_next_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real, begin = built_case(tmp_path / "build", PARALLEL), save.write_tensors, BackgroundSave.__init__

    def write(path: Path, *rest: Any) -> object:
        if path.name == "rank_0000.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, *rest)

    def begin_and_fail(one: BackgroundSave, *rest: Any) -> None:
        begin(one, *rest)
        one._thread.join()

    monkeypatch.setattr(save, "write_tensors", write)
    monkeypatch.setattr(BackgroundSave, "__init__", begin_and_fail)

    def act(trainer):  # type: ignore[no-untyped-def]
        own = slice(4 * trainer.rank, 4 * trainer.rank + 4)
        batches = [batch(step, own) for step in range(8)]
        for step, following in zip(batches, [*batches[1:], None], strict=True):
            try:
                trainer.train(step, following)
            except CheckpointError as error:
                return trainer.step, str(error)
            if trainer.step == 3:
                trainer.save(tmp_path / "runs", background=True)
        return trainer.step, ""

    first, second = on_all(folder, 2, act)
    assert first == second
    assert first[0] == 5
    assert "rank 0: " in first[1]
    assert "No space left on device" in first[1]


SLOW = """
import time
from pathlib import Path
def slow(batch):  # while a signal is under way
    time.sleep(0.05 * Path(__file__).with_name("slow").exists())
    return batch
"""


def test_stopped_by_a_signal_or_its_time_it_goes_on_bit_by_bit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "slow.py").write_text(SLOW)
    plan = PLACED.replace("data: data.npz", "data: {source: data.npz, transform: 'slow.py:slow'}")
    build = str(built(folder, plan))
    assert train(build, "--checkpoint", "whole", "--epochs", "40", "--save", "500") == 0
    settings = "  checkpoint: {background: true}\n"
    build = str(built(folder, plan + settings, "background"))
    kept = ["--checkpoint", "kept", "--resume", "auto", "--epochs", "40", "--save", "500", "--log", "500"]
    assert train(build, *kept, "--max-time", "0.0001") == 75
    told = capsys.readouterr()
    assert (
        "stopped by max_time after step 2: saved in kept" in told.err or "stopped by max_time after step 1" in told.err
    )
    (folder / "slow").touch()
    process = subprocess.Popen(
        command(build, "--plan", f"{build}.yaml", "--threads", "1", *kept, "--log", "1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **AS_ROOT},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    (folder / "slow").unlink()
    assert process.returncode == 75, error
    assert "stopped by SIGTERM after step" in error
    assert "Traceback" not in error
    found = latest(folder / "kept")
    assert found is not None
    assert int(found.name[5:]) < 200
    assert train(build, *kept) == 0
    assert "resumes after step" in capsys.readouterr().out
    assert tensors(folder / "kept") == tensors(folder / "whole")
    assert train(build, *kept) == 0, "a job that is started again behind its last step has nothing to do"
    assert "resumes after step 200 from" in capsys.readouterr().out


def test_a_time_that_is_none_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["train", str(folder), "--max-time", "soon"]) == 2
    assert "expected a time, but got the string 'soon'" in capsys.readouterr().err
