"""Which sequences run in which slots: every request gets its tokens, whatever the others are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from partc.runtime.artifact.generation import GenerationRecord
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
