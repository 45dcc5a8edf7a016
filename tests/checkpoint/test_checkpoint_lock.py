"""One job at a time writes into a folder of checkpoints, a dead one leaves no lock, and `keep` removes what its run has written alone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from checkpoint_case import save_all, tensors
from partc.runtime import Trainer
from partc.runtime.checkpoint import lock as checkpoint_lock
from partc.runtime.checkpoint.lock import LOCK, Lock
from partc.runtime.checkpoint.newest import latest
from partc.runtime.checkpoint.run_list import WRITTEN
from partc.runtime.errors import CheckpointError
from trainer_case import PARALLEL, batch, built, on_all

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")
HOLDS = """
import os, sys, time
from pathlib import Path
from partc.runtime.checkpoint.lock import Lock
lock = Lock(Path(sys.argv[1]))
if len(sys.argv) > 2 and os.fork() == 0:
    time.sleep(30)
print("holds", flush=True)
time.sleep(30)
"""


def holder(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Another process, which has the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder), *words], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in (WRITTEN, LOCK))


@pytest.mark.parametrize("words", [[], ["forks"]])
def test_another_job_is_named_and_its_death_frees_the_folder(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_lock, "PATIENCE_SECONDS", 0.1)
    folder = tmp_path / "runs"
    process = holder(folder, *words)
    try:
        for error in save_all(folder, 10, 6, tensors()):
            lines = str(error).splitlines()
            assert "was not written: 1 of 6 ranks failed" in lines[0]
            where = f"process {process.pid} on {socket.gethostname()}, since 20"
            assert lines[1].startswith(f"  rank 0: {folder}: another job writes its checkpoints here: {where}")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert save_all(folder, 10, 6, tensors()) == [folder / "step_00000010"] * 6
        assert names(folder) == ["step_00000010"]
    finally:
        end(process)


def test_a_job_waits_for_one_that_is_ending(tmp_path: Path) -> None:
    process = holder(tmp_path)
    killer = threading.Timer(0.2, end, [process])
    killer.start()
    try:
        Lock(tmp_path).release()
    finally:
        killer.join()


def test_a_lock_is_taken_once_and_given_back(tmp_path: Path) -> None:
    first = Lock(tmp_path)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on "):
        Lock(tmp_path)
    first.release()
    assert (tmp_path / LOCK).read_bytes() == b""
    Lock(tmp_path).release()


def test_without_locks_of_the_file_system_the_text_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(checkpoint_lock.fcntl, "flock", unknown)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / LOCK).write_text(f"process {gone.pid} on {socket.gethostname()}, since 2020-01-01 00:00:00 UTC\n")
    lock = Lock(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"process {os.getpid()} on .*\n.*\n.*remove .*\.lock if that job has ended"
    ):
        Lock(tmp_path)
    lock.release()
    monkeypatch.setattr(checkpoint_lock, "PATIENCE_SECONDS", 0.1)
    (tmp_path / LOCK).write_text("process 1 on elsewhere, since \x1b[2J\n")
    with pytest.raises(CheckpointError, match=r"process 1 on elsewhere, since \\x1b\[2J"):
        Lock(tmp_path)


def test_what_is_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: no checkpoint can be written here: File exists"):
        Lock(tmp_path / "file")
    (tmp_path / "away").touch()
    (tmp_path / LOCK).symlink_to(tmp_path / "away")
    with pytest.raises(CheckpointError, match="no checkpoint can be written here: Too many levels of symbolic links"):
        Lock(tmp_path)
    assert (tmp_path / "away").read_bytes() == b""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("lock") / "build", PARALLEL)


def train(trainer: Trainer, steps: int, runs: Path, keep: int | None = None) -> None:
    for _ in range(steps):
        trainer.train(batch(trainer.step, slice(4 * trainer.rank, 4 * trainer.rank + 4)))
        trainer.save(runs, keep=keep)


def test_a_trainer_holds_the_folder_until_it_is_closed(build: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    def hold(trainer: Trainer) -> None:
        train(trainer, 1, runs)
        if trainer.rank == 0:
            with pytest.raises(CheckpointError, match="another job writes"):
                Lock(runs)
        trainer.program.all_gather_text("")

    on_all(build, 2, hold)
    lock = Lock(runs)

    def refused(trainer: Trainer) -> str:
        with pytest.raises(CheckpointError, match="another job writes") as caught:
            trainer.claim(runs)
        return str(caught.value)

    first, second = on_all(build, 2, refused)
    assert first == second
    lock.release()


def test_keep_counts_and_removes_what_its_run_has_written(build: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    on_all(build, 2, lambda trainer: train(trainer, 3, runs))
    on_all(build, 2, lambda trainer: train(trainer, 2, runs, keep=1))
    assert names(runs) == ["step_00000002", "step_00000003"], "step 3 is another run's"

    def go_on(trainer: Trainer) -> None:
        trainer.load(runs / "step_00000002")
        train(trainer, 3, runs, keep=2)

    on_all(build, 2, go_on)
    assert names(runs) == ["step_00000004", "step_00000005"], "step 3 was replaced by this run's own"


def test_what_a_user_has_put_there_stays(tmp_path: Path) -> None:
    runs, away = tmp_path / "runs", tmp_path / "away"
    for step in (1, 2, 3, 4, 5):
        save_all(runs, step, 1, tensors(step))
    (runs / "step_00000001" / "notes.txt").write_text("mine")
    shutil.move(runs / "step_00000002", away)
    (runs / "step_00000002").symlink_to(away)
    shutil.copy(runs / "step_00000004" / "checkpoint.json", runs / "step_00000003")
    save_all(runs, 6, 1, tensors(6), keep=1)
    assert names(runs) == ["step_00000001", "step_00000002", "step_00000003", "step_00000006"]
    assert names(away) == ["checkpoint.json", "rank_0000.safetensors"]
    for step, what in ((1, "holds 'notes.txt', which partc has not written"), (2, "is not a folder")):
        (error,) = save_all(runs, step, 1, tensors(9))
        assert f"step_0000000{step} exists and {what}: move it away" in str(error)
    (runs / WRITTEN).write_text('{"../away": ["' + "0" * 64 + '"], "step_00000006": "x", "step_00000001": [7]}')
    save_all(runs, 7, 1, tensors(7), keep=1)
    assert "step_00000006" in names(runs), "a list that is not sound lists nothing"
    assert latest(runs) == runs / "step_00000007"


def test_debris_of_dead_jobs_goes_and_nothing_else(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 1, tensors(1))
    for name in (".step_00000002.saving", ".step_00000003.removed"):
        shutil.copytree(tmp_path / "step_00000001", tmp_path / name)
    (tmp_path / ".step_00000003.removed" / "notes.txt").write_text("mine")
    (tmp_path / ".step_00000004.saving").symlink_to(tmp_path / "step_00000001")
    save_all(tmp_path, 5, 1, tensors(5))
    assert names(tmp_path) == [".step_00000003.removed", ".step_00000004.saving", "step_00000001", "step_00000005"]
    assert names(tmp_path / ".step_00000003.removed") == ["notes.txt"]
