"""Limits the connections of a server: their number, and how much and for how long a client may send or leave unread.

uvicorn's protocol parses HTTP. A `Connection` stands between it and the socket: it is uvicorn's transport and the socket's protocol, and
passes on only the bytes that the current request needs:

| state | what is awaited | at most |
|---|---|---|
| `HEAD` | the head of a request | 16 KiB, 256 headers; 10 s from the connection's begin, or its last answer, on |
| `BODY` | its body | 1 MB, of which uvicorn has 64 KiB, and 16 KiB of chunk sizes, extensions and trailers without body; 30 s (`app.py`) |
| `ANSWER` | the end of the answer | 30 s without the client reading; 32 KiB of what follows, then nothing is read |
| `CLOSING` | the end of the connection | 5 s |

Times begin with a state: a client that sends a byte now and then gains nothing. Where the maximum number of connections is open, a new
one displaces the oldest in the first of the states `CLOSING`, `HEAD` and `BODY`: a client with many incomplete requests displaces its own.
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
"""The most headers of a request, together with its trailers."""
SPARE = 128
"""The most connections in addition to those with a request that runs or waits."""
_UNREAD_SECONDS, _CLOSING_SECONDS = 30, 5
_AHEAD_BYTES = 16 << 10
_SLICE, _SLICES = 1024, 4
"""The bytes that uvicorn gets at once, and the most such slices of a connection in one turn of the event loop.

uvicorn parses all requests in these bytes, even those that wait for the answer to an earlier request; other connections need their turn.
"""
_OTHER_FILES = 20
"""Files of the process that are reserved for other uses: the pipes of ranks and template, which start later and restart."""
_TOGETHER = 8
"""The most connections without a complete head that are closed at once to make room, where others wait to be accepted.

Their files are closed in one turn of the event loop.
"""
_LEAST = 4
_RETRY_SECONDS = 0.05
_YOUNG_SECONDS = 0.02
"""The shortest life of a connection, with its time in the system's queue: its client may be late with the head."""
_TURN_SECONDS = 0.001
_PATIENCE_SECONDS = 0.25
"""Seconds without a connection that can make room, before new ones are refused: many requests are answered, or refused, within less."""
_UPGRADE = re.compile(rb"(?i)(?<=\n)upgrade(?=:)")
_QUEUE_OFFSET = 24
"""The offset of `tcpi_unacked` in Linux's `struct tcp_info`: for a listener, the length of its queue."""
_REASONS = {
    408: "Request Timeout",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
Application = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class State(enum.IntEnum):
    """The event that a connection waits for; where there are too many connections, those in the first states are closed first."""

    CLOSING = 0
    HEAD = 1
    BODY = 2
    ANSWER = 3


class Connections:
    """The open connections, at most `most`; the bodies of their requests have at most `body` bytes."""

    def __init__(self, most: int, body: int) -> None:
        self.most, self.body = most, body
        self.received = bytearray(_AHEAD_BYTES)
        """The bytes last read from a socket, until its connection has taken them."""
        self._open: set[Connection] = set()
        self._refused = 0
        self._full_since: float | None = None
        """The time since when no connection could make room; None while one can."""

    def around(self, application: Application) -> Application:
        """Wraps the application so that a connection is notified when its answer ends."""

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
                try:  # one turn of the loop accepts all waiting connections, and reads the others' bytes
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
        """Whether there is room for a connection, if need be after another one is closed."""
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
        """Ends connections whose time is over, once a second."""
        while True:
            await asyncio.sleep(1)
            for connection in [*self._open]:
                connection.end_overdue()

    def _displace(self, most: int = 1) -> float | None:
        """Ends connections that have waited for their clients for long enough, at most `most`; returns 0 where it has ended one.

        Else it returns the seconds after which one may be ended, or None where no connection waits.

        A client that sends a head at once is never found with only a part of it: connections with a part are ended before those without any
        byte. The sockets are checked for unread bytes first: after a long turn of the event loop these are old, which is not the client's
        fault. Of several ended connections only the first may have a complete head.
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
        """Adds a connection to the count."""
        self._open.add(connection)

    def discard(self, connection: Connection) -> None:
        """Removes a connection from the count."""
        self._open.discard(connection)


class Queue:
    """Tracks since when the connections of a listener wait to be accepted, as far as is known: they are accepted in order of arrival."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._accepted = 0
        self._seen = deque[tuple[float, int]]()
        """Times, each with the number of connections that had arrived by then, including accepted ones."""

    def accepted(self, now: float) -> float:
        """Records that the next connection was accepted; returns the latest time at which it entered the queue."""
        self._accepted += 1
        while self._seen and self._seen[0][1] < self._accepted:
            self._seen.popleft()
        since = self._seen[0][0] if self._seen else now
        come = self._accepted + _queue_length(self._listener)
        if come > (self._seen[-1][1] if self._seen else self._accepted):
            self._seen.append((now, come))
        return since

    def forget(self) -> None:
        """Records that connections may have left the queue without having been accepted."""
        self._seen.clear()


def _queue_length(listener: socket.socket) -> int:
    """Returns the number of connections that wait to be accepted; 0 where the system does not report it."""
    if sys.platform != "linux" or listener.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    state = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUE_OFFSET + 4)
    return int.from_bytes(state[_QUEUE_OFFSET:], sys.byteorder)


