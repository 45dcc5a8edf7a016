"""Limits of connections in front of both protocols of uvicorn: what a client may send, leave unread and keep open, and what it gets."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import uvicorn
from partc.cli.server import connections as connections_module
from partc.cli.server import front
from partc.cli.server.app import Turns
from partc.cli.server.connections import HEAD_BYTES, Connections, Queue, State
from partc.cli.server.front import few_lines
from partc.cli.server.refusals import RefusedError
from waiting import until

BODY = 100_000
BOTH = pytest.mark.parametrize("http", ["h11", "httptools"])


class Served:
    """Connections to an application that answers with the path and the body of a request: `/refused` unread, `/waits` after `release`."""

    def __init__(self, http: str, most: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.connections = Connections(most, BODY)
        self.release, self.calls = threading.Event(), 0
        self.loop = asyncio.new_event_loop()
        config = uvicorn.Config(self.connections.around(self.answer), log_config=None, http=http, ws="none")
        config.load()
        protocol: Any = config.http_protocol_class
        self.protocol = partial(protocol, config=config, server_state=uvicorn.Server(config).server_state)

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        scope["headers"] = [*scope["headers"]]  # as starlette does
        body, more = scope["path"].encode(), scope["path"] != "/refused"
        while more:
            message = await receive()
            more = message.get("more_body", False)
            body += message.get("body", b"")
        while scope["path"] == "/waits" and not self.release.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    def run(self) -> None:
        with self.loop_until_cancelled():
            self.serving = self.loop.create_task(self.connections.serve(self.listener, self.protocol))
            self.loop.run_until_complete(self.serving)

    @contextmanager
    def loop_until_cancelled(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            for one in [*self.connections._open]:
                one.abort()
            self.loop.run_until_complete(asyncio.sleep(0.3))
        finally:
            self.loop.close()


@contextmanager
def served(http: str, most: int = 16) -> Iterator[Served]:
    found = Served(http, most)
    thread = threading.Thread(target=found.run)
    thread.start()
    try:
        yield found
    finally:
        found.release.set()
        found.loop.call_soon_threadsafe(lambda: found.serving.cancel())
        thread.join(10)
        found.listener.close()


@contextmanager
def dialled(server: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as end:
        yield end


def read_all(end: socket.socket) -> bytes:
    """What comes until the end of a connection, also by a reset."""
    found = b""
    try:
        while data := end.recv(1 << 16):
            found += data
    except ConnectionError:
        pass
    return found


def answers(end: socket.socket, count: int) -> list[bytes]:
    """The bodies of so many answers."""
    found, rest = list[bytes](), b""
    while len(found) < count:
        head, blank, body = rest.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]) if blank else 0
        if blank and len(body) >= size:
            assert head.startswith(b"HTTP/1.1 200")
            found, rest = [*found, body[:size]], body[size:]
        else:
            data = end.recv(1 << 16)
            assert data, (found, rest)
            rest += data
    return found


def request_of(random: Random) -> tuple[bytes, bytes]:
    """A request, and the body of its answer."""
    path = b"/%d" % random.randrange(1000)
    head = b"POST %b HTTP/1.1\r\nHost: h\r\n" % path
    body = random.randbytes(random.choice((0, 1, 900, 3000, 70_000)))
    if random.random() < 0.3:
        return b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % path, path
    if random.random() < 0.5:
        return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body), path + body
    cuts = sorted({0, len(body), *(random.randrange(len(body) + 1) for _ in range(3))})
    shards = [body[begin:end] for begin, end in pairwise(cuts)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in shards)
    return b"%bTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % (head, chunks), path + body


@BOTH
def test_requests_cut_anywhere_and_sent_ahead_are_answered_in_their_order(http: str) -> None:
    random = Random(1)
    with served(http) as server:
        for _ in range(6):
            requests, wanted = zip(*(request_of(random) for _ in range(8)), strict=True)
            data = b"".join(requests)
            cuts = sorted({0, len(data), *(random.randrange(len(data)) for _ in range(random.choice((1, 9))))})

            def send(end: socket.socket, data: bytes = data, cuts: list[int] = cuts) -> None:
                for begin, stop in pairwise(cuts):
                    end.sendall(data[begin:stop])

            with dialled(server) as end:
                sender = threading.Thread(target=send, args=(end,))
                sender.start()
                assert answers(end, 8) == [*wanted]
                sender.join()


@BOTH
def test_a_head_or_trailer_without_end_is_refused(http: str) -> None:
    with served(http) as server:
        for line in (b"a: b\r\n", b"x" * 1000):
            with dialled(server) as end:
                end.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n" + line * (2 * HEAD_BYTES // len(line)))
                assert read_all(end).startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
        endless = (
            (b"0\r\n", b"a:\r\n" * 250, 431), (b"0\r\na: ", b"b" * 1000, 431), (b"", b"1;" + b"a" * 5000 + b"\r\n \r\n", 413),
            (b"1;", b"a" * 1000, 431), (b"", b"0" * 1000, 431), (b"", b"1\r\n \r\n" * 200, 413),
        )  # fmt: skip
        for begin, rest, status in endless:
            with dialled(server) as end:
                end.sendall(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + begin)
                with suppress(ConnectionError):
                    for _ in range(150):
                        end.sendall(rest)
                code = int(read_all(end).split()[1])
                assert code == status if http == "httptools" else code in (400, status), (begin, rest)


@BOTH
def test_who_asks_for_another_protocol_is_answered_in_this_one(http: str) -> None:
    """As Java's client does: the header `Upgrade` may be ignored, and with httptools it takes the body away."""
    body = b"{}\nupgrade: a\n"
    asks = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n"
    head = b"POST /u HTTP/1.1\r\nHost: h\r\n" + asks + b"Content-Length: %d\r\n\r\n" % len(body)
    chunked = (
        b"POST /u HTTP/1.1\r\n" + asks.swapcase() + b"Host: h\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body)
    )
    with served(http) as server:
        for size in (1, 2, 3, 7, 23, 1000):
            with dialled(server) as end:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for data in (head + body, chunked + body + b"\r\n0\r\n\r\n"):
                    for at in range(0, len(data), size):
                        end.sendall(data[at : at + size])
                    assert answers(end, 1) == [b"/u" + body]


