"""What clients of the server get: the tokens that a prompt has alone, as text and as streams, and a clear refusal of everything else."""

from __future__ import annotations

import dataclasses
import gc
import http.client
import json
import os
import signal
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import VOCABULARY, Unsharded, decoder
from partc.cli.job import serving
from partc.cli.job.job import Job
from partc.cli.main import invoke
from partc.cli.server.connections import Connection, State, _readable
from partc.cli.server.front import Front
from partc.cli.server.settings import ServerSettings
from partc.compiler.pipeline import compile_model
from partc.runtime import RankError, open_artifact
from partc.runtime.artifact.generation import RequestDefaults
from partc.runtime.program import sessions
from server_case import LETTERS, Client, LocalServer, write_tokenizer
from waiting import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    onnx.save(decoder(), folder / "model.onnx")
    (folder / "plan.yaml").write_text("ranks: 1\ngenerate: {slots: 2, length: 128, chunk: 4}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


@pytest.fixture(scope="module")
def server(build: Path) -> Iterator[LocalServer]:
    with LocalServer(build, write_tokenizer(build.parent), queue=2) as found:
        yield found


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return Unsharded(decoder()).tokens(PROMPT, 40)


def text_of(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def usage(read: int, made: int, cached: int = 0) -> dict[str, object]:
    counts = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def test_a_prompt_is_continued_as_ids_and_as_text(server: LocalServer, tokens: list[int]) -> None:
    found = server.complete(PROMPT, max_tokens=40)
    assert (found["token_ids"], found["text"], found["finish_reason"]) == (tokens, text_of(tokens), "length")
    assert found["usage"] == usage(5, 40)
    assert server.complete(text_of(PROMPT), max_tokens=3)["token_ids"] == tokens[:3]
    assert server.complete([*PROMPT, 7, 8, 9, 10, 11], max_tokens=1)["usage"] == usage(10, 1, cached=4)
    neutral = {"n": 1, "echo": False, "logprobs": None, "user": "me", "presence_penalty": 0, "model": "model.onnx"}
    assert server.complete(PROMPT, max_tokens=3, **neutral)["token_ids"] == tokens[:3]
    drawn = [server.complete(PROMPT, temperature=0.9, top_p=0.9, seed=seed)["text"] for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]
    status, models = server.get("/v1/models")
    assert (status, models["data"][0]["id"], models["data"][0]["max_model_len"]) == (200, "model.onnx", 128)
    assert server.get("/health") == (200, {"status": "ok"})


def test_what_clients_of_the_api_send_by_themselves_is_taken(server: LocalServer, tokens: list[int]) -> None:
    """One prompt as a list, fields that are null, those that change no answer, and an answer's message as their record of it has it."""
    assert server.complete([PROMPT], max_tokens=3)["token_ids"] == tokens[:3]
    assert server.complete([text_of(PROMPT)], max_tokens=3)["token_ids"] == tokens[:3]
    unset = dict.fromkeys(("logit_bias", "n", "stop", "stream_options", "suffix", "store", "reasoning_effort", "user"))
    labels = {"metadata": {"run": "a"}, "safety_identifier": "me", "prompt_cache_key": "k", "service_tier": "auto"}
    tools = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "modalities": ["text"]}
    empty = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", **empty}]
    messages.append({"role": "user", "content": "a", "name": None})  # type: ignore[dict-item]
    status, found = server.post(CHAT, {"messages": messages, "max_completion_tokens": 9, **unset, **labels, **tools})
    assert (status, found.get("error")) == (200, None)
    assert found["choices"][0]["message"]["content"] == server.complete("uhiayouaA", max_tokens=9)["text"]
    assert server.get("/v1/models/model.onnx") == (200, server.get("/v1/models")[1]["data"][0])
    status, refused = server.get("/v1/models/other")
    assert (status, refused["error"]["code"]) == (404, "model_not_found")


def test_tokens_that_end_an_answer(build: Path, server: LocalServer, tokens: list[int]) -> None:
    found = server.complete(PROMPT, max_tokens=40, stop_token_ids=[tokens[6], 63])
    at = tokens.index(tokens[6])
    assert (found["token_ids"], found["text"], found["finish_reason"]) == (
        tokens[: at + 1],
        text_of(tokens[:at]),
        "stop",
    )
    manifest = json.loads((build / "manifest.json").read_text())
    assert manifest["generation"]["stop"] == []
    reader = server.front._reader
    reader = dataclasses.replace(reader, ending=(tokens[6],))
    for ignores, stop in ((False, [tokens[6], 5]), (True, [5])):
        body = {"prompt": PROMPT, "stop_token_ids": [5], "ignore_eos": ignores}
        request = reader.completion(json.dumps(body).encode())[0].request
        assert (request.stop, request.ignore_end) == (stop, ignores)
    defaults = RequestDefaults(temperature=0.6, top_p=0.9, suppress=[3])
    reader = dataclasses.replace(reader, record=reader.record.model_copy(update={"defaults": defaults}))
    for said, draws in (({}, (0.6, 0.9)), ({"temperature": 0}, (0.0, 0.9)), ({"top_p": 1}, (0.6, 1.0))):
        request = reader.completion(json.dumps({"prompt": PROMPT, **said}).encode())[0].request
        assert (request.temperature, request.top_p, request.suppress) == (*draws, [3])
    status, refused = server.post(COMPLETIONS, {"prompt": PROMPT, "stop_token_ids": [64]})
    assert (status, refused["error"]["message"]) == (400, "64 is not a token; tokens are 0 to 63")


def test_a_conversation_is_continued_within_its_last_message(server: LocalServer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo "}]
    wanted = server.complete("uhiayo", max_tokens=9)["text"]
    status, found = server.post(CHAT, {"messages": messages, "max_tokens": 9, "continue_final_message": True})
    assert (status, found["choices"][0]["message"]["content"]) == (200, wanted)
    status, found = server.post(CHAT, {"messages": messages[:1], "max_tokens": 9, "add_generation_prompt": False})
    assert found["choices"][0]["message"]["content"] == server.complete("uhi", max_tokens=9)["text"]
    for wrong in (messages[:1], [{"role": "assistant", "content": " "}]):
        status, refused = server.post(CHAT, {"messages": wrong, "continue_final_message": True})
        assert (status, refused["error"]["param"]) == (400, "continue_final_message"), refused


def test_a_template_gets_the_values_of_a_request(server: LocalServer) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    wanted = server.complete("uhizzA", max_tokens=9)["text"]
    status, found = server.post(CHAT, {**body, "chat_template_kwargs": {"extra": "zz", "thinks": True}})
    assert (status, found["choices"][0]["message"]["content"]) == (200, wanted)
    for wrong, fact in (
        ([], "is not a mapping"),
        ({"tools": [1]}, 'has no true, false, number or text as "tools"'),
        ({"messages": "a"}, 'has the name "messages", which the server sets'),
        ({str(at): 1 for at in range(65)}, "has 65 names; at most 64"),
    ):
        status, refused = server.post(CHAT, {**body, "chat_template_kwargs": wrong})
        assert (status, refused["error"]["param"]) == (400, "chat_template_kwargs")
        assert fact in refused["error"]["message"]


def test_several_prompts_and_choices_are_one_answer(build: Path, tokens: list[int]) -> None:
    other = [7, 7]
    with LocalServer(build, queue=6) as server:
        alone = server.complete(other, max_tokens=9)["token_ids"]
        body = {"prompt": [PROMPT, other], "n": 2, "max_tokens": 9}
        status, found = server.post(COMPLETIONS, body)
        assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
        assert [one["token_ids"] for one in found["choices"]] == [tokens[:9]] * 2 + [alone] * 2
        assert found["usage"] == usage(7, 36)
        drawn = {"prompt": PROMPT, "n": 3, "max_tokens": 9, "temperature": 2.0, "seed": 2**64 - 1}
        choices = server.post(COMPLETIONS, drawn)[1]["choices"]
        for choice, seed in zip(choices, (2**64 - 1, 0, 1), strict=True):
            assert choice["token_ids"] == server.complete(PROMPT, max_tokens=9, temperature=2.0, seed=seed)["token_ids"]
        with server.streaming(COMPLETIONS, {**body, "stream_options": {"include_usage": True}}) as events:
            *documents, end = [data for _, data in events]
        parts: list[list[int]] = [[], [], [], []]
        *documents, counts = map(json.loads, documents)
        for document in documents:
            assert document["id"] == documents[0]["id"]
            for choice in document["choices"]:
                parts[choice["index"]] += choice["token_ids"]
        assert (parts, end) == ([tokens[:9]] * 2 + [alone] * 2, "[DONE]")
        assert counts["usage"] == usage(7, 36, cached=4)  # the prompt of the answer before
        with server.streaming(COMPLETIONS, {"prompt": [PROMPT, other], "n": 3, "max_tokens": 120}) as events:
            next(events)
            status, refused = server.post(COMPLETIONS, body)
            assert (status, refused["error"]["code"]) == (429, "queue_full")
        until(lambda: not server.front._engine._open)  # type: ignore[union-attr]
        for wrong, fact in (
            ({"n": 9}, "9 choices are more than the 8 requests that may run or wait"),
            ({"n": 129}, "'n' is wrong"),
            ({"n": 65}, "2 prompts with 65 choices each; at most 128 choices together"),
            ({"prompt": [[1]] * 129}, "'prompt' has 129 prompts; at most 128"),
            ({"prompt": [[1], [64]]}, "64 is not a token"),
            ({"prompt": [[1], 2]}, "'prompt' is a text, or a list of token ids"),
        ):
            status, refused = server.post(COMPLETIONS, {"prompt": [[1], [2]] if wrong.get("n") == 65 else [1], **wrong})
            assert status == 400
            assert fact in refused["error"]["message"], refused


def test_texts_and_tokens_are_each_other(server: LocalServer) -> None:
    found = server.post("/tokenize", {"prompt": text_of(PROMPT), "model": "model.onnx"})
    assert found == (200, {"count": 5, "max_model_len": 128, "tokens": PROMPT})
    assert server.post("/detokenize", {"tokens": PROMPT}) == (200, {"prompt": text_of(PROMPT)})
    status, found = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert (status, text_of(found["tokens"])) == (200, "uhiA")
    for path, body, fact in (
        ("/tokenize", {}, "the body has either a prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "either a prompt or messages"),
        ("/tokenize", {"prompt": "a" * 129}, "the text has 129 letters, more than 128 tokens have"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "the model 'other' is not here"),
        ("/detokenize", {"tokens": [64]}, "64 is not a token; tokens are 0 to 63"),
        ("/detokenize", {"tokens": [1] * 129}, "there are 129 tokens, more than 128"),
        ("/detokenize", {"tokens": "a"}, "'tokens' is wrong"),
    ):
        status, refused = server.post(path, body)
        assert status in (400, 404)
        assert fact in refused["error"]["message"]


def test_a_key_a_name_and_the_pages_of_others(build: Path, tokens: list[int]) -> None:
    page, key = {"Origin": "https://chat.example"}, {"Authorization": "Bearer secret"}
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3, "model": "mine"}).encode()
    with LocalServer(build, name="mine", api_key="secret", origins=("https://chat.example",)) as server:
        for wrong in (
            {},
            {"Authorization": "Bearer secre"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer \xff"},
        ):
            status, headers, refused = server.request("POST", COMPLETIONS, body, **page, **wrong)
            assert (status, headers["access-control-allow-origin"]) == (401, "https://chat.example")
            assert json.loads(refused)["error"]["code"] == "invalid_api_key"
        assert [server.get(path)[0] for path in ("/health", "/v1/models")] == [200, 401]
        status, headers, found = server.request("POST", COMPLETIONS, body, **page, **key)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example")
        assert (json.loads(found)["model"], json.loads(found)["choices"][0]["token_ids"]) == ("mine", tokens[:3])
        asks = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless-os",
        }
        status, headers, _ = server.request("OPTIONS", COMPLETIONS, **page, **asks)
        assert (status, headers["access-control-allow-headers"]) == (200, "authorization,x-stainless-os")
        other = {"Origin": "https://evil.example"}
        assert server.request("OPTIONS", COMPLETIONS, **other, **asks)[0] == 400
        status, headers, _ = server.request("POST", COMPLETIONS, body, **other, **key)
        assert (status, "access-control-allow-origin" in headers) == (403, False)


def test_options_of_a_server_that_cannot_be_met(
    build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("a b\n")
    for options, fact in (
        (["--api-key", ""], "the key is empty"),
        (["--api-key", f"@{tmp_path / 'key'}"], "letters other than those of ASCII without spaces"),
        (["--api-key", f"@{tmp_path / 'other'}"], "other: "),
        (["--cors", "chat.example"], "'chat.example' is not an origin"),
    ):
        assert invoke(["serve", str(build), *options]) == 2
        assert fact in " ".join(capsys.readouterr().err.split())


def test_a_stream_has_the_same_text_in_shards(server: LocalServer, tokens: list[int]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "stream_options": {"include_usage": True}}
    with server.streaming(COMPLETIONS, body) as events:
        found = [data for _, data in events]
    assert found[-1] == "[DONE]"
    documents = [json.loads(one) for one in found[:-1]]
    assert documents[-1]["choices"] == []
    assert documents[-1]["usage"]["completion_tokens"] == 40
    choices = [one["choices"][0] for one in documents[:-1]]
    assert "".join(one["text"] for one in choices) == text_of(tokens)
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["length"]


def test_a_conversation_becomes_one_prompt(server: LocalServer) -> None:
    messages = [{"role": "system", "content": "b"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    status, found = server.post(CHAT, {"messages": messages, "max_completion_tokens": 9})
    assert status == 200
    wanted = server.complete("sbuhiA", max_tokens=9)
    assert found["choices"][0]["message"] == {"role": "assistant", "content": wanted["text"]}
    with server.streaming(CHAT, {"messages": messages, "max_tokens": 9}) as events:
        deltas = [json.loads(data)["choices"][0]["delta"] for _, data in events if data != "[DONE]"]
    assert deltas[0]["role"] == "assistant"
    assert "".join(one["content"] for one in deltas) == wanted["text"]


def test_an_answer_ends_at_a_text_that_begins_in_one_token_and_ends_in_another(
    server: LocalServer, tokens: list[int]
) -> None:
    text = text_of(tokens)
    stop = text[7:10]
    at = text.index(stop)
    for stops in (stop, ["#", stop]):
        found = server.complete(PROMPT, max_tokens=40, stop=stops)
        assert (found["text"], found["finish_reason"]) == (text[:at], "stop")
    with server.streaming(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 40, "stop": [stop]}) as events:
        found_text = "".join(json.loads(data)["choices"][0]["text"] for _, data in events if data != "[DONE]")
    assert found_text == text[:at]
    until(lambda: server.batch.slots.used == 0)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": PROMPT, "best": 1}, 400, "'best' is not a field that this server knows"),
        ({"prompt": PROMPT, "model": "other"}, 404, "'other' is not here"),
        ({"prompt": PROMPT, "logprobs": 21}, 400, "its logprobs is 21; it is 0 to 20"),
        ({"prompt": PROMPT, "logprobs": True}, 400, "'logprobs' is wrong"),
        ({"prompt": [1] * 129, "echo": True, "logprobs": 1, "max_tokens": 0}, 400, "the prompt has 129 tokens"),
        ({"prompt": [1] * 128, "echo": True, "logprobs": 1, "max_tokens": 1}, 400, "at least one is the answer's"),
        ({"prompt": PROMPT, "echo": True, "max_tokens": -1}, 400, "asks for -1 tokens"),
        ({"prompt": PROMPT, "n": 10_000}, 400, "'n' is wrong: Input should be less than or equal to 128"),
        ({"prompt": PROMPT, "n": 2, "best_of": 1}, 400, "best_of is 1: it is at least n, 2"),
        ({"prompt": PROMPT, "best_of": 2, "stream": True}, 400, "best_of is 2"),
        ({"prompt": PROMPT, "logit_bias": {str(at): 1 for at in range(10_000)}}, 400, "has 10,000 tokens; at most"),
        ({"prompt": PROMPT, "logit_bias": {"-1": 1}}, 400, 'has "-1", which is not the number of a token'),
        ({"prompt": PROMPT, "logit_bias": {"64": 1}}, 400, "its logit_bias has 64, which is not a token"),
        ({"prompt": PROMPT, "min_tokens": 17}, 400, "its min_tokens is 17; it is 0 to 16"),
        ({"prompt": PROMPT, "presence_penalty": -3}, 400, "its presence_penalty is -3"),
        ({"prompt": []}, 400, "no token"),
        ({"prompt": ""}, 400, "no token"),
        ({"prompt": [1] * 128}, 400, "at least one is the answer's"),
        ({"prompt": [1, VOCABULARY]}, 400, f"{VOCABULARY} is not a token"),
        ({"prompt": [1, -1]}, 400, "-1 is not a token"),
        ({"prompt": [True]}, 400, "'prompt' is a text, or a list of token ids"),
        ({"prompt": PROMPT, "store": True}, 400, "'store' is true"),
        ({"prompt": PROMPT, "max_tokens": 0}, 400, "asks for 0 tokens"),
        ({"prompt": PROMPT, "max_tokens": 124}, 400, "129"),
        ({"prompt": PROMPT, "temperature": -0.5}, 400, "temperature is -0.5"),
        ({"prompt": PROMPT, "temperature": 1e-320}, 400, "which takes the likeliest token, or at least 1e-30"),
        ({"prompt": PROMPT, "top_p": 1.5}, 400, "top_p is 1.5"),
        ({"prompt": PROMPT, "top_k": -1}, 400, "top_k is -1"),
        ({"prompt": PROMPT, "seed": -1}, 400, "seed is -1"),
        ({"prompt": PROMPT, "stop": ["x"] * 100_000}, 400, "'stop' has 100,000 texts; at most 16"),
        ({"prompt": PROMPT, "stop": ["x", "x" * 257]}, 400, "'stop' has a text of 257 letters; each has 1 to 256"),
        ({"prompt": PROMPT, "stop": [1]}, 400, "'stop' is a text, or a list of texts"),
        ({"prompt": PROMPT, "timeout": 0}, 400, "timeout"),
        ({}, 400, "prompt"),
        ([1], 400, "not a JSON object"),
        (b'{"prompt": [1], "temperature": NaN}', 400, "NaN is not a number"),
        (b'{"prompt": "\xff"}', 400, "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', 400, "not valid UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', 400, "not valid UTF-8"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"prompt": [1], "max_tokens": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b" " * 1_000_001, 413, "1,000,000 bytes"),
    ],
)
def test_what_cannot_be_met_is_refused_before_a_rank_hears_of_it(
    server: LocalServer, body: Any, status: int, words: str
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    before = server.metrics()
    found, _, text = server.request("POST", COMPLETIONS, data)
    error = json.loads(text)["error"]
    assert (found, {*error}) == (status, {"message", "type", "param", "code"})
    assert words in error["message"]
    after = server.metrics()
    assert (
        after['partc_requests_total{finish="refused"}'] == before.get('partc_requests_total{finish="refused"}', 0) + 1
    )
    assert after["partc_step_seconds_count"] == before["partc_step_seconds_count"]


def test_a_refusal_takes_no_thread(server: LocalServer) -> None:
    """Threads that have ended keep their part of the address space: forty took 800 MiB of it."""
    assert server.request("POST", COMPLETIONS, b"{}")[0] == 400
    assert server.request("GET", "/nowhere")[0] == 404
    assert server.request("POST", COMPLETIONS, b"{}", **{"Content-Encoding": "gzip"})[0] == 415
    assert not [thread.name for thread in threading.enumerate() if "AnyIO" in thread.name]


def test_a_connection_takes_no_more_than_the_guide_says(server: LocalServer) -> None:
    """Each in the state in which it takes most: with a whole body, of which each letter is a chunk, and the longest head and trailers."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    headers, long = b"".join(b"%x:%b\r\n" % (at, b"v" * 50) for at in range(120)), b"X:" + b"a" * 16_000
    requests = [
        head + b"\r\n" + b"1\r\n \r\n" * 169_000,
        head + headers + b"\r\nf423f\r\n" + b" " * 999_999 + b"\r\n0\r\n" + headers,
        head + headers + b"\r\nf423f\r\n" + b" " * 999_999 + b"\r\n0\r\n" + long,
        head + long,
    ]

    def have_read_all() -> bool:
        """Whether the connections have nothing to read."""
        instances = gc.get_referrers(Connection)  # a list of all objects would count as memory
        found = [one for one in instances if isinstance(one, Connection) and one.state is not State.CLOSING]
        return (
            len(found) == 8 and not any(one.is_read for one in found) and not _readable(one.fileno() for one in found)
        )

    gc.collect()
    with ExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(2):
            for request in requests:
                end = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
                end.sendall(request)
        until(have_read_all)
        after, peak = tracemalloc.get_traced_memory()
        assert 3 * 1_000_000 < after - before < peak - before < 6 * 1_400_000 + 2 * 64_000


def test_a_client_that_leaves_within_its_body_is_refused(
    server: LocalServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is counted, and nothing of it is in the server's output."""
    before = server.metrics().get(refused := 'partc_requests_total{finish="refused"}', 0)
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{")
    until(lambda: server.metrics().get(refused, 0) == before + 1)
    assert capfd.readouterr().err == ""


def test_wrong_paths_methods_and_origins_have_errors_of_the_same_form(server: LocalServer) -> None:
    for method, path, status in (("GET", COMPLETIONS, 405), ("POST", "/health", 405), ("GET", "/v1/none", 404)):
        found, _, text = server.request(method, path)
        assert (found, json.loads(text)["error"]["type"]) == (status, "invalid_request_error")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    assert server.request("POST", COMPLETIONS, body, Origin="http://elsewhere.example")[0] == 403
    assert server.request("POST", COMPLETIONS, body, Origin=f"http://127.0.0.1:{server.port}")[0] == 200
    status, _, text = server.request("POST", CHAT, b'{"messages": [{"role": "\\u001b[2J", "content": "x"}]}')
    assert status == 400
    assert b"\x1b" not in text


def test_only_its_own_hosts_are_served(build: Path) -> None:
    """A stranger's name that has the address of this machine makes a browser send requests of the stranger's page as this server's own."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    with LocalServer(build, hosts=("Models.Example",)) as server:
        for host in ("localhost", f"127.0.0.1:{server.port}", "[::1]:80", "LOCALHOST:1", "models.example:80"):
            assert server.request("POST", COMPLETIONS, body, Host=host, Origin=f"http://{host}")[0] == 200, host
        for host in ("evil.example", f"evil.example:{server.port}", "localhost.evil.example", "127.0.0.2", ""):
            for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/none")):
                status, _, text = server.request(method, path, body, Host=host, Origin=f"http://{host}")
                assert (status, json.loads(text)["error"]["code"]) == (421, "host"), (host, path)


def test_a_client_that_leaves_frees_its_slot(server: LocalServer) -> None:
    """One that gets a stream, one that waits for a whole answer, and one whose request waits for a slot."""
    before = server.metrics().get('partc_requests_total{finish="left"}', 0)
    many = {"prompt": [1], "max_tokens": 127}
    with held(server) as entered, server.streaming(COMPLETIONS, many):
        entered.wait(60)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", COMPLETIONS, json.dumps(many))
        with server.streaming(COMPLETIONS, many):
            connection.close()
    until(lambda: server.metrics()['partc_requests_total{finish="left"}'] == before + 3)
    until(lambda: server.batch.slots.used == server.batch.slots.waiting == 0)
    assert server.metrics()["partc_slots_used"] == 0


def test_logits_that_are_not_finite_end_their_request_alone(server: LocalServer, tokens: list[int]) -> None:
    programs, body = {**server.generator._programs}, {"prompt": PROMPT, "max_tokens": 3}

    class Spoilt:
        """Its steps find no token for any slot."""

        def __init__(self, program: Any) -> None:
            self.program = program
            self.at_slots = program.at_slots

        def step_of_all(self, given: Any) -> Any:
            made = self.program.step_of_all(given)
            return [{**one, "next_token": np.full_like(one["next_token"], VOCABULARY)} for one in made]

    server.generator._programs = {name: Spoilt(one) for name, one in programs.items()}
    try:
        status, found = server.post(COMPLETIONS, body)
        assert (status, found["error"]["code"]) == (500, "not_finite")
        with server.streaming(COMPLETIONS, body) as events:
            kind, data = [*events][-1]
        assert (kind, json.loads(data)["error"]["code"]) == ("error", "not_finite")
    finally:
        server.generator._programs = programs
    assert server.complete(PROMPT, max_tokens=3)["token_ids"] == tokens[:3]


def test_the_command_serves_in_one_process_until_a_signal(
    build: Path, tokens: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        client = Client(free.getsockname()[1])
    found: list[list[int]] = []

    def ask() -> None:
        try:
            until(lambda: _healthy(client))
            found.append(client.complete(PROMPT, max_tokens=9)["token_ids"])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    asks = threading.Thread(target=ask)
    asks.start()
    assert invoke(["serve", str(build), "--port", str(client.port), "--drain", "1"]) == 0
    asks.join()
    assert found == [tokens[:9]]
    lines = capsys.readouterr()
    assert lines.out == f"serving on http://127.0.0.1:{client.port}; Ctrl-C ends it\n"
    assert lines.err == "ends: no more requests are taken, open ones have 1 s\n"


def _healthy(client: Client) -> bool:
    try:
        return client.get("/health")[0] == 200
    except ConnectionError:
        return False


def test_a_full_queue_and_a_deadline_are_reported(server: LocalServer) -> None:
    """Two run and two wait; a fifth hears when to come again. A request ends at its deadline whether it runs or waits."""
    many, short = {"prompt": [1], "max_tokens": 127}, {"prompt": [1], "max_tokens": 127, "timeout": 3}
    with (
        held(server),
        server.streaming(COMPLETIONS, short) as runs,
        server.streaming(COMPLETIONS, many),
        server.streaming(COMPLETIONS, many),
        server.streaming(COMPLETIONS, short) as waits,
    ):
        status, headers, text = server.request("POST", COMPLETIONS, json.dumps(many).encode())
        assert (status, headers["retry-after"], json.loads(text)["error"]["code"]) == (429, "1", "queue_full")
        for events in (runs, waits):
            assert json.loads(next(events)[1])["choices"][0]["finish_reason"] == "timeout"
    until(lambda: server.batch.slots.used == server.batch.slots.waiting == 0)


class Starved:
    """A session that finds no memory on rank 1 for one of its nodes, from when `full` is set."""

    full, node = threading.Event(), "layers.1.o.MatMul"

    def __init__(self, session: Any) -> None:
        self.session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run_with_iobinding(self, binding: Any) -> None:
        is_its = any(output.name.startswith(self.node) for output in self.session.get_outputs())
        if self.full.is_set() and threading.current_thread().name.endswith(" 1") and is_its:
            text = f"Non-zero status code returned while running MatMul node. Name:'{self.node}'"
            raise RuntimeError(
                f"{text} Status Message: Failed to allocate memory for requested buffer of size 18874368"
            )
        self.session.run_with_iobinding(binding)


def test_a_rank_without_memory_ends_streams_with_its_name_and_op(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_session = sessions.new_session
    monkeypatch.setattr(sessions, "new_session", lambda *given, **more: Starved(new_session(*given, **more)))
    (tmp_path / "plan.yaml").write_text(
        "ranks: 2\nsharding: {'layers.1.o': rowwise}\ngenerate: {slots: 2, length: 128}\n"
    )
    compile_model(build.parent / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    events = list[tuple[str, str]]()

    def ask(front: Front) -> None:
        client = Client(int(front.address.rpartition(":")[2]))
        with client.streaming(COMPLETIONS, {"prompt": [1], "max_tokens": 127}) as found:
            next(found)
            Starved.full.set()
            events.extend(found)

    asking = list[threading.Thread]()

    def began(front: Front) -> None:
        asking.append(threading.Thread(target=ask, args=(front,)))
        asking[0].start()

    monkeypatch.setattr(serving, "report_address", began)
    job = Job(folder=str(tmp_path / "build"), serving=ServerSettings(port=0))
    try:
        with pytest.raises(RankError, match=r"(?s)rank 1 failed in MatMul \(layers.1.o.MatMul\): .*\n  help: "):
            serving.run_threads(job, open_artifact(tmp_path / "build").manifest)
    finally:
        Starved.full.clear()
    asking[0].join(60)
    kind, data = events[-1]
    assert kind == "error"
    assert "rank 1 failed in MatMul (layers.1.o.MatMul)" in json.loads(data)["error"]["message"]


@contextmanager
def held(server: LocalServer) -> Iterator[threading.Event]:
    """Steps do not end meanwhile; the event is set once one has begun."""
    release, entered = threading.Event(), threading.Event()
    begin = server.generator.begin

    def wait(*given: Any) -> Any:
        entered.set()
        release.wait(60)
        return begin(*given)

    server.generator.begin = wait  # type: ignore[method-assign]
    try:
        yield entered
    finally:
        server.generator.begin = begin  # type: ignore[method-assign]
        release.set()
