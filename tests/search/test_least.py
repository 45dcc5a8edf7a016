"""What a candidate takes at least: no simulated step is below it, on machines whose latencies weigh more than their speeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from late import late, trained
from machines import curve, machine
from partc.cli.simulation.leasts import Leasts
from partc.cli.simulation.node_sets import Placed
from partc.cli.simulation.plays import play_program
from partc.cli.simulation.step import Simulation
from partc.compiler.cost.machine import Curve, Machine
from partc.compiler.cost.node import PRODUCT
from partc.compiler.cost.play import Compute
from partc.compiler.cost.price import NodeCost
from partc.compiler.ir.program import Complete
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.search.blocks import Way
from partc.compiler.search.candidate import SCHEDULES, Candidate, Fixed
from partc.compiler.search.search import Request, Search, named_stage
from partc.compiler.search.taken_over import base_of
from partc.runtime.artifact.format import ALL_GATHER, REDUCE_SCATTER
from perceptrons import TRAIN, layers
from proposal_case import source


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, Candidate], Complete]:
    """The programs of candidates on so many ranks, which are the same on each of the machines."""
    return {}


def compiled_once(search: Search, compiled: dict[tuple[int, Candidate], Complete]) -> Callable[[Candidate], Simulation]:
    """What plays a candidate of the search, of four layers, which is compiled once."""

    def step(one: Candidate) -> Simulation:
        key = search.request.ranks, one
        if key not in compiled:
            compiled[key] = search.proposal(one).done
        return play_program(search, compiled[key])

    return step


@pytest.mark.parametrize(("session", "called"), [(2e-5, 2e-6), (1e-7, 2e-5)])
def test_no_candidate_of_stages_is_below_the_bound(
    session: float, called: float, compiled: dict[tuple[int, Candidate], Complete], tmp_path: Path
) -> None:
    """Each in thirty-two of all on 4 ranks, and all of two stages and few microbatches, before and behind what is learned of tp."""
    search = trained(tmp_path, 4, late(session, called), 4)
    step = compiled_once(search, compiled)
    least = Leasts(search, step(Candidate(Degrees())))
    halves = [one for one in search.candidates if one.degrees.stages == 2 and one.microbatches < 4]
    played = {one: step(one) for one in {*search.candidates[::32], *halves}}
    assert {one.schedule for one in played} == {"", *(name for name, _ in SCHEDULES)}
    for _ in range(2):
        assert {str(one) for one, step in played.items() if step.played.seconds < least(one)} == set()
        tensor = Candidate(Degrees(tp=4))
        least.learn(tensor, step(tensor))


def test_stages_that_are_no_chain_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of tables and layers that a later stage reads both: what follows what is not known, and all else counts."""
    monkeypatch.setattr(Placed, "_follow", lambda placed: False)
    search = trained(tmp_path, 4, late(2e-5, 2e-6), 2)
    least = Leasts(search, play_program(search, search.proposal(Candidate(Degrees())).done))
    assert all(0 < least.quick(one) <= least(one) for one in search.candidates)
    several = [Candidate(Degrees(stages=2)), Candidate(Degrees(1, 2, 2), 2, "1f1b", zero=True)]
    assert {*several} < {*search.candidates}
    assert all(least(one) <= play_program(search, search.proposal(one).done).played.seconds for one in several)


def test_a_sharded_optimizer_is_reduced_by_collectives_of_its_own(tmp_path: Path) -> None:
    """Where those are faster than an AllReduce of as many bytes."""
    on = late(0.0, 1e-7)
    slow = replace(on.links[0], all_reduce=curve(1e6), split={op: curve(1e9) for op in (REDUCE_SCATTER, ALL_GATHER)})
    search = trained(tmp_path, 4, replace(on, links=[slow]), 4)
    least = Leasts(search, play_program(search, search.proposal(Candidate(Degrees())).done))
    sharded, whole = (Candidate(Degrees(dp=2, stages=2), 2, "1f1b", zero=zero) for zero in (True, False))
    for one in (sharded, whole):
        assert least(one) <= play_program(search, search.proposal(one).done).played.seconds
    assert least(sharded) < 0.1 * least(whole)


