"""Which sequences run in which slots: every request gets its tokens, whatever the others are."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from decoders import Unsharded, decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from partc.compiler import compile_model
from partc.compiler.errors import CompileError
from partc.runtime import load_local_generator
from partc.runtime.artifact.generation import GenerationRecord
from partc.runtime.generation.request import Request
from partc.runtime.generation.slots import Slots

VOCABULARY = 50
END = 3
"""The token that ends the decoder's text."""


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
        stop=[END],
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


def ends_of(request: Request) -> set[int]:
    """The tokens that end a request."""
    return {*request.stop} if request.ignore_end else {END, *request.stop}


def alone(request: Request) -> list[int]:
    """What the decoder makes of a request by itself."""
    tokens, made = [*request.prompt], list[int]()
    while len(made) < request.max_tokens and not (made and made[-1] in ends_of(request)):
        made.append(following(tokens))
        tokens.append(made[-1])
    return made


request = st.builds(
    Request,
    prompt=st.lists(st.integers(0, VOCABULARY - 1) | st.just(1), min_size=1, max_size=30),
    max_tokens=st.integers(1, 30),
    stop=st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
    ignore_end=st.booleans(),
)


@settings(max_examples=60, deadline=None)
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
        for copy in step.copies:
            assert copy.source // size == copy.target // size  # a run lies on one rank
            caches[copy.target] = caches[copy.source][: copy.count]
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
        "stop" if tokens[-1] in ends_of(one) else "length" for tokens, one in zip(made, requests, strict=True)
    ]


def test_prompts_hold_others_up_by_one_chunk_a_token_in_the_order_of_requests() -> None:
    prompts = [[1], [*range(9)], [*range(9, 15)]]
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


