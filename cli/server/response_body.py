"""Converts the body of a request to `/v1/responses` to the body of an equivalent conversation.

The server stores nothing: a client sends the whole conversation, and `previous_response_id` and `store: true` are refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from partc.cli.server.body_fields import Labels, Sampling, Strict
from pydantic import BeforeValidator, Field, model_validator

_MOST_ITEMS = _MOST_PARTS = 1024
_TEXTS = ("input_text", "output_text", "text")


def _text(content: object) -> object:
    """Returns the text of a content, which is a text or a list of parts; raises ValueError if a part is not a text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > _MOST_PARTS:
        raise ValueError(f"is a text, or a list of at most {_MOST_PARTS:,} parts with the type 'input_text'")
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS or not isinstance(part.get("text"), str):
            raise ValueError(f"has the part {json.dumps(part)[:80]} at {at}; this model reads text alone")
    return "".join(part["text"] for part in content)


def _items(items: object) -> object:
    """Returns the items of an input, each with its type; raises ValueError for an unknown type, or too many items."""
    if isinstance(items, str):
        return [{"type": "message", "role": "user", "content": items}]
    if not isinstance(items, list) or not items or len(items) > _MOST_ITEMS:
        raise ValueError(f"is a text, or a list of 1 to {_MOST_ITEMS:,} items")
    for at, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind not in ("message", "function_call", "function_call_output"):
            raise ValueError(
                f"has an item of the type {json.dumps(kind)[:80]} at {at}; this model reads text and calls"
            )
    return [{"type": "message", **item} for item in items]


class _Part(Strict):
    id: str | None = None
    status: str | None = None


class _MessageItem(_Part):
    type: Literal["message"]
    role: Annotated[str, Field(pattern="^(system|developer|user|assistant)$")]
    content: Annotated[str, BeforeValidator(_text)]


class _CallItem(_Part):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _OutputItem(_Part):
    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[str, BeforeValidator(_text)]


class _ResponseTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Format(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _refuse_without_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError(f"has the type {self.type} and {'no' if self.schema_ is None else 'a'} schema")
        return self


class _Text(Strict):
    format: _Format = _Format()
    verbosity: Literal["medium"] = "medium"


Item = Annotated[_MessageItem | _CallItem | _OutputItem, Field(discriminator="type")]
_SAME = {*Labels.model_fields, *Sampling.model_fields, "stream"}
"""Fields that the body of a conversation has too."""


class ResponseBody(Labels, Sampling):
    """The body of a request to `/v1/responses`."""

    input: Annotated[list[Item], BeforeValidator(_items)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    tools: list[_ResponseTool] = Field(default_factory=list)
    tool_choice: str | dict[str, str] = "auto"
    parallel_tool_calls: bool = True
    text: _Text = _Text()
    truncation: Literal["disabled"] = "disabled"

    def chat(self) -> dict[str, Any]:
        """Returns the equivalent body of `/v1/chat/completions`."""
        body = self.model_dump(include=_SAME, exclude_none=True)
        body |= {"messages": self._messages(), "max_completion_tokens": self.max_output_tokens}
        if self.tools:
            tools = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools]
            body |= {"tools": [{"type": "function", "function": tool} for tool in tools]}
            body |= {"tool_choice": self._choice(), "parallel_tool_calls": self.parallel_tool_calls}
        form = self.text.format
        if form.type == "json_schema":
            body["response_format"] = {"type": form.type, "json_schema": {"schema": form.schema_}}
        elif form.type == "json_object":
            body["response_format"] = {"type": form.type}
        return body

    def repeated(self) -> dict[str, Any]:
        """Returns the fields of the request that an answer repeats."""
        text = self.text.model_dump(by_alias=True, exclude_none=True)
        tools = [tool.model_dump() for tool in self.tools]
        names = ("instructions", "max_output_tokens", "parallel_tool_calls", "tool_choice", "truncation", "user")
        same = {name: getattr(self, name) for name in names}
        drawn = {"temperature": self.temperature, "top_p": self.top_p}
        return {**same, **drawn, "metadata": self.metadata or {}, "tools": tools, "text": text, "store": False}

    def _choice(self) -> object:
        match self.tool_choice:
            case {"type": "function", "name": name}:
                return {"type": "function", "function": {"name": name}}
        return self.tool_choice

    def _messages(self) -> list[dict[str, Any]]:
        """Returns the messages of the items; calls are added to the assistant's message before them."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            match item:
                case _MessageItem():
                    messages.append({"role": item.role, "content": item.content})
                case _OutputItem():
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
                case _CallItem():
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant"})
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    messages[-1].setdefault("tool_calls", []).append(call)
        return messages
