"""`auto` over random graphs, homes, times and limits: valid, within limits, never slower than what fits, near to the least there is."""

from __future__ import annotations

import random

import pytest
from event_rows import actions, validate_actions
from exhaustive import least_time
from homes import loop, one_each, vee
from partc.compiler.schedule.costs import Costs, StageCost, unit_costs, with_times
from partc.compiler.schedule.memory import one_microbatch, peaks, within
from partc.compiler.schedule.simulate import simulate
from partc.compiler.schedule.stages import Edge, Stages, chain, graph
from partc.compiler.schedule.validity import validate
from partc.compiler.schedulers import auto as auto_module
from partc.compiler.schedulers.auto import LimitError, auto, improve
from partc.compiler.schedulers.bound import lower_bound
from partc.compiler.schedulers.fill import fill
from partc.compiler.schedulers.named import gpipe, one_f_one_b, zb_h1
from partc.runtime.artifact.tasks.task import Kind, Task


def random_stages(chosen: random.Random) -> Stages:
    """Up to eight stages on up to four homes: some on several, some without a backward pass, edges with and without gradients."""
    homes, count = chosen.choice((1, 2, 3, 4)), chosen.randint(1, 8)
    wide = chosen.choice((0.0, 0.0, 0.3))
    on = [
        tuple(sorted(chosen.sample(range(homes), chosen.randint(1, homes) if chosen.random() < wide else 1)))
        for _ in range(count)
    ]
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = [Edge(a, b, chosen.random() < 0.85) for a, b in pairs if chosen.random() < (0.8 if a == b - 1 else 0.3)]
    found = graph(on, edges)
    if chosen.random() < 0.2:
        found = Stages(found.stage_ranks, found.edges, found.ranks, tuple(chosen.random() < 0.7 for _ in on))
    return found


def random_costs(chosen: random.Random, stages: Stages) -> Costs:
    some = []
    for _ in range(len(stages)):
        forward = chosen.uniform(0.3, 1.5)
        apart = forward * chosen.uniform(0.8, 1.3), forward * chosen.uniform(0.2, 1.1)
        whole = chosen.choice((None, forward * 1.9))
        some.append(StageCost(forward, *apart, whole, chosen.uniform(0.5, 1.5), chosen.choice((None, 0.3, 1.6))))
    return Costs(tuple(some), chosen.choice((0, 0, 0.1, 0.5)))


def test_random_graphs_homes_times_and_limits() -> None:
    chosen, met = random.Random(41), 0
    for _ in range(8):
        stages, m = random_stages(chosen), chosen.choice((1, 2, 3, 5))
        costs = random_costs(chosen, stages)
        limits = [one * chosen.choice((1, 1.3, 2, 3, 100)) for one in one_microbatch(stages, costs)]
        found = auto(stages, m, costs, limits)
        assert validate(found.schedule) == []
        assert within(peaks(found.schedule, costs), limits)
        assert validate_actions(actions(found.schedule, costs), stages) == []
        assert found.total >= found.bound * (1 - 1e-9)
        met += found.total <= found.bound * (1 + 1e-9)
        for make in (gpipe, *([one_f_one_b, zb_h1] if stages.is_one_each else [])):
            other = make(stages, m)
            if within(peaks(other, costs), limits):
                assert found.total <= simulate(other, costs).total * (1 + 1e-9)
    assert met > 4, "most small cases meet the bound"


def test_equal_stages_meet_the_closed_forms() -> None:
    for p in range(1, 9):
        for m in (p, 2 * p, 2 * p + 1):
            found = auto(one_each(p), m, unit_costs(one_each(p)), [p] * p)
            assert found.total == found.bound == 3 * m + p - 1
            assert max(peaks(found.schedule, unit_costs(one_each(p)))) <= p
            if m >= 2 * p:
                found = auto(vee(p), m, unit_costs(vee(p)), [p] * p)
                assert found.total == found.bound == 3 * m + (p - 1) / 2


