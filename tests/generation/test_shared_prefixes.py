"""Prompts that share their begin copy entries of caches: the same bits as of prompts that are read whole, in fewer steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import onnx
import pytest
from decoder_layouts import LAYOUTS, recording
from decoders import Unsharded, decoder
from partc.compiler.pipeline import compile_model
from partc.runtime import ContinuousBatch, Generator, Request, load_local_generator
from partc.runtime.generation.prefixes import Copy, Prefixes
from rows import of_today

SYSTEM = [*range(20, 39)]
PROMPTS = [
    [*SYSTEM, 1, 2],
    [*SYSTEM, 3],
    [7, 7],
    [*SYSTEM[:9], 40, 41],
    SYSTEM,
    [*SYSTEM, 3, 50, 51, 52, 53, 54, 55, 56],
    SYSTEM[::-1],
]
REQUESTS = [Request(prompt, max_tokens=6) for prompt in PROMPTS]
CACHED = {0: 0, 1: 16, 2: 0, 3: 8, 4: 8, 5: 16, 6: 0}
"""By request of one run in two slots how many tokens of its prompt lie in a cache, in chunks of 8."""


def compiled(folder: Path, layout: str, slots: str) -> Path:
    """The artifact of a small decoder."""
    onnx.save(decoder(fused=True), folder / "model.onnx")
    (folder / "plan.yaml").write_text(f"{LAYOUTS[layout]}generate: {{{slots}, length: 64, chunk: 8}}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


def made(generator: Generator, requests: list[Request]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """By request its tokens, and how many of its prompt's lay in a cache."""
    tokens, cached = dict[int, list[int]](), dict.fromkeys(range(len(requests)), 0)
    for one in generator.each(requests):
        tokens.setdefault(one.request, []).append(one.token)
        cached[one.request] += one.cached
    return tokens, cached


@pytest.mark.parametrize(
    ("layout", "slots"),
    [
        ("tensor parallel", "slots: 3, cache: int8"),
        *of_today(
            [
                ("one rank", "slots: 2"),
                ("data parallel", "slots: 4"),
                ("tensor parallel stages", "slots: 4, groups: 2"),
            ],
            1,
        ),
    ],
)
def test_logits_have_the_bits_of_prompts_that_are_read_whole(
    layout: str, slots: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(one.prompt, max_tokens=6, temperature=1.0) for one in REQUESTS]
    with load_local_generator(compiled(tmp_path, layout, slots)) as generator:
        bits: list[dict[tuple[tuple[int, ...], int], bytes]] = [{}, {}]
        for shares, told in zip((True, False), bits, strict=True):
            with monkeypatch.context() as patch:
                recording(patch, lambda one, number, keys, told=told: told.update({(tuple(one.prompt), number): keys}))
                patch.setattr(generator, "slots", partial(Generator.slots, generator, shares))
                _, cached = made(generator, requests)
            assert any(cached.values()) is shares
        assert bits[0] == bits[1]
        assert len(bits[0]) == 6 * len(requests)


def test_tokens_are_those_of_each_prompt_alone_and_a_wrong_copy_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Unsharded(decoder(fused=True))
    wanted = {number: whole.tokens(one.prompt, 6) for number, one in enumerate(REQUESTS)}
    with load_local_generator(compiled(tmp_path, "one rank", "slots: 2")) as generator:
        assert made(generator, REQUESTS) == (wanted, CACHED)
        # a prompt that is scored is read whole, by steps of a decode, whose entries no other prompt shares
        scored = Request(PROMPTS[0], max_tokens=6, logprobs=0, scores_prompt=True)
        assert sum(one.cached for one in generator.each([scored, REQUESTS[1], scored])) == 0
        right = Generator._copy
        for fault in (
            lambda copies: [],
            lambda copies: [Copy(one.source, one.target, one.count - 1) for one in copies],
        ):
            with monkeypatch.context() as patch:
                patch.setattr(Generator, "_copy", lambda self, copies, fault=fault: right(self, fault(copies)))
                assert made(generator, REQUESTS)[0] != wanted
        with monkeypatch.context() as patch:  # a begin that only looks alike
            patch.setattr(
                Prefixes, "common", lambda self, slot, prompt: min(self.counts[slot], (len(prompt) - 1) // 8 * 8)
            )
            assert made(generator, REQUESTS)[0] != wanted


def test_a_conversation_reads_its_new_tokens(tmp_path: Path) -> None:
    """Each turn repeats the prompt and the answer of the one before."""
    whole = Unsharded(decoder(fused=True))
    with load_local_generator(compiled(tmp_path, "tensor parallel", "slots: 3")) as generator:
        batch = ContinuousBatch(generator)
        batch.warm_up()
        prompt = list[int](SYSTEM[:5])
        for turn in range(6):
            batch.admit(turn, Request(prompt, max_tokens=4))
            tokens, cached = list[int](), 0
            while not batch.idle:
                for one in batch.step() or []:
                    tokens.append(one.token)
                    cached += one.cached
            assert tokens == whole.tokens(prompt, 4)
            assert cached == 0 if turn == 0 else cached == (len(prompt) - 7) // 8 * 8
            prompt += [*tokens, 60, turn, 61]
        batch.end()
        assert batch.step() is None
