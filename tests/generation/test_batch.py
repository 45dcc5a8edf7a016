"""Requests that join and leave a batch between steps get the tokens that they get alone, on any number of ranks."""

from __future__ import annotations

import random
from pathlib import Path
from threading import Thread

import numpy as np
import onnx
import pytest
from decoders import VOCABULARY, Unsharded, decoder
from mpi_ranks_case import MPIEXEC, job
from onnx import numpy_helper
from partc.compiler.pipeline import compile_model
from partc.runtime import ContinuousBatch, Generator, InputError, RankError, Request, load, load_local_generator
from partc.runtime.communication.in_process import LocalAgreements, LocalWorld
from partc.runtime.generation.commands import Command

SPOILT = 9
"""The token whose embedding is not a number in the spoilt model."""


def compiled(folder: Path, ranks: str = "ranks: 1\n", spoilt: bool = False) -> Path:
    model = decoder()
    if spoilt:
        for weight in model.graph.initializer:
            if weight.name.startswith("embed.tokens"):
                rows = numpy_helper.to_array(weight).copy()
                rows[SPOILT] = np.nan
                weight.CopyFrom(numpy_helper.from_array(rows, weight.name))
    onnx.save(model, folder / "model.onnx")
    (folder / "plan.yaml").write_text(f"{ranks}generate: {{slots: 2, length: 64, chunk: 4}}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


def lead(batch: ContinuousBatch, requests: dict[int, Request], leaving: dict[int, int]) -> dict[int, list[int]]:
    """Admits a request a step, and takes those in `leaving` out after so many tokens; the tokens of all."""
    made: dict[int, list[int]] = {number: [] for number in requests}
    waiting, open_ones, left_at, step = [*requests], {*requests}, dict[int, int](), 0
    while open_ones:
        if waiting:
            number = waiting.pop(0)
            batch.admit(number, requests[number])
        tokens = batch.step()
        assert tokens is not None
        step += 1
        for one in tokens:
            if one.request not in open_ones:
                assert step <= left_at[one.request] + 2
                continue
            made[one.request].append(one.token)
            if one.finish:
                open_ones.discard(one.request)
            elif len(made[one.request]) == leaving.get(one.request):
                batch.cancel(one.request)
                left_at[one.request] = step
                open_ones.discard(one.request)
    batch.end()
    while batch.step() is not None:
        pass
    assert batch.slots.used == batch.slots.waiting == 0
    return made


def follow(generator: Generator) -> None:
    batch = ContinuousBatch(generator)
    while batch.step() is not None:
        pass


def cases() -> tuple[dict[int, Request], dict[int, int]]:
    rng = random.Random(5)
    requests = {
        number: Request(
            [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 3, 40]))], max_tokens=rng.choice([1, 5, 9])
        )
        for number in range(9)
    }
    return requests, {1: 2, 4: 1, 6: 3}


def check(made: dict[int, list[int]], requests: dict[int, Request], leaving: dict[int, int]) -> None:
    model = Unsharded(decoder())
    for number, tokens in made.items():
        whole = model.tokens([*requests[number].prompt], requests[number].max_tokens)
        assert tokens == whole[: leaving.get(number, len(whole))], number


def test_who_joins_and_leaves_changes_no_other_tokens(tmp_path: Path) -> None:
    requests, leaving = cases()
    with load_local_generator(compiled(tmp_path)) as generator:
        check(lead(ContinuousBatch(generator), requests, leaving), requests, leaving)


def test_other_ranks_learn_what_rank_0_decides(tmp_path: Path) -> None:
    """Each rank has a program of its own, and rank 0 alone the requests; a prompt of 60 tokens takes two messages."""
    folder, world = compiled(tmp_path, "ranks: 2\ndataset: data_parallel\n"), LocalWorld(2)
    requests, leaving = cases()
    requests[9] = Request([63] * 60, max_tokens=2, stop=[62] * 200)
    found: list[dict[int, list[int]]] = []

    def run(rank: int) -> None:
        with Generator(load(folder, world.transport(rank))) as generator:
            if rank == 0:
                found.append(lead(ContinuousBatch(generator), requests, leaving))
            else:
                follow(generator)

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    check(found[0], requests, leaving)


def test_steps_agree_without_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks give a step the same inputs, so none asks another one for its sizes."""
    folder = compiled(tmp_path, "ranks: 2\ndataset: data_parallel\n")
    with load_local_generator(folder) as generator:

        def begin(*_: object) -> None:
            raise AssertionError("an agreement has begun")

        monkeypatch.setattr(LocalAgreements, "begin", begin)
        (answer,) = generator.run([Request([3, 1, 4, 1, 5], max_tokens=6)])
    assert answer.tokens == Unsharded(decoder()).tokens([3, 1, 4, 1, 5], 6)


LEFT = """
generator = runtime.load_generator(folder, threads=1)
try:
    for number, token in enumerate(generator.stream([1, 2, 3], max_tokens=20)):
        if rank == 1 and number == 4:
            raise ValueError("mine")
except runtime.RankError as error:
    print("told:", error, flush=True)
    sys.exit(1)
"""


@pytest.mark.skipif(not MPIEXEC.exists(), reason="the environment has no mpiexec of its own")
def test_a_rank_that_leaves_between_tokens_is_told_to_the_others(tmp_path: Path) -> None:
    result = job(compiled(tmp_path, "ranks: 2\ndataset: data_parallel\n"), LEFT, 2)
    assert result.returncode != 0
    assert result.stdout.splitlines() == ["told: rank 1 has left the job: <string>:17: ValueError: mine"]


def test_commands_are_what_was_sent() -> None:
    request = Request((1, 2), max_tokens=3, temperature=0.5, top_k=4, top_p=0.25, seed=2**64 - 1, stop=(6,))
    command = Command({3: request}, [1, 2], True)
    again = Command.loads(command.dumps())
    assert (again.cancelled, again.ends) == ([1, 2], True)
    assert again.admitted[3] == Request([1, 2], 3, 0.5, 4, 0.25, 2**64 - 1, [6])
    assert Command().dumps() == ""


def test_a_request_without_numbers_ends_alone(tmp_path: Path) -> None:
    """Its logits are not finite; others, and the next one in its slot, get their tokens."""
    model = Unsharded(decoder())
    with load_local_generator(compiled(tmp_path, spoilt=True)) as generator:
        batch = ContinuousBatch(generator)
        good = Request([3, 1, 4], max_tokens=20)
        batch.admit(0, Request([5, SPOILT, 5, 6, 7], max_tokens=9))
        batch.admit(1, good)
        batch.admit(2, good)
        made: dict[int, list[int]] = {0: [], 1: [], 2: []}
        finish = {}
        while len(finish) < 3:
            for one in batch.step() or []:
                made[one.request].append(one.token)
                if one.finish:
                    finish[one.request] = one.finish
        assert finish == {0: "error", 1: "length", 2: "length"}
        assert made[1] == made[2] == model.tokens([3, 1, 4], 20)
        with pytest.raises(RankError, match="logits of 1 sequence are not finite"):
            generator.run([Request([SPOILT], max_tokens=3)])
        assert generator.run([good])[0].tokens == made[1]
        with pytest.raises(InputError):
            batch.admit(3, Request([]))
