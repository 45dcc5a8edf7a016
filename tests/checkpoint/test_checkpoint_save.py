"""Saving a checkpoint: wherever it breaks off the last one is whole, all ranks fail alike, and only as many stay as are asked for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_case import META, Ranks, held, layout, record, save_all, tensors
from partc.runtime.checkpoint import save as checkpoint_save
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.lock import LOCK
from partc.runtime.checkpoint.newest import latest
from partc.runtime.checkpoint.run_list import WRITTEN
from partc.runtime.checkpoint.save import save
from partc.runtime.checkpoint.verify import verify
from partc.runtime.errors import CheckpointError

RANKS = 6


def shown(folder: Path) -> list[str]:
    """What lies in a folder of checkpoints beside the run's list and its lock."""
    return sorted(path.name for path in folder.iterdir() if WRITTEN not in path.name and path.name != LOCK)


def holds(folder: Path, step: int, seed: int) -> None:
    """The latest checkpoint is the one of a step, whole, with the tensors of a seed."""
    path = latest(folder)
    assert path is not None
    checkpoint = Checkpoint.open(path)
    assert (checkpoint.index.step, verify(path)) == (step, [])
    assert all(checkpoint.read(name).tobytes() == array.tobytes() for name, array in tensors(seed).items())


def test_the_oldest_go_and_the_new_one_stays(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_all(tmp_path, step, 1, tensors(step), keep=2)
    assert shown(tmp_path) == ["step_00000020", "step_00000030"]
    (tmp_path / "step_00000005").mkdir()
    (tmp_path / "notes.txt").touch()
    save_all(tmp_path, 15, 1, tensors(15), keep=2)
    assert shown(tmp_path) == ["notes.txt", "step_00000005", "step_00000015", "step_00000030"]
    save_all(tmp_path, 123456789, 1, tensors(9), keep=1)
    assert shown(tmp_path) == ["notes.txt", "step_00000005", "step_123456789"]
    save_all(tmp_path, 1, 1, tensors(1))
    assert len(shown(tmp_path)) == 4
    holds(tmp_path, 123456789, 9)


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    save_all(tmp_path, 10, RANKS, tensors(1))
    save_all(tmp_path, 10, 1, tensors(2))
    assert shown(tmp_path) == ["step_00000010"]
    holds(tmp_path, 10, 2)


class Crash(BaseException):
    """What nothing catches: the process is gone."""


def crash_at(patch: pytest.MonkeyPatch, owner: object, name: str, at: int) -> list[int]:
    """Makes the k-th call of a function the last; gives the list that counts calls."""
    calls: list[int] = []
    real: Callable[..., object] = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> object:
        calls.append(len(calls))
        if len(calls) > at:
            raise Crash
        return real(*args, **kwargs)

    patch.setattr(owner, name, counted)
    return calls


STAGES = {"mkdir": (os, "mkdir"), "fsync": (os, "fsync"), "rename": (os, "replace"), "remove": (os, "unlink")}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
def test_a_crash_anywhere_leaves_the_last_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, again: bool
) -> None:
    old, new = (10, 10) if again else (10, 20)
    at, ended = 0, False
    while not ended:
        folder = tmp_path / f"{stage}{at}"
        save_all(folder, 5, 1, tensors(5))
        save_all(folder, old, 1, tensors(1))
        with monkeypatch.context() as patch:
            calls = crash_at(patch, *STAGES[stage], at)
            try:
                save_all(folder, new, 1, tensors(2), keep=1)
                ended = len(calls) <= at
            except Crash:
                pass
        path = latest(folder)
        assert path is not None
        found = Checkpoint.open(path)
        first = found.read("fc.cube").tobytes() == tensors(1)["fc.cube"].tobytes()
        holds(folder, old if first else new, 1 if first else 2)
        save_all(folder, 30, 1, tensors(3), keep=1)
        assert sorted(os.listdir(folder)) == [LOCK, WRITTEN, "step_00000030"], "what crashed saves left is cleared"
        at += 1
    assert at > 1


