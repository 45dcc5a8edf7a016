"""`partc train --restarts` goes on from the newest checkpoint when a rank is lost, gives up without progress, and restarts no mistake."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from partc.cli.launch import launch
from partc.cli.main import invoke
from training_command_case import PARALLEL, PLACED, built, folder, run, tensors, train

__all__ = ["folder"]

DIES = '''
import os
import signal
from pathlib import Path

HERE = Path(__file__).parent


def dies(batch):
    """Each file `die_<n>` ends a rank at its batch n, if it can be removed: so only one of them."""
    dies.calls += 1
    try:
        (HERE / f"die_{dies.calls}").unlink()
    except FileNotFoundError:
        return batch
    os.kill(os.getpid(), signal.SIGKILL)


dies.calls = 0


def dies_again(batch):
    """The file `die_<k>_<n>` ends a rank at its batch n, after k losses."""
    dies.calls += 1
    lost = len([*HERE.glob("lost_*")])
    try:
        (HERE / f"die_{lost}_{dies.calls}").rename(HERE / f"lost_{lost}")
    except FileNotFoundError:
        return batch
    os.kill(os.getpid(), signal.SIGKILL)


def fails(batch):
    raise ValueError("a mistake")
'''


def made(folder: Path, transform: str) -> Path:
    (folder / "dying.py").write_text(DIES)
    data = f"{{source: data.npz, transform: 'dying.py:{transform}'}}"
    return built(folder, PLACED.replace("data: data.npz", f"data: {data}"))


def test_lost_ranks_are_started_again_from_the_newest_checkpoint(folder: Path) -> None:
    build = made(folder, "dies")
    whole, kept = folder / "whole", folder / "kept"
    assert train(str(build), "--checkpoint", str(whole), "--save", "5") == 0
    # In the folder is a checkpoint of another training: the first restart does not take it.
    assert train(str(build), "--checkpoint", str(kept), "--steps", "2", "--seed", "5") == 0
    # Before the first checkpoint; after it; and again, of the training that went on. The other rank, which reads ahead, does not reach the
    # next.
    for batch in (3, 8, 12):
        (folder / f"die_{batch}").touch()
    code, said = run(build, "--checkpoint", str(kept), "--save", "3", "--restarts", "1")
    assert code == 0, said
    assert said.count("was killed by signal 9 (SIGKILL)") == 3
    assert "starts the ranks again as the command says; 0 more times" in said
    assert f"starts the ranks again from {kept}/step_" in said
    assert tensors(kept) == tensors(whole)


def test_without_a_new_checkpoint_it_is_given_up(folder: Path) -> None:
    build = made(folder, "dies")
    (folder / "die_1").touch()
    (folder / "die_2").touch()
    code, said = run(build, "--checkpoint", str(folder / "kept"), "--restarts", "1")
    assert code == 1
    assert "1 restart without a new checkpoint: the training is given up" in said


def test_a_mistake_is_not_repeated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = made(folder, "fails")
    code, said = run(build, "--checkpoint", str(folder / "kept"), "--restarts", "3")
    assert code == 1
    assert "a mistake" in said
    assert "starts the ranks again" not in said
    for words, fact in (
        (("--restarts", "3"), "--restarts: the training has no folder for checkpoints"),
        (("--backoff", "3"), "--backoff: nothing is started again without --restarts"),
        (("--restarts", "3", "--in-process"), "--restarts: the ranks are threads of this process"),
    ):
        code = invoke(["train", str(build), "--plan", f"{build}.yaml", *words])
        said = capsys.readouterr().err
        assert (code, fact in said) == (2, True), said


def test_lost_ranks_continue_from_a_copy_in_memory(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checkpoint on disk: each loss with a later copy counts anew, and two within one interval give the bits of none."""
    (folder / "dying.py").write_text(DIES)
    plan = PARALLEL.replace("data: data.npz", "data: {source: data.npz, transform: 'dying.py:dies_again'}")
    build = built(folder, plan.replace("mesh:", "elastic: {ranks: [2], copies: 1, every: 3}\nmesh:"))
    whole, kept = folder / "whole", folder / "kept"
    assert train(str(build), "--checkpoint", str(whole), "--save", "100") == 0
    for name in ("die_0_12", "die_1_2", "die_2_12"):  # after a copy; in the same interval; after another copy
        (folder / name).touch()
    code, said = run(build, "--checkpoint", str(kept), "--save", "100", "--restarts", "2")
    assert code == 0, said
    assert said.count("was killed by signal 9 (SIGKILL)") == 3
    (copies,) = {*re.findall(r"or from the copy of step \d+ in (\S+);", said)}
    assert not Path(copies).exists()
    assert "all ranks are on one host: copies of the state outlive them, but not the host" in said
    assert tensors(kept) == tensors(whole)
    monkeypatch.setattr(launch, "_launched", lambda *given: SimpleNamespace(code=0))
    assert invoke(["train", str(build), "--plan", f"{build}.yaml"]) == 0
    said = capsys.readouterr().err
    assert "no copies of the state are kept in memory: 'elastic: copies' is for --restarts" in said
