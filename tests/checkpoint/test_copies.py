"""Copies of a state in the memory of hosts: any lost host, or several that do not follow each other, leave all of it, of one step."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from checkpoint_case import META, held, layout, load_all, tensors
from mpi_ranks_case import MPIEXEC, job
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.verification import Verification
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.errors import CheckpointError
from partc.runtime.training.copies import Copies

Result = TypeVar("Result")
HOSTS = 4
RANKS = 2 * HOSTS
LOST = [lost for count in range(HOSTS + 1) for lost in itertools.combinations(range(HOSTS), count)]


def on_ranks(folders: Sequence[Path], act: Callable[[Copies], Result]) -> list[Result]:
    """The results of an act on each rank; `folders` has that of each rank's host."""
    world = LocalWorld(len(folders))
    with ThreadPoolExecutor(len(folders)) as threads:
        made = [
            threads.submit(lambda rank=rank: act(Copies(folders[rank], world.transport(rank))))
            for rank in range(len(folders))
        ]
        return [one.result() for one in made]


def host(place: Path, number: int) -> Path:
    return place / f"host{number}" / "copies"


def copied(place: Path, states: Mapping[int, Mapping[str, Array]], turns: int = 2) -> None:
    """Copies the states of some steps from 8 ranks of 4 hosts; the last one takes only so many turns."""
    for number in range(HOSTS):
        host(place, number).parent.mkdir(exist_ok=True)
    records = layout(tensors(), RANKS)

    def act(copies: Copies) -> None:
        for step, state in states.items():
            copies.begin(step, held(records, copies.rank, state), records, META)
        for _ in range(turns):
            copies.advance()

    on_ranks([host(place, rank // 2) for rank in range(RANKS)], act)


def continued(folders: Sequence[Path], after: int = 0) -> list[Path | None]:
    return on_ranks(folders, lambda copies: copies.newest(after))


@pytest.mark.parametrize("lost", LOST)
def test_each_host_and_those_that_do_not_follow_each_other_may_be_lost(tmp_path: Path, lost: tuple[int, ...]) -> None:
    """8 ranks of 4 hosts continue on 6 ranks of 3 hosts: those that are left, and new ones."""
    states = {10: tensors(1), 20: tensors(2)}
    copied(tmp_path, states)
    for number in lost:
        shutil.rmtree(host(tmp_path, number))
    left = [number for number in range(HOSTS) if number not in lost][:3]
    new = [HOSTS + k for k in range(3 - len(left))]
    for number in new:
        host(tmp_path, number).parent.mkdir()
    folders = [host(tmp_path, (left + new)[rank // 2]) for rank in range(6)]
    found = continued(folders)
    whole = not any((number + 1) % HOSTS in lost for number in lost)
    # a host that is left and not used gives nothing
    whole = whole and all(number in left or (number + 1) % HOSTS in left for number in range(HOSTS))
    assert [place is not None for place in found] == [whole] * 6
    for place in dict.fromkeys(found) if whole else ():
        assert place is not None
        checkpoint = Checkpoint.at(place)
        assert checkpoint.index.step == 20
        with Verification(checkpoint) as proof:
            assert proof.problems() == []
        records = layout(tensors(), 6)
        for rank, arrays in enumerate(load_all(checkpoint, records, 6)):
            for (_, wanted), array in zip(held(records, rank, states[20]), arrays, strict=True):
                np.testing.assert_array_equal(array, wanted)


def test_a_copy_that_is_not_complete_leaves_the_one_before(tmp_path: Path) -> None:
    """A failure after each turn of the second copy."""
    folders = [host(tmp_path, rank // 2) for rank in range(RANKS)]
    for turns, step in ((0, 10), (1, 10), (2, 20)):
        copied(tmp_path, {10: tensors(1), 20: tensors(2)}, turns)
        found = continued(folders)
        assert [place and place.name for place in found] == [f"step_{step:08d}"] * RANKS, turns
        assert continued(folders, after=20) == [None] * RANKS  # the disk has the same step


def test_steps_of_another_course_are_no_part_of_a_copy(tmp_path: Path) -> None:
    """A host that was cut off has a copy of the same step from before the job went back."""
    copied(tmp_path, {10: tensors(1)})
    apart = tmp_path / "apart"
    shutil.move(host(tmp_path, 0), apart)
    folders = [host(tmp_path, number) for number in (1, 2, 3) for _ in range(2)]
    records = layout(tensors(), 6)

    def act(copies: Copies) -> None:
        copies.begin(10, held(records, copies.rank, tensors(2)), records, META)
        copies.advance()
        copies.advance()

    on_ranks(folders, act)
    shutil.move(apart, host(tmp_path, 0))
    found = continued([host(tmp_path, 0), *folders[::2]])
    for place in found:
        assert place is not None
        np.testing.assert_array_equal(Checkpoint.at(place).read("fc.cube"), tensors(2)["fc.cube"])


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(CheckpointError, match="is not a folder that this user alone may use"):
        on_ranks([folder], lambda copies: None)


def test_a_copy_without_room_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    copied(tmp_path, {10: tensors(1)})
    written = "partc.runtime.training.copies._write"

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, os.strerror(28), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(written, full)
        copied(tmp_path, {20: tensors(2), 30: tensors(3)})
    assert capfd.readouterr().err.count("warning: no copy of the state is kept in memory:") == 1
    found = continued([host(tmp_path, rank // 2) for rank in range(RANKS)])
    assert [place and place.name for place in found] == ["step_00000010"] * RANKS


OVER_MPI = """
from pathlib import Path
from checkpoint_case import META, held, layout, tensors
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.training.copies import Copies

place = Path(sys.argv[1])
transport = MpiTransport(MPI.COMM_WORLD)
copies = Copies(place / f"host{rank}", transport)
records = layout(tensors(), 6)
copies.begin(10, held(records, rank, tensors(1)), records, META)
copies.advance()
copies.advance()
held_files = sorted(file.name for file in (place / f"host{rank}" / "step_00000010").glob("rank*"))
again = Copies(place / f"host{(rank + 1) % 6}" if rank != 5 else place / "new", transport)  # host 0 is lost
found = again.newest(0)
same = (Checkpoint.at(found).read("fc.cube") == tensors(1)["fc.cube"]).all()
print("rank", rank, held_files, same, flush=True)
transport.close()
"""


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python")
def test_copies_over_mpi(tmp_path: Path) -> None:
    done = job(tmp_path, OVER_MPI, 6, {"PYTHONPATH": str(Path(__file__).parent)})
    assert done.returncode == 0, done.stderr
    for rank in range(6):
        files = [f"rank_{number:04d}.safetensors" for number in sorted((rank, (rank - 1) % 6))]
        assert f"rank {rank} {files} True" in done.stdout
