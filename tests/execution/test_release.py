"""A program that is closed gives back its sessions, those of updates too, which programs of one process share."""

from __future__ import annotations

import gc
from pathlib import Path

from partc.runtime import load_trainer
from partc.runtime.updates import updater
from small_training import PERCEPTRON, compiled


def test_sessions_of_updates_end_with_the_last_program_that_has_them(tmp_path: Path) -> None:
    gc.freeze()  # the collection below looks at what this test makes
    before = {*updater._sessions}
    folder = compiled(tmp_path / "a", PERCEPTRON, "ranks: 1\n", "{type: momentum, lr: 0.1, momentum: 0.71}")
    with load_trainer(folder, threads=1) as first:
        (own,) = {*updater._sessions} - before
        with load_trainer(folder, threads=1):
            assert {*updater._sessions} - before == {own}
        assert own in updater._sessions
    del first
    gc.collect()
    assert own not in updater._sessions
