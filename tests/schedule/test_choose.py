"""The schedule of a plan's words: names that fit, defaults, limits, and every refusal with its remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from homes import loop, one_each, vee
from partc.compiler.errors import CompileError
from partc.compiler.schedule.costs import BYTES, MICROBATCHES, Costs, StageCost, unit_costs
from partc.compiler.schedule.memory import Limit, parse_limit, peaks
from partc.compiler.schedule.stages import Edge, Stages, chain, grouped
from partc.compiler.schedule.validity import validate
from partc.compiler.schedulers.choose import NAMES, choose

BY_BYTES = Costs((StageCost(saved=3e8), StageCost(saved=1e8)), unit=BYTES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_stages_that_fit(name: str) -> None:
    stages = {"zbv": vee(3), "interleaved": loop(3, 2)}.get(name, one_each(3))
    schedule = choose(stages, 7, name)
    assert schedule.name == name
    assert validate(schedule) == []


def test_what_is_chosen_without_a_name() -> None:
    assert choose(one_each(3), 4).name == "1f1b"
    assert choose(vee(3), 4).name == "auto"
    assert choose(one_each(1), 1).name == "1f1b"


def test_groups_of_ranks_are_homes() -> None:
    two = grouped([[0, 1], [2, 3], [0, 1]], [Edge(0, 1), Edge(1, 2)], [True] * 3)
    assert (two.stage_ranks, two.ranks) == (((0,), (1,), (0,)), ((0, 1), (2, 3)))
    assert str(choose(two, 1, "gpipe")) == "ranks 0,1: 0F0 2F0 2B0 0B0\nranks 2,3: 1F0 1B0"
    over = grouped([[0, 1], [2], [3, 2, 1, 0]], [Edge(0, 2), Edge(1, 2)], [True] * 3)
    assert (over.stage_ranks, over.ranks) == (((0,), (1,), (0, 1, 2)), ((0, 1), (2,), (3,)))
    assert str(choose(over, 1, "auto")) == "ranks 0,1: 0F0 2F0 2B0 0B0\nrank 2: 1F0 2F0 2B0 1B0\nrank 3: 2F0 2B0"


def test_rows_of_a_plan() -> None:
    schedule = choose(one_each(2), 1, ["0F0 0B0", "1F0 1B0"])
    assert schedule.name == "text"
    with pytest.raises(CompileError, match=r"^plan.yaml:4: rank 1, cell 2: 1B0 is missing"):
        choose(one_each(2), 1, ["0F0 0B0", "1F0"], where="plan.yaml:2", rows_where=["plan.yaml:3", "plan.yaml:4"])


REFUSED = [
    (
        one_each(2),
        {"microbatches": 0, "schedule": "1f1B", "memory": "4 apples"},
        """pipeline: microbatches: 0 is not a number of microbatches
  it is an integer of at least 1
pipeline: memory: '4 apples' is not a limit
  a limit is an amount above 0 with its unit, such as 4GB, 512MiB or '2.5 microbatches'
pipeline: schedule: '1f1B' is not known
  schedules are gpipe, 1f1b, interleaved, zb_h1, zbv, auto, or a list of rows
  help: the nearest name is 1f1b""",
    ),
    (
        one_each(2),
        {"microbatches": 4, "schedule": "interleave"},
        """pipeline: schedule: 'interleave' is not known
  schedules are gpipe, 1f1b, interleaved, zb_h1, zbv, auto, or a list of rows
  help: the nearest name is interleaved""",
    ),
    (
        one_each(3),
        {"microbatches": 4, "schedule": "zbv"},
        """pipeline: schedule: zbv does not fit stages on rank 0, rank 1, rank 2
  groups must be named again in the opposite order: 0 1 1 0
  help: place the second half of the stages on the groups in the opposite order, or write schedule: 1f1b or zb_h1 or auto""",
    ),
    (
        one_each(2),
        {"microbatches": 4, "schedule": "interleaved"},
        """pipeline: schedule: interleaved does not fit stages on rank 0, rank 1
  groups must be named again in the same order: 0 1 0 1
  help: name each group again in the placement, or write schedule: 1f1b or zb_h1 or auto""",
    ),
    (
        loop(2, 2),
        {"microbatches": 4, "schedule": "1f1b"},
        """pipeline: schedule: 1f1b does not fit stages on rank 0, rank 1, rank 0, rank 1
  every stage needs a rank or group of its own
  help: place every stage on a group of its own, or write schedule: interleaved or auto""",
    ),
    (
        one_each(4),
        {"microbatches": 8, "schedule": "1f1b", "memory": "3 microbatches"},
        """pipeline: schedule: 1f1b does not keep to memory: 3 microbatches: rank 0 keeps 4 microbatches
  a rank keeps what F saves until the backward pass has read it
  help: write schedule: auto, or raise the limit: from 1 microbatch on there is a schedule""",
    ),
    (
        one_each(2),
        {"microbatches": 4, "schedule": "auto", "memory": "250MB", "costs": BY_BYTES},
        """pipeline: no schedule keeps to memory: 250MB: rank 0 keeps 286 MiB (1 microbatch)
  a rank keeps at least what one microbatch saves in all of its stages
  help: take more and smaller microbatches, recompute layers, or raise the limit: from 287 MiB on there is a schedule""",
    ),
    (
        one_each(2),
        {"microbatches": 4, "schedule": "gpipe", "memory": 250_000_000, "costs": BY_BYTES},
        """pipeline: schedule: gpipe does not keep to memory: 238 MiB: rank 0 keeps 1.12 GiB (4 microbatches), \
