"""The server's side of the loop of steps: open requests, their news, and the admission of new ones.

All of it runs in the event loop of the server's thread. A request that has ended, by its last token, its deadline, its client or a failure,
is forgotten here at once; if the ranks still run it, they are sent a cancellation.
"""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from partc.cli.server.link import MOST_BYTES
from partc.cli.server.metrics import Metrics
from partc.cli.server.refusals import RefusedError, without_traceback
from partc.runtime.generation.adapters import AdapterChange
from partc.runtime.generation.request import Request

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_RETRY = 1
LEFT = "left"
"""The reason for the end of a request whose client has disconnected."""


class State(enum.Enum):
    """The state of the ranks, which decides about new requests: they are taken in `READY`."""

    STARTING = "the ranks are loading"
    READY = "ok"
    DRAINING = "the server ends"
    FAILED = "the ranks have failed"


Score: TypeAlias = tuple[float, list[tuple[int, float]]]


@dataclass(frozen=True)
class Tokens:
    """Tokens of one request, in order; `finish` is the reason for which the last token ends it, empty if it does not.

    `scores`: the tokens' scores, and `of_prompt` those of tokens of the prompt, if the request has `logprobs`: each a log probability, and
    the likely tokens with their numbers and log probabilities.
    """

    numbers: list[int]
    finish: str
    scores: list[Score] = field(default_factory=list)
    of_prompt: list[Score] = field(default_factory=list)


@dataclass(frozen=True)
class RequestEnd:
    """The end of a request by the server, with the reason: `timeout`, `shutdown`, `stop`, or `LEFT`."""

    finish: str


@dataclass(frozen=True)
class Failed:
    """The failure of the ranks, with its text."""

    text: str


News: TypeAlias = Tokens | RequestEnd | Failed


@dataclass(eq=False)
class Ticket:
    """An open request: its number, and the news that its answer has not yet taken.

    `cached`: the number of its prompt's tokens that were in the ranks' caches, and were not read. `embedding`: that of its prompt, float32
    as base64, once it has ended.
    """

    number: int
    begun: float
    deadline: asyncio.TimerHandle | None = None
    has_token: bool = False
    cached: int = 0
    embedding: str = ""
    _news: list[News] = field(default_factory=list)
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, news: News) -> None:
        """Adds news; a waiting reader wakes up once for all news that arrives."""
        self._news.append(news)
        self._has_news.set()

    async def news(self) -> list[News]:
        """Waits for news, and returns all news since the last call; for one reader."""
        await self._has_news.wait()
        self._has_news.clear()
        found, self._news = self._news, []
        return found


