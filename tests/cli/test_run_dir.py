"""The folders of a job: nobody's but their owner's while it lives, and gone when it does not, whoever is left to remove them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from partc.cli.job.folders import sweep
from partc.cli.launch import guard
from partc.cli.launch.run_dir import RunDir
from partc.runtime.job.status_board import write_pid

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="locks and /proc")


def aged(folder: Path) -> Path:
    os.utime(folder, (time.time() - 3600,) * 2)
    return folder


def raise_no_files(folder: Path) -> list[int]:
    raise OSError(errno.EMFILE, "Too many open files")


def test_folders_of_dead_owners_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    names = ("partc-run-dead", "partc-run-young", "partc-run-other", "mine")
    dead, young, other, mine = (tmp_path / name for name in names)
    for folder in (dead, young, other, mine):
        folder.mkdir()
        (folder / "file").write_text("")
    for folder in (dead, young, mine):
        (folder / "lock").write_text("")
    for folder in (dead, other, mine):
        aged(folder)
    with RunDir(2) as run_dir:
        aged(run_dir.folder)
        sweep(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([run_dir.folder.name, *names[1:]])
        assert all(folder.is_dir() for folder in run_dir.folders())
        write_pid(run_dir.folder, 1)
        before = run_dir.pids()
        monkeypatch.setattr("partc.cli.launch.run_dir.read_pids", raise_no_files)
        assert run_dir.pids() == before == [0, os.getpid()]
    assert not any(folder.exists() for folder in run_dir.folders())


def test_the_guard_ends_a_job_whose_owner_was_killed_and_removes_its_folders(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    launcher = subprocess.Popen(["sleep", "600"], start_new_session=True)
    rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", str(folder)])
    rank.send_signal(signal.SIGSTOP)
    with subprocess.Popen([sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(f"{folder}\n{launcher.pid}\n".encode())
        process.stdin.close()
        assert process.wait(60) == 0
    assert launcher.wait(60) == -signal.SIGTERM
    assert rank.wait(60) == -signal.SIGKILL
    assert not folder.exists()
