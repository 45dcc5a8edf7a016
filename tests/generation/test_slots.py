"""Which sequences run in which slots: every request gets its tokens, whatever the others are; and which tokens are drawn."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from partc.runtime.artifact.generation import GenerationRecord
from partc.runtime.generation.draw import draw
from partc.runtime.generation.request import Request
from partc.runtime.generation.slots import Slots

VOCABULARY = 50


def record(slots: int, chunk: int, padded: bool = True, runs: int = 1) -> GenerationRecord:
    return GenerationRecord(
        tokens="ids",
        position="position",
        count="count",
        next="next",
        vocabulary=VOCABULARY,
        slots=slots,
        length=64,
        chunk=chunk,
        runs=runs,
        padded=padded,
    )


def admitted(record: GenerationRecord, requests: list[Request]) -> Slots:
    """Slots for which all of these wait."""
    slots = Slots(record)
    for number, one in enumerate(requests):
        slots.admit(number, one)
    return slots


def following(tokens: list[int]) -> int:
    """A decoder for tests: the next token follows from all before it."""
    return sum((k + 1) * token for k, token in enumerate(tokens)) % VOCABULARY


def alone(request: Request) -> list[int]:
    """What the decoder makes of a request by itself."""
    tokens, made = [*request.prompt], list[int]()
    while len(made) < request.max_tokens and not (made and made[-1] in request.stop):
        made.append(following(tokens))
        tokens.append(made[-1])
    return made


request = st.builds(
    Request,
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
    max_tokens=st.integers(1, 30),
    stop=st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(request, max_size=9), st.integers(1, 3), st.integers(1, 3), st.integers(1, 12), st.booleans())
def test_every_request_gets_its_tokens_whoever_runs_beside_it(
    requests: list[Request], runs: int, size: int, chunk: int, padded: bool
) -> None:
    slots = runs * size
    running = admitted(record(slots, chunk, padded or slots > 1, runs), requests)
    caches: list[list[int]] = [[] for _ in range(slots)]
    made: list[list[int]] = [[] for _ in requests]
    finish = [""] * len(requests)
    while (step := running.next()) is not None:
        rows, width = step.tokens.shape
        if step.slots is None:
            assert (rows, width) == (slots, 1)
        else:
            assert [slot // size for slot in step.slots] == [*range(runs)]
            assert (rows, width) == (runs, chunk if padded or slots > 1 else step.count[0])
        assert step.count.sum() >= 1
        chosen = []
        for row, slot in enumerate(step.slots or range(slots)):
            position, count = int(step.position[row]), int(step.count[row])
            assert position + width <= 64 + chunk - 1  # what is written has room
            assert position <= len(caches[slot])  # all before it has been written
            caches[slot] = caches[slot][:position] + step.tokens[row].tolist()
            chosen.append(following(caches[slot][: position + count]))
        for token in running.take(step, chosen):
            assert not finish[token.request]
            made[token.request].append(token.token)
            finish[token.request] = token.finish
    assert made == [alone(one) for one in requests]
    assert finish == [
        "stop" if tokens[-1] in one.stop else "length" for tokens, one in zip(made, requests, strict=True)
    ]


def test_prompts_hold_others_up_by_one_chunk_a_token_in_the_order_of_requests() -> None:
    prompts = [[1], [*range(9)], [*range(6)]]
    running = admitted(record(3, 4), [Request(prompt, max_tokens=9) for prompt in prompts])
    parts = []
    while (step := running.next()) is not None:
        parts.append((step.slots, step.count.tolist(), step.position.tolist()))
        for _ in running.take(step, [0] * 3):
            pass
    assert parts[:10] == [
        ([0], [1], [0]),
        (None, [1, 0, 0], [1, 0, 0]),
        ([1], [4], [0]),
        (None, [1, 0, 0], [2, 4, 0]),  # what is written at 4 of slot 1 is written again by its next chunk
        ([1], [4], [4]),
        (None, [1, 0, 0], [3, 8, 0]),
        ([1], [1], [8]),
        (None, [1, 1, 0], [4, 9, 0]),
        ([2], [4], [0]),
        (None, [1, 1, 0], [5, 10, 4]),
    ]


def test_slots_that_are_dealt_out_are_read_at_once() -> None:
    running = admitted(record(4, 8, runs=2), [Request([token] * 3, max_tokens=2) for token in range(4)])
    step = running.next()
    assert step is not None
    assert (step.slots, step.tokens[:, 0].tolist()) == ([0, 2], [0, 2])


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    count = 4000

    def shares(**options: float) -> list[float]:
        one = Request([0], **{"temperature": 1.0, "seed": 3, **options})  # type: ignore[arg-type]
        found = Counter(draw(logits, one, number) for number in range(count))
        return [found[token] / count for token in range(4)]

    assert np.allclose(shares(), [0.5, 0.25, 0.15, 0.1], atol=0.03)
    assert np.allclose(shares(temperature=0.5), np.array([0.25, 0.0625, 0.0225, 0.01]) / 0.345, atol=0.03)
    assert np.allclose(shares(top_k=2), [2 / 3, 1 / 3, 0, 0], atol=0.03)
    assert np.allclose(shares(top_p=0.6), [2 / 3, 1 / 3, 0, 0], atol=0.03)  # the fewest that reach 0.6
    assert shares(top_p=0.5) == [1.0, 0, 0, 0]
    assert shares(top_k=1) == [1.0, 0, 0, 0]


def test_what_is_drawn_follows_from_the_seed_and_the_number_of_the_token() -> None:
    logits = np.zeros(1000, np.float32)
    drawn = [draw(logits, Request([0], temperature=1.0, seed=7), number) for number in range(50)]
    assert drawn == [draw(logits, Request([5, 6], temperature=1.0, seed=7), number) for number in range(50)]
    assert drawn != [draw(logits, Request([0], temperature=1.0, seed=8), number) for number in range(50)]
    assert len(set(drawn)) > 40
