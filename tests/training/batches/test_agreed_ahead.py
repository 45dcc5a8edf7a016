"""Steps that are announced: ranks agree on them while the step before runs, with the same results and the same refusals."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from artifact_text import write
from nonfinite_case import batch, built, fed, kept
from partc.runtime import InputError, NonFiniteError, Program, Trainer, UsageError, load
from partc.runtime.communication.in_process import LocalWorld
from trainer_case import on_all

TWO = [
    """rank0 (float[n, 3] x) => () <float[n, 3] h> { h = Neg(x)  = partc.comm.Send <peer = 1, tag = 0> (h) }""",
    """rank1 (float[n, 3] z) => (float[n, 3] y) <float[n, 3] h> { h = partc.comm.Recv <peer = 0, tag = 0> ()  y = Add(h, z) }""",
]


def on_programs(folder: Path, act: Callable[[Program], Any], on_error: Any = "raise") -> list[Any]:
    world = LocalWorld(2)

    def rank(number: int) -> Any:
        with load(folder, world.transport(number), threads=1, on_error=on_error) as program:
            return act(program)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(rank, range(2)))


def given(step: int, rows: int = 2) -> dict[str, np.ndarray]:
    return {name: np.full((rows, 3), step, np.float32) for name in ("x", "z")}


@pytest.mark.parametrize("name", ["shared", "placed"])
def test_announced_steps_give_the_same_bits_whichever_ranks_announce_them(name: str, tmp_path: Path) -> None:
    folder, ranks = built(tmp_path / "build", name, "stop")

    def act(announces: Callable[[int, int], bool]) -> Callable[[Trainer], Any]:
        def run(trainer: Trainer) -> Any:
            trainer.rate = lambda step: 0.1 / (1 + step)
            batches = [fed(trainer, batch(step)) for step in range(6)]
            losses = []
            for step, one in enumerate(batches):
                following = batches[step + 1] if step < 5 and announces(trainer.rank, step) else None
                losses.append(trainer.train(one, following))
                if step in (2, 3):
                    trainer.evaluate([(one, 8), (one, 8)])
            return losses, kept(trainer)

        return run

    want = on_all(folder, ranks, act(lambda rank, step: False))
    assert on_all(folder, ranks, act(lambda rank, step: True)) == want
    assert on_all(folder, ranks, act(lambda rank, step: (rank + step) % 3 != 0)) == want


@pytest.mark.parametrize("announced", [True, False])
def test_a_rank_runs_freely_into_an_announced_step(announced: bool, tmp_path: Path) -> None:
    second = Event()

    def act(program: Program) -> Any:
        steps = [given(step) for step in range(2)]
        wait = program._transport.wait
        ahead = []

        def slow(*rest: Any) -> None:
            ahead.append(second.wait(60.0 if announced else 0.05))
            wait(*rest)

        if program.rank == 1:
            program._transport.wait = slow  # type: ignore[method-assign]
        found = []
        for step in range(2):
            if announced and step == 0:
                program.announce(steps[1])
            found.append(program(steps[step]))
            if program.rank == 0 and step == 1:
                second.set()
        return ahead, [outputs["y"].tolist() for outputs in found if outputs]

    _, (ahead, values) = on_programs(write(tmp_path, TWO), act)
    assert ahead[0] is announced
    assert values == [[[0.0] * 3] * 2] * 2


def test_a_bad_batch_is_refused_by_all_ranks_whoever_announced_it(tmp_path: Path) -> None:
    def act(program: Program) -> str:
        bad = given(1, rows=2 + program.rank)
        for first in (0, 1):
            if program.rank == first:
                program.announce(bad)
            program(given(0))
            with pytest.raises(InputError) as error:
                program(bad)
            assert len(program(given(2))) == program.rank
        return str(error.value)

    first, second = on_programs(write(tmp_path, TWO), act)
    assert first == second
    assert "input 'z' axis 0 is 3, but 'n' is 2 by input 'x' axis 0" in first


def test_another_batch_than_the_announced_one_is_an_error(tmp_path: Path) -> None:
    def act(program: Program) -> None:
        program.announce(given(1))
        program(given(0))
        with pytest.raises(UsageError, match="are not those that were announced\n  help: call it with the very arrays"):
            program(given(1))

    on_programs(write(tmp_path, TWO), act)


def test_steps_that_can_be_given_up_are_agreed_upon_one_by_one(tmp_path: Path) -> None:
    def act(program: Program) -> Any:
        program.announce(given(1))
        program(given(0))
        return program(given(2))

    assert [len(outputs) for outputs in on_programs(write(tmp_path, TWO), act, "recover")] == [0, 1]


def test_a_loss_that_is_not_finite_is_told_one_step_later(tmp_path: Path) -> None:
    folder, ranks = built(tmp_path / "build", "placed", "stop")

    def act(trainer: Trainer) -> str:
        batches = [fed(trainer, batch(step, np.nan if step == 1 else None)) for step in range(5)]
        for step in range(3):
            trainer.train(batches[step], batches[step + 1])
        with pytest.raises(NonFiniteError) as error:
            trainer.train(batches[3], batches[4])
        return str(error.value)

    first, second = on_all(folder, ranks, act)
    assert first == second
    assert first.startswith("step 2: the loss is nan\n  rank 0: input 'x': record 5 of the batch holds nan\n")


def test_it_is_told_at_once_where_something_else_is_done(tmp_path: Path) -> None:
    folder, ranks = built(tmp_path / "build", "placed", "stop")

    def act(trainer: Trainer) -> int:
        batches = [fed(trainer, batch(step, np.nan if step == 1 else None)) for step in range(4)]
        for step in range(3):
            trainer.train(batches[step], batches[step + 1])
        with pytest.raises(NonFiniteError, match="step 2: the loss is nan"):
            trainer.save(tmp_path / "runs")
        with pytest.raises(NonFiniteError, match="step 2: the loss is nan"):
            trainer.train(batches[3])  # the others were told with this step's sizes
        return trainer.step

    assert on_all(folder, ranks, act) == [3, 3]