def test_inference_meets_the_bound_of_its_homes() -> None:
    """One stage each: m + p - 1. A loop, m >= p: m + (p - 1)/2. A V comes back to the first rank: m + p - 1."""
    for p, m in ((2, 3), (4, 8), (4, 2)):
        for homes, total in (
            ([*range(p)], m + p - 1),
            ([*range(p)] * 2, m + (p - 1) / 2 + max(0, p - m) / 2),
            ([*range(p), *reversed(range(p))], m + p - 1),
        ):
            stages = chain(homes, backward=False)
            found = auto(stages, m, unit_costs(stages), [1e-6] * p)
            assert found.total == found.bound == total
            assert not any(peaks(found.schedule, unit_costs(stages)))


def test_half_the_memory_of_1f1b_with_less_bubble() -> None:
    stages = vee(4)
    found = auto(stages, 6, unit_costs(stages), [2.0] * 4)
    assert max(peaks(found.schedule, unit_costs(stages))) == 2
    assert found.total <= 23.5 < simulate(one_f_one_b(one_each(4), 6), unit_costs(one_each(4))).total


def test_a_longer_last_stage() -> None:
    costs = Costs((*[StageCost()] * 3, StageCost(1.6, 1.6, 1)))
    found = auto(one_each(4), 8, costs, [4] * 4)
    assert found.total == pytest.approx(found.bound) == pytest.approx(36.6)
    assert simulate(one_f_one_b(one_each(4), 8), costs).total == pytest.approx(42.6)


def test_near_the_least_time_of_all_orders_and_the_bound_below_it() -> None:
    chosen, ratios = random.Random(6), []
    for _ in range(6):
        p, m = chosen.choice(((2, 2), (2, 3), (3, 2)))
        stages = chosen.choice((one_each(p), vee(2), loop(2, 2), graph([(0,), (1,), (0,)], [Edge(0, 2), Edge(1, 2)])))
        some = []
        for s in range(len(stages)):
            f = chosen.uniform(0.6, 1.4)
            some.append(
                StageCost(f, f * chosen.uniform(0.8, 1.3), f * chosen.uniform(0.5, 1.1), None, 1, 0.6 if s % 2 else 1)
            )
        costs = Costs(tuple(some), chosen.choice((0, 0.1)))
        limits = [one * chosen.choice((1, 1.5, 2)) for one in one_microbatch(stages, costs)]
        least, found = least_time(stages, m, costs, limits), auto(stages, m, costs, limits)
        assert lower_bound(stages, m, costs, limits) <= least * (1 + 1e-9)
        ratios.append(found.total / least)
    assert max(ratios) < 1.03
    assert sum(ratios) / len(ratios) < 1.005


def test_the_bound_of_a_limit_is_an_area() -> None:
    """Half units a stage. Rank 0 keeps half a microbatch for 4.5 units in stage 0, and for 2 and 0.5 (W) in stage 2: 3.5, four times."""
    stages = loop(2, 2)
    assert lower_bound(stages, 4, unit_costs(stages), [1, 1]) == 14
    assert lower_bound(stages, 4, unit_costs(stages), [1, 100]) == 14
    assert lower_bound(stages, 4, unit_costs(stages), [100, 100]) == 12.5
    assert lower_bound(one_each(2), 4, unit_costs(one_each(2)), [1, 1]) == 4 * 5


def test_w_fills_waits_within_the_limits() -> None:
    """The order of 1F1B with room for p microbatches becomes as fast as ZB-H1; where W would keep too much, B stays whole."""
    stages = one_each(3)
    order, costs = one_f_one_b(stages, 5), unit_costs(stages)
    filled = fill(order, costs, [3, 3, 3])
    assert filled is not None
    assert simulate(filled, costs).total == 17 == simulate(zb_h1(stages, 5), costs).total
    assert max(peaks(filled, costs)) <= 3
    assert fill(order, costs, [3, 3, 0.5]) is None
    dear = Costs((StageCost(), StageCost(), StageCost(deferred=2)))
    within_one = fill(order, dear, [3, 3, 1])
    assert within_one is not None
    assert max(peaks(within_one, dear)) <= 3
    assert {s for s, _ in within_one.split} == {1}


