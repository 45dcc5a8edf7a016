"""A step played by two clocks a rank: waits, messages that leave one after the other, shared cores, classes, the critical path."""

from __future__ import annotations

import pytest
from partc.compiler.cost.play import Action, Begin, Class, Communicate, Compute, Finish, Played, Receive, Send, play


def compute(seconds: float, path: str = "") -> Action:
    return Compute(f"compute {path}", path, seconds=seconds)


def send(tag: int, travel: float) -> Action:
    return Send(f"send {tag}", tag=tag, travel=travel, peer=1)


def receive(tag: int) -> Action:
    return Receive(f"receive {tag}", tag=tag, peer=0)


def begin(tag: int, travel: float) -> Action:
    return Begin(f"begin {tag}", tag=tag, op="AllReduce", group="g", travel=travel)


def finish(tag: int, seconds: float = 0.0) -> Action:
    return Finish(f"finish {tag}", tag=tag, op="AllReduce", group="g", seconds=seconds)


def played(*rows: list[Action], cores: int = 0, ranks: int = 1) -> Played:
    """Each row is a class of so many ranks; every message and collective is of all classes."""
    every = tuple(range(len(rows)))
    tags = {one.tag: every for row in rows for one in row if isinstance(one, Communicate)}
    classes = [Class(tuple(range(k * ranks, (k + 1) * ranks)), row, tags) for k, row in enumerate(rows)]
    return play(classes, cores)


def test_a_receiver_waits_for_what_has_travelled() -> None:
    found = played([compute(3), send(1, 2), compute(1)], [compute(1), receive(1), compute(4)])
    assert found.seconds == pytest.approx(3 + 2 + 4)
    assert found.busy == [4, 5]
    assert [(action.what, seconds) for _, action, seconds in found.critical] == [
        ("compute ", 3),
        ("send 1", 2),
        ("compute ", 4),
    ]


def test_messages_of_a_rank_leave_one_after_the_other() -> None:
    found = played([send(1, 2), send(2, 2)], [receive(2), receive(1)])
    assert found.seconds == pytest.approx(4)
    assert found.communication == [4, 0]


def test_a_collective_begins_with_the_last_rank_and_goes_on_beside() -> None:
    rows = [compute(1), begin(1, 5), compute(3), finish(1, 0.5)], [compute(2), begin(1, 5), compute(9), finish(1, 0.5)]
    found = played(*map(list, rows))
    assert [some[-1].end for some in found.intervals] == pytest.approx([2 + 5 + 0.5, 2 + 9 + 0.5])
    assert found.busy == pytest.approx([4.5, 11.5])


def test_ranks_share_cores_in_proportion() -> None:
    """Three on two cores go on at two thirds; when the first has ended, both others have a core each."""
    found = played([compute(2)], [compute(4)], [compute(4)], cores=2)
    assert [some[-1].end for some in found.intervals] == pytest.approx([3, 5, 5])
    assert played([compute(2)], [compute(4)], cores=2).seconds == pytest.approx(4)


def test_a_class_counts_as_its_ranks() -> None:
    assert played([compute(3)], cores=2, ranks=4).seconds == pytest.approx(6)
    assert played([compute(3)], cores=4, ranks=4).seconds == pytest.approx(3)


def test_waiting_takes_no_core() -> None:
    rows = [compute(2), send(1, 1), compute(2)], [receive(1), compute(2)], [compute(6)]
    assert [some[-1].end for some in played(*map(list, rows), cores=2).intervals] == pytest.approx([4.5, 5.5, 6.5])


def test_ranks_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ValueError, match="rank 0 waits without end in receive 1"):
        played([receive(1), send(2, 1)], [receive(2), send(1, 1)])
