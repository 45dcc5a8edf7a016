"""Changes of logits are those of transformers' processors and of OpenAI's formulas, however the vocabulary is cut."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from partc.runtime import Request
from partc.runtime.artifact.generation import GenerationRecord
from partc.runtime.generation.changes import changes_of
from partc.runtime.generation.draw import NO_TOKEN, Scratch, candidates, draw
from partc.runtime.generation.request import faults_of

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers", "5.0", reason="compares with processors of transformers")

VOCABULARY = 90
RECORD = GenerationRecord(
    tokens="ids", position="position", count="count", next="next", logits="logits",
    vocabulary=VOCABULARY, slots=1, length=64, chunk=8, stop=[2, 80],
)  # fmt: skip
PROMPT, MADE = [3, 1, 4, 1, 5, 70], [9, 1, 9, 88, 9]
Logits = np.ndarray[Any, Any]


def changed(request: Request, logits: Logits, shards: int = 3) -> Logits:
    """The logits after the changes of a request, whose answer grows by tokens in between, by shards."""
    steps, found, size = changes_of(request, RECORD), logits.copy(), VOCABULARY // shards
    for tokens in (MADE[:2], MADE, MADE):
        found = logits.copy()
        for begin in range(0, VOCABULARY, size):
            for one in steps:
                one.change(found[begin : begin + size], begin, tokens)
    return found


def test_changes_are_those_of_transformers_and_openai() -> None:
    logits = (np.random.default_rng(0).standard_normal(VOCABULARY) * 4).astype(np.float32)
    scores, ids = torch.from_numpy(logits)[None], torch.tensor([PROMPT + MADE])
    of_repetition = transformers.RepetitionPenaltyLogitsProcessor(1.7)(ids, scores.clone())[0].numpy()
    assert (changed(Request(PROMPT, repetition_penalty=1.7), logits) == of_repetition).all()
    expected = logits.astype(np.float64)
    for token, times in Counter(MADE).items():
        expected[token] -= 0.6 * (times > 0) + 0.25 * times
    found = changed(Request(PROMPT, presence_penalty=0.6, frequency_penalty=0.25), logits)
    assert np.abs(found - expected).max() < 1e-6
    assert (found != logits).sum() == 3
    expected = logits.copy()
    expected[[5, 89]] += np.float32([-100, 2.5])
    assert (changed(Request(PROMPT, logit_bias={5: -100, 89: 2.5}), logits) == expected).all()
    without_ends = transformers.SuppressTokensLogitsProcessor([2, 7, 80])(ids, scores.clone())[0].numpy()
    assert (changed(Request(PROMPT, min_tokens=6, stop=[7]), logits) == without_ends).all()
    assert (changed(Request(PROMPT, min_tokens=5, stop=[7]), logits) == logits).all()
    assert changes_of(Request(PROMPT, temperature=1.0, min_p=0.1), RECORD) == ()


def test_min_p_keeps_the_tokens_that_transformers_keeps() -> None:
    logits = (np.random.default_rng(1).standard_normal(VOCABULARY) * 2).astype(np.float32)
    kept = (
        transformers.MinPLogitsWarper(0.1)(torch.zeros(1, 1), torch.from_numpy(logits)[None])[0]
        .isfinite()
        .nonzero()
        .flatten()
    )
    request = Request(temperature=1.0, min_p=0.1)
    one = candidates(logits, 0, VOCABULARY, request, Scratch())
    drawn = {draw([one], request, number, Scratch()) for number in range(1500)}
    assert drawn == {*kept.tolist()}
    assert 3 < len(drawn) < 50


def test_without_a_finite_logit_no_token_is_drawn() -> None:
    for request in (Request(), Request(temperature=1.0), Request(temperature=1.0, top_k=3)):
        shards = [candidates(np.full(4, -np.inf, np.float32), begin, 2, request, Scratch()) for begin in (0, 4)]
        assert draw(shards, request, 0, Scratch()) == NO_TOKEN


def test_requests_are_packed_without_what_they_do_not_ask() -> None:
    request = Request([1], logit_bias={5: -1.5}, min_p=0.25, min_tokens=1)
    packed = json.loads(json.dumps(request.packed()))
    assert packed.keys() == {"prompt", "logit_bias", "min_p", "min_tokens", "encoder"}
    assert Request.unpacked(packed) == request


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"repetition_penalty": 0.0}, "its repetition_penalty is 0.0; it is above 0 and below 1,000,000"),
        ({"presence_penalty": 2.5}, "its presence_penalty is 2.5; it is -2 to 2"),
        ({"frequency_penalty": float("nan")}, "its frequency_penalty is nan; it is -2 to 2"),
        ({"logit_bias": dict.fromkeys(range(10_000), 1)}, "its logit_bias has 10,000 tokens; at most 1,024"),
        ({"logit_bias": {90: 1}}, "its logit_bias has 90, which is not a token; tokens are 0 to 89"),
        ({"logit_bias": {9: 101}}, "its logit_bias of 9 is 101; it is -100 to 100"),
        ({"min_p": 1.5}, "its min_p is 1.5; it is 0 to 1"),
        ({"min_tokens": 9}, "its min_tokens is 9; it is 0 to 8, the most tokens of its answer"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], fact: str) -> None:
    request = Request([1], max_tokens=8, **options)
    assert [*faults_of(request, RECORD)] == [fact]


def test_an_artifact_without_logits_changes_none() -> None:
    silent = RECORD.model_copy(update={"logits": ""})
    (fact,) = faults_of(Request([1], logit_bias={1: 1.0}), silent)
    assert fact.startswith("it asks for logit_bias, and the artifact gives the likeliest token alone")
    assert not [*faults_of(Request([1]), silent)]