class Engine:
    """The open requests of a server, and its connection to the loop of steps."""

    def __init__(self, slots: int, queue: int, metrics: Metrics) -> None:
        self.state = State.STARTING
        self.metrics = metrics
        self.most = slots + queue
        """The number of requests that may run or wait, including those whose bodies are being read."""
        self._open: dict[int, Ticket] = {}
        self._read = 0
        self._next = 0
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[bytes] = []
        self.adapters: list[str] = []
        """The names of the adapters by place; empty for free places."""
        self._changes: deque[tuple[AdapterChange, asyncio.Future[str]]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles the messages of a loop of steps until it ends."""
        self._writer = writer
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
        except (ConnectionError, ValueError):
            pass  # its end is what the launching process reports
        finally:
            writer.close()
            if self._writer is writer:  # and not that of ranks that were started since
                self._writer = None
                self.metrics.used = self.metrics.waiting = 0
                if self.state is State.READY:
                    self.state = State.FAILED

    @contextmanager
    def place(self) -> Iterator[None]:
        """Reserves a place in the queue while a request is read and submitted; raises RefusedError if there is none."""
        self._refuse_where_none_is_taken()
        if (count := len(self._open) + self._read) >= self.most:
            raise RefusedError(429, f"{count} requests are open, and no more can wait", code="queue_full", retry=_RETRY)
        self._read += 1
        try:
            yield
        finally:
            self._read -= 1

    def _refuse_where_none_is_taken(self) -> None:
        if self.state is not State.READY or self._writer is None:
            raise RefusedError(503, f"no request is taken: {self.state.value}", code="unavailable", retry=_RETRY)

    def refuse_too_many(self, count: int) -> None:
        """Raises RefusedError if the choices of one request, which has reserved one place, are too many."""
        if count > self.most:
            fact = f"{count} choices are more than the {self.most} requests that may run or wait; ask for fewer"
            raise RefusedError(400, fact, "n")
        if (taken := len(self._open) + self._read - 1) + count > self.most:
            raise RefusedError(
                429, f"{taken} requests are open, and no {count} more can wait", code="queue_full", retry=_RETRY
            )

    def submit(self, request: Request, timeout: float) -> Ticket:
        """Sends a request to the ranks; raises RefusedError if they take none now."""
        self._refuse_where_none_is_taken()
        if request.adapter and request.adapter not in self.adapters:
            raise RefusedError(404, f"the adapter '{request.adapter}' has left", "model", "model_not_found")
        ticket = Ticket(self._next, time.monotonic())
        self._next += 1
        self._open[ticket.number] = ticket
        self._empty.clear()
        self.metrics.prompt_tokens += request.read
        ticket.deadline = asyncio.get_running_loop().call_later(timeout, self.end, ticket, "timeout")
        self._send({"admit": ticket.number, "request": request.packed()})
        return ticket

    async def change(self, change: AdapterChange) -> None:
        """Loads or unloads an adapter for later requests; raises RefusedError if that fails."""
        self._refuse_where_none_is_taken()
        if not change.file:
            self.adapters = ["" if name == change.name else name for name in self.adapters]
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._changes.append((change, done))
        self._send({"change": change.packed()})
        if problem := await done:
            raise RefusedError(400 if self.state is State.READY else 500, problem, "lora_name")

    def end(self, ticket: Ticket, finish: str) -> None:
        """Ends a request that is still open; its slot is free two steps later."""
        if self._forget(ticket, finish):
            ticket.add(RequestEnd(finish))
            self._send({"cancel": ticket.number})

    def fail(self, text: str) -> None:
        """Records that the ranks have failed: every open request ends with this text."""
        if self.state is not State.DRAINING:
            self.state = State.FAILED
        changes = [*self._changes]
        self._changes.clear()
        for _, done in changes:
            if not done.done():
                done.set_result(without_traceback(text))
        for ticket in [*self._open.values()]:
            self._forget(ticket, "error")
            ticket.add(Failed(without_traceback(text)))

    async def drain(self, seconds: float) -> None:
        """Takes no more requests, gives the open ones `seconds` seconds, and ends the loop of steps."""
        self.state = State.DRAINING
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            for ticket in [*self._open.values()]:
                self.end(ticket, "shutdown")
        self._send({"end": True})

    def _take(self, message: dict[str, Any]) -> None:
        for problem in message.get("changed", ()):
            if self._changes and not (found := self._changes.popleft()[1]).done():
                found.set_result(problem)
        if "adapters" in message:  # those that leave are not among them, though ranks have them still
            leaving = {one.name for one, _ in self._changes if not one.file}
            self.adapters = ["" if name in leaving else name for name in message["adapters"]]
        if "ready" in message and self.state is not State.DRAINING:
            self.state = State.READY
        if "made" in message:
            for number, count in message["cached"]:
                self.metrics.cached_tokens += count
                if (ticket := self._open.get(number)) is not None:
                    ticket.cached = count
            drafted, accepted = message.get("drafts", (0, 0))
            self.metrics.drafted_tokens += drafted
            self.metrics.accepted_tokens += accepted
            for number, embedding in message.get("embedded", ()):
                if (ticket := self._open.get(number)) is not None:
                    ticket.embedding = embedding
            self._tokens(message["made"])
            self.metrics.used, self.metrics.waiting = message["used"], message["waiting"]
            for seconds in message["seconds"]:
                self.metrics.steps.add(seconds)

    def _tokens(self, made: Iterable[Any]) -> None:
        for number, tokens, finish, *scores in made:
            ticket = self._open.get(number)
            if ticket is None:
                continue
            self.metrics.completion_tokens += len(tokens) - (finish == "error")
            if finish:
                self._forget(ticket, finish)
            ticket.add(Tokens(tokens, finish, *scores))
            if tokens and not ticket.has_token:
                ticket.has_token = True
                self.metrics.first.add(time.monotonic() - ticket.begun)

    def _forget(self, ticket: Ticket, finish: str) -> bool:
        """Removes a request from the open ones; returns False if it is not among them."""
        if self._open.pop(ticket.number, None) is None:
            return False
        if ticket.deadline is not None:
            ticket.deadline.cancel()
        self.metrics.requests[finish] += 1
        if not self._open:
            self._empty.set()
        return True

    def _send(self, message: dict[str, Any]) -> None:
        """Sends a message, in one write with all others of this turn of the event loop, so that simultaneous requests join together."""
        data = _ENCODE(message).encode() + b"\n"
        assert len(data) < MOST_BYTES
        self._unsent.append(data)
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._send_all)

    def _send_all(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)
