"""The proof of a step plan finds every planted overlap: two values that are needed at the same time, in one place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.runtime import load_local
from partc.runtime.errors import RankError
from partc.runtime.execution.memory import layout
from partc.runtime.execution.memory.freed import VARIABLE, PoisonFreed, pattern
from partc.runtime.execution.memory.proof import meetings
from partc.runtime.execution.program import Program
from partc.runtime.execution.step_plan import StepPlan
from partc.runtime.execution.targets.workers import LanePlan
from partc.runtime.program.memory_plan import Arena, Lifetime, assign
from partc.runtime.program.steps import Segment, Send
from partc.runtime.updates.updater import Updater
from small_training import DATA_PARALLEL, MOMENTUM, PERCEPTRON, compiled
from targeted import ON_CPU, perceptron_steps, scattered, targeted

PIPED = """ranks: 2
symbols: {batch: {divisor: 4}}
placement: {one: 0, plus: 0, turn: 1, two: 1}
pipeline: {microbatches: 2, schedule: 1f1b}
"""
CASES = {
    "data parallel": (DATA_PARALLEL, False),
    "data parallel, targets": (DATA_PARALLEL, True),
    "stages": (PIPED, False),
    "stages, targets": ("target: {'{one,turn}': cuda}\n" + PIPED, False),
}


@pytest.fixture(scope="module", params=CASES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Program]]:
    plan, scatter = CASES[request.param]
    folder = tmp_path_factory.mktemp("proof")
    built = compiled(folder / "build", PERCEPTRON, plan, MOMENTUM)
    built = targeted(built, folder / "targeted", scattered) if scatter else built
    with load_local(built, trust=True, devices=ON_CPU) as program:
        perceptron_steps(program, 1)
        yield program.ranks


class Planned:
    """Step plans of a rank whose arenas a test changes."""

    def __init__(self, rank: Program, monkeypatch: pytest.MonkeyPatch) -> None:
        (plan,) = rank._schedules.values()
        self.rank, self.bindings = rank, dict(plan.bindings)
        self.lives: list[Sequence[Lifetime]] = []
        self.moved: tuple[str, str] | None = None
        monkeypatch.setattr(layout, "assign", self._assigned)

    def _assigned(self, lives: Sequence[Lifetime]) -> Arena:
        self.lives.append(lives)
        arena = assign(lives)
        if self.moved is not None and self.moved[0] in arena.offsets:
            arena.offsets[self.moved[0]] = arena.offsets[self.moved[1]]
        return replace(arena, bytes=arena.bytes + max((life.bytes for life in lives), default=0))

    def plan(self, moved: tuple[str, str] | None = None) -> StepPlan:
        """The plan, the first of two values lying where the second one does."""
        self.lives, self.moved, rank = [], moved, self.rank
        return StepPlan(rank._program, self.bindings, rank._transport, rank._wire, rank._at_once)


def test_a_sound_plan_is_proven(ranks: Sequence[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    for fills in ("0", "1"):
        monkeypatch.setenv(VARIABLE, fills)
        for rank in ranks:
            assert list(meetings(Planned(rank, monkeypatch).plan())) == []


def test_every_planted_overlap_is_found(ranks: Sequence[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values on others that live at the same time, each fourth pair, of two targets each twelfth, other ones each day; but a sum in the
    place of the term that it adds to is none.
    """
    monkeypatch.setenv(VARIABLE, "0")
    count, day = 0, int(os.environ["PARTC_TEST_DAY"])
    for rank in ranks:
        planned = Planned(rank, monkeypatch)
        every = 4 if planned.plan().lanes is None else 12
        sums = _sums(rank)
        for lives in planned.lives:
            for one, other in islice(permutations([life for life in lives if life.bytes], 2), day % every, None, every):
                if one.born <= other.died and other.born <= one.died and (other.name, one.name) not in sums:
                    found = list(meetings(planned.plan((one.name, other.name))))
                    assert found, (one, other)
                    count += 1
    assert count > 25


