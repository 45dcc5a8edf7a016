"""Named schedules: totals and peaks by their closed forms, played by a second player too; any number of microbatches, any graph."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
from homes import loop, one_each, vee
from partc.compiler.schedule.costs import Costs, StageCost, unit_costs
from partc.compiler.schedule.memory import peaks
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.simulate import simulate
from partc.compiler.schedule.stages import Edge, Stages, chain, graph
from partc.compiler.schedule.validity import validate
from partc.compiler.schedulers.named import equal_rounds, gpipe, in_turn, interleaved, one_f_one_b, zb_h1, zbv
from schedule_ticks import Played, play

Maker = Callable[[Stages, int], Schedule]
RANGE = [(p, m) for p in (2, 3, 5, 8) for m in sorted({p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1})]
"""Ranks and microbatches: the fewest, those about whole rounds, and a rest."""


def played(schedule: Schedule) -> Played:
    """The second player's result, F = B = W = one tick a stage."""
    rows = [[(task.stage, str(task.kind), task.microbatch) for task in row] for row in schedule.rows]
    return play(rows, dict(enumerate(schedule.stages.sources)), {"F": 1, "B": 1, "W": 1})


def figures(schedule: Schedule, v: int = 1) -> tuple[Fraction, list[Fraction]]:
    """Total and peaks in units of one rank and microbatch, on which both players agree."""
    assert validate(schedule) == []
    ticks, count = played(schedule), len(schedule.stages)
    costs = Costs((StageCost(),) * count)
    timing = simulate(schedule, costs)
    assert timing.total == ticks.total
    assert {(t.stage, str(t.kind), t.microbatch): begin for t, (begin, _) in timing.spans.items()} == ticks.begins
    assert peaks(schedule, costs) == ticks.peaks
    return Fraction(ticks.total, v), [Fraction(peak, v) for peak in ticks.peaks]


@pytest.mark.parametrize(
    ("make", "stages", "v", "total", "peak"),
    [
        (gpipe, one_each(4), 1, 33, 8),
        (one_f_one_b, one_each(4), 1, 33, 4),
        (interleaved, loop(4, 2), 2, 28.5, 5.5),
        (zb_h1, one_each(4), 1, 27, 4),
        (zbv, vee(4), 2, 25.5, 4),
    ],
)
def test_four_ranks_and_eight_microbatches(make: Maker, stages: Stages, v: int, total: float, peak: float) -> None:
    schedule = make(stages, 8)
    found, kept = figures(schedule, v)
    assert (found, max(kept)) == (total, peak)
    assert simulate(schedule, unit_costs(stages)).total == total
    assert max(peaks(schedule, unit_costs(stages))) == peak


def test_gpipe_keeps_all_and_1f1b_what_follows() -> None:
    for p, m in RANGE:
        assert figures(gpipe(one_each(p), m)) == (3 * m + 3 * (p - 1), [m] * p)
        assert figures(one_f_one_b(one_each(p), m)) == (3 * m + 3 * (p - 1), [min(m, p - r) for r in range(p)])


def test_zb_h1_meets_the_bound_of_one_stage_a_rank_with_p_microbatches_on_every_rank() -> None:
    for p, m in RANGE:
        assert figures(zb_h1(one_each(p), m)) == (3 * m + p - 1, [min(m, p)] * p)


def test_zbv_halves_that() -> None:
    for p, m in RANGE:
        schedule = zbv(vee(p), m)
        total, kept = figures(schedule, 2)
        assert total == 3 * m + max(Fraction(p - 1, 2), 2 * p - 1 - m)
        assert max(kept) == p if m >= 2 * p - 1 else max(kept) <= min(m, p)
        if m >= 2 * p:
            assert simulate(schedule, unit_costs(schedule.stages)).period == 3 * m


