"""Rows of tasks and messages: one global order never blocks, and what blocks is found as a player of all interleavings finds it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from event_rows import Action, Message, Role, actions, blocked, most_unread, roles, validate_actions
from homes import loop, one_each, vee
from partc.compiler.schedule.costs import Costs, StageCost
from partc.compiler.schedule.grid import message_counts, readers
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.stages import Edge, graph
from partc.compiler.schedulers.named import gpipe, interleaved, one_f_one_b, zb_h1, zbv
from partc.runtime.artifact.tasks.task import Task

Rows = tuple[tuple[Action, ...], ...]


def makes_of(p: int, m: int) -> list[Schedule]:
    return [
        gpipe(one_each(p), m),
        one_f_one_b(one_each(p), m),
        zb_h1(one_each(p), m),
        zbv(vee(p), m),
        interleaved(loop(p, 2), m),
    ]


def naive(schedule: Schedule) -> Rows:
    """What a rank would do by itself: receive right before the task that reads, send right behind the one that makes."""
    stages, rows = schedule.stages, []
    for home, row in enumerate(schedule.rows):
        found: list[Action] = []
        for task in row:
            for need in stages.needs(task):
                if stages.crosses(need.stage, task.stage):
                    found.append(Message(need, task.stage, Role.RECEIVE))
            found.append(task)
            found += [
                Message(task, reader, role)
                for reader in readers(task, stages)
                for one, role in roles(stages, task.stage, reader)
                if one == home
            ]
        rows.append(tuple(found))
    return tuple(rows)


def gets_stuck_in_some_interleaving(rows: Rows, buffered: bool) -> set[bool]:
    """Every interleaving is played: whether some of them end stuck (True), and some at the ends of all rows (False)."""
    ends = {a[:2]: {} for row in rows for a in row if isinstance(a, Message)}  # type: ignore[var-annotated]
    for r, row in enumerate(rows):
        for cell, action in enumerate(row):
            if isinstance(action, Message):
                ends[action[:2]][r] = cell
    seen: set[tuple[int, ...]] = set()
    results: set[bool] = set()
    states = [(0,) * len(rows)]
    while states:
        at = states.pop()
        if at in seen:
            continue
        seen.add(at)
        after = []
        for r, row in enumerate(rows):
            if at[r] == len(row):
                continue
            action = row[at[r]]
            moving = [r]
            if isinstance(action, Message):
                (other,) = (one for one in ends[action[:2]] if one != r)
                there = ends[action[:2]][other]
                if buffered and action.role is Role.RECEIVE and at[other] <= there:
                    continue
                if not buffered:
                    if at[other] != there:
                        continue
                    moving = [r, other]
            after.append(tuple(k + (r in moving) for r, k in enumerate(at)))
        if not after:
            results.add(any(k < len(row) for k, row in zip(at, rows, strict=True)))
        states += after
    return results


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_one_order_never_blocks_where_each_rank_by_itself_does(p: int, m: int) -> None:
    for schedule in makes_of(p, m):
        rows = actions(schedule)
        assert blocked(rows) == blocked(rows, buffered=True) == []
        assert validate_actions(rows, schedule.stages) == []
        assert tuple(tuple(one for one in row if isinstance(one, Task)) for row in rows) == schedule.rows
        assert blocked(naive(schedule), buffered=True) == []
        if (schedule.name, p, m) in {
            ("1f1b", 4, 8),
            ("zb_h1", 4, 8),
            ("interleaved", 4, 8),
            ("zbv", 4, 8),
            ("1f1b", 2, 3),
        }:
            assert blocked(naive(schedule))


def test_the_documented_order() -> None:
    rows = actions(one_f_one_b(one_each(2), 2))
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0F0>1 0F1 0F1>1 0<1B0 0B0 0<1B1 0B1",
        "1<0F0 1F0 1<0F1 1B0 1B0>0 1F1 1B1 1B1>0",
    ]


def test_random_times_and_tasks_without_time_keep_one_order() -> None:
    chosen = random.Random(3)
    for trial in range(60):
        for schedule in makes_of(chosen.randint(1, 4), chosen.randint(1, 5)):
            tasks = [task for row in schedule.rows for task in row]
            times = {task: chosen.choice((0.0, chosen.random()) if trial % 2 else (chosen.random(),)) for task in tasks}
            rows = actions(
                schedule, Costs((StageCost(),) * len(schedule.stages), chosen.choice((0, 0.2)), measured=times)
            )
            assert validate_actions(rows, schedule.stages) == []


def test_stages_on_several_homes_take_part_in_one_event() -> None:
    stages = graph([(0,), (1,), (0, 1, 2), (0,), (2,)], [Edge(0, 2), Edge(1, 2), Edge(2, 3), Edge(2, 4, False)])
    schedule = gpipe(stages, 1)
    rows = actions(schedule)
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0F0>2 2<1F0 2F0 3<2F0 2F0>4 3F0 3B0 3B0>2 2B0 0<2B0 2B0>1 0B0",
        "1F0 2<0F0 1F0>2 2F0 2F0>3 2F0>4 2<3B0 2B0 2B0>0 1<2B0 1B0",
        "2<0F0 2<1F0 2F0 2F0>3 4<2F0 4F0 2<3B0 4B0 2B0 2B0>0 2B0>1",
    ]
    assert validate_actions(rows, stages) == []
    moved = graph([(0, 1), (1, 2)], [Edge(0, 1)], backward=False)
    assert [" ".join(map(str, row)) for row in actions(gpipe(moved, 1))] == ["0F0 0F0>1", "0F0 0F0<>1 1F0", "1<0F0 1F0"]
    assert validate_actions(actions(gpipe(moved, 4)), moved) == []
    changed = graph([(0, 1, 2), (0, 1, 3)], [Edge(0, 1)])
    rows = actions(gpipe(changed, 2))
    assert blocked(rows) == blocked(rows, buffered=True) == []
    assert "0F0<>1" in map(str, rows[0])
    assert "0F0<>1" in map(str, rows[1])


@pytest.mark.parametrize("buffered", [False, True])
def test_blocking_is_found_as_by_all_interleavings(buffered: bool) -> None:
    chosen, found = random.Random(17), []
    for _ in range(250):
        p, m = chosen.choice(((2, 1), (2, 2), (3, 1)))
        schedule = chosen.choice(makes_of(p, m))
        rows = [list(row) for row in naive(schedule)]
        for _ in range(chosen.randint(0, 4)):
            row = chosen.choice(rows)
            moved = row.pop(chosen.randrange(len(row)))
            row.insert(chosen.randint(0, len(row)), moved)
        shuffled = tuple(map(tuple, rows))
        ends = gets_stuck_in_some_interleaving(shuffled, buffered)
        assert len(ends) == 1, "rows block in every interleaving or in none"
        assert ends == {bool(blocked(shuffled, buffered))}
        found.append(ends == {True})
    assert 20 < sum(found) < 230


def test_what_is_wrong_with_messages_is_said() -> None:
    stages = one_each(2)
    rows = [list(row) for row in actions(one_f_one_b(stages, 2))]

    def said(first: Sequence[Action], second: Sequence[Action]) -> str:
        return "\n".join(map(str, validate_actions((first, second), stages, "build")))

    assert said([a for a in rows[0] if str(a) != "0F1>1"], rows[1]) == (
        """build: rank 1, cell 3: 1<0F1 has no Send in any row
    1<0F0 1F0 1<0F1 1B0 1B0>0 1F1 1B1 1B1>0
              ^^^^^
  a message has two ends
  help: add the Send"""
    )
    assert "rank 1, cell 1: 1F0 reads what 0F0 makes, which is not there yet" in said(
        rows[0], [rows[1][1], rows[1][0], *rows[1][2:]]
    )
    assert "rank 0, cell 1: 0F0>1 sends what 0F0 makes" in said([rows[0][1], rows[0][0], *rows[0][2:]], rows[1])
    assert "rank 0, cell 3: 0F0>1 appears twice" in said([*rows[0][:2], *rows[0][1:]], rows[1])
    assert said([*rows[0][:2], rows[0][2], rows[0][4], rows[0][3], *rows[0][5:]], rows[1]) == (
        """build: rank 0, cell 4: deadlock: 0<1B0 waits for rank 1, which waits in 1<0F1
    0F0 0F0>1 0F1 0<1B0 0F1>1 0B0 0<1B1 0B1
                  ^^^^^
  ranks take part in messages in one order: a Send may wait until its receiver has come to the Receive
  help: put each message right behind the task that makes it, in both rows