@pytest.mark.parametrize(("chunk", "together"), [(4, 1), (16, 4), (64, 8)])
def test_short_prompts_are_read_together_up_to_the_tokens_of_a_chunk(chunk: int, together: int) -> None:
    """Of the eight prompts each has a chunk of four tokens; the programs of `chunk` 64 are 4, 16 and 64 tokens wide."""
    own = record(8, chunk).model_copy(update={"narrow_chunks": [size for size in (4, 16) if size < chunk]})
    running = admitted(own, [Request([token] * 3, max_tokens=9) for token in range(8)])
    kinds = ""
    while (step := running.next()) is not None:
        kinds += "d" if step.slots is None else "p"
        running.take(step, [0] * 8)
    assert kinds.startswith(("p" * together + "d") * (8 // together))
    assert kinds.count("p") == 8


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(
    ("length", "widths"),
    [(3, [4]), (5, [16]), (20, [16, 4]), (32, [16, 16]), (40, [64]), (70, [64, 16]), (84, [64, 16, 4])],
)
def test_a_prompt_ends_in_the_prefills_that_cost_the_least(length: int, widths: list[int], on_host: bool) -> None:
    """On a device a wide prefill takes hardly longer than a narrow one."""
    own = record(2, 64).model_copy(update={"narrow_chunks": [4, 16], "length": 256})
    slots = Slots(own, on_host=on_host)
    slots.admit(0, Request([*range(100, 100 + length)], max_tokens=1))
    steps = []
    while (step := slots.next()) is not None:
        steps.append(step)
        slots.take(step, [0] * 2)
    at_once = next(width for width in (4, 16, 64) if width >= length % 64)
    assert [step.tokens.shape[1] for step in steps] == (widths if on_host else [64] * (length // 64) + [at_once])
    assert [step.program for step in steps] == [
        {4: "prefill_4", 16: "prefill_16", 64: "prefill"}[step.tokens.shape[1]] for step in steps
    ]
    assert [token for step in steps for token in step.tokens[0, : step.count[0]]] == [*range(100, 100 + length)]


def test_slots_that_are_dealt_out_are_read_at_once() -> None:
    running = admitted(record(4, 8, runs=2), [Request([token] * 3, max_tokens=2) for token in range(4)])
    step = running.next()
    assert step is not None
    assert (step.slots, step.tokens[:, 0].tolist()) == ([0, 2], [0, 2])


PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]]


def answers(model: onnx.ModelProto, slots: int, folder: Path) -> list[list[int]]:
    """What a model makes of the prompts at once."""
    onnx.save(model, folder / "model.onnx")
    (folder / "plan.yaml").write_text(f"ranks: 1\ngenerate: {{slots: {slots}, length: 32, chunk: 4}}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    with load_local_generator(folder / "build", threads=1) as generator:
        return [one.tokens for one in generator.run([Request(prompt, max_tokens=9) for prompt in PROMPTS])]


def test_positions_that_a_mask_counts_are_those_of_each_sequence(tmp_path: Path) -> None:
    model = decoder(behind="mask")
    assert answers(model, 3, tmp_path) == [Unsharded(model).tokens(prompt, 9) for prompt in PROMPTS]


def test_positions_that_a_range_counts_are_those_of_each_sequence(tmp_path: Path) -> None:
    model = decoder(behind="count")
    assert answers(model, 3, tmp_path) == [Unsharded(model).tokens(prompt, 9) for prompt in PROMPTS]


def test_positions_behind_one_length_are_of_one_slot(tmp_path: Path) -> None:
    model = decoder(behind="table")
    with pytest.raises(CompileError, match=r"Slice 'behind\..* takes one length for all sequences, and 'slots' is 3"):
        answers(model, 3, tmp_path)
    assert answers(model, 1, tmp_path) == [Unsharded(model).tokens(prompt, 9) for prompt in PROMPTS]


def read(slots: Slots, prompts: list[list[int]], tokens: int = 1) -> list[tuple[int, int]]:
    """Reads prompts one after the other; by prompt its slot, and how many of its tokens lay in a cache."""
    found = []
    for prompt in prompts:
        slots.admit(len(found), Request(prompt, max_tokens=tokens))
        step, made = slots.next(), []
        slot = next(iter(step.taking.values()))[0] if step else -1
        while step is not None:
            made += slots.take(step, [7] * len(step.tokens))
            step = slots.next()
        found.append((slot, made[0].cached))
    return found


def test_a_prompt_reads_what_no_slot_has() -> None:
    system, more = [*range(9)], [*range(20, 26)]
    # whole chunks alone, and never its last token; a slot that has the begin is taken, else the one that ended first
    prompts = [system, system, [*system, *more], more, system[:8], [*system, 7, *more]]
    assert read(Slots(record(3, 4)), prompts) == [(0, 0), (0, 8), (0, 8), (1, 0), (0, 4), (0, 8)]
    assert [cached for _, cached in read(Slots(record(3, 4), shares=False), prompts)] == [0] * 6


def test_prompts_that_come_together_are_read_once() -> None:
    running = admitted(record(4, 4), [Request([*range(10), number], max_tokens=3) for number in range(4)])
    made, copies, reads = [], [], 0
    while (step := running.next()) is not None:
        copies += [(copy.source, copy.target, copy.count) for copy in step.copies]
        reads += int(step.count.sum()) if step.slots is not None else 0
        made += running.take(step, [7] * len(step.tokens))
    assert copies == [(0, 1, 8), (0, 2, 8), (0, 3, 8)]
    assert reads == 11 + 3 * 3
    assert {one.request: one.cached for one in reversed(made) if one.cached} == {1: 8, 2: 8, 3: 8}


def test_slots_that_were_cleared_are_not_shared() -> None:
    slots = Slots(record(1, 4))
    prompt = [*range(9)]
    assert read(slots, [prompt]) == [(0, 0)]
    slots.admit(5, Request(prompt))
    step = slots.next()
    assert step is not None
    assert step.position.tolist() == [8]
    slots.cancel(5)
    slots.admit(6, Request(prompt))  # it has the slot, and waits for the step of the one before it
    assert slots.next() is not None
    slots.take(step, [VOCABULARY])
    step = slots.next()
    assert step is not None
    assert step.position.tolist() == [0]
