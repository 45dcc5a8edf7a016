"""The answer to a request as server-sent events, written as tokens come.

Tokens that are there together are one event with all of them, and one write: what a token costs is the system's call that wakes its reader.
Of the events between the first and the last one only text and tokens differ, so the rest of them is encoded once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager

from partc.cli.server.answer import Answer, Delta
from partc.cli.server.engine import LEFT, Engine, Ticket
from partc.cli.server.refusals import RefusedError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class EventStream(Response):
    """An answer that is being made, as the response to its request."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, engine: Engine) -> None:
        self._answer, self._engine = answer, engine
        head, _, rest = _ENCODE(answer.chunk(Delta("", [], ""), False)).rpartition('""')
        middle, _, tail = rest.rpartition("[]")
        self._around = f"data: {head}", middle, f"{tail}\n\n"
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the answer ends, or its client has gone."""
        with ended_when_left(receive, self._engine, self._answer.ticket):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            events, ends = "", False
            while not ends:
                events, ends = await self._next()
                await send({"type": "http.response.body", "body": events.encode(), "more_body": not ends})

    async def _next(self) -> tuple[str, bool]:
        """The next events, and whether they are the last ones."""
        answer = self._answer
        first = not answer.made
        try:
            delta = await answer.next(self._engine)
        except RefusedError as error:
            return f"event: error\ndata: {_ENCODE(error.body())}\n\n", True
        if not (first or delta.finish or answer.completion.counts_always):
            head, middle, tail = self._around
            return f"{head}{_ENCODE(delta.text)}{middle}{_ENCODE(delta.tokens)}{tail}", False
        event = f"data: {_ENCODE(answer.chunk(delta, first))}\n\n"
        if not delta.finish:
            return event, False
        counts = f"data: {_ENCODE(answer.counts())}\n\n" if answer.completion.counts else ""
        return f"{event}{counts}data: [DONE]\n\n", True


@contextmanager
def ended_when_left(receive: Receive, engine: Engine, ticket: Ticket) -> Iterator[None]:
    """Ends a request whose client goes away meanwhile, and at the end one that is still open."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        engine.end(ticket, LEFT)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        engine.end(ticket, LEFT)