build: rank 1, cell 3: deadlock: 1<0F1 waits for rank 0, which waits in 0<1B0
    1<0F0 1F0 1<0F1 1B0 1B0>0 1F1 1B1 1B1>0
              ^^^^^
  ranks take part in messages in one order: a Send may wait until its receiver has come to the Receive
  help: put each message right behind the task that makes it, in both rows"""
    )


def test_messages_of_an_edge() -> None:
    for p, m in ((2, 3), (4, 8), (5, 5)):
        edges = {(f"rank {r}", f"rank {r + 1}") for r in range(p - 1)}
        assert message_counts(one_f_one_b(one_each(p), m)) == dict.fromkeys(edges, 2 * m)
        assert message_counts(zbv(vee(p), m)) == dict.fromkeys(edges, 4 * m)
        looped = message_counts(interleaved(loop(p, 2), m))
        around = {("rank 0", f"rank {p - 1}"): 2 * m}
        assert looped == dict.fromkeys(edges, 4 * m) | around if p > 2 else {("rank 0", "rank 1"): 6 * m}
        sent = sum(isinstance(a, Message) and a.role is Role.SEND for row in actions(zbv(vee(p), m)) for a in row)
        assert sent == 4 * m * (p - 1)


def test_messages_that_wait_to_be_read() -> None:
    assert [max(most_unread(actions(schedule))) for schedule in makes_of(4, 8)] == [1, 2, 2, 3, 4]
