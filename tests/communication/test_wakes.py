"""No interleaving loses a wake, or reads a value too early or too late; each fault planted in the protocol is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from partc.runtime.communication.host import rounds
from partc.runtime.communication.host.rounds import Collective, HostGroup, Rounds
from partc.runtime.job.parking import Parking
from simulation.scheduler import Scheduler
from simulation.wakes import Memory, SimulatedCell, SimulatedWords, run

RUNS, TRIES = 300, 3000


def test_no_interleaving_is_wrong() -> None:
    schedulers: dict[int, Scheduler] = {}
    for seed in range(RUNS):
        assert run(seed, schedulers) == [], f"python tests/simulation/wakes.py --from {seed} --runs 1"


def _no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "fence", lambda self, rank: self.point(rank))


def _fewer_rooms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rounds, "ROOMS", 2)


def _no_wake_by_the_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedWords, "wake", lambda self, place: None)


def _sleeps_without_a_look(patch: pytest.MonkeyPatch) -> None:
    def wait(self: Parking, ready: Callable[[], bool], look: Callable[[], object]) -> None:
        while not ready():
            self._own[0] = 1
            self.fence()
            self._words.sleep(self._place)
            look()

    patch.setattr(Parking, "wait", wait)


def _slots_are_used_again_early(patch: pytest.MonkeyPatch) -> None:
    get = SimulatedCell.__getitem__

    def early(self: SimulatedCell, at: int) -> int:
        emptied = self.name[0] == "channel" and self.name[-1] == 1
        return get(self, at) + emptied

    patch.setattr(SimulatedCell, "__getitem__", early)


@pytest.mark.parametrize(
    "plant", [_no_fence, _fewer_rooms, _no_wake_by_the_last, _sleeps_without_a_look, _slots_are_used_again_early]
)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        schedulers: dict[int, Scheduler] = {}
        assert any(run(seed, schedulers) for seed in range(TRIES)), f"{TRIES} runs did not find it"


def test_a_list_is_under_way_while_a_round_of_it_is_begun_and_not_put() -> None:
    """A rank with many lists asks those alone, at every wait and before every segment."""

    class Silent(Rounds):
        count = 3

        def put(self, index: int, turn: int) -> None:
            pass

        get = put

    class Nobody:
        def __init__(self) -> None:
            self.cells = [[0], [0]]

        def sleep(self, place: int) -> None:
            pass

        wake = sleep

    unput: dict[HostGroup, None] = {}
    cells = [[0], [0]]
    group, idle = (HostGroup(cells, 0, [1], Parking(Nobody(), 0, lambda: None, None), unput) for _ in range(2))
    request = Collective(group, Silent()).begin()
    assert [*unput] == [group], "the third round waits for the other's first"
    cells[1][0] = 1
    for one in [*unput]:
        one.advance()
    assert (unput, request.Test(), idle.put) == ({}, False, 0), "all is put, and the other has not arrived"
    cells[1][0] = 3
    assert request.Test()
