"""Requests that join and leave a batch between steps get the tokens that they get alone, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import numpy as np
import onnx
import pytest
from batches import cases, check, follow, lead
from decoders import Unsharded, decoder
from mpi_ranks_case import MPIEXEC, job
from onnx import numpy_helper
from partc.compiler.pipeline import compile_model
from partc.runtime import ContinuousBatch, Generator, InputError, RankError, Request, load, load_local_generator
from partc.runtime.communication.in_process import LocalAgreements, LocalWorld
from partc.runtime.generation.batch import WORDS, Command
from partc.runtime.generation.batch import begin as begin_command

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


def test_commands_of_every_length_reach_the_others_and_leave_nothing_behind() -> None:
    """Around the size of a first message, and after each one an empty command, which all commands without news share."""
    room = 8 * (WORDS - 1)
    fills = [room - len(Command(cancelled=[10**9]).dumps()) + more for more in (-1, 0, 1, 8, 4 * room)]
    sent = [Command(cancelled=[10 ** (9 + fill)]) for fill in fills]
    assert [len(one.dumps()) - room for one in sent] == [-1, 0, 1, 8, 4 * room]
    commands = [command for one in sent for command in (one, Command())]
    world, got = LocalWorld(2), list[list[Command]]()

    def follow() -> None:
        agreements = LocalAgreements(world, 1, -1)
        got.append([begin_command(agreements, None)() for _ in commands])

    other = Thread(target=follow)
    other.start()
    leads = LocalAgreements(world, 0, -1)
    assert [begin_command(leads, one)() for one in commands] == commands
    other.join(60)
    assert got == [commands]


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
