"""Sends the answer to a request as server-sent events, as its tokens arrive.

Tokens that are ready together become one event and one write: the cost of a token is the system call that wakes its reader.
Between the first and the last event only text and tokens differ, so the rest of an event is encoded once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from partc.cli.server.answer import Answer, Delta
from partc.cli.server.engine import LEFT, Engine, Ticket
from partc.cli.server.refusals import RefusedError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class _Choice:
    """One choice of an answer in progress, as events."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        head, _, rest = _ENCODE(answer.chunk(Delta("", [], ""), False)).rpartition('""')
        middle, _, tail = rest.rpartition("[]")
        self._around = f"data: {head}", middle, f"{tail}\n\n"

    async def next(self, engine: Engine) -> tuple[str, bool, bool]:
        """Returns the next events, whether they are the last ones, and whether the answer has failed."""
        answer = self.answer
        first = not answer.num_tokens
        try:
            delta = await answer.next(engine)
        except RefusedError as error:
            return f"event: error\ndata: {_ENCODE(error.body())}\n\n", True, True
        if not (first or delta.finish or answer.completion.counts_always or answer.completion.logprobs):
            head, middle, tail = self._around
            return f"{head}{_ENCODE(delta.text)}{middle}{_ENCODE(delta.tokens)}{tail}", False, False
        return f"data: {_ENCODE(answer.chunk(delta, first))}\n\n", bool(delta.finish), False


class EventStream(Response):
    """An answer in progress, with one choice or several, as the response to its request."""

    media_type = "text/event-stream"

    def __init__(self, answers: Sequence[Answer], engine: Engine) -> None:
        self._answers, self._engine = answers, engine
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the answer ends, or its client has gone."""
        with ended_when_left(receive, self._engine, [one.ticket for one in self._answers]):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with aclosing(self._all() if len(self._answers) > 1 else self._only()) as parts:
                async for events, ends in parts:
                    await send({"type": "http.response.body", "body": events.encode(), "more_body": not ends})

    async def _only(self) -> AsyncGenerator[tuple[str, bool], None]:
        """Yields the events of the only choice, joined where several are ready, each with whether it is the last."""
        choice, ends = _Choice(self._answers[0]), False
        while not ends:
            events, ends, fails = await choice.next(self._engine)
            yield events + (self._end() if ends and not fails else ""), ends

    async def _all(self) -> AsyncGenerator[tuple[str, bool], None]:
        """Yields the events of all choices as they arrive, in the same form; a failure ends all choices."""
        waiting = {self._task(choice): choice for choice in map(_Choice, self._answers)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                text, fails = "", False
                for task in done:
                    choice = waiting.pop(task)
                    events, ends, has_failed = task.result()
                    text, fails = text + events, fails or has_failed
                    if not ends:
                        waiting[self._task(choice)] = choice
                yield text + ("" if fails or waiting else self._end()), fails or not waiting
                if fails:
                    return
        finally:
            for task in waiting:
                task.cancel()

    def _task(self, choice: _Choice) -> asyncio.Task[tuple[str, bool, bool]]:
        return asyncio.create_task(choice.next(self._engine))

    def _end(self) -> str:
        """Returns the last events of an answer."""
        first = self._answers[0]
        counts = f"data: {_ENCODE(first.counts(self._answers))}\n\n" if first.completion.counts else ""
        return f"{counts}data: [DONE]\n\n"


@contextmanager
def ended_when_left(receive: Receive, engine: Engine, tickets: Sequence[Ticket]) -> Iterator[None]:
    """A context that ends requests as soon as their client disconnects, and at its exit those that are still open."""

    def end() -> None:
        for ticket in tickets:
            engine.end(ticket, LEFT)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        end()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        end()