def test_exchanges_make_a_schedule_faster_within_the_limits() -> None:
    stages = vee(2)
    costs = Costs((StageCost(2, 1, 1), StageCost(), StageCost(1, 2, 1), StageCost()))
    slow = gpipe(stages, 4)
    for limits in ([8, 8], [float("inf")] * 2):
        fast = improve(slow, costs, limits, 0.0, 100_000)
        assert validate(fast) == []
        assert within(peaks(fast, costs), limits)
        assert simulate(fast, costs).total < simulate(slow, costs).total


def test_exchanges_end_with_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large schedule has many critical neighbours: those of one round alone may be more than the work allows."""
    stages, times = one_each(4), []
    schedule = gpipe(stages, 30)
    count = sum(map(len, schedule.rows))
    monkeypatch.setattr(auto_module, "simulate", lambda *given: times.append(1) or simulate(*given))
    improve(schedule, unit_costs(stages), [100] * 4, 0.0, 5 * count)
    assert 1 < len(times) <= 6


def test_times_of_nothing() -> None:
    assert auto(vee(2), 3, Costs((StageCost(0, 0, 0),) * 4)).total == 0
    assert auto(vee(2), 3, Costs((StageCost(0, 0, 0),) * 4, message=1.0)).total > 0


def test_b_and_w_are_apart_only_where_allowed_and_where_it_helps() -> None:
    stages, costs = one_each(4), unit_costs(one_each(4))
    whole = auto(stages, 8, costs, split=False)
    assert not whole.schedule.split
    assert whole.total == whole.bound == 33
    alone = auto(one_each(1), 5, unit_costs(one_each(1)))
    assert not alone.schedule.split
    dear = Costs((StageCost(1, 2, 2, undivided=2),) * 4)
    assert not auto(stages, 8, dear).schedule.split


def test_measured_times_of_single_tasks_count() -> None:
    stages = one_each(3)
    slow = {Task(1, Kind.FORWARD, 2): 9.0}
    costs = Costs((StageCost(),) * 3, measured=slow)
    found = auto(stages, 4, costs)
    assert found.total >= found.bound >= 4 * 3 + 8 + 1
    timing = simulate(found.schedule, costs)
    begin, end = timing.spans[Task(1, Kind.FORWARD, 2)]
    assert end - begin == 9
    assert Task(1, Kind.FORWARD, 2) in timing.critical


def test_given_times_of_kinds_and_tasks() -> None:
    costs = with_times(Costs((StageCost(1, 1, 3), StageCost())), {"0B": 2, "1B": 5, "1W": 2, "1F3": 9}, "ms")
    assert costs.stages == (StageCost(1, 0.5, 1.5, undivided=2), StageCost(1, 5, 2))
    assert (dict(costs.measured), costs.clock) == ({Task(1, Kind.FORWARD, 3): 9}, "ms")
    with pytest.raises(ValueError, match="the stages are 0 to 1"):
        with_times(costs, {"2F": 1})


def test_messages_take_the_times_of_their_edges() -> None:
    stages = one_each(3)
    costs = Costs((StageCost(),) * 3, 9.0, {(0, 1): 1.0, (1, 2): 2.0})
    spans = simulate(one_f_one_b(stages, 1), costs).spans
    assert spans[Task(1, Kind.FORWARD, 0)] == (2, 3)
    assert spans[Task(2, Kind.FORWARD, 0)] == (5, 6)
    assert spans[Task(0, Kind.BACKWARD, 0)] == (13, 15)
    assert auto(stages, 6, costs).total <= simulate(one_f_one_b(stages, 6), costs).total


def test_what_ends_last_is_told_back_to_the_begin() -> None:
    timing = simulate(one_f_one_b(one_each(3), 2), unit_costs(one_each(3)))
    assert " ".join(map(str, timing.critical)) == "0F0 1F0 2F0 2B0 2F1 2B1 1B1 0B1"
    assert timing.idle == (6, 6, 6)
    assert (timing.bubble, timing.overhead) == (0.5, 1.0)


def test_a_limit_below_one_microbatch_is_refused() -> None:
    with pytest.raises(LimitError):
        auto(one_each(2), 4, unit_costs(one_each(2)), [1, 0.9])


def test_the_same_case_gives_the_same_rows() -> None:
    chosen = random.Random(9)
    stages = random_stages(chosen)
    costs = random_costs(chosen, stages)
    assert auto(stages, 2, costs) == auto(stages, 2, costs)
