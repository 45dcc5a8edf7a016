"""A save in the background is one in the foreground: what the step left, whole or not there, and an error of one rank is all ranks'."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_case import META, Ranks, held, layout, tensors
from partc.runtime.checkpoint import save as checkpoint_save
from partc.runtime.checkpoint.background import BackgroundSave
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.run_list import Retention
from partc.runtime.checkpoint.save import Save
from partc.runtime.checkpoint.verify import verify
from partc.runtime.errors import CheckpointError
from partc.runtime.files.writers import new_file

RANKS = 6


def save(folder: Path, step: int, whole: dict[str, Any], keep: int | None = None) -> list[object]:
    """Saves in the background, while the arrays change; the path, or the error, of each rank."""
    records = layout(whole, RANKS)

    def act(rank: int, share: Any) -> object:
        pieces = held(records, rank, whole)
        one = BackgroundSave(Save(folder, step, rank, pieces, records, META, Retention(keep)), RANKS, share)
        for _, array in pieces:
            if array.shape:
                array[...] = 0
        return one.finish(share)

    return Ranks(RANKS).run(act)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith((".step", "step")))


def test_it_has_what_the_step_left_and_removes_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(path: Path) -> Any:
        time.sleep(0.05 if path.name == "rank_0003.written" else 0)
        return new_file(path)

    monkeypatch.setattr("partc.runtime.checkpoint.background.new_file", late)
    for step in (1, 2, 3):
        assert save(tmp_path, step, tensors(step), keep=2) == [tmp_path / f"step_{step:08}"] * RANKS
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
    assert not [*tmp_path.rglob("*.written")]
    checkpoint = Checkpoint.open(tmp_path)
    assert verify(checkpoint.path) == []
    assert all(checkpoint.read(name).tobytes() == array.tobytes() for name, array in tensors(3).items())


@pytest.mark.parametrize("word", [False, True], ids=["disk full", "for the word, too"])
def test_a_rank_that_cannot_write_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: bool) -> None:
    save(tmp_path, 1, tensors(1))
    real, full = checkpoint_save.write_tensors, threading.Event()

    def write(path: Path, *rest: Any) -> object:
        if path.name == "rank_0001.safetensors":
            full.set()
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_save, "write_tensors", write)
        if word:
            opened = __import__("partc.runtime.checkpoint.background", fromlist=["new_file"]).new_file

            def no_file(path: Path) -> Any:
                if path.name == "rank_0001.written":
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
                return opened(path)

            patch.setattr("partc.runtime.checkpoint.background.new_file", no_file)
        found = save(tmp_path, 2, tensors(2))
    assert full.is_set()
    for error in found:
        assert isinstance(error, CheckpointError)
        assert "was not written: 1 of 6 ranks failed" in str(error)
        assert "rank 1: " in str(error)
        assert "No space left on device; make room on the disk" in str(error)
    assert names(tmp_path) == ["step_00000001"]
    assert save(tmp_path, 2, tensors(2)) == [tmp_path / "step_00000002"] * RANKS


def test_what_a_killed_one_left_is_cleared(tmp_path: Path) -> None:
    save(tmp_path, 1, tensors(1))
    hidden = tmp_path / ".step_00000002.saving"
    hidden.mkdir()
    for name in ("rank_0001.safetensors", "rank_0001.written"):
        (hidden / name).write_text("half")
    save(tmp_path, 3, tensors(3))
    assert names(tmp_path) == ["step_00000001", "step_00000003"]


def test_given_up_without_the_others_nothing_new_is_there(tmp_path: Path) -> None:
    records = layout(tensors(1), RANKS)
    for text in ('"+', '"-gone"\n'):
        one = Save(tmp_path, 1, 0, held(records, 0, tensors(1)), records, META)
        saving = BackgroundSave(one, 2, lambda said: [said, said])
        (one.scratch / "rank_0001.written").write_text(text)
        saving.give_up()
        assert not saving.is_complete
        one.discard()
    assert names(tmp_path) == []
