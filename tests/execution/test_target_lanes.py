"""Targets that run at the same time: what waits for what, every legal order gives the same bits, and failures end all lanes."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact_text import write
from partc.cli.output.targets import counted, line
from partc.runtime import load_local
from partc.runtime.errors import RankError
from partc.runtime.execution.step_plan import StepPlan
from partc.runtime.execution.targets.dependencies import Access, Range, waits_of
from partc.runtime.execution.targets.workers import LanePlan, Workers
from partc.runtime.execution.times.profiler import overlap
from small_training import DATA_PARALLEL, MOMENTUM, PERCEPTRON, compiled
from targeted import ON_CPU, perceptron_steps, scattered, targeted


def chance_accesses(chance: random.Random) -> list[Access]:
    """Actions of three lanes over ranges of a small memory, and names."""

    def some() -> tuple[Range, ...]:
        found: list[Range] = []
        for _ in range(chance.randrange(3)):
            begin = chance.randrange(12)
            found.append(
                chance.choice(["x", "y"]) if chance.random() < 0.2 else (begin, begin + 1 + chance.randrange(4))
            )
        return tuple(found)

    return [Access(chance.randrange(3), some(), some()) for _ in range(chance.randrange(2, 25))]


def meet(one: Access, two: Access) -> bool:
    """Whether two actions keep the order of the file."""
    pairs = [(one.writes, (*two.reads, *two.writes)), (two.writes, one.reads)]
    return any(
        a == b if isinstance(a, str) or isinstance(b, str) else a[0] < b[1] and b[0] < a[1]
        for left, right in pairs
        for a in left
        for b in right
    )


@pytest.mark.parametrize("seed", range(40))
def test_waits_keep_the_order_of_whatever_meets_and_no_more(seed: int) -> None:
    """Held against all pairs: two that meet are ordered by waits and lanes, and each wait is of two that meet."""
    accesses = chance_accesses(random.Random(seed))
    waits = waits_of(accesses, 3)
    lanes = [[place for place, one in enumerate(accesses) if one.lane == lane] for lane in range(3)]
    before: list[set[int]] = []
    for place, access in enumerate(accesses):
        direct = {lanes[lane][count - 1] for lane, count in waits[place]}
        own = [other for other in lanes[access.lane] if other < place][-1:]
        for other in direct:
            assert other < place
            assert meet(accesses[other], access)
        before.append(set().union(*({other, *before[other]} for other in (*direct, *own))))
        for other in range(place):
            if accesses[other].lane != access.lane and meet(accesses[other], access):
                assert other in before[place]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return targeted(compiled(folder / "build", PERCEPTRON, DATA_PARALLEL, MOMENTUM), folder / "targeted", scattered)


def test_every_legal_order_gives_the_same_bits(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actions one by one, the lane by chance: what a fast or a slow device may do."""
    with load_local(trained, trust=True, devices=ON_CPU, on_error="raise") as ranks:
        expected = perceptron_steps(ranks)
    orders = set()
    for seed in range(6):
        chance = random.Random(seed)

        def run(self: Workers, plan: LanePlan, actions: list[Any], *_: object, chance: random.Random = chance) -> None:
            done = [0] * len(plan.lanes)
            order = []
            while open_lanes := [lane for lane, places in enumerate(plan.lanes) if done[lane] < len(places)]:
                ready = [
                    lane
                    for lane in open_lanes
                    if all(done[other] >= count for other, count in plan.waits[plan.lanes[lane][done[lane]]])
                ]
                lane = chance.choice(ready)
                order.append(lane)
                actions[plan.lanes[lane][done[lane]]][1]()
                done[lane] += 1
            orders.add(tuple(order))

        monkeypatch.setattr(Workers, "run", run)
        with load_local(trained, trust=True, devices=ON_CPU) as ranks:
            found = perceptron_steps(ranks)
        assert found[0] == expected[0]
        assert all(array.tobytes() == expected[1][name].tobytes() for name, array in found[1].items())
    assert len(orders) > 6


BRANCHES = """rank0 (float[n, 3] x) => (float[n, 3] y, float[n, 3] z)
{ a = Relu(x)
  y = Neg(a)
  b = Tanh(x)
  z = Neg(b) }"""


def branches(folder: Path) -> Path:
    """Two independent branches, one on each target."""
    return targeted(
        write(folder / "build", [BRANCHES]),
        folder / "targeted",
        lambda node: "cuda" if node.output[0] in "bz" else "cpu",
    )


