"""Answers of `/v1/responses`, for text and calls of tools: the items of an output, as one document or as events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from partc.cli.server.answer import Answer, Delta, usage_of
from partc.cli.server.engine import Engine
from partc.cli.server.refusals import RefusedError
from partc.cli.server.stream import EventStream
from partc.cli.text.tool_calls import Call

_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def document(answer: Answer, deltas: Sequence[Delta]) -> dict[str, Any]:
    """Returns the complete answer to a request."""
    text = "".join(one.text for one in deltas)
    last = deltas[-1]
    return _document(
        answer, _status(last.finish), last.finish, [*_message_items(answer, text, last), *_calls(answer, last)]
    )


class ResponseStream(EventStream):
    """An answer in progress, as the events of `/v1/responses`."""

    def __init__(self, answer: Answer, engine: Engine) -> None:
        super().__init__([answer], engine)
        self._answer, self._count, self._shown = answer, 0, ""

    async def _only(self) -> AsyncGenerator[tuple[str, bool], None]:
        """Yields the events, joined where several are ready, each with whether it is the last."""
        answer, text, begun = self._answer, "", False
        begin = {"response": _document(answer, "in_progress", "", [])}
        yield self._event("response.created", begin) + self._event("response.in_progress", begin), False
        place = {"item_id": _message_id(answer), "output_index": 0, "content_index": 0}
        while True:
            try:
                delta = await answer.next(self._engine)
            except RefusedError as error:
                fault = error.body()["error"]
                yield self._event("error", {name: fault[name] for name in ("code", "message", "param")}), True
                return
            text += delta.text
            ends = bool(delta.finish)
            has_message = bool(text) or (ends and not delta.calls)
            events = ""
            if has_message and not begun:
                begun = True
                item = {"output_index": 0, "item": _message(answer, "in_progress", [])}
                events += self._event("response.output_item.added", item)
                events += self._event("response.content_part.added", place | {"part": _part("")})
            if delta.text:
                more = place | {"delta": delta.text, "logprobs": []}
                events += self._event("response.output_text.delta", more)
            if ends:
                yield events + "".join(self._last(text, delta, begun, place)), True
                return
            if events:
                yield events, False

    def _last(self, text: str, delta: Delta, has_message: bool, place: Mapping[str, Any]) -> Iterator[str]:
        """Yields the events after the last token."""
        answer, items = self._answer, list[dict[str, Any]]()
        if has_message:
            items += _message_items(answer, text, delta)
            yield self._event("response.output_text.done", {**place, "text": text, "logprobs": []})
            yield self._event("response.content_part.done", {**place, "part": _part(text)})
            yield self._event("response.output_item.done", {"output_index": 0, "item": items[0]})
        for at, item in enumerate(_calls(answer, delta), len(items)):
            of = {"item_id": item["id"], "output_index": at}
            new = item | {"status": "in_progress", "arguments": ""}
            yield self._event("response.output_item.added", {"output_index": at, "item": new})
            yield self._event("response.function_call_arguments.delta", of | {"delta": item["arguments"]})
            done = of | {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", done)
            yield self._event("response.output_item.done", {"output_index": at, "item": item})
            items.append(item)
        status = _status(delta.finish)
        yield self._event(f"response.{status}", {"response": _document(answer, status, delta.finish, items)})

    def _event(self, kind: str, fields: Mapping[str, Any]) -> str:
        body = _ENCODE({"type": kind, "sequence_number": self._count, **fields})
        self._count += 1
        return f"event: {kind}\ndata: {body}\n\n"


def _status(finish: str) -> str:
    return "completed" if finish in ("stop", "tool_calls") else "incomplete"


def _message_id(answer: Answer) -> str:
    return f"msg_{answer.number}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(answer: Answer, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": _message_id(answer), "type": "message", "status": status, "role": "assistant", "content": content}


def _message_items(answer: Answer, text: str, last: Delta) -> list[dict[str, Any]]:
    """Returns the message item of an answer; none where the answer has only calls."""
    return [_message(answer, _status(last.finish), [_part(text)])] if text or not last.calls else []


def _calls(answer: Answer, last: Delta) -> list[dict[str, Any]]:
    """Returns the items of an answer's calls of tools."""
    return [_call(answer, at, call) for at, call in enumerate(last.calls)]


def _call(answer: Answer, at: int, call: Call) -> dict[str, Any]:
    name = f"{answer.number}_{at}"
    of = {"id": f"fc_{name}", "type": "function_call", "status": "completed", "call_id": f"call_{name}"}
    return {**of, "name": call.name, "arguments": call.arguments}


def _document(answer: Answer, status: str, finish: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    reason = "max_output_tokens" if finish == "length" else finish
    usage = None
    if finish:
        counts = usage_of([answer])
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": reason} if status == "incomplete" else None,
        "model": answer.model,
        "output": items,
        "previous_response_id": None,
        **(answer.completion.response or {}),
        "usage": usage,
    }
