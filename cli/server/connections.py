"""The connections of a server: how many there are, and how much and for how long a client may send or leave unread.

uvicorn's protocol reads the HTTP. A `Connection` is between it and the socket, the transport of the one and the protocol of the other, and
passes no more bytes on than the present request needs:

| state | what is awaited | at most |
|---|---|---|
| `HEAD` | the head of a request | 16 KiB; 10 s from the connection's begin, or its last answer, on |
| `BODY` | its body | 1 MB, of which uvicorn has 64 KiB; 30 s (`app.py`) |
| `ANSWER` | the end of the answer | 30 s without the client reading; 16 KiB of what follows, then nothing is read |
| `CLOSING` | the end of the connection | 5 s |

Times begin with a state: a client that sends a byte now and then gains nothing. Where there are as many connections as there may be, a new
one displaces the oldest in the first of the states `CLOSING`, `HEAD` and `BODY`: who opens many and completes no request displaces its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import select
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from partc.cli.server.refusals import error_body

HEAD_BYTES = 16 << 10
HEAD_SECONDS = 10
HEADERS = 256
SPARE = 128
"""How many connections there may be besides those with a request that runs or waits."""
_UNREAD_SECONDS, _CLOSING_SECONDS = 30, 5
_AHEAD_BYTES = 16 << 10
_SLICE = 1024
"""Bytes that uvicorn gets at once: it parses all requests in them, also those that wait for the answer to an earlier one."""
_OTHER_FILES = 16
"""Files of the process that are left to others than connections."""
_LEAST = 4
_RETRY_SECONDS = 0.05
_YOUNG_SECONDS = 0.02
"""How long a connection stays: its client may be late with the head. With 26 connections the last of 1,024 new ones waits for 1 s."""
_TURN_SECONDS = 0.001
_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}
Application = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class State(enum.IntEnum):
    """What a connection waits for; those of the first state are closed first where there are too many."""

    CLOSING = 0
    HEAD = 1
    BODY = 2
    ANSWER = 3


class Connections:
    """The open connections, at most `most`, whose requests have bodies of `body` bytes at most."""

    def __init__(self, most: int, body: int) -> None:
        self.most, self.body = most, body
        self._open: set[Connection] = set()

    def around(self, application: Application) -> Application:
        """The application, whose answers' ends the connections hear of."""

        async def answered(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
            try:
                await application(scope, receive, send)
            finally:  # uvicorn may still write, where the application has failed
                asyncio.get_running_loop().call_soon(scope["state"]["connection"].look)

        return answered

    async def serve(self, listener: socket.socket, protocol: Callable[..., Any]) -> None:
        """Accepts connections and gives each a `protocol` of uvicorn, until it is cancelled."""
        loop = asyncio.get_running_loop()
        clock = loop.create_task(self._watch())
        try:
            while True:
                try:
                    end, _ = await loop.sock_accept(listener)
                except OSError:  # its client has gone, or the process has no more files or memory
                    self._displace()
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                try:
                    await self._admit(end, protocol)
                except BaseException as error:
                    end.close()
                    if not isinstance(error, OSError):
                        raise
        finally:
            clock.cancel()

    async def _admit(self, end: socket.socket, protocol: Callable[..., Any]) -> None:
        """Adds a connection, in the place of another one if need be."""
        while len(self._open) >= self.most and (young := self._displace()):
            await asyncio.sleep(young)
        if len(self._open) < self.most:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: Connection(self, protocol), end)
            return
        with end:
            end.send(_refusal(503, f"{self.most} connections have requests, and there are no more"))
        await asyncio.sleep(0)

    async def _watch(self) -> None:
        """Ends connections whose time is over."""
        while True:
            await asyncio.sleep(1)
            for connection in [*self._open]:
                connection.end_overdue()

    def _displace(self) -> float:
        """Ends a connection that waits for its client, if one does for long enough; else after how many seconds one may, 0 without one.

        A client that sends a head at once is never found with a part of it: those with a part are ended before those with none. What a
        client has sent is read before: after a long turn of the event loop it is old, and not because of its client.
        """
        waiting = [one for one in self._open if one.state is not State.ANSWER]
        since = asyncio.get_running_loop().time() - _YOUNG_SECONDS
        old = [one for one in waiting if one.since <= since]
        unread = _readable(one.fileno() for one in old if one.state is not State.CLOSING)
        if late := [one for one in old if one.state is State.CLOSING or one.fileno() not in unread]:
            min(late, key=lambda one: (one.state, not one.has_begun, one.since)).abort()
            return 0.0
        return max(min((one.since for one in waiting), default=since) - since, _TURN_SECONDS if old else 0.0)

    def add(self, connection: Connection) -> None:
        """Counts a connection."""
        self._open.add(connection)

    def discard(self, connection: Connection) -> None:
        """Counts a connection no longer."""
        self._open.discard(connection)


