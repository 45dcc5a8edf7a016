"""Rows as text: what is printed is parsed, every kind of wrong cell is found and marked, and the grid of known schedules."""

from __future__ import annotations

import random

import pytest
from conftest import Golden
from homes import loop, one_each, vee
from partc.compiler.errors import CompileError
from partc.compiler.schedule.costs import Costs, StageCost, unit_costs
from partc.compiler.schedule.grid import grid, schedule_text
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.simulate import simulate
from partc.compiler.schedule.stages import Edge, Stages, chain, graph
from partc.compiler.schedule.text import schedule_of_text
from partc.compiler.schedule.validity import validate
from partc.compiler.schedulers.named import gpipe, interleaved, one_f_one_b, zb_h1, zbv
from partc.runtime.artifact.tasks.task import Kind, Task, parse

KNOWN = [
    gpipe(vee(2), 3),
    one_f_one_b(one_each(3), 5),
    interleaved(loop(2, 2), 3),
    zb_h1(one_each(3), 4),
    zbv(vee(2), 4),
    gpipe(graph([(0, 1), (0,), (1,)], [Edge(0, 1), Edge(0, 2)]), 2),
]


def text_of(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.rows]


def refused(rows: list[str], stages: Stages, microbatches: int) -> str:
    with pytest.raises(CompileError) as caught:
        schedule_of_text(rows, stages, microbatches, "plan.yaml:7")
    assert all(problem.where == "plan.yaml:7" for problem in caught.value.problems)
    return str(caught.value)


@pytest.mark.parametrize("schedule", KNOWN, ids=lambda schedule: schedule.name)
def test_rows_are_read_back(schedule: Schedule) -> None:
    for rows in (text_of(schedule), str(schedule).splitlines()):
        assert schedule_of_text(rows, schedule.stages, schedule.microbatches).rows == schedule.rows


@pytest.mark.parametrize("text", ["", "F0", "0F", "0f0", "0X1", "-1F0", "0F0 ", "0F1.5", "²F0", "0F0>1", "٣F٣"])
def test_a_cell_is_a_task(text: str) -> None:
    with pytest.raises(ValueError, match="such as 2F0"):
        parse(text)


def test_large_numbers_in_cells() -> None:
    assert parse("12F345") == Task(12, Kind.FORWARD, 345)


REFUSED = [
    (
        ["0F0 0b0", "1F0 1B0"],
        """plan.yaml:7: rank 0, cell 2: '0b0' is not a task
    0F0 0b0
        ^^^
  a cell is a stage, F, B or W, and a microbatch, such as 2F0
  help: write 0B0""",
    ),
    (
        ["0F0 0B0", "1F0 1B0 1B0"],
        """plan.yaml:7: rank 1, cell 3: 1B0 appears twice, first in cell 2
    1F0 1B0 1B0
            ^^^
  every F and every B runs once on each home of its stage, a W at most once
  help: remove one of the two""",
    ),
    (
        ["0F0 0B0", "1B0 1F0"],
        """plan.yaml:7: rank 1, cell 1: 1B0 comes before 1F0 (cell 2), for which it waits
    1B0 1F0
    ^^^
  F waits for the F of the stages that it reads from; B for its own F and for the B of the stages that read from it; W for its B
  help: move 1B0 after 1F0""",
    ),
    (
        ["0F0 0B0", "1F0"],
        """plan.yaml:7: rank 1, cell 2: 1B0 is missing
    1F0
        ^
  in every row: every F and every B runs once on each home of its stage, a W at most once
  help: add what is missing""",
    ),
    (
        ["0F0 0B0 1F0", "1B0"],
        """plan.yaml:7: rank 0, cell 3: 1F0 is of stage 1, which is on rank 1
    0F0 0B0 1F0
            ^^^
  a stage runs where its nodes are placed; stages on rank 0: 0
  help: move it to the row of rank 1
plan.yaml:7: rank 1, cell 2: 1F0 is missing
    1B0
        ^
  in every row: every F and every B runs once on each home of its stage, a W at most once
  help: add what is missing""",
    ),
    (
        ["0F0 0B0 0W0", "1F0 1B0 2F0 1F1"],
        """plan.yaml:7: rank 0, cell 3: 0W0 is of a stage whose backward pass is whole
    0F0 0B0 0W0
            ^^^
  no cotangent leaves stage 0, so its backward pass is one task
  help: remove 0W0: 0B0 is all of it
plan.yaml:7: rank 1, cell 3: 2F0 is of stage 2
    1F0 1B0 2F0 1F1
            ^^^
  the stages are 0 to 1
  help: the first number is the stage: 0 to 1
plan.yaml:7: rank 1, cell 4: 1F1 is of microbatch 1
    1F0 1B0 2F0 1F1
                ^^^
  the microbatches are 0 to 0
  help: the last number is the microbatch: 0 to 0; or set microbatches: 2""",
    ),
    (
        ["0F0 0B0", "rank 2: 1F0 1B0"],
        """plan.yaml:7: the row of rank 1 is named 'rank 2'
  the rows are those of rank 0, rank 1, in this order
  help: write 'rank 1:', or no name""",
    ),
    (
        ["0F0 0B0"],
        """plan.yaml:7: 1 row is given for 2 homes: rank 0, rank 1
  every home of a stage, a rank or a group of ranks, has one row, in the order of the ranks
  help: write 2 rows""",
    ),
]