@BOTH
def test_an_application_that_answers_late_harms_nobody(http: str, caplog: pytest.LogCaptureFixture) -> None:
    with served(http) as server, dialled(server) as end:
        end.sendall(b"POST /refused HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert read_all(end).startswith(b"HTTP/1.1 400")
        until(lambda: server.calls == 1)
    assert not [record for record in caplog.records if record.exc_info]


def test_the_time_in_the_queue_of_the_system_counts() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=8) as listener, ExitStack() as stack:
        queue, sinces = Queue(listener), list[float]()
        for now, come in ((1.0, 3), (2.0, 2), (3.0, 0), (4.0, 0), (5.0, 0)):
            for _ in range(come):
                stack.enter_context(socket.create_connection(listener.getsockname()))
            stack.enter_context(listener.accept()[0])
            sinces.append(queue.accepted(now))
        assert sinces == ([1.0, 1.0, 1.0, 2.0, 2.0] if sys.platform == "linux" else [1.0, 2.0, 3.0, 4.0, 5.0])


@BOTH
def test_requests_whose_answers_nobody_reads_wait_at_their_client(http: str) -> None:
    with served(http) as server, dialled(server) as end:
        end.sendall(b"GET /waits HTTP/1.1\r\nHost: h\r\n\r\n")
        end.settimeout(0.5)
        with suppress(TimeoutError):
            for _ in range(10_000):
                end.sendall(b"GET /1 HTTP/1.1\r\nHost: h\r\n\r\n" * 100)
            raise AssertionError("it reads on")
        (connection,) = server.connections._open
        assert len(connection._ahead) <= 2 * HEAD_BYTES
        assert len(getattr(connection._http, "pipeline", ())) < 60
        assert (server.calls, connection.state) == (1, State.ANSWER)


@BOTH
def test_an_answer_before_the_end_of_its_body_is_read_by_who_still_sends(http: str) -> None:
    with served(http) as server, dialled(server) as end:
        end.sendall(b"POST /refused HTTP/1.1\r\nHost: h\r\nContent-Length: 5000000\r\n\r\n")
        assert answers(end, 1) == [b"/refused"]
        end.sendall(b" " * 4_000_000)
        assert read_all(end) == b""


