"""Logarithms of probabilities in answers, in both forms of the API: of tokens made, of a prompt that is shown, in streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import Unsharded, decoder
from partc.cli.server.logprobs import TokenTexts
from partc.compiler.pipeline import compile_model
from server_case import LETTERS, LocalServer, write_tokenizer
from tokenizers import Tokenizer, decoders, models

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("scored")
    onnx.save(decoder(), folder / "model.onnx")
    (folder / "plan.yaml").write_text("ranks: 1\ngenerate: {slots: 2, length: 32, chunk: 4}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    with LocalServer(folder / "build", write_tokenizer(folder), queue=6) as found:
        yield found


def streamed(server: LocalServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.streaming(path, body) as events:
        return [json.loads(data)["choices"][0] for _, data in events if data != "[DONE]"]


def test_a_completion_has_those_of_its_prompt_and_its_tokens(server: LocalServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "logprobs": 2, "echo": True, "logit_bias": {"7": 100}, "min_tokens": 5}
    found = server.complete(**body)
    assert found["token_ids"] == [7] * 5
    tokens, got = PROMPT + [7] * 5, found["logprobs"]
    rows = Unsharded(decoder()).log_probabilities(tokens)
    assert found["text"] == "".join(got["tokens"]) == "".join(LETTERS[token] for token in tokens)
    assert got["text_offset"] == [*range(11)]
    assert (got["token_logprobs"][0], got["top_logprobs"][0]) == (None, None)
    for row, token, logprob, top in zip(
        rows, tokens[1:], got["token_logprobs"][1:], got["top_logprobs"][1:], strict=False
    ):
        likely = {*np.argsort(-row)[:2].tolist(), token}
        assert {**top} == pytest.approx({LETTERS[other]: row[other] for other in likely}, abs=1e-5)
        assert logprob == top[LETTERS[token]]
    events = streamed(server, COMPLETIONS, body)
    assert "".join(one["text"] for one in events) == found["text"]
    for name, values in got.items():
        assert [value for one in events for value in one["logprobs"][name]] == values, name


def test_a_prompt_alone_has_a_score_for_each_token_up_to_the_length(server: LocalServer) -> None:
    prompt = [*range(32)]
    rows = Unsharded(decoder()).log_probabilities(prompt)
    wanted = [rows[at - 1][at] for at in range(1, 32)]
    found = server.complete(prompt, max_tokens=0, logprobs=1, echo=True)
    assert (found["token_ids"], found["finish_reason"], found["text"]) == ([], "length", LETTERS[:32])
    assert found["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-5)
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (32, 0)
    (event,) = streamed(server, COMPLETIONS, {"prompt": prompt, "max_tokens": 0, "logprobs": 1, "echo": True})
    assert event["logprobs"] == found["logprobs"]
    status, several = server.post(COMPLETIONS, {"prompt": ["abc", "d"], "max_tokens": 0, "echo": True})
    assert (status, [(one["text"], one["logprobs"]) for one in several["choices"]]) == (
        200,
        [("abc", None), ("d", None)],
    )


def test_a_chat_has_those_of_its_tokens_with_their_bytes(server: LocalServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    status, found = server.post(CHAT, body)
    assert status == 200, found
    choice = found["choices"][0]
    (content,) = (choice["logprobs"]["content"],)
    assert "".join(one["token"] for one in content) == choice["message"]["content"]
    assert all(one["bytes"] == [*one["token"].encode()] for one in content)
    assert [one["top_logprobs"][0]["logprob"] for one in content] == [one["logprob"] for one in content]
    assert {len(one["top_logprobs"]) for one in content} == {3}
    events = streamed(server, CHAT, body)
    assert [one for event in events for one in event["logprobs"]["content"]] == content
    status, found = server.post(CHAT, {**body, "top_logprobs": 21})
    assert (status, found["error"]["param"]) == (400, "top_logprobs")
    status, found = server.post(CHAT, {**body, "logprobs": False})
    assert (status, found["error"]["message"]) == (400, "top_logprobs needs logprobs: true")


def test_the_likeliest_of_several_choices_are_answered(server: LocalServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 2.0, "seed": 3, "logprobs": 0}
    status, made = server.post(COMPLETIONS, {**body, "n": 5})
    status, found = server.post(COMPLETIONS, {**body, "n": 2, "best_of": 5})
    assert status == 200, found
    order = sorted(made["choices"], key=lambda one: -sum(one["logprobs"]["token_logprobs"]))
    assert [one["text"] for one in found["choices"]] == [one["text"] for one in order[:2]]
    assert [one["index"] for one in found["choices"]] == [0, 1]
    assert found["usage"]["completion_tokens"] == 30


def test_texts_of_tokens_have_the_letters_around_them() -> None:
    of_bytes = Tokenizer(models.BPE({"\u0120the": 0, "\u00e2\u0122": 1, "\u0123": 2, "<s>": 3}, []))
    of_bytes.decoder = decoders.ByteLevel()
    of_bytes.add_special_tokens(["<s>"])
    texts = TokenTexts(of_bytes)
    assert [texts.text_of(token) for token in (0, 1, 3, 9)] == [" the", "bytes:\\xe2\\x80", "<s>", "token_id:9"]
    pieces = Tokenizer(models.BPE({"\u2581the": 0, "<0xE2>": 1, "a": 2}, []))
    pieces.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = TokenTexts(pieces)
    assert [texts.text_of(token) for token in (0, 1, 2)] == [" the", "bytes:\\xe2", "a"]
    found, end = texts.completion([0, 2], [None, (-float("inf"), [(2, -float("inf"))])], 5)
    assert (found["token_logprobs"], found["text_offset"], end) == ([None, -9999.0], [5, 9], 10)
    assert TokenTexts(None).text_of(7) == "token_id:7"
