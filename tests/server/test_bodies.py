"""Whatever a client sends is a request that can be met, or is refused with a status of its own: no body is a fault of the server."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partc.cli.job.job import Job
from partc.cli.job.rank import _report
from partc.cli.server.bodies import Completion, Reader
from partc.cli.server.refusals import RefusedError, without_traceback
from partc.cli.text.chat_template import find_chat_template
from partc.cli.text.tokenizer import open_tokenizer
from partc.runtime.artifact.generation import GenerationRecord
from partc.runtime.generation.request import faults_of
from server_case import write_tokenizer

RECORD = GenerationRecord(
    tokens="t", position="p", count="c", next="n", logits="l", vocabulary=64, slots=2, length=32, chunk=4
)
FIELDS = (
    *(
        "prompt",
        "messages",
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "stream",
    ),
    *("stream_options", "timeout", "user", "n", "echo", "logprobs", "logit_bias", "tools", "response_format", "other"),
)
LEAVES = (
    st.none() | st.booleans() | st.integers(-3, 80) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.sampled_from(["user", "system", "text", "\ud800", "\x1b[2J", "m"])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x"]), inner)
    ),
    max_leaves=6,
)
FITTING = {
    "prompt": st.lists(st.integers(-1, 64), max_size=34) | st.text("abc", max_size=34),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text("ab", max_size=9)})
    ),
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    path: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Reader("m", RECORD, open_tokenizer(str(path)), find_chat_template(str(path)))


def read(reader: Reader, data: bytes) -> list[list[Completion]]:
    """The requests that a body makes as either kind; those that refuse it have a status, a text and a body."""
    found, refused = [], list[RefusedError]()
    for how in (reader.completion, reader.chat):
        try:
            found.append(how(data))
        except RefusedError as error:
            refused.append(error)
    assert all(400 <= error.status < 500 and str(error) for error in refused)
    assert all(json.dumps(error.body(), ensure_ascii=False).encode() for error in refused)
    return found


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES), st.fixed_dictionaries({}, optional=FITTING))
@settings(max_examples=40, deadline=None)
def test_any_document_is_met_or_refused(reader: Reader, odd: dict[str, object], fitting: dict[str, object]) -> None:
    for document in (odd, {**odd, **fitting}, fitting):
        for found in read(reader, json.dumps(document).encode()):
            assert all([*faults_of(one.request, RECORD)] == [] for one in found)


@given(st.binary(max_size=60))
@settings(max_examples=25, deadline=None)
def test_any_bytes_are_refused(reader: Reader, data: bytes) -> None:
    assert read(reader, data) == []


def test_clients_get_no_traceback() -> None:
    text = "Traceback (most recent call last):\n  File 'a'\n    x\n    ^\nMemoryError: 12 GB\npartc: this is a bug in partc"
    assert without_traceback(text) == "a rank has failed: MemoryError: 12 GB"
    assert without_traceback("rank 1 was killed\n  help: look") == "rank 1 was killed\n  help: look"


def test_memory_that_is_not_there_is_no_fault_of_partc(capfd: pytest.CaptureFixture[str]) -> None:
    _report(Job(folder="build"), 1, MemoryError("12 GB"))
    told = capfd.readouterr().err
    assert told.startswith("rank 1: no memory is left: 12 GB\n  help: ")
    assert "bug" not in told


def test_some_are_met(reader: Reader) -> None:
    assert len(read(reader, b'{"prompt": "abc"}')) == 1
    assert len(read(reader, b'{"messages": [{"role": "user", "content": "ab"}]}')) == 1


NUMBERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "timeout",
    "n",
    "best_of",
    "top_logprobs",
    "presence_penalty",
)
SWITCHES = ("stream", "echo", "store", "parallel_tool_calls")


def test_true_is_no_number_and_one_no_switch(reader: Reader) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for name, value in [
        *((name, value) for name in NUMBERS for value in (True, False)),
        *((name, 1) for name in SWITCHES),
    ]:
        assert read(reader, json.dumps({"prompt": [1], name: value}).encode()) == [], name
        assert read(reader, json.dumps({**chat, name: value}).encode()) == [], name
    for name, value in (("n", 1), ("presence_penalty", 0.0), ("logprobs", False), ("logprobs", 0)):
        assert len(read(reader, json.dumps({"prompt": [1], name: value}).encode())) == 1, name


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ([{"type": "text", "text": "a"}, IMAGE], "'messages.0.content' has a part of the type \"image_url\" at 1; this model reads text alone"),  # noqa: E501
        ([{"type": "text"}], "'messages.0.content' has no {\"type\": \"text\", \"text\": ...} at 0"),
        ([{"type": "text", "text": "a", "x": 1}], "'messages.0.content' has the field \"x\" in its part 0; leave it out"),
        (1, "'messages.0.content' is a text, or a list of parts with the type 'text'"),
        ([{}] * 2000, "'messages.0.content' has 2,000 parts; at most 1,024"),
        ("a" * 33, "the text has 33 letters, more than 32 tokens have, the length of this model"),
    ],
)  # fmt: skip
def test_what_a_message_may_be_is_said_without_the_names_of_validators(
    reader: Reader, content: object, fact: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        reader.chat(json.dumps({"messages": [{"role": "user", "content": content}]}).encode())
    assert str(caught.value) == fact


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(reader: Reader) -> None:
    class Untouched:
        """A tokenizer whose tokens are letters, and which reads no text."""

        def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
            return {"a": 0, "bc": 1}

    found = dataclasses.replace(reader, tokenizer=Untouched())
    with pytest.raises(RefusedError, match="the text has 65 letters, more than 32 tokens have"):
        found.completion(b'{"prompt": "%b"}' % (b"a" * 65))
    with pytest.raises(AttributeError):
        found.completion(b'{"prompt": "%b"}' % (b"a" * 64))


def test_documents_of_many_faults_are_refused_in_few_words(reader: Reader) -> None:
    many = {f"k{at}": 0 for at in range(70)}
    for body in (
        {"prompt": [1], **many},
        {"prompt": [1], "metadata": many},
        {"messages": [{}] * 1000},
        {"messages": [{"role": "user", "content": [{}] * 1000}]},
    ):
        for how in (reader.completion, reader.chat):
            with pytest.raises(RefusedError) as caught:
                how(json.dumps(body).encode())
            assert len(str(caught.value)) < 1000


def test_too_many_or_too_long_is_refused_with_the_field(reader: Reader) -> None:
    """In the form of OpenAI's errors."""
    chat = {"messages": [{"role": "user", "content": "a"}]}
    refused = [
        (
            reader.completion,
            {"prompt": [1], "logit_bias": {str(k): 1 for k in range(10_000)}},
            "logit_bias",
            "has 10,000 tokens",
        ),
        (reader.completion, {"prompt": [1], "n": 10_000}, "n", "less than or equal to 128"),
        (reader.chat, {**chat, "n": 10_000}, "n", "less than or equal to 128"),
        (reader.completion, {"prompt": [[1]] * 5_000}, "prompt", "5,000 prompts"),
        (
            reader.completion,
            {"prompt": [1] * 40, "echo": True, "logprobs": 1, "max_tokens": 0},
            "prompt",
            "has 40 tokens",
        ),
        (reader.chat, {**chat, "tools": [{"type": "function", "function": {}}]}, "tools", "function.name"),
        (reader.embeddings, {"input": [1, 2]}, "input", "gives no embeddings"),
    ]
    for read_body, body, field, fact in refused:
        with pytest.raises(RefusedError, match=fact) as caught:
            read_body(json.dumps(body).encode())
        error = caught.value.body()["error"]
        assert (caught.value.status, error["type"], error["param"]) == (400, "invalid_request_error", field)