@BOTH
def test_connections_without_a_request_make_room_for_others(http: str) -> None:
    with served(http, most=4) as server, ExitStack() as stack:
        for size in range(40):
            end = stack.enter_context(dialled(server))
            end.sendall(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n1"[: size * 2])
        with dialled(server) as end:
            end.sendall(b"GET /2 HTTP/1.1\r\nHost: h\r\n\r\n")
            assert answers(end, 1) == [b"/2"]
        assert len(server.connections._open) <= 4


def test_bytes_that_the_server_has_not_read_are_no_fault_of_their_client() -> None:
    """A long turn of the event loop makes connections old, and those with a head in their socket are read, not displaced."""
    with served("httptools") as server, dialled(server) as end, dialled(server):
        until(lambda: sum(one.has_socket for one in server.connections._open) == 2)
        waits = list[float]()

        def displace() -> None:
            end.sendall(b"GET /4 HTTP/1.1\r\nHost: h\r\n\r\n")
            time.sleep(0.05)
            waits.extend(server.connections._displace() for _ in range(2))

        server.loop.call_soon_threadsafe(displace)
        assert answers(end, 1) == [b"/4"]
        assert waits[0] == 0 < waits[1]


def test_a_client_that_resets_while_its_answer_ends_does_no_harm() -> None:
    with served("httptools") as server, dialled(server) as end:
        end.sendall(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n1")
        until(lambda: any(one.state is State.BODY for one in server.connections._open))
        (connection,) = server.connections._open

        async def close() -> None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0" + b"\0" * 4)
            end.close()
            connection.close()

        asyncio.run_coroutine_threadsafe(close(), server.loop).result(10)
        until(lambda: not server.connections._open)


def test_where_all_have_a_request_a_new_connection_is_refused() -> None:
    with served("httptools", most=2) as server, ExitStack() as stack:
        ends = [stack.enter_context(dialled(server)) for _ in range(2)]
        for end in ends:
            end.sendall(b"GET /waits HTTP/1.1\r\nHost: h\r\n\r\n")
        until(lambda: server.calls == 2)
        with dialled(server) as end:
            assert read_all(end).startswith(b"HTTP/1.1 503")
        server.release.set()
        assert [answers(end, 1) for end in ends] == [[b"/waits"], [b"/waits"]]


def test_a_time_begins_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then gives a head no more time; one that has none is closed without an answer."""
    monkeypatch.setattr(connections_module, "HEAD_SECONDS", 0.2)
    with served("httptools") as server, dialled(server) as slow, dialled(server) as silent:
        slow.settimeout(0.05)
        slow.sendall(b"GET / HTTP/1.1\r\n")
        found = b""
        while not found:
            slow.sendall(b"a: b\r\n")
            with suppress(TimeoutError):
                found = slow.recv(1 << 16)
        assert found.startswith(b"HTTP/1.1 408")
        assert read_all(silent) == b""


def test_a_process_without_files_accepts_again_once_it_has_some() -> None:
    with served("httptools") as server:
        accept, left = server.loop.sock_accept, [2]

        async def scarce(listener: socket.socket) -> Any:
            found = await accept(listener)
            if left[0]:
                left[0] -= 1
                found[0].close()
                raise OSError(errno.EMFILE, "too many open files")
            return found

        server.loop.sock_accept = scarce  # type: ignore[method-assign]
        found = b""
        for _ in range(4):  # the first may be accepted by the call that waits already
            with dialled(server) as end, suppress(ConnectionError):
                end.sendall(b"GET /3 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
                found = read_all(end)
        assert found.endswith(b"/3")


def test_of_equal_lines_one_is_written(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(front, "_LINE_SECONDS", 0.1)
    logger = logging.getLogger("uvicorn.error")
    with few_lines("uvicorn.error"):
        for _ in range(100):
            logger.warning("Invalid HTTP request received.")
        logger.warning("another")
        time.sleep(0.15)
        for number in range(2):
            logger.warning("x %d", number)
    assert [record.getMessage() for record in caplog.records][:3] == [
        "Invalid HTTP request received.",
        "another",
        "x 0",
    ]
    assert len(caplog.records) == 3


def test_bodies_are_read_one_at_once_and_the_shortest_first() -> None:
    begin, order = threading.Event(), list[bytes]()

    def read(body: bytes) -> Any:
        begin.wait(10)
        order.append(body)

    async def run() -> None:
        turns, large = Turns(most=4), Turns()
        tasks = [asyncio.create_task(turns.run(read, body)) for body in (b"first", b"333", b"22", b"4444", b"1")]
        tasks += [asyncio.create_task(large.run(read, body)) for body in (b"large", b"55555")]
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="4 conversations wait"):
            await turns.run(read, b"")
        with pytest.raises(RefusedError, match="bytes wait to be read"):
            await large.run(read, b" " * 4_000_000)
        tasks[2].cancel()
        await asyncio.sleep(0)
        begin.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert [body for body in order if b"5" not in body and body != b"large"] == [b"first", b"1", b"333", b"4444"]