class Connection(asyncio.Protocol):
    """A connection; to uvicorn its transport."""

    write: Callable[[bytes], None]
    get_extra_info: Callable[..., Any]

    def __init__(self, others: Connections, protocol: Callable[..., Any]) -> None:
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._http = protocol(app_state={"connection": self}, _loop=self._loop)
        self._transport: Any = None
        self._ahead = bytearray()
        """Bytes that uvicorn does not get yet."""
        self._size = 0
        """The bytes of the head or body that it has."""
        self._pauses = False
        """Whether uvicorn wants no bytes now."""
        self._unread: float | None = None
        """Since when the client has not read."""
        self.state, self.since = State.HEAD, self._loop.time()

    @property
    def has_begun(self) -> bool:
        """Whether it has a part of a head or body."""
        return self._size > 0

    def fileno(self) -> int:
        """Its file."""
        return int(self._transport.get_extra_info("socket").fileno())

    # as the protocol of the socket

    def connection_made(self, transport: Any) -> None:
        """Begins."""
        self._transport = transport
        self.write, self.get_extra_info = transport.write, transport.get_extra_info
        self._others.add(self)
        self._http.connection_made(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Ends."""
        self._others.discard(self)
        self._ahead.clear()
        self._http.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Passes bytes on, as far as the request goes."""
        if self.state is not State.CLOSING:
            self._ahead += data
            self._pass_on()

    def eof_received(self) -> None:
        """The client sends no more, which ends the connection."""

    def pause_writing(self) -> None:
        """The client does not read."""
        self._unread = self._loop.time()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        self._unread = None
        self._http.resume_writing()

    # as the transport of uvicorn

    def is_closing(self) -> bool:
        """Whether it ends."""
        return self.state is State.CLOSING or self._transport.is_closing()

    def pause_reading(self) -> None:
        """uvicorn wants no more bytes now."""
        self._pauses = True
        self._read_or_not()

    def resume_reading(self) -> None:
        """uvicorn wants bytes again."""
        self._pauses = False
        self._read_or_not()
        if self._ahead:
            self._loop.call_soon(self._pass_on)

    def close(self) -> None:
        """Ends once all is written. A client that still sends a body gets the answer before, which a reset would take from it."""
        if self.state is State.CLOSING:
            return
        sends = self.state is State.BODY or self._ahead or (self.state is State.HEAD and self._size)
        self._enter(State.CLOSING)
        self._ahead.clear()
        if not sends or self._transport.is_closing():
            self._transport.close()
        else:
            with contextlib.suppress(OSError):  # its client has gone
                self._transport.write_eof()
            self._pauses = False
            self._read_or_not()

    def abort(self) -> None:
        """Ends at once."""
        self._others.discard(self)
        self._enter(State.CLOSING)
        self._ahead.clear()
        self._transport.abort()

    # the states

    def look(self) -> None:
        """Passes on what has waited for the end of an answer."""
        if self.state is State.CLOSING:
            return
        cycle = self._http.cycle
        if cycle is not None and cycle.response_complete and cycle.more_body:
            self.close()  # the rest of the body is not read
        else:
            self._update()
            self._pass_on()

    def end_overdue(self) -> None:
        """Ends the connection where its time is over."""
        now = self._loop.time()
        is_unread = self._unread is not None and now - self._unread > _UNREAD_SECONDS
        if is_unread or (self.state is State.CLOSING and now - self.since > _CLOSING_SECONDS):
            self.abort()
        elif self.state is State.HEAD and now - self.since > HEAD_SECONDS:
            if self._size:
                self._refuse(408, f"the head of the request did not come within {HEAD_SECONDS} s")
            else:
                self.close()

    def _pass_on(self) -> None:
        """Gives uvicorn the bytes of the request that is read now."""
        while self._ahead and self.state in (State.HEAD, State.BODY) and not self._pauses:
            data = bytes(self._ahead[:_SLICE])
            del self._ahead[:_SLICE]
            self._size += len(data)
            self._http.data_received(data)
            self._update()
            if self.state is State.HEAD and self._size > HEAD_BYTES:
                self._refuse(431, f"the head of the request has more than {HEAD_BYTES:,} bytes")
            elif self.state is State.BODY and self._is_too_long():
                self.abort()
        self._read_or_not()

    def _is_too_long(self) -> bool:
        """Whether a body has more bytes than `app.py` takes, with its sizes of chunks, or more headers with its trailers."""
        return self._size > self._others.body + HEAD_BYTES or len(self._http.cycle.scope["headers"]) > HEADERS

    def _update(self) -> None:
        """Finds the state of the request that uvicorn reads."""
        if self.state is State.CLOSING:
            return
        cycle, state = self._http.cycle, State.HEAD
        if cycle is not None and not cycle.response_complete:
            state = State.BODY if cycle.more_body else State.ANSWER
        if state is not self.state:
            self._enter(state)

    def _enter(self, state: State) -> None:
        self.state, self.since, self._size = state, self._loop.time(), 0

    def _refuse(self, status: int, fact: str) -> None:
        self.write(_refusal(status, fact))
        self.close()

    def _read_or_not(self) -> None:
        """Reads from the socket, or lets the client wait."""
        if self._transport.is_closing():
            return
        if self._pauses or len(self._ahead) > _AHEAD_BYTES:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


def most_connections(requests: int) -> int:
    """How many connections a server may have with so many requests that run or wait: some more, as far as the process may have files."""
    import resource

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)[0], requests + SPARE
    if files == resource.RLIM_INFINITY:
        return most
    return max(_LEAST, min(most, files - len(os.listdir("/dev/fd")) - _OTHER_FILES))


def _readable(files: Iterable[int]) -> set[int]:
    """Which of the sockets have bytes or an end that were not read yet."""
    found = select.poll()
    for file in files:
        found.register(file, select.POLLIN)
    return {file for file, _ in found.poll(0)}


def _refusal(status: int, fact: str) -> bytes:
    """The bytes of an answer."""
    body = json.dumps(error_body(fact, "invalid_request_error" if status < 500 else "server_error")).encode() + b"\n"
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