class Connection(asyncio.BufferedProtocol):
    """A connection: the protocol of its socket, and uvicorn's transport."""

    write: Callable[[bytes], None]
    get_extra_info: Callable[..., Any]

    def __init__(self, others: Connections, protocol: Callable[..., Any], since: float) -> None:
        self._others = others
        self._loop = asyncio.get_running_loop()
        self._http = protocol(app_state={"connection": self}, _loop=self._loop)
        self._transport: Any = None
        self._ahead = bytearray()
        """Bytes that uvicorn has not got yet."""
        self._last = b""
        """The last two bytes that uvicorn got."""
        self._continues = False
        """Whether uvicorn gets more of these bytes in the next turn of the event loop."""
        self._size = 0
        """The bytes of the current head or body that uvicorn got."""
        self._framing = 0
        """The last of these bytes, as far as they are chunk sizes, extensions or trailers."""
        self._pauses = False
        """Whether uvicorn wants no bytes now."""
        self._unread: float | None = None
        """The time since when the client has not read; None while it reads."""
        self.state, self.since = State.HEAD, since

    @property
    def has_begun(self) -> bool:
        """Whether a part of a head or body has arrived."""
        return self._size > 0

    def fileno(self) -> int:
        """The socket's file number."""
        return int(self._transport.get_extra_info("socket").fileno())

    @property
    def has_socket(self) -> bool:
        """Whether its socket is attached, which happens two turns of the event loop after it was accepted."""
        return self._transport is not None

    async def start(self, end: socket.socket) -> None:
        """Begins to read a socket; closes it where that fails."""
        try:
            await self._loop.connect_accepted_socket(lambda: self, end)
        except BaseException as error:
            self._others.discard(self)
            end.close()
            if not isinstance(error, OSError):
                raise

    # as the protocol of the socket

    def connection_made(self, transport: Any) -> None:
        """Attaches the socket's transport."""
        self._transport = transport
        self.write, self.get_extra_info = transport.write, transport.get_extra_info
        self._http.connection_made(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Ends the connection, and frees its data.

        uvicorn's protocol and this object refer to each other, and keep a timer after an error.
        """
        self._others.discard(self)
        self._enter(State.CLOSING)
        self._ahead.clear()
        self._http.connection_lost(None)
        del self._http

    def get_buffer(self, sizehint: int) -> bytearray:
        """Returns the buffer for the next bytes."""
        return self._others.received

    def buffer_updated(self, nbytes: int) -> None:
        """Passes bytes on, as far as the request goes."""
        if self.state is not State.CLOSING:
            self._ahead += memoryview(self._others.received)[:nbytes]
            self._pass_on() if not self._continues else self._read_or_not()

    def eof_received(self) -> None:
        """Returns None, which ends the connection: the client sends no more."""

    def pause_writing(self) -> None:
        """Records that the client does not read."""
        self._unread = self._loop.time()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Records that the client has read."""
        self._unread = None
        self._http.resume_writing()

    # as the transport of uvicorn

    def is_closing(self) -> bool:
        """Whether the connection is ending."""
        return self.state is State.CLOSING or self._transport.is_closing()

    def pause_reading(self) -> None:
        """Stops reading: uvicorn wants no more bytes now."""
        self._pauses = True
        self._read_or_not()

    def resume_reading(self) -> None:
        """Reads again: uvicorn wants more bytes."""
        self._pauses = False
        self._read_or_not()
        self._continue()

    def close(self) -> None:
        """Ends the connection once all bytes are written; an application that has not answered is notified that the client has gone.

        A client that still sends a body first gets the answer, which a reset would take from it.
        """
        if self.state is State.CLOSING:
            return
        sends = self.state is State.BODY or self._ahead or (self.state is State.HEAD and self._size)
        self._enter(State.CLOSING)
        self._ahead.clear()
        self.write = _ignore  # for an application that does not know it yet
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
        """Ends the connection at once."""
        self._others.discard(self)
        self._enter(State.CLOSING)
        self._ahead.clear()
        self._transport.abort()

    # the states

    def look(self) -> None:
        """Passes on the bytes that have waited for the end of an answer."""
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
        """Gives uvicorn the next bytes of the current request."""
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
        """Schedules the next bytes for the next turn of the event loop."""

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
        """Returns the bytes that uvicorn gets next, with a header `Upgrade` renamed, since uvicorn would drop the request's body.

        A server may ignore that header; Java's client asks for HTTP/2 in this way. A part of that name waits for the rest.
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
        """The number of bytes of the body that uvicorn has now."""
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
        """Updates the state from the request that uvicorn reads."""
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
        """Answers with a refusal in place of the application, and closes the connection."""
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
        """Starts or stops reading from the socket; while it stops, the client waits."""
        if self._transport.is_closing():
            return
        if self._pauses or len(self._ahead) > _AHEAD_BYTES:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


def most_connections(requests: int) -> int:
    """Returns the most connections of a server for `requests` that run or wait: `SPARE` more, as far as the limit of open files allows."""
    import resource

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)[0], requests + SPARE
    if files == resource.RLIM_INFINITY:
        return most
    return max(_LEAST, min(most, files - len(os.listdir("/dev/fd")) - _OTHER_FILES))


def _ignore(data: bytes) -> None:
    """Discards the bytes."""


def _readable(files: Iterable[int]) -> set[int]:
    """Returns the sockets that have unread bytes or an unread end."""
    found = select.poll()
    for file in files:
        found.register(file, select.POLLIN)
    return {file for file, _ in found.poll(0)}


def _refusal(status: int, fact: str) -> bytes:
    """Returns the bytes of an HTTP answer with an error."""
    body = json.dumps(error_body(fact, "invalid_request_error" if status < 500 else "server_error")).encode() + b"\n"
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
