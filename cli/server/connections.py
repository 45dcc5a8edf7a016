"""The connections of a server: how many there are, and how much and for how long a client may send or leave unread.

uvicorn's protocol reads the HTTP. A `Connection` is between it and the socket, the transport of the one and the protocol of the other, and
passes no more bytes on than the present request needs:

| state | what is awaited | at most |
|---|---|---|
| `HEAD` | the head of a request | 16 KiB, 256 headers; 10 s from the connection's begin, or its last answer, on |
| `BODY` | its body | 1 MB, of which uvicorn has 64 KiB, and 16 KiB of chunk sizes, extensions and trailers without body; 30 s (`app.py`) |
| `ANSWER` | the end of the answer | 30 s without the client reading; 32 KiB of what follows, then nothing is read |
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
import re
import select
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from partc.cli.server.refusals import error_body

HEAD_BYTES = 16 << 10
HEAD_SECONDS = 10
HEADERS = 256
"""How many headers a head may have with its trailers."""
SPARE = 128
"""How many connections there may be besides those with a request that runs or waits."""
_UNREAD_SECONDS, _CLOSING_SECONDS = 30, 5
_AHEAD_BYTES = 16 << 10
_SLICE, _SLICES = 1024, 4
"""Bytes that uvicorn gets at once: it parses all requests in them, also those that wait for the answer to an earlier one; and how many
slices of a connection there are in a turn of the event loop, in which all others want theirs.
"""
_OTHER_FILES = 20
"""Files of the process that are left to others than connections: the pipes of ranks and template, which start later and again."""
_TOGETHER = 8
"""How many connections without a complete head make room at once, where others wait to be accepted: their files are closed in one turn of
the event loop.
"""
_LEAST = 4
_RETRY_SECONDS = 0.05
_YOUNG_SECONDS = 0.02
"""How long a connection stays, with its time in the system's queue: its client may be late with the head."""
_TURN_SECONDS = 0.001
_PATIENCE_SECONDS = 0.25
"""For how long no connection may be able to make room until new ones are refused: many requests are answered, or refused, within less."""
_UPGRADE = re.compile(rb"(?i)(?<=\n)upgrade(?=:)")
_QUEUE_OFFSET = 24
"""The offset of `tcpi_unacked` in Linux's `struct tcp_info`: the length of the queue, for a listener."""
_REASONS = {
    408: "Request Timeout",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
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
        self.received = bytearray(_AHEAD_BYTES)
        """What was read of a socket last, until its connection has taken it."""
        self._open: set[Connection] = set()
        self._refused = 0
        self._full_since: float | None = None
        """Since when no connection could make room."""

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
        clock, starting, queue = loop.create_task(self._watch()), set[asyncio.Task[None]](), Queue(listener)
        try:
            while True:
                try:  # connections that wait are accepted in one turn of the loop, which has the bytes of all others to read
                    end, _ = await loop.sock_accept(listener)
                except OSError:  # its client has gone, or the process has no more files or memory
                    queue.forget()
                    self._displace()
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                since = queue.accepted(loop.time())
                try:
                    is_admitted = await self._admit(end, listener)
                except BaseException:
                    end.close()
                    raise
                if is_admitted:
                    connection = Connection(self, protocol, since)
                    self.add(connection)
                    task = loop.create_task(connection.start(end))
                    starting.add(task)
                    task.add_done_callback(starting.discard)
        finally:
            clock.cancel()
            for connection in [*self._open]:
                if connection.state is State.BODY:  # uvicorn would wait for the rest
                    connection.abort()

    async def _admit(self, end: socket.socket, listener: socket.socket) -> bool:
        """Whether there is place for a connection, if need be that of another one."""
        clock = asyncio.get_running_loop().time
        while len(self._open) >= self.most:
            seconds = self._displace(_TOGETHER if _readable([listener.fileno()]) else 1)
            if seconds is None and clock() < (self._full_since or clock()) + _PATIENCE_SECONDS:
                self._full_since, seconds = self._full_since or clock(), _TURN_SECONDS
            if seconds is None:
                with end, contextlib.suppress(OSError):
                    end.send(_refusal(503, f"{self.most} connections have requests, and there are no more"))
                self._refused += 1
                if not self._refused % _TOGETHER:
                    await asyncio.sleep(0)
                return False
            await asyncio.sleep(seconds)
        self._full_since = None
        return True

    async def _watch(self) -> None:
        """Ends connections whose time is over."""
        while True:
            await asyncio.sleep(1)
            for connection in [*self._open]:
                connection.end_overdue()

    def _displace(self, most: int = 1) -> float | None:
        """Ends connections that wait for their clients, if some do for long enough; else after how many seconds one may, None without one.

        A client that sends a head at once is never found with a part of it: those with a part are ended before those with none. What a
        client has sent is read before: after a long turn of the event loop it is old, and not because of its client. Of several that
        are ended only the first may have a complete head.
        """
        waiting = [one for one in self._open if one.state is not State.ANSWER]
        if not waiting:
            return None
        since = asyncio.get_running_loop().time() - _YOUNG_SECONDS
        old = [one for one in waiting if one.has_socket and not one.is_read and one.since <= since]
        unread = _readable(one.fileno() for one in old if one.state is not State.CLOSING)
        late = [one for one in old if one.state is State.CLOSING or one.fileno() not in unread]
        late.sort(key=lambda one: (one.state, not one.has_begun, one.since))
        for at, one in enumerate(late[:most]):
            if not at or one.state is not State.BODY:
                one.abort()
        return 0.0 if late else max(min(one.since for one in waiting) - since, _TURN_SECONDS)

    def add(self, connection: Connection) -> None:
        """Counts a connection."""
        self._open.add(connection)

    def discard(self, connection: Connection) -> None:
        """Counts a connection no longer."""
        self._open.discard(connection)


class Queue:
    """Since when the connections of a listener wait to be accepted, as far as is known: each waits in the order in which it came."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._accepted = 0
        self._seen = deque[tuple[float, int]]()
        """Times, and how many connections had come by then, those that were accepted included."""

    def accepted(self, now: float) -> float:
        """Notes that the next one was accepted; when it was in the queue at the latest."""
        self._accepted += 1
        while self._seen and self._seen[0][1] < self._accepted:
            self._seen.popleft()
        since = self._seen[0][0] if self._seen else now
        come = self._accepted + _queue_length(self._listener)
        if come > (self._seen[-1][1] if self._seen else self._accepted):
            self._seen.append((now, come))
        return since

    def forget(self) -> None:
        """Notes that some may have left the queue without having been accepted."""
        self._seen.clear()


def _queue_length(listener: socket.socket) -> int:
    """How many connections wait to be accepted; 0 where the system does not say."""
    if sys.platform != "linux" or listener.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    state = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUE_OFFSET + 4)
    return int.from_bytes(state[_QUEUE_OFFSET:], sys.byteorder)


class Connection(asyncio.BufferedProtocol):
    """A connection; to uvicorn its transport."""

    write: Callable[[bytes], None]
    get_extra_info: Callable[..., Any]

    def __init__(self, others: Connections, protocol: Callable[..., Any], since: float) -> None:
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._http = protocol(app_state={"connection": self}, _loop=self._loop)
        self._transport: Any = None
        self._ahead = bytearray()
        """Bytes that uvicorn does not get yet."""
        self._last = b""
        """The last two bytes that it got."""
        self._continues = False
        """Whether it gets more of them in the next turn of the event loop."""
        self._size = 0
        """The bytes of the head or body that it has."""
        self._framing = 0
        """The last of them that are of chunk sizes, extensions or trailers."""
        self._pauses = False
        """Whether uvicorn wants no bytes now."""
        self._unread: float | None = None
        """Since when the client has not read."""
        self.state, self.since = State.HEAD, since

    @property
    def has_begun(self) -> bool:
        """Whether it has a part of a head or body."""
        return self._size > 0

    def fileno(self) -> int:
        """Its file."""
        return int(self._transport.get_extra_info("socket").fileno())

    @property
    def has_socket(self) -> bool:
        """Whether it has begun, which it does two turns of the event loop after it was accepted."""
        return self._transport is not None

    async def start(self, end: socket.socket) -> None:
        """Begins to read a socket, and ends where that fails."""
        try:
            await self._loop.connect_accepted_socket(lambda: self, end)
        except BaseException as error:
            self._others.discard(self)
            end.close()
            if not isinstance(error, OSError):
                raise

    # as the protocol of the socket

    def connection_made(self, transport: Any) -> None:
        """Begins."""
        self._transport = transport
        self.write, self.get_extra_info = transport.write, transport.get_extra_info
        self._http.connection_made(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Ends, and frees what it has: uvicorn's protocol and this object refer to each other, and keep a timer after an error."""
        self._others.discard(self)
        self._enter(State.CLOSING)
        self._ahead.clear()
        self._http.connection_lost(None)
        del self._http

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where the next bytes are written to."""
        return self._others.received

    def buffer_updated(self, nbytes: int) -> None:
        """Passes bytes on, as far as the request goes."""
        if self.state is not State.CLOSING:
            self._ahead += memoryview(self._others.received)[:nbytes]
            self._pass_on() if not self._continues else self._read_or_not()

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
        self._continue()

    def close(self) -> None:
        """Ends once all is written; an application that has not answered hears that the client has gone.

        A client that still sends a body gets the answer before, which a reset would take from it.
        """
        if self.state is State.CLOSING:
            return
        sends = self.state is State.BODY or self._ahead or (self.state is State.HEAD and self._size)
        self._enter(State.CLOSING)
        self._ahead.clear()
        self.write = _ignore  # of an application that does not know yet
        if (cycle := self._http.cycle) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
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
        """Gives uvicorn the next bytes of the request that is read now."""
        for _ in range(_SLICES):
            data = self._slice()
            if not data:
                break
            del self._ahead[: len(data)]
            self._last = (self._last + data)[-2:]
            cycle, body = self._http.cycle, self._body_bytes
            self._size += len(data)
            self._framing += len(data)
            self._http.data_received(data)
            if self._http.cycle is not cycle or self._body_bytes > body:
                self._framing = 0
            self._update()
            self._refuse_excess()
        self._continue()
        self._read_or_not()

    def _continue(self) -> None:
        """Has the next bytes passed on in the next turn of the event loop."""

        def pass_on() -> None:
            self._continues = False
            self._pass_on()

        if self.is_read and not self._continues:
            self._continues = True
            self._loop.call_soon(pass_on)

    @property
    def is_read(self) -> bool:
        """Whether uvicorn gets bytes now."""
        return bool(self._slice())

    def _slice(self) -> bytes:
        """The bytes that uvicorn gets next, without a header `Upgrade`, which a server may ignore: uvicorn would drop the request's body.

        Java's client asks for HTTP/2 in this way. A part of its name waits for the rest.
        """
        if self._pauses or self.state not in (State.HEAD, State.BODY):
            return b""
        data = bytes(self._ahead[:_SLICE])
        if self.state is State.BODY:
            return data
        text = self._last + data
        end = text.find(b"\n\r\n")
        head, rest = (text, b"") if end < 0 else (text[:end], text[end:])
        _, line, name = head.rpartition(b"\n")
        if line and name and not rest and b"upgrade".startswith(name.lower()):
            head = head[: -len(name)]
        return (_UPGRADE.sub(b"Ignored", head) + rest)[len(self._last) :]

    @property
    def _body_bytes(self) -> int:
        """The bytes of the body that uvicorn has now."""
        cycle = self._http.cycle
        return 0 if cycle is None else len(cycle.body)

    def _refuse_excess(self) -> None:
        """Refuses a request that has sent more than it may; `app.py` refuses bodies that are too long without chunks."""
        if self.state is State.HEAD and self._size > HEAD_BYTES:
            self._refuse(431, f"the head of the request has more than {HEAD_BYTES:,} bytes")
        elif self.state not in (State.HEAD, State.BODY):
            return
        elif len(self._http.headers or ()) > HEADERS:
            self._refuse(431, f"the request has more than {HEADERS} headers and trailers")
        elif self._framing > HEAD_BYTES:
            self._refuse(
                431, f"the request has more than {HEAD_BYTES:,} bytes of chunk extensions or trailers together"
            )
        elif self._size > self._others.body + HEAD_BYTES:
            self._refuse(413, f"the body and its chunk sizes have more than {self._others.body + HEAD_BYTES:,} bytes")

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
        self.state, self.since, self._size, self._framing = state, self._loop.time(), 0, 0

    def _refuse(self, status: int, fact: str) -> None:
        """Answers instead of the application."""
        if (
            self._http.cycle is not None
            and self._http.cycle.response_started
            and not self._http.cycle.response_complete
        ):
            self.abort()
            return
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


def _ignore(data: bytes) -> None:
    """Writes nothing."""


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
