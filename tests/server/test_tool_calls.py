"""Calls of tools come out of the text of an answer in all forms, whole and as a stream, no other letter is lost, and schemas bind."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partc.cli.text.tokenizer import open_tokenizer
from partc.cli.text.tool_calls import FORMS, Call, CallText, form_of
from partc.runtime.generation import schema
from server_case import SCRIPT, LocalServer, write_script, write_tokenizer

CHAT = "/v1/chat/completions"
NAMES = ("f", "g_2")
F = Call("f", '{"x": 1}')
G = Call("g_2", '{"y": "a</tool_call>;é", "z": [true, null]}')
G_TEXT = '{"y": "a</tool_call>;é", "z": [true, null]}'


def divided(form: str, parts: list[str], names: tuple[str, ...] = NAMES, most: int | None = None) -> Any:
    """Content and calls of a text that comes in parts."""
    text = CallText(FORMS[form], names, most)
    content = "".join(text.add(part) for part in parts)
    rest, calls = text.end()
    return content + rest, calls


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALLS = [
    ("hermes", hermes("f", '{"x": 1}'), "", [F]),
    ("hermes", f"I look.\n{hermes('f', F.arguments)}\n{hermes('g_2', G_TEXT)}", "I look.", [F, G]),
    ("hermes", f"a {hermes('f', F.arguments)} b", "a b", [F]),
    ("llama3", '{"name": "f", "parameters": {"x": 1}}', "", [F]),
    ("llama3", f'\n<|python_tag|>{{"name": "f", "parameters": {{"x": 1}}}}; {{"name": "g_2", "parameters": {G_TEXT}}}', "", [F, G]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {{"x": 1}}}}, {{"name": "g_2", "arguments": {G_TEXT}}}]', "", [F, G]),
    ("mistral", f'Look: [TOOL_CALLS]f[ARGS]{{"x": 1}}[TOOL_CALLS]g_2{G_TEXT}', "Look:", [F, G]),
    ("pythonic", "[f(x=1), g_2(y='a</tool_call>;é', z=[True, None])]", "", [F, G]),
    ("pythonic", "<|python_start|>[f(x=1)]<|python_end|>", "", [F]),
]  # fmt: skip
TEXTS = [
    ("hermes", hermes("other", "{}")),
    ("hermes", hermes("f", "[1]")),
    ("hermes", hermes("f", '{"x": NaN}')),
    ("hermes", hermes("f", '{"x": 1e999}')),
    ("hermes", hermes("f", '{"x": "\\ud800"}')),
    ("hermes", hermes("f", '{"x": ' + "[" * 100_000)),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", "<tool_"),
    ("llama3", '{"x": 1} is JSON'),
    ("llama3", ' see {"name": "f", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, 1]'),
    ("mistral", "[TOOL_CALLS]f"),
    ("pythonic", "[1, 2] are numbers"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(x=open('a'))]"),
    ("pythonic", "[f(**{})]"),
    ("pythonic", "[f(x=1e999)]"),
    ("pythonic", "[" * 1000),
    ("pythonic", "[f(x='\\ud800')]"),
    ("pythonic", " "),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CALLS)
def test_calls_come_out_of_text(form: str, text: str, content: str, calls: list[Call]) -> None:
    assert divided(form, [text]) == divided(form, [*text]) == (content, calls)
    assert divided(form, [text], most=1) == (content, calls[:1])


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    assert divided(form, [text]) == (text, [])
    if len(text) < 10_000:
        assert divided(form, [*text]) == (text, [])


MARKS = [mark for form in FORMS.values() for mark in form.controls]
PARTS = st.sampled_from(['{"name": "f", "arguments": {}}', "f(x=1)", *"<[{}]>; \nab", *MARKS])


@given(st.sampled_from([*FORMS]), st.lists(PARTS, max_size=9))
@settings(deadline=None)
def test_text_is_divided_in_one_way_however_it_comes(form: str, parts: list[str]) -> None:
    content, calls = divided(form, parts)
    assert (content, calls) == divided(form, [*"".join(parts)])
    assert calls or content == "".join(parts)
    assert divided(form, parts, names=()) == ("".join(parts), [])


def test_the_form_is_that_of_the_template(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path)))
    for text, form in (
        ("{{ tools }}<tool_call>", "hermes"),
        ("<tool_call><function=f>", ""),
        ("<tool_call>f<arg_key>", ""),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3"),
        ("[func_name1(params_name1=value)]", "pythonic"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("{{ tools }}", ""),
    ):
        assert form_of(text, tokenizer) == form
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    assert form_of("{{ tools }}", tokenizer) == "mistral"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"const": None, "type": "object"}, "strict": None}}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script(tmp_path_factory.mktemp("tools"), "ranks: 1\ngenerate: {slots: 2, length: 400, chunk: 32}\n")


@pytest.fixture(scope="module")
def server(built: Path) -> Iterator[LocalServer]:
    with LocalServer(built, built.parent / "tokenizer.json") as found:
        yield found


def test_calls_are_answered_and_streamed(server: LocalServer) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    status, found = server.post(CHAT, {**body, "tool_choice": "auto"})
    assert status == 200, found
    choice = found["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Sure.")
    assert (call["type"], call["function"], len(call["id"])) == ("function", {"name": "f", "arguments": '{"x": 1}'}, 9)

    with server.streaming(CHAT, body) as events:
        chunks = [json.loads(data)["choices"][0] for _, data in events if data != "[DONE]"]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "Sure."
    (last,) = [chunk for chunk in chunks if "tool_calls" in chunk["delta"]]
    (streamed,) = last["delta"]["tool_calls"]
    assert (last["finish_reason"], streamed["index"], streamed["function"]) == ("tool_calls", 0, call["function"])

    for options, finish in (({"tool_choice": "none"}, "stop"), ({"tools": []}, "stop"), ({"max_tokens": 6}, "length")):
        status, found = server.post(CHAT, {**body, **options})
        choice = found["choices"][0]
        assert (choice["finish_reason"], "tool_calls" in choice["message"]) == (finish, False)

    turns = [*body["messages"], choice["message"] | {"content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "content": "7</s>", "tool_call_id": call["id"]})
    status, text = server.post("/tokenize", {"messages": turns, "tools": [TOOL]})
    prompt = server.post("/detokenize", {"tokens": text["tokens"]})[1]["prompt"]
    assert prompt == f'tf{{"const": null, "type": "object"}}userhiassistantcf1tool7</s>{call["id"]}U'
    assert SCRIPT.index("</s>") + 1 not in text["tokens"]  # the client's are letters


def test_tools_that_cannot_be_met_are_refused(server: LocalServer, tmp_path: Path) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"a": deep}

    def tool(**function: Any) -> dict[str, Any]:
        return {"tools": [{"type": "function", "function": function}]}

    def turn(**message: Any) -> dict[str, Any]:
        return {"messages": [message]}

    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for change, fact in (
        (tool(), "'tools.0.function.name' is wrong: Field required"),
        (tool(name="a b"), "'tools.0.function.name' is wrong"),
        (tool(name="f", parameters=deep), "'tools.0.function.parameters' has more than 64 levels"),
        (tool(name="f", parameters=[]), "'tools.0.function.parameters' is not a JSON schema"),
        ({"tools": [TOOL, TOOL]}, "two tools have the name 'f'"),
        ({"tools": [{"type": "web_search"}]}, "'tools.0.type' is wrong: Input should be 'function'"),
        ({"tools": [TOOL] * 129}, "'tools' is wrong"),
        ({"tool_choice": "often"}, "'tool_choice' is not \"none\", \"auto\""),
        (turn(role="user"), "'messages.0' has no content"),
        (turn(role="user", content="a", tool_calls=[call]), "'messages.0' has tool_calls, and its role is user"),
        (turn(role="user", content="a", tool_call_id="a"), "'messages.0' has a tool_call_id"),
        (turn(role="assistant", tool_calls=[call | {"function": {"name": "f", "arguments": "[1]"}}]), "is not a text with a JSON object"),
    ):  # fmt: skip
        status, found = server.post(CHAT, {**body, **change})
        assert (status, fact in found["error"]["message"]) == (400, True), found


SHAPE = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["ab", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def formed(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}}


def test_answers_fit_a_schema_or_are_a_call_that_is_asked_for(server: LocalServer) -> None:
    """The model would write its script; others that run at the same time still do."""
    pytest.importorskip("llguidance", reason="an extra of the package")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 3.0, "seed": 4, "top_p": 0.5}):
        status, found = server.post(CHAT, {**body, **options, **formed(SHAPE)})
        assert status == 200, found
        answer = json.loads(found["choices"][0]["message"]["content"])
        assert (isinstance(answer["a"], int), answer["b"] in ("ab", None), len(answer)) == (True, True, 2)
        assert found["choices"][0]["finish_reason"] == "stop"
        status, found = server.post(CHAT, {**body, **options, "response_format": {"type": "json_object"}})
        assert isinstance(json.loads(found["choices"][0]["message"]["content"]), dict)
        plain = {"type": "function", "function": {"name": "f"}}
        other = {
            "type": "function",
            "function": {"name": "g", "parameters": {"$defs": {"d": SHAPE}, "$ref": "#/$defs/d"}},
        }
        for choice, names in (("required", {"f", "g"}), ({"type": "function", "function": {"name": "g"}}, {"g"})):
            status, found = server.post(CHAT, {**body, **options, "tools": [plain, other], "tool_choice": choice})
            assert status == 200, found
            (call,) = found["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] in names
            assert call["function"]["name"] == "f" or {*json.loads(call["function"]["arguments"])} == {"a", "b"}
    script = server.post(CHAT, body)[1]["choices"][0]["message"]["content"]
    assert script.startswith("Sure")


def test_formats_that_cannot_be_met_are_refused(server: LocalServer) -> None:
    pytest.importorskip("llguidance", reason="an extra of the package")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30}
    for change, fact in (
        ({"response_format": {"type": "xml"}}, "'response_format' is not of the type"),
        ({"response_format": {"type": "json_schema"}}, "'response_format' is not of the type"),
        (formed({"type": "strange"}), "the schema cannot be compiled: Invalid type: strange"),
        (formed({"type": "object", "unevaluatedProperties": False}), "the schema cannot be compiled: Unimplemented keys"),
        (formed({"$ref": "http://x/y"}), "the schema cannot be compiled"),
        (formed({"type": "string", "pattern": "("}), "the schema cannot be compiled: regex parse error: error: unclosed group"),
        (formed({"type": "string", "minLength": 29}), "no answer that fits its schema is found within its 30 tokens"),
        (formed({"enum": ["a" * 40_000]}), "the schema of the answer has 40,013 letters; at most 32,768"),
        ({**formed(SHAPE), "ignore_eos": True}, "it has a schema, and no token ends an answer"),
        ({"tool_choice": "required"}, "asks for a tool that is not in 'tools'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "asks for a tool that is not in"),
        ({"tools": [TOOL], "tool_choice": "required", **formed(SHAPE)}, "a call of a tool or has a format, not both"),
    ):  # fmt: skip
        status, found = server.post(CHAT, {**body, **change})
        assert (status, fact in found["error"]["message"]) == (400, True), found


def test_without_the_package_a_schema_is_refused(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    schema._tokenizer.cache_clear()
    schema._matcher.cache_clear()
    status, found = server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], **formed(SHAPE)})
    assert (status, found["error"]["message"]) == (400, "a schema needs the package llguidance")
    schema._tokenizer.cache_clear()
