"""Whatever a client sends is a request that can be met, or is refused with a status of its own: no body is a fault of the server."""

from __future__ import annotations

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


def read(reader: Reader, data: bytes) -> list[Completion]:
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
@settings(max_examples=100, deadline=None)
def test_any_document_is_met_or_refused(reader: Reader, odd: dict[str, object], fitting: dict[str, object]) -> None:
    for document in (odd, {**odd, **fitting}, fitting):
        for found in read(reader, json.dumps(document).encode()):
            assert [*faults_of(found.request, RECORD)] == []


@given(st.binary(max_size=60))
@settings(max_examples=50, deadline=None)
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
