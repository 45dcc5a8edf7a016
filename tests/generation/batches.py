"""Requests that join and leave a batch, and what leads and follows it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from decoders import VOCABULARY, Unsharded, decoder
from partc.runtime import ContinuousBatch, Generator, Request, load
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.communication.in_process import LocalWorld


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


def check(
    made: dict[int, list[int]], requests: dict[int, Request], leaving: dict[int, int], fused: bool = False
) -> None:
    model = Unsharded(decoder(fused=fused))
    for number, tokens in made.items():
        whole = model.tokens([*requests[number].prompt], requests[number].max_tokens)
        assert tokens == whole[: leaving.get(number, len(whole))], number


def on_ranks(folder: Path, work: Callable[[int, Generator], object]) -> list[Any]:
    """What the work returns on each rank, with a program of its own; the first error of any."""
    size = open_artifact(folder).manifest.ranks
    world, found = LocalWorld(size), list[Any]([None] * size)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with Generator(load(folder, world.transport(rank))) as generator:
                found[rank] = work(rank, generator)
        except BaseException as error:
            errors.append(error)
            world.fail(str(error))

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return found