@pytest.mark.parametrize(("rows", "text"), REFUSED)
def test_wrong_rows_are_refused_with_the_first_wrong_cell_marked(rows: list[str], text: str) -> None:
    assert refused(rows, one_each(2), 1) == text


def test_a_stage_without_a_backward_pass_has_f_alone() -> None:
    text = refused(["0F0 0B0", "1F0 1W0"], chain([0, 1], backward=False), 1)
    assert "rank 0, cell 2: 0B0 is of a stage that has F alone" in text
    assert "rank 1, cell 2: 1W0 is of a stage that has F alone" in text


def test_rows_that_wait_for_each_other_are_refused_with_the_cycle() -> None:
    assert refused(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], one_each(2), 2) == (
        """plan.yaml:7: rank 0, cell 2: 0B0 never runs: 0B0 waits for 1B0, which comes after 1F1 on rank 1, \
1F1 waits for 0F1, which comes after 0B0 on rank 0
    0F0 0B0 0F1 0B1
        ^^^
  rows must not wait for each other
  help: move one of these tasks to another place of its row to break the cycle"""
    )


def test_homes_that_share_stages_run_them_in_one_order() -> None:
    stages = graph([(0, 1), (0, 1)], [])
    assert "rank 0, cell 1: the order of 0F0 and 1F0 is another one" in refused(
        ["0F0 1F0 0B0 1B0", "1F0 0F0 0B0 1B0"], stages, 1
    )


def test_a_long_row_is_shown_around_the_cell() -> None:
    rows = ["0F0 0B0 " * 10 + "0x0 " + "0F0 0B0 " * 10, "1F0 1B0"]
    cells = "0F0 0B0 " * 4
    assert f"rank 0, cell 21: '0x0' is not a task\n    ... {cells}0x0 {cells}...\n{' ' * 40}^^^\n" in refused(
        rows, one_each(2), 1
    )


@pytest.mark.parametrize("schedule", KNOWN, ids=lambda schedule: schedule.name)
def test_every_mutation_of_a_cell_is_found_where_it_is(schedule: Schedule) -> None:
    """Every cell is removed, doubled, of another kind, stage or microbatch, or in another row: each leaves a problem in its row."""
    stages, m = schedule.stages, schedule.microbatches
    for home, row in enumerate(schedule.rows):
        for cell, task in enumerate(row):
            others = [task._replace(kind=kind) for kind in Kind if kind is not task.kind]
            others += [
                task._replace(stage=(task.stage + 1) % len(stages)),
                task._replace(microbatch=(task.microbatch + 1) % m),
            ]
            others += [task._replace(stage=len(stages)), task._replace(microbatch=m)]
            changed = [(*row[:cell], other, *row[cell + 1 :]) for other in others]
            changed += [(*row[:cell], task, *row[cell:])]
            if task.kind is not Kind.WEIGHT:
                changed.append((*row[:cell], *row[cell + 1 :]))
            for some in changed:
                rows = (*schedule.rows[:home], some, *schedule.rows[home + 1 :])
                found = validate(Schedule("text", stages, m, rows))
                assert found, (schedule.name, some)
                assert any(stages.label(home) in problem.fact for problem in found)
                assert all("^" in problem.fact for problem in found)