@pytest.mark.parametrize("ranks", ["data parallel", "stages"], indirect=True)
def test_members_of_an_update_that_lie_apart_are_found(
    ranks: Sequence[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    count = 0
    for rank in ranks:
        plan = Planned(rank, monkeypatch).plan()
        for group in (
            one.group for some in plan.program.replacement.updates.values() for one in some if isinstance(one, Updater)
        ):
            for one, other in (names[:2] for names in (*group.operands, *group.outputs) if len(names) > 1):
                kept = plan.memory.cells[one], plan.memory.cells[other]
                plan.memory.cells[one], plan.memory.cells[other] = kept[::-1]
                assert any(f"'{other}' does not lie behind '{one}'" in line for line in meetings(plan))
                plan.memory.cells[one], plan.memory.cells[other] = kept
                count += 1
        assert list(meetings(plan)) == []
    assert count > 2


def _sums(rank: Program) -> set[tuple[str, str]]:
    """By the places where they lie, sums and the terms that may have been there."""
    places, roots = rank._program.values.flat_places, rank._program.arenas.aliases
    pairs = [pair for step in rank._program.steps if isinstance(step, Segment) and step.task for pair in step.sums]
    return {(roots.get(term, term), places.get(made, (made, 0))[0]) for term, made in pairs}


def test_an_overlap_is_told_with_values_actions_and_bytes(
    ranks: Sequence[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last value of the arena that others are needed beside is put where another one lies."""
    monkeypatch.setenv(VARIABLE, "0")
    planned = Planned(ranks[0], monkeypatch)
    planned.plan()
    lives = [life for life in planned.lives[0] if life.bytes and not life.name.endswith("\n")]
    one, other = next(
        pair for pair in permutations(lives, 2) if pair[0].born < pair[1].born < pair[0].died and not pair[0].sends
    )
    monkeypatch.undo()
    monkeypatch.setenv(VARIABLE, "0")
    moved = Planned(ranks[0], monkeypatch)
    text = "\n".join(meetings(moved.plan((other.name, one.name))))
    assert re.search(
        r"'[^']+' and '[^']+' share bytes \d+ to \d+ of the arena of (cpu|cuda): .+ (before|and makes) ", text
    ), text


def test_no_step_runs_with_a_plan_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_zero(lives: Sequence[Lifetime]) -> Arena:
        arena = assign(lives)
        return Arena(arena.bytes, dict.fromkeys(arena.offsets, 0), arena.waits)

    monkeypatch.setattr(layout, "assign", at_zero)
    built = compiled(tmp_path / "build", PERCEPTRON, DATA_PARALLEL, MOMENTUM)
    with load_local(built, trust=True) as ranks, pytest.raises(RankError) as error:
        perceptron_steps(ranks, 1)
    lines = str(error.value).splitlines()
    assert re.match(r"rank [01]: the memory of a step is planned wrongly: '.+' and '.+' share bytes", lines[0]), lines
    assert lines[-2].strip().startswith("values that are needed at the same time have bytes of their own, and ")
    assert lines[-1].startswith("  help: ")


def test_check_proves_the_memory_of_every_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    built = str(compiled(tmp_path / "build", PERCEPTRON, DATA_PARALLEL, MOMENTUM))
    assert invoke(["check", built, "--memory"]) == 0
    assert "memory: no two values of a step overlap while both are needed" in capsys.readouterr().out
    monkeypatch.setattr(
        layout, "assign", lambda lives: replace((arena := assign(lives)), offsets=dict.fromkeys(arena.offsets, 0))
    )
    assert invoke(["check", built, "--memory"]) == 1
    assert re.search(r"program 'train': rank 1: .+ '.+' and '.+' share bytes", capsys.readouterr().err)


def test_lanes_that_do_not_wait_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait of a lane for another one, left out."""
    built = compiled(tmp_path / "build", PERCEPTRON, DATA_PARALLEL, MOMENTUM)
    folder = targeted(built, tmp_path / "targeted", scattered)
    with load_local(folder, trust=True, devices=ON_CPU) as ranks:
        perceptron_steps(ranks, 1)
        plan = Planned(ranks.ranks[0], monkeypatch).plan()
        assert plan.lanes is not None
        assert list(meetings(plan)) == []
        order = plan.lanes.order
        asked = [(place, wait) for place, waits in enumerate(order.waits[:-1]) for wait in waits]
        assert len(asked) > 10
        for place, wait in asked:
            waits = [*order.waits]
            waits[place] = tuple(one for one in waits[place] if one != wait)
            plan.lanes.order = LanePlan(order.lanes, waits)
            assert any("does not wait for" in text for text in meetings(plan)), (place, wait)


def test_what_is_on_its_way_is_not_freed(ranks: Sequence[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a place is filled when its value is read last, though a send of it has not been waited for."""
    monkeypatch.setenv(VARIABLE, "1")
    sending = 0

    def too_early(self: PoisonFreed, lives: Sequence[Lifetime], *more: Any) -> None:
        begun(self, [replace(life, sends=()) for life in lives], *more)

    begun = PoisonFreed.__init__
    for rank in ranks:
        planned = Planned(rank, monkeypatch)
        planned.plan()
        if any(life.sends for lives in planned.lives for life in lives if life.bytes):
            monkeypatch.setattr(PoisonFreed, "__init__", too_early)
            assert any("has been given up" in text for text in meetings(planned.plan()))
            monkeypatch.setattr(PoisonFreed, "__init__", begun)
            sending += 1
    assert sending or not any(isinstance(step, Send) for rank in ranks for step in rank._program.steps)


def test_what_fills_free_memory_is_no_number() -> None:
    data = pattern(64)
    for kind in (np.float16, np.float32, np.float64):
        assert np.isnan(data.view(kind)).all()
    assert (data.view(np.int32) > 2**31 - 2**17).all()
    assert (data.view(np.int64) > 2**62).all()
    bits = data.view(np.uint16)
    assert ((bits & 0x7F80) == 0x7F80).all()
    assert ((bits & 0x7F) != 0).all(), "NaN as a bfloat16"


@pytest.mark.parametrize("name", CASES)
def test_free_memory_is_filled_and_nothing_changes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, scatter = CASES[name]
    built = compiled(tmp_path / "build", PERCEPTRON, plan, MOMENTUM)
    built = targeted(built, tmp_path / "targeted", scattered) if scatter else built
    found = []
    for fills in ("0", "1"):
        monkeypatch.setenv(VARIABLE, fills)
        with load_local(built, trust=True, devices=ON_CPU) as ranks:
            found.append(perceptron_steps(ranks))
            arena = ranks.ranks[0]._program.arenas.host
            assert (pattern(64).tobytes() in arena.tobytes()) == (fills == "1")
    assert found[0][0] == found[1][0]
    for tensor, value in found[0][1].items():
        np.testing.assert_array_equal(found[1][1][tensor], value, err_msg=tensor)