def test_a_hidden_folder_is_no_checkpoint(tmp_path: Path) -> None:
    save_all(tmp_path, 10, 1, tensors(1))
    save_all(tmp_path, 20, 1, tensors(2))
    (tmp_path / "step_00000020").rename(tmp_path / ".step_00000020.saving")
    shutil.copytree(tmp_path / "step_00000010", tmp_path / ".step_00000040.removed")
    holds(tmp_path, 10, 1)
    (tmp_path / "step_00000010").rename(tmp_path / ".step_00000010.old")
    holds(tmp_path, 10, 1)
    save_all(tmp_path, 5, 1, tensors(5))
    assert shown(tmp_path) == ["step_00000005", "step_00000010"]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_failed_write_on_one_rank_fails_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    save_all(tmp_path, 10, RANKS, tensors(1))
    real = checkpoint_save.write_tensors

    def full(path: Path, *rest: Any) -> object:
        if path.name == f"rank_{rank:04d}.safetensors":
            raise OSError(28, "No space left on device", str(path))
        return real(path, *rest)

    monkeypatch.setattr(checkpoint_save, "write_tensors", full)
    found = save_all(tmp_path, 20, RANKS, tensors(2), keep=1)
    assert [type(one) for one in found] == [CheckpointError] * RANKS
    file = tmp_path / ".step_00000020.saving" / f"rank_{rank:04d}.safetensors"
    assert {str(one) for one in found} == {
        f"{tmp_path / 'step_00000020'}: was not written: 1 of 6 ranks failed\n"
        f"  rank {rank}: {file}: No space left on device; make room on the disk\n"
        "  help: earlier checkpoints are intact; fix this and resume from the last one"
    }
    assert shown(tmp_path) == ["step_00000010"]
    holds(tmp_path, 10, 1)


def test_a_failed_rename_fails_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*paths: object, **folders: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refused)
    found = save_all(tmp_path, 20, RANKS, tensors(2))
    assert [type(one) for one in found] == [CheckpointError] * RANKS
    assert ".written.json: cannot be written: Permission denied; give a place" in str(found[5])
    assert shown(tmp_path) == []


def test_a_step_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, 10, RANKS, tensors(1))
    real = os.replace

    def refused(source: Path, target: Path) -> None:
        if source.name.endswith(".saving"):
            raise PermissionError(13, "Permission denied")
        real(source, target)

    monkeypatch.setattr(os, "replace", refused)
    assert isinstance(save_all(tmp_path, 10, RANKS, tensors(2))[3], CheckpointError)
    assert shown(tmp_path) == ["step_00000010"]
    holds(tmp_path, 10, 1)


def test_an_old_one_that_cannot_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, 10, 1, tensors(1))
    real = os.replace

    def refused(source: Path, target: Path) -> None:
        if target.name.endswith(".removed"):
            raise PermissionError(13, "Permission denied")
        real(source, target)

    monkeypatch.setattr(os, "replace", refused)
    assert save_all(tmp_path, 20, 1, tensors(2), keep=1) == [tmp_path / "step_00000020"]
    assert shown(tmp_path) == ["step_00000010", "step_00000020"]


def test_wrong_pieces_are_told_by_the_rank_that_has_them(tmp_path: Path) -> None:
    whole = tensors()
    records = layout(whole, RANKS)

    def act(rank: int, share: Callable[[str], list[str]]) -> object:
        pieces = held(records, rank, whole)
        if rank == 1:
            pieces = [(one, array[:1] if one.value == "embed.weight.exp_avg" else array) for one, array in pieces]
        if rank == 5:
            pieces = [(one, array) for one, array in pieces if one.value != "fc.bias"]
        return save(tmp_path, 1, rank, pieces, records, META, share)

    texts = {str(error) for error in Ranks(RANKS).run(act)}
    (text,) = texts
    assert "2 of 6 ranks failed" in text
    assert (
        "rank 1: 'embed.weight.exp_avg' was given as float32 [1, 7]; the rank's shard is tensor(float) [4, 7]" in text
    )
    assert "rank 5: 'fc.bias', which is 'fc.bias' here, was not given" in text