@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_divides_the_overhead_by_the_stages_of_a_rank_for_any_microbatches(v: int) -> None:
    for p, m in RANGE if v == 2 else RANGE[::3]:
        size = -(-m // max(1, m // p))
        kept = [min(Fraction(m), Fraction((v - 1) * size + 2 * (p - 1 - r) + 1, v)) for r in range(p)]
        assert figures(interleaved(loop(p, v), m), v) == (3 * m + Fraction(3 * (p - 1), v), kept)


def test_rounds_are_whole_and_no_smaller_than_the_ranks() -> None:
    assert equal_rounds(11, 4) == [range(0, 5), range(5, 11)]
    assert equal_rounds(3, 4) == [range(3)]
    for m in range(1, 40):
        rounds = equal_rounds(m, 4)
        assert [i for some in rounds for i in some] == list(range(m))
        assert min(map(len, rounds)) >= min(m, 4)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_fewer_microbatches_than_ranks_and_one_rank(p: int) -> None:
    for m in range(1, p + 1):
        for make, stages, v in (
            (gpipe, one_each(p), 1),
            (one_f_one_b, one_each(p), 1),
            (zb_h1, one_each(p), 1),
            (zbv, vee(p), 2),
            (interleaved, loop(p, 2), 2),
            (interleaved, loop(p, 3), 3),
        ):
            total, _ = figures(make(stages, m), v)
            assert 3 * m <= total <= 3 * m + 3 * (p - 1)


def test_stages_may_be_on_ranks_in_any_order() -> None:
    for p in (2, 3, 5):
        order = random.Random(p).sample(range(p), p)
        assert figures(one_f_one_b(chain(order), 7))[0] == 21 + 3 * (p - 1)
        assert figures(zb_h1(chain(order), 7))[0] == 21 + p - 1
        assert figures(zbv(chain([*order, *reversed(order)]), 10), 2)[0] == 30 + Fraction(p - 1, 2)
        assert figures(interleaved(chain(order * 2), 7), 2)[0] == 21 + Fraction(3 * (p - 1), 2)


def test_any_graph_of_stages_is_valid_for_every_schedule_that_fits_its_homes() -> None:
    chosen = random.Random(11)
    for _ in range(40):
        p, m = chosen.randint(1, 5), chosen.randint(1, 9)
        for homes, makers in (
            (one_each(p).stage_ranks, (gpipe, one_f_one_b, zb_h1)),
            (vee(p).stage_ranks, (gpipe, zbv)),
            (loop(p, 2).stage_ranks, (gpipe, interleaved)),
        ):
            pairs = [(a, b) for b in range(len(homes)) for a in range(b)]
            edges = [Edge(a, b, chosen.random() < 0.8) for a, b in pairs if chosen.random() < 0.5]
            stages = graph(homes, edges)
            for make in makers:
                schedule = make(stages, m)
                assert validate(schedule) == []
                simulate(schedule, unit_costs(stages))


def test_inference_has_forward_passes_alone() -> None:
    for p, m in ((1, 3), (4, 8), (5, 3)):
        for make, stages in (
            (one_f_one_b, chain(range(p), False)),
            (zbv, chain([*range(p), *reversed(range(p))], False)),
        ):
            schedule = make(stages, m)
            assert validate(schedule) == []
            assert {str(task.kind) for row in schedule.rows for task in row} == {"F"}
            assert set(peaks(schedule, unit_costs(stages))) == {0.0}
        assert simulate(one_f_one_b(chain(range(p), False), m), Costs((StageCost(),) * p)).total == m + p - 1


def test_the_docstrings_show_what_the_schedules_are() -> None:
    for make, stages, m in (
        (gpipe, one_each(2), 3),
        (one_f_one_b, one_each(3), 4),
        (interleaved, loop(2, 2), 4),
        (zb_h1, one_each(3), 4),
        (zbv, vee(2), 4),
    ):
        shown = inspect.getdoc(make) or ""
        assert "\n".join(f"    {line}" for line in str(make(stages, m)).splitlines()) in shown


@pytest.mark.parametrize("stages", [one_each(1), one_each(3), loop(2, 3), vee(2)], ids=lambda one: str(one.stage_ranks))
def test_in_turn_keeps_one_microbatch_on_any_homes(stages: Stages) -> None:
    total, peak = figures(in_turn(stages, 5))
    assert total == 5 * 3 * len(stages)
    assert peak == [len(own) for own in stages.on]