def test_independent_branches_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each branch ends only when the other one has begun, so that neither can come first."""
    meeting = threading.Barrier(2, timeout=60)
    plan_steps = StepPlan._plan

    def meet_inside(self: StepPlan, *given: Any) -> None:
        plan_steps(self, *given)
        for place, (index, action) in enumerate(self.actions):
            if self.is_step(place) and index in self.program.runners:
                self.actions[place] = index, lambda action=action: (meeting.wait(), action())

    monkeypatch.setattr(StepPlan, "_plan", meet_inside)
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    with load_local(branches(tmp_path), trust=True, devices=ON_CPU) as program:
        for _ in range(3):
            found = program(x=x)
    np.testing.assert_array_equal(found["y"], -np.maximum(x, 0))
    np.testing.assert_allclose(found["z"], -np.tanh(x), rtol=1e-6)


def test_the_time_of_both_is_measured() -> None:
    assert overlap([[(0.0, 2.0), (3.0, 5.0)], [(1.0, 4.0)]]) == 2.0
    assert overlap([[(0.0, 1.0)], [(1.0, 2.0)]]) == 0.0


def test_a_profile_and_a_run_tell_of_targets(tmp_path: Path) -> None:
    x = np.zeros((4, 3), np.float32)
    with load_local(branches(tmp_path), trust=True, devices=ON_CPU) as program:
        profiler = program.ranks[0].record_times()
        for _ in range(5):
            program(x=x)
        told = json.loads(profiler.text())
        (spans,) = json.loads(profiler.trace())["plans"]
        counts = counted([program.ranks[0].counts.text()])
    assert {one["lane"] for one in spans} == {0, 1}
    assert [one["bytes"] for one in spans if one["kind"] == "Copy"] == [48, 48]
    assert set(told["targets"]) == {"cpu", "cuda"}
    assert len(told["overlap"]) == len(told["step"]) == 2
    assert counts["to"] == {"cpu": {"copies": 1.0, "bytes": 48.0}, "cuda": {"copies": 1.0, "bytes": 48.0}}
    assert line(counts) == "targets: in a step 1 copy to cpu (48 B), 1 to cuda (48 B), 1 switch on 1 rank"
    on_gpu = line({**counts, "devices": ["cuda:0"]}, "system,mpi,cuda")
    assert on_gpu.endswith("; cuda is cuda:0; operands of MPI lie on the host (MPI speaks of system,mpi,cuda)")


def test_one_target_has_no_lanes(tmp_path: Path) -> None:
    folder = targeted(write(tmp_path / "build", [BRANCHES]), tmp_path / "targeted", lambda node: "cuda")
    for built, devices in ((tmp_path / "build", {}), (folder, ON_CPU)):
        with load_local(built, trust=True, devices=devices) as program:
            program(x=np.zeros((1, 3), np.float32))
            (plan,) = program.ranks[0]._schedules.values()
            assert plan.lanes is None
            assert program.ranks[0]._program.targets.workers is None


FAILS = """rank0 (float[n, 3] x, int64[1] at) => (float[n, 3] y) <float[n, 3] h, float[n, 3] k>
{ h = Relu(x)
  = partc.comm.Send <peer = 1, tag = 0> (h)
  g = Gather(x, at)
  z = Neg(h)
  k = partc.comm.Recv <peer = 1, tag = 1> ()
  s = Add(k, z)
  y = Add(s, g) }"""
ANSWERS = """rank1 () => () <float[n, 3] h, float[n, 3] k>
{ h = partc.comm.Recv <peer = 0, tag = 0> ()
  k = Neg(h)
  = partc.comm.Send <peer = 0, tag = 1> (k) }"""


def test_a_failure_on_a_target_ends_the_step_with_its_op(tmp_path: Path) -> None:
    """Then the program of one process runs on; no lane is left behind."""
    folder = targeted(
        write(tmp_path / "build", [FAILS, ANSWERS]),
        tmp_path / "targeted",
        lambda node: "cuda" if node.output[0] == "g" else "cpu",
    )
    x = np.ones((2, 3), np.float32)
    with load_local(folder, trust=True, devices=ON_CPU) as program:
        for _ in range(3):
            with pytest.raises(RankError, match=r"rank 0 failed in Gather"):
                program(x=x, at=np.array([5]))
            assert program(x=x, at=np.array([1]))["y"].tolist() == [[-1.0] * 3] * 2
        threads = [one for one in threading.enumerate() if one.name.startswith("partc target")]
        assert len(threads) >= 1
    with load_local(folder, trust=True, devices=ON_CPU, on_error="recover") as program, pytest.raises(RankError):
        program(x=x, at=np.array([5]))


def test_a_lane_that_waits_for_messages_is_interrupted() -> None:
    """The first lane waits for another rank, which waits for what the second lane would have made."""
    interrupted = threading.Event()

    def first() -> None:
        assert interrupted.wait(60)
        raise RankError("interrupted")

    def fail() -> None:
        raise ValueError("no kernel")

    def run(actions: list[tuple[int, Callable[[], None]]]) -> str:
        workers = Workers(2)
        plan = LanePlan([[0], [1, 2]], [(), (), ()])
        try:
            workers.run(plan, actions, lambda index: None, lambda wait: wait(), lambda *_: interrupted.set())
        except Exception as error:
            return str(error)
        finally:
            workers.close()
        return ""

    def leave() -> None:
        raise SystemExit(3)

    assert run([(3, first), (4, fail), (5, fail)]) == "step 4 has failed: no kernel"
    interrupted.clear()
    assert run([(3, first), (4, leave), (5, fail)]) == "step 4 has failed: SystemExit: 3"
