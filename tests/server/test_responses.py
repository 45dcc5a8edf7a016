"""`/v1/responses` says what `/v1/chat/completions` says: text, calls, usage, whole and as events; what it cannot do it refuses by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from server_case import LocalServer, write_script

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("responses")
    built = write_script(folder, "ranks: 1\ngenerate: {slots: 2, length: 400, chunk: 32}\n")
    with LocalServer(built, folder / "tokenizer.json") as found:
        yield found


def of_chat(server: LocalServer, **body: Any) -> tuple[str, dict[str, Any]]:
    """The text and the usage of the same conversation as a chat."""
    status, found = server.post("/v1/chat/completions", body)
    assert status == 200, found
    return found["choices"][0]["message"]["content"], found["usage"]


def events_of(server: LocalServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.streaming(PATH, body) as events:
        found = [(kind, json.loads(data)) for kind, data in events]
    assert [one["sequence_number"] for _, one in found] == [*range(len(found))]
    assert all(kind == one["type"] for kind, one in found)
    return [one for _, one in found]


def test_text_is_that_of_a_chat(server: LocalServer) -> None:
    status, found = server.post(PATH, {"input": "hi", "instructions": "be", "max_output_tokens": 6, "user": "me"})
    assert status == 200, found
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    text, usage = of_chat(server, messages=messages, max_tokens=6)
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert [(part["type"], part["text"]) for part in item["content"]] == [("output_text", text)]
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (found["instructions"], found["max_output_tokens"], found["user"]) == ("be", 6, "me")
    counts = [found["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")]
    assert counts == [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    assert found["usage"]["input_tokens_details"]["cached_tokens"] >= 0


def test_calls_and_their_results_are_items(server: LocalServer) -> None:
    status, found = server.post(PATH, {"input": "hi", "tools": [TOOL]})
    assert status == 200, found
    message, call = found["output"]
    assert (found["status"], message["content"][0]["text"]) == ("completed", "Sure.")
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"x": 1}')

    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, message, call, result]
    status, again = server.post(PATH, {"input": turns, "tools": [TOOL]})
    assert status == 200, again
    shown = {"id": call["call_id"], "type": "function", "function": {"name": "f", "arguments": call["arguments"]}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Sure.", "tool_calls": [shown]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "7"},
    ]
    assert again["usage"]["input_tokens"] == of_chat(server, messages=messages, tools=[CHAT_TOOL])[1]["prompt_tokens"]


def test_events_add_up_to_the_whole(server: LocalServer) -> None:
    for body in ({"input": "hi", "tools": [TOOL]}, {"input": "hi", "max_output_tokens": 5}):
        whole = server.post(PATH, body)[1]
        events = events_of(server, body)
        kinds = [one["type"] for one in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == f"response.{whole['status']}"
        text = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
        assert text == whole["output"][0]["content"][0]["text"]
        done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        last = events[-1]["response"]
        for one in (*done, *last["output"], *whole["output"]):
            one.pop("id")
            one.pop("call_id", None)
        assert done == last["output"] == whole["output"]
        assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_format_binds_the_answer(server: LocalServer) -> None:
    pytest.importorskip("llguidance", reason="an extra of the package")
    form = {"type": "json_schema", "name": "s", "schema": {"enum": ["ab"]}, "strict": True}
    status, found = server.post(PATH, {"input": "hi", "text": {"format": form}, "max_output_tokens": 60})
    assert status == 200, found
    assert found["output"][0]["content"][0]["text"] == '"ab"'
    assert found["text"]["format"] == form


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"previous_response_id": "resp_1"}, "'previous_response_id' is not a field that this server knows"),
        ({"store": True}, "'store' is true: this server does not do that"),
        ({"input": []}, "'input' is a text, or a list of 1 to 1,024 items"),
        ({"input": [{"type": "reasoning"}]}, 'has an item of the type "reasoning" at 0'),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "this model reads text alone"),
        ({"tools": [{"type": "web_search"}]}, "'tools.0.type' is wrong"),
        ({"truncation": "auto"}, "'truncation' is wrong: Input should be 'disabled'"),
        (
            {"text": {"format": {"type": "json_schema", "name": "s"}}},
            "'text.format' has the type json_schema and no schema",
        ),
        ({"max_output_tokens": 0}, "it asks for 0 tokens; at least 1"),
    ],
)
def test_what_it_does_not_do_is_refused(server: LocalServer, change: dict[str, Any], fact: str) -> None:
    status, found = server.post(PATH, {"input": "hi", **change})
    assert (status, fact in found["error"]["message"]) == (400, True), found


def test_a_client_of_openai_reads_it(server: LocalServer) -> None:
    openai = pytest.importorskip("openai", reason="a client that is installed for this alone")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    response = client.responses.create(model="model.onnx", input="hi", tools=[TOOL])
    assert response.output_text == "Sure."
    assert [item.type for item in response.output] == ["message", "function_call"]
    with client.responses.stream(model="model.onnx", input="hi", tools=[TOOL]) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == "Sure."