@pytest.mark.parametrize("buckets", ["", "  bucket_mb: 0.01\n"])
def test_shards_are_gathered_behind_all_that_is_computed(buckets: str, tmp_path: Path) -> None:
    """Where links are slow that is most of a step, and no simulated step is below it."""
    on = late(1e-5, 1e-5)
    slow = replace(on.links[0], send=curve(1e9), all_reduce=curve(1e9), split={"AllGather": curve(1e8)})
    search = trained(tmp_path, 4, replace(on, links=[slow]), 4, buckets)
    least = Leasts(search, play_program(search, search.proposal(Candidate(Degrees())).done))
    for one in (one for one in search.candidates if one.zero and one.degrees.stages == 1 and one.microbatches < 3):
        played = play_program(search, search.proposal(one).done).played.seconds
        assert (0.7 * played if one.degrees.tp == 1 else 0) < least(one) <= played, str(one)


def test_a_pipeline_fills_before_it_computes(tmp_path: Path) -> None:
    """Of eight stages and microbatches the bound is well above the mean of what ranks compute, and not above the simulated step."""
    search = trained(tmp_path, 8, late(1e-7, 2e-6), 8)
    least = Leasts(search, play_program(search, search.proposal(Candidate(Degrees())).done))
    one = Candidate(Degrees(stages=8), 8, "zb_h1")
    assert 1.1 * least.quick(one) < least(one) <= play_program(search, search.proposal(one).done).played.seconds


@pytest.mark.parametrize(
    "one", [Candidate(Degrees(stages=4), 2, "1f1b"), Candidate(Degrees(stages=2), 2, "interleaved", stages_each=2)]
)
def test_stages_that_may_have_a_node_hold_where_the_compiler_placed_it(one: Candidate, tmp_path: Path) -> None:
    """What no line of the plan names is on a stage behind what it reads and before its readers; so is its gradient.

    Where the plan names stages, it is known on which.
    """
    search = trained(tmp_path, 4, machine(), 2)
    some, stage_of = search.stages_of(*one.staging), search.stage_of(4)
    played = play_program(search, search.proposal(one).done).played
    seen = 0
    for action in (action for one in played.classes for action in one.actions if isinstance(action, Compute)):
        for path in action.modules if action.task else ():
            named = named_stage(stage_of, path)
            may_have = some.get(path, range(4)) if named is None else range(named, named + 1)
            assert int(action.task[0]) in may_have, (path, action.task)
            seen += named is None and len(may_have) < 4
    assert seen > 4
    sizes = [len(may_have) for path, may_have in some.items() if named_stage(stage_of, path) is None]
    assert max(sizes) == (1 if one.stages_each > 1 else 2)


def test_sessions_and_the_agreement_of_ranks_count(tmp_path: Path) -> None:
    """Each microbatch is a session on each stage, and the sizes of a step are agreed on first."""
    slow, fast = (trained(tmp_path, 4, late(session, 1e-6), 2) for session in (1e-3, 0.0))
    some = [Leasts(one, play_program(one, one.proposal(Candidate(Degrees())).done)) for one in (slow, fast)]
    one = Candidate(Degrees(stages=2), 8, "1f1b")
    assert some[0](one) - some[1](one) >= 0.999 * 8e-3
    agreement = fast.request.machine.links[0].collective("AllReduce", 4, 0)
    alone, all = (some[1].on(ranks)._beside(ranks) for ranks in (1, 4))
    assert all - alone == pytest.approx(agreement)
    assert agreement > 0


def test_a_search_has_no_candidate_of_more_stages_than_there_are(tmp_path: Path) -> None:
    """What the compiler refuses would else be the bound."""
    search = trained(tmp_path, 64, late(1e-6, 1e-6), 2)
    most = max(one.degrees.stages for one in search.candidates)
    assert most < 64
    search.proposal(Candidate(Degrees(stages=most), 2, "1f1b"))


def test_even_shards_take_no_less_than_their_share() -> None:
    """A shard of a node takes what calling it takes; of a batch of matrices a shard has fewer of them or smaller ones."""
    cpu = late(0.0, 2e-6).processor("cpu")
    one = NodeCost("elementwise", 0.0, 1, 65536.0)
    assert one.in_even_shards(cpu, 64) == 2e-6 > one.least(cpu) / 64
    product = NodeCost(PRODUCT, 8e9, 8, 0.0)
    each = [many * cpu.products["matmul"](2e9 / many) for many in (2, 4, 8)]
    assert product.in_even_shards(cpu, 4) == pytest.approx(min(each), rel=1e-9)
    assert math.isclose(product.in_even_shards(cpu, 1), product.seconds(cpu))