rank 1 keeps 381 MiB (4 microbatches)
  a rank keeps what F saves until the backward pass has read it
  help: take more and smaller microbatches, recompute layers, or raise the limit: from 287 MiB on there is a schedule""",
    ),
    (
        one_each(2),
        {"microbatches": 4, "memory": "1GB"},
        """pipeline: memory: 1GB cannot be held against rows
  sizes of stages are not known here
  help: give the limit in microbatches, such as '2.5 microbatches'""",
    ),
    (
        one_each(2),
        {"microbatches": 4, "memory": "1GB", "costs": replace(BY_BYTES, unbounded="batch")},
        """pipeline: memory: 1GB cannot be held against rows
  'batch' has no largest size, so a microbatch may have any number of bytes
  help: declare it in 'symbols', such as {max: 512}, or give the limit in microbatches, such as '2.5 microbatches'""",
    ),
    (
        one_each(2),
        {
            "microbatches": 4,
            "schedule": "auto",
            "memory": "999MB",
            "costs": replace(BY_BYTES, fixed=(7e8, 0.0)),
        },
        """pipeline: no schedule keeps to memory: 999MB: rank 0 keeps 954 MiB (1 microbatch, and 668 MiB of parameters, state, batch \
and one task)
  a rank keeps at least what one microbatch saves in all of its stages
  help: take more and smaller microbatches, recompute layers, or raise the limit: from 954 MiB on there is a schedule""",
    ),
]


@pytest.mark.parametrize(("stages", "words", "text"), REFUSED)
def test_what_does_not_fit_is_refused(stages: Stages, words: dict[str, object], text: str) -> None:
    with pytest.raises(CompileError) as caught:
        choose(stages, **words)  # type: ignore[arg-type]
    assert str(caught.value) == text


@pytest.mark.parametrize("microbatches", [0, -1, True, 2.0, "4", None])
def test_microbatches_are_a_whole_number(microbatches: object) -> None:
    with pytest.raises(CompileError, match="not a number of microbatches"):
        choose(one_each(2), microbatches)


def test_limits_are_kept() -> None:
    stages = one_each(4)
    assert max(peaks(choose(stages, 8, "auto", "3 microbatches"), unit_costs(stages))) <= 3
    costs = Costs(tuple(StageCost(saved=2e8) for _ in range(4)), unit=BYTES)
    assert max(peaks(choose(stages, 8, "auto", "600MB", costs), costs)) <= 6e8
    assert max(peaks(choose(stages, 8, "auto", "2 microbatches", costs), unit_costs(stages))) <= 2
    assert choose(stages, 8, "1f1b", Limit(8e8), costs).name == "1f1b"


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        (4096, 4096, BYTES),
        ("4GB", 4e9, BYTES),
        ("1.5 MiB", 1.5 * 2**20, BYTES),
        ("12B", 12, BYTES),
        ("4gb", 4e9, BYTES),
        ("2.5 microbatches", 2.5, MICROBATCHES),
        ("1 microbatch", 1, MICROBATCHES),
    ],
)
def test_forms_of_a_limit(text: str | int, amount: float, unit: str) -> None:
    assert parse_limit(text) == Limit(amount, unit)


@pytest.mark.parametrize("text", ["", "4", "0GB", "-1GB", "4 GBs", "1e9B", 0, -5, True])
def test_what_is_no_limit(text: str | int) -> None:
    with pytest.raises(ValueError, match="a limit is an amount above 0"):
        parse_limit(text)


def test_inference_streams_by_any_schedule() -> None:
    for name, homes in (
        ("gpipe", [0, 1, 2]),
        ("1f1b", [0, 1, 2]),
        ("zb_h1", [2, 0, 1]),
        ("interleaved", [0, 1, 0, 1]),
        ("zbv", [0, 1, 1, 0]),
    ):
        stages = chain(homes, backward=False)
        assert validate(choose(stages, 5, name)) == []
        assert not choose(stages, 5, "auto", "1 microbatch").split