def test_records_that_no_rank_can_save_are_told_once(tmp_path: Path) -> None:
    whole = {"odd": np.zeros(3, np.complex64)}
    found = save_all(tmp_path, 1, 2, whole, records=[record("odd", whole["odd"], [0, 1])])
    assert "2 of 2 ranks failed\n  ranks 0, 1: 'odd' is tensor(complex64), which the safetensors format lacks" in str(
        found[1]
    )


def test_ranks_that_share_no_folder_are_told(tmp_path: Path) -> None:
    whole = tensors()
    records = layout(whole, RANKS)

    def act(rank: int, share: Callable[[str], list[str]]) -> object:
        folder = tmp_path / ("here" if rank < 3 else "there")
        return save(folder, 1, rank, held(records, rank, whole), records, META, share)

    texts = [str(error) for error in Ranks(RANKS).run(act)]
    assert "rank_0003.safetensors was written with" in texts[0]
    assert f"rank 0 sees no such file: {tmp_path / 'here'} must be on a file system that all ranks share" in texts[0]


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from checkpoint_case import META, held, layout, tensors
from partc.runtime.errors import CheckpointError
from partc.runtime.checkpoint import save as checkpoint_save
from partc.runtime.checkpoint.run_list import Retention
stage, folder = sys.argv[1], Path(sys.argv[2])
die = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
if stage == "write":
    read = np.ascontiguousarray
    count = iter(range(3))
    np.ascontiguousarray = lambda array: read(array) if next(count, None) is not None else die()
if stage == "rename":
    os.replace = die
if stage == "index":
    checkpoint_save._sync_folder = die
whole = tensors(2)
records = layout(whole, 1)
checkpoint_save.save(folder, 20, 0, held(records, 0, whole), records, META, lambda text: [text], Retention(1))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("stage", ["write", "index", "rename"])
def test_a_killed_process_leaves_the_last_one_whole(tmp_path: Path, stage: str) -> None:
    save_all(tmp_path, 10, 1, tensors(1))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", KILLED, stage, str(tmp_path)], env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert shown(tmp_path) == [".step_00000020.saving", "step_00000010"]
    holds(tmp_path, 10, 1)
    save_all(tmp_path, 20, 1, tensors(2), keep=2)
    assert shown(tmp_path) == ["step_00000010", "step_00000020"]
    holds(tmp_path, 20, 2)


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_a_link_in_the_place_of_the_hidden_folder_keeps_what_it_leads_to(tmp_path: Path, ranks: int) -> None:
    runs, mine = tmp_path / "runs", tmp_path / "mine"
    save_all(runs, 10, ranks, tensors(1))
    mine.mkdir()
    names = ["checkpoint.json", *(f"rank_{rank:04d}.safetensors" for rank in range(ranks))]
    for name in names:
        (mine / name).write_text("mine")
    for hidden in (".step_00000020.saving", ".step_00000030.old", ".step_00000010.removed"):
        (runs / hidden).symlink_to("../mine")
    found = save_all(runs, 20, ranks, tensors(2), keep=1)
    assert [type(one) for one in found] == [CheckpointError] * ranks
    assert "is a link to ../mine, and is not replaced; move it away" in str(found[0])
    (runs / ".step_00000020.saving").unlink()
    save_all(runs, 20, ranks, tensors(2), keep=1)
    assert {name: (mine / name).read_text() for name in names} == dict.fromkeys(names, "mine")
    holds(runs, 20, 2)


def test_a_rank_that_finds_a_link_writes_nothing_behind_it(tmp_path: Path) -> None:
    """Ranks that share no folder: on the second host a link has the name that the first has made a folder of."""
    whole = tensors()
    records = layout(whole, RANKS)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "rank_0001.safetensors").write_text("mine")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / ".step_00000001.saving").symlink_to(mine)

    def act(rank: int, share: Callable[[str], list[str]]) -> object:
        folder = tmp_path / ("there" if rank == 1 else "here")
        return save(folder, 1, rank, held(records, rank, whole), records, META, share)

    texts = [str(error) for error in Ranks(RANKS).run(act)]
    assert f"is a link to {mine}, and is not replaced" in texts[0]
    assert [(one.name, one.read_text()) for one in mine.iterdir()] == [("rank_0001.safetensors", "mine")]