def wide(bandwidth: float) -> Machine:
    """A machine on which bytes and operations take long, and calls next to nothing."""
    one = late(1e-7, 1e-7)
    link = replace(one.links[0], overlap=0.9, send=curve(bandwidth, 1e-7), all_reduce=curve(bandwidth, 1e-7))
    cpu = replace(one.processors["cpu"], products={"matmul": Curve(((1e6, 1e-4), (1e12, 1e2)))})
    return replace(one, links=[link], processors={"cpu": cpu})


MACHINES = {
    "sessions": late(2e-5, 2e-6),
    "calls": late(1e-7, 2e-5),
    "slow links": wide(1e7),
    "links": wide(1e8),
    "work": wide(1e10),
}


LEARNED = (Candidate(Degrees(2, 2, 2), 2, "1f1b", zero=True), Candidate(Degrees(2, 1, 4)))


@pytest.mark.parametrize("name", MACHINES)
def test_what_a_plan_in_stages_says_of_layers_holds_for_others(
    name: str, compiled: dict[tuple[int, Candidate], Complete], tmp_path: Path
) -> None:
    """Stages, tp, dp and ZeRO, in one microbatch and in several, on two and four ranks of a layer."""
    search = trained(tmp_path, 8, MACHINES[name], 4)
    step = compiled_once(search, compiled)
    every = [one for one in search.candidates if one.degrees.tp > 1 and one.microbatches <= 4 and not one.by_module]
    some = [one for one in every if one.degrees.stages > 1][::3]
    some += [one for one in every if one.degrees.stages == 1][::4]
    assert len(some) > 12
    whole, played = step(Candidate(Degrees())), {one: step(one).played.seconds for one in some}
    for learned in LEARNED:
        least = Leasts(search, whole)
        least.learn(learned, step(learned))
        ratios = {one: least(one) / seconds for one, seconds in played.items()}
        assert {str(one): ratio for one, ratio in ratios.items() if ratio > 1} == {}
        assert max(ratios.values()) > 0.7


def test_sums_of_a_layer_that_a_plan_in_stages_has_are_in_the_bound(tmp_path: Path) -> None:
    """Links on which they take most of a step, of other stages, ranks of a layer and microbatches than were played."""
    search = trained(tmp_path, 8, wide(1e7), 4)
    least = Leasts(search, play_program(search, search.proposal(Candidate(Degrees())).done))
    learned = Candidate(Degrees(2, 2, 2), 2, "1f1b", zero=True)
    step = play_program(search, search.proposal(learned).done)
    some = [
        Candidate(Degrees(2, 1, 2), 4, "1f1b"),
        Candidate(Degrees(4, 1, 2), 2, "zb_h1"),
        Candidate(Degrees(tp=4), 2),
    ]
    before = [least(one) for one in some]
    least.learn(learned, step)
    for one, without in zip(some, before, strict=True):
        played = play_program(search, search.proposal(one).done).played.seconds
        assert max(1.5 * without, 0.5 * played) < least(one) <= played, str(one)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("zero", [False, True])
def test_no_candidate_by_module_is_below_the_bound(name: str, zero: bool, tmp_path: Path) -> None:
    """Modules that are sharded, whole or have their records; what ranks have whole, and sums that wait for each other, count."""
    (tmp_path / "train.yaml").write_text(TRAIN)
    base, model = base_of(tmp_path / "train.yaml", source(layers(depth=3)))
    search = Search.of(model, "model.onnx", Request(4, Fixed(), base, MACHINES[name], {}))
    least = Leasts(search, play_program(search, search.proposal(Candidate(Degrees())).done))
    one = Candidate(Degrees(tp=2, dp=2), zero=zero, by_module=True)
    modules, bounds = search.modules(one.degrees), list[float]()
    for ways in ("WWSWS", "WSWSW", "RRRSS", "RRSSS"):
        own = tuple({"W": Way.WHOLE, "S": Way.SHARDED, "R": Way.RECORDS}[way] for way in ways[: len(modules.ways)])
        search._modules[one.degrees] = replace(modules, ways=own)
        fresh = Leasts(search, least.whole)
        bounds.append(fresh(one) / play_program(search, search.proposal(one).done).played.seconds)
    assert max(bounds) <= 1
    assert min(bounds) > 0.2
