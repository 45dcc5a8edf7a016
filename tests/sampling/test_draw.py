"""Tokens that are drawn of shards' candidates are those of the sorted vocabulary, whatever is left out, and however it is cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from partc.runtime import Request
from partc.runtime.generation.draw import FIRST, Candidates, Scratch, candidate_count, candidates, draw

Logits = np.ndarray[Any, Any]


def sorted_draw(logits: Logits, request: Request, number: int) -> int:
    """The law over the whole vocabulary, sorted."""
    scaled = logits.astype(np.float64) / request.temperature
    order = np.argsort(-scaled, kind="stable")
    if request.top_k:
        order = order[: request.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    sums = np.cumsum(weights)
    if request.top_p < 1:
        kept = int(np.searchsorted(sums, request.top_p * sums[-1])) + 1
        order, sums = order[:kept], sums[:kept]
    kept = int((weights[: len(order)] >= request.min_p).sum())
    order, sums = order[:kept], sums[:kept]
    uniform = np.random.Generator(np.random.Philox(key=request.seed, counter=number)).random()
    return int(order[min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(order) - 1)])


def drawn(logits: Logits, request: Request, number: int, shards: int = 1) -> tuple[int, int]:
    """The token of candidates, and how often they were too few."""
    size, further = len(logits) // shards, 0
    while True:
        count, found = candidate_count(request, further, size), list[Candidates]()
        for begin in range(0, len(logits), size):
            one = candidates(logits[begin : begin + size], begin, count, request, Scratch())
            assert one.all == (count == size)
            found.append(one)
        token = draw(found, request, number, Scratch())
        if token is not None:
            return token, further
        further += 1


def some_logits(kind: str, size: int) -> Logits:
    rng = np.random.default_rng(size)
    match kind:
        case "wide":
            return (rng.standard_normal(size) * 6).astype(np.float32)
        case "flat":
            return (rng.standard_normal(size) * 0.01).astype(np.float32)
        case "ties":
            return rng.integers(-3, 3, size).astype(np.float32) * np.where(rng.random(size) < 0.5, 1, -1).astype("f")
        case "equal":
            return np.full(size, -2.5, np.float32)
        case "half":
            return rng.standard_normal(size).astype(np.float16)
        case _:
            return np.where(rng.random(size) < 0.1, rng.standard_normal(size), -np.inf).astype(np.float32)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["wide", "flat", "ties", "equal", "half", "masked"])
def test_tokens_are_those_of_the_sorted_vocabulary(kind: str, shards: int) -> None:
    rng = np.random.default_rng(1)
    for size in (3, 63, 3 * FIRST, 3000):
        logits = some_logits(kind, size)
        for top_p in (1.0, np.nextafter(1, 0), 0.95, 0.5, 1 / 3, 1e-3, 5e-324):
            for top_k in (0, 1, 2, 50, FIRST, 200, 5000):
                one = Request(
                    temperature=float(rng.choice([0.05, 0.8, 1.0, 7.0])),
                    top_k=top_k,
                    top_p=float(top_p),
                    min_p=float(rng.choice([0, 0, 0.01, 0.3])),
                    seed=int(rng.integers(1 << 40)),
                )
                for number in range(2):
                    assert drawn(logits, one, number, shards)[0] == sorted_draw(logits, one, number), (size, one)


def test_few_candidates_are_enough_where_they_have_the_mass() -> None:
    peaked, flat = some_logits("wide", 30_000), np.zeros(30_000, np.float32)
    nucleus = Request(temperature=1.0, top_p=0.9, seed=3)
    assert {drawn(peaked, nucleus, number, 2)[1] for number in range(20)} == {0}
    assert {drawn(flat, nucleus, number, 2)[1] for number in range(3)} == {2}
    assert {drawn(flat, Request(temperature=1.0, top_k=FIRST, seed=3), number, 2)[1] for number in range(20)} == {0}


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    count = 2000

    def shares(**options: float) -> list[float]:
        one = Request([0], **{"temperature": 1.0, "seed": 3, **options})  # type: ignore[arg-type]
        found = Counter(drawn(logits, one, number)[0] for number in range(count))
        return [found[token] / count for token in range(4)]

    assert np.allclose(shares(), [0.5, 0.25, 0.15, 0.1], atol=0.04)
    assert np.allclose(shares(temperature=0.5), np.array([0.25, 0.0625, 0.0225, 0.01]) / 0.345, atol=0.04)
    assert np.allclose(shares(top_k=2), [2 / 3, 1 / 3, 0, 0], atol=0.04)
    assert np.allclose(shares(top_p=0.6), [2 / 3, 1 / 3, 0, 0], atol=0.04)  # the fewest that reach 0.6
    assert shares(top_p=0.5) == [1.0, 0, 0, 0]
    assert shares(top_k=1) == [1.0, 0, 0, 0]


def test_what_is_drawn_follows_from_the_seed_and_the_number_of_the_token() -> None:
    logits = np.zeros(1000, np.float32)

    def tokens(prompt: list[int], seed: int) -> list[int]:
        return [drawn(logits, Request(prompt, temperature=1.0, seed=seed), number)[0] for number in range(50)]

    assert tokens([0], 7) == tokens([5, 6], 7)
    assert tokens([0], 7) != tokens([0], 8)
    assert len(set(tokens([0], 7))) > 40
