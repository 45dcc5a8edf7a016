"""No interleaving loses a wake, or reads a value too early or too late; each fault planted in the protocol is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from partc.runtime.communication.host import rounds
from partc.runtime.communication.host.pair import PairRound
from partc.runtime.job.parking import Parking
from simulation.scheduler import Scheduler
from simulation.wakes import Memory, SimulatedCell, SimulatedCount, SimulatedWords, Values, run

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


def _no_wake_on_the_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedCount, "wake", lambda self: None)


def _closed_before_it_is_made(patch: pytest.MonkeyPatch) -> None:
    made = rounds.HostGroup._made

    def early(self: rounds.HostGroup, number: int, *given: Any) -> bool:
        if all(cell[0] >= number for cell in self._cells):
            self._closed[0] = number
        return made(self, number, *given)

    patch.setattr(rounds.HostGroup, "_made", early)


def _sleeps_on_what_it_sees_later(patch: pytest.MonkeyPatch) -> None:
    def sleep(self: SimulatedCount, seen: int) -> None:
        self.memory.sleep(self.rank, self.name, self.cell[0])

    patch.setattr(SimulatedCount, "sleep", sleep)


def _sleeps_without_a_look(patch: pytest.MonkeyPatch) -> None:
    def wait(self: Parking, ready: Callable[[], bool], look: Callable[[], object], count: object = None) -> None:
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


def _a_pair_wakes_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Parking, "word", lambda self, place: (0, 0))


def _a_pair_gets_early(patch: pytest.MonkeyPatch) -> None:
    bound = PairRound._bound

    def early(self: PairRound, turn: int) -> tuple[rounds.Action, rounds.Action]:
        self._other = [1 << 40]
        return bound(self, turn)

    patch.setattr(PairRound, "_bound", early)


def _a_pair_says_it_has_come_before_it_puts(patch: pytest.MonkeyPatch) -> None:
    bound = PairRound._bound

    def early(self: PairRound, turn: int) -> tuple[rounds.Action, rounds.Action]:
        put, get = bound(self, turn)

        def late() -> None:
            self._own[0] = self.group.begun
            put()

        self._actions[turn] = late, get
        return late, get

    patch.setattr(PairRound, "_bound", early)


@pytest.mark.parametrize(
    "plant",
    [
        _no_fence,
        _fewer_rooms,
        _no_wake_by_the_last,
        _no_wake_on_the_number,
        _closed_before_it_is_made,
        _sleeps_on_what_it_sees_later,
        _sleeps_without_a_look,
        _slots_are_used_again_early,
        _a_pair_wakes_nobody,
        _a_pair_gets_early,
        _a_pair_says_it_has_come_before_it_puts,
    ],
)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        schedulers: dict[int, Scheduler] = {}
        assert any(run(seed, schedulers) for seed in range(TRIES)), f"{TRIES} runs did not find it"


def test_a_round_that_an_interrupted_rank_has_left_open_is_over_for_the_others() -> None:
    size, numbers, wanted = 3, Memory(Scheduler(3), None), []
    for rank in range(size):
        cells = [SimulatedCell(numbers, rank, "arrivals", other) for other in range(size)]
        numbers.point = lambda rank: None  # type: ignore[method-assign]
        parking = Parking(SimulatedWords(numbers, rank), rank, lambda rank=rank: numbers.fence(rank), None)
        others = [other for other in range(size) if other != rank]
        closed = SimulatedCount(numbers, rank, "closed")
        group = rounds.HostGroup(cells, rank, others, parking, closed, closed)
        one = rounds.Collective(group, Values(numbers, rank, 1))
        if rank == size - 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group, "_made", _interrupted)
                with pytest.raises(KeyboardInterrupt):
                    one.begin()
        else:
            wanted.append((one.begin(), group))
    assert not any(one.Test() for one, _ in wanted)
    for one, group in wanted:
        group.close_own()
        assert one.Test()
        assert one.rounds.wrong == 0


def _interrupted(*given: object) -> bool:
    raise KeyboardInterrupt


def test_a_group_is_under_way_while_a_round_of_it_is_begun_and_not_put() -> None:
    """A rank with many groups asks those alone, at every wait and beside every segment."""
    numbers = Memory(Scheduler(2), None)
    numbers.point = lambda rank: None  # type: ignore[method-assign]
    unput: dict[rounds.HostGroup, None] = {}
    cells = [SimulatedCell(numbers, 0, "arrivals", other) for other in range(2)]
    parking = Parking(SimulatedWords(numbers, 0), 0, lambda: numbers.fence(0), None)
    closed = SimulatedCount(numbers, 0, "closed")
    short, long = (rounds.HostGroup(cells, 0, [1], parking, closed, closed) for _ in range(2))
    short.unput = long.unput = unput
    rounds.Collective(short, Values(numbers, 0, 1)).begin()
    assert unput == {}, "its one round is put at once"
    rounds.Collective(long, Values(numbers, 0, 3)).begin()
    assert [*unput] == [long], "the third round waits for the first of the other"