@pytest.mark.parametrize("schedule", KNOWN, ids=lambda schedule: schedule.name)
def test_every_exchange_of_two_neighbours_is_valid_or_refused_as_a_player_finds(schedule: Schedule) -> None:
    """Two tasks change places: refused exactly if a run of the rows gets stuck."""
    seen = set()
    for home, row in enumerate(schedule.rows):
        for cell in range(len(row) - 1):
            some = (*row[:cell], row[cell + 1], row[cell], *row[cell + 2 :])
            rows = (*schedule.rows[:home], some, *schedule.rows[home + 1 :])
            found = validate(Schedule("text", schedule.stages, schedule.microbatches, rows))
            assert bool(found) == gets_stuck(rows, schedule.stages)
            seen.add(bool(found))
    assert seen == {True, False}


def gets_stuck(rows: tuple[tuple[Task, ...], ...], stages: Stages) -> bool:
    """Whether rows, run in any order, come to a point where no row can go on."""
    done: set[Task] = set()
    at = [0] * len(rows)
    while True:
        heads = {task: h for h, row in enumerate(rows) if at[h] < len(row) for task in [row[at[h]]]}
        ready = [
            task
            for task in heads
            if all(at[h] < len(rows[h]) and rows[h][at[h]] == task for h in stages.stage_ranks[task.stage])
            and all(need in done for need in stages.needs(task))
        ]
        if not ready:
            return bool(heads)
        for home in stages.stage_ranks[ready[0].stage]:
            at[home] += 1
        done.add(ready[0])


def test_random_orders_are_refused_exactly_if_they_get_stuck() -> None:
    chosen, seen = random.Random(5), []
    for _ in range(300):
        stages = chain([chosen.randrange(3) for _ in range(chosen.randint(1, 4))] + [2, 1, 0][: chosen.randint(0, 3)])
        tasks = [
            Task(s, kind, i) for s in range(len(stages)) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(2)
        ]
        order = [(chosen.random() * 2 + (task.kind is Kind.BACKWARD) * 3 + task.microbatch, task) for task in tasks]
        rows = tuple(
            tuple(task for _, task in sorted(order) if (h,) == stages.stage_ranks[task.stage])
            for h in range(stages.rows)
        )
        wrong = bool(validate(Schedule("text", stages, 2, rows)))
        assert wrong == gets_stuck(rows, stages)
        seen.append(wrong)
    assert 30 < sum(seen) < 270


def test_texts_of_schedules(golden: Golden) -> None:
    texts = [
        schedule_text(one_f_one_b(one_each(4), 8)),
        schedule_text(zbv(vee(2), 4)),
        schedule_text(
            zb_h1(one_each(3), 3), Costs((StageCost(1.1, 1.3, 0.7), StageCost(1, 1.31, 0.9), StageCost(1.37)), 0.01)
        ),
        schedule_text(KNOWN[-1]),
        schedule_text(one_f_one_b(chain([1, 0], False), 3)),
    ]
    golden("schedules.txt", "\n".join(texts))


def test_every_task_has_a_cell_of_the_grid() -> None:
    chosen = random.Random(2)
    for zero in (0.0, 0.3):
        for schedule in KNOWN:
            times = {task: 0.0 if chosen.random() < zero else chosen.random() for row in schedule.rows for task in row}
            costs = Costs((StageCost(),) * len(schedule.stages), measured=times)
            lines = grid(schedule, simulate(schedule, costs)).splitlines()
            for home, row in enumerate(schedule.rows):
                label = schedule.stages.label(home)
                shown = [cell for line in lines if line.startswith(label) for cell in line.split("|")[1].split()]
                assert [cell for cell in shown if cell[0] not in ".-"] == [str(task) for task in row]
    assert grid(KNOWN[1], simulate(KNOWN[1], unit_costs(KNOWN[1].stages))).count("---") == 15
