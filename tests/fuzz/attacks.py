"""Attacks on a server on a port of this machine, by what a client may send or leave unread.

A process of its own makes them:

python -c "import attacks; attacks.main()" PORT SECONDS headers,texts
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from random import Random

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def dial(port: int) -> Ends:
    return await asyncio.open_connection("127.0.0.1", port)


async def send(ends: Ends, data: bytes, times: int = 1, wait: float = 0.0) -> None:
    """Sends the same bytes several times, and reads nothing."""
    for _ in range(times):
        ends[1].write(data)
        await ends[1].drain()
        await asyncio.sleep(wait)


async def ask(port: int, body: bytes, path: str = "/v1/completions", host: str = "localhost") -> int:
    """The status of an answer."""
    reader, writer = await dial(port)
    with contextlib.closing(writer):
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nContent-Length: {len(body)}\r\n\r\n"
        await send((reader, writer), head.encode() + body)
        return int((await reader.readline()).split()[1])


async def headers(port: int, random: Random) -> None:
    ends = await dial(port)
    with contextlib.closing(ends[1]):
        await send(ends, b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        await send(ends, (b"X-A: " + b"b" * random.randrange(200) + b"\r\n") * 500, 2000)


async def half_requests(port: int, random: Random) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX:"
    ends = [await dial(port) for _ in range(800)]
    for one in ends:
        with contextlib.suppress(OSError):
            await send(one, head[: random.randrange(len(head))])
    await asyncio.sleep(1)
    for one in ends:
        one[1].close()


async def slow_heads(port: int, random: Random) -> None:
    ends = await dial(port)
    with contextlib.closing(ends[1]):
        await send(ends, b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        await send(ends, b"a: b\r\n", 1000, 0.5)


async def slow_bodies(port: int, random: Random) -> None:
    ends = await dial(port)
    with contextlib.closing(ends[1]):
        await send(
            ends, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n" + b" " * 99_999
        )
        await send(ends, b" ", 1000, 0.5)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\nUpgrade: "
TRAILERS = (
    (CHUNKED + b"0\r\n", b"a:\r\n"), (CHUNKED + b"0\r\na: ", b"b"), (CHUNKED + b"0\r\na: b\r\n", b" folded\r\n"),
    (CHUNKED + b"1\r\n \r\n0\r\n", b"long-" * 100 + b":\r\n"),
)  # fmt: skip
CHUNKS = (
    (CHUNKED, b"1\r\n \r\n"), (CHUNKED, b"1;a\r\n \r\n"), (CHUNKED + b"1;", b"a" * 5000), (CHUNKED + b"1;a=\"", b"\\\\"),
    (CHUNKED, b"1;" + b"a" * 900 + b"\r\n \r\n"), (CHUNKED, b"0" * 100), (CHUNKED + b"fffffffffffffffe\r\n", b" " * 100),
)  # fmt: skip
HEADS = (
    (b"GET /", b"a" * 100), (b"GET /?", b"%00"), (b"G", b"G"), (GET, b"a:\r\n"), (GET + b"a: ", b"b"), (GET + b"a: b\r\n", b" folded\r\n"),
    (GET + b"Cookie: ", b"a=b; "), (b"", b"\r\n"), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0\0\4\0\0\0\0\0"), (b"\x16\3\1", b"\2\0"),
    (GET + UPGRADE + b"websocket\r\n\r\n", b"\x81\x7e\x40\0" + b"a" * 100), (GET + UPGRADE + b"h2c\r\n\r\n", GET + b"\r\n"),
    (POST + UPGRADE + b"h2c\r\nContent-Length: 999999\r\n\r\n", b" "), (b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"a" * 100),
    (POST + b"Expect: 100-continue\r\nContent-Length: 999999\r\n\r\n", b""), (POST + b"Content-Length: 99999999999999\r\n\r\n", b" "),
    (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"1\r\n \r\n"),
    (POST + b"Content-Encoding: gzip\r\nContent-Length: 999999\r\n\r\n", b"\0"),
)  # fmt: skip
"""Begins of requests, and what follows them without end."""


async def trailers(port: int, random: Random) -> None:
    await endless(port, *random.choice(TRAILERS))


async def chunks(port: int, random: Random) -> None:
    await endless(port, *random.choice(CHUNKS))


async def heads(port: int, random: Random) -> None:
    await endless(port, *random.choice(HEADS))


async def endless(port: int, begin: bytes, rest: bytes) -> None:
    """Sends the begin of a request, and 20 MB of what follows, or for a second nothing."""
    ends = await dial(port)
    with contextlib.closing(ends[1]):
        await send(ends, begin)
        if not rest:
            await asyncio.sleep(1)
        else:
            await send(ends, rest * (1 + 4000 // len(rest)), 5000)


async def pipelined(port: int, random: Random) -> None:
    ends = await dial(port)
    request = random.choice((b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\r\n"))
    with contextlib.closing(ends[1]):
        await asyncio.wait_for(send(ends, request * 1000, 1000), 10)


async def texts(port: int, random: Random) -> None:
    body = json.dumps({"prompt": "ab c" * 240_000, "max_tokens": 4}).encode()
    statuses = await asyncio.gather(*(ask(port, body) for _ in range(24)), return_exceptions=True)
    assert not {200, 500} & {*statuses}, statuses


async def bodies(port: int, random: Random) -> None:
    message = '{"role": "user", "content": '
    body, path = random.choice(
        (
            ('{"messages": [' + message + "[" + "{}," * 300_000 + "{}]}]}", "/v1/chat/completions"),
            ('{"messages": [' + (message + '"a"},') * 20_000 + message + '"a"}]}', "/v1/chat/completions"),
            ('{"messages": [' + message + '"' + "</s>" * 200_000 + '"}]}', "/v1/chat/completions"),
            ('{"prompt": [' + "1," * 400_000 + "1]}", "/v1/completions"),
            ("[" * 900_000, "/v1/completions"),
            ('{"prompt": [1], ' + ",".join(f'"k{at}": 0' for at in range(60_000)) + "}", "/v1/completions"),
            (
                '{"prompt": [1], "metadata": {' + ",".join(f'"k{at}": 0' for at in range(60_000)) + "}}",
                "/v1/completions",
            ),
        )
    )
    status = await ask(port, body.encode(), path)
    assert status in (400, 429, 503), f"{body[:60]} is answered with {status}"


async def templates(port: int, random: Random) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "loop"}]}).encode()
    status = await ask(port, body, "/v1/chat/completions")
    assert status in (400, 429, 503), f"a template that loops is answered with {status}"


async def rebinding(port: int, random: Random) -> None:
    status = await ask(port, b'{"prompt": [1], "max_tokens": 1}', host=f"evil.example:{port}")
    assert status in (421, 503), f"evil.example is answered with {status}"


async def garbage(port: int, random: Random) -> None:
    ends = await dial(port)
    with contextlib.closing(ends[1]):
        await send(ends, random.randbytes(random.randrange(1, 2000)) + b"\r\n\r\n", 3)


async def resets(port: int, random: Random) -> None:
    ends = await dial(port)
    linger = b"\x01\0\0\0" + b"\0" * 4
    ends[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    await send(ends, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * random.randrange(3))
    ends[1].transport.abort()


async def unread_streams(port: int, random: Random) -> None:
    ends = await dial(port)
    body = b'{"prompt": [1, 2], "max_tokens": 100, "stream": true}'
    with contextlib.closing(ends[1]):
        await send(
            ends, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await asyncio.sleep(random.random())


ATTACKS: dict[Callable[[int, Random], Awaitable[None]], tuple[int, float]] = {
    headers: (2, 0.1), half_requests: (1, 0.1), slow_heads: (40, 0.1), slow_bodies: (40, 0.1), trailers: (2, 0.1),
    chunks: (2, 0.1), heads: (4, 0.05), pipelined: (3, 0.1), texts: (1, 0.2),
    bodies: (2, 0.2), templates: (6, 0.1), rebinding: (2, 0.02), garbage: (2, 0.02), resets: (2, 0.02), unread_streams: (1, 0.5),
}  # fmt: skip
"""By attack how many clients make it at once, and how long each waits before the next time."""
NAMES = [attack.__name__ for attack in ATTACKS]


async def attacked(names: list[str], port: int, seconds: float) -> int:
    """Makes attacks for so long; how many times."""
    count = 0

    async def repeat(attack: Callable[[int, Random], Awaitable[None]], number: int, wait: float) -> None:
        nonlocal count
        random = Random(number)
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError, IndexError, ValueError):
                await attack(port, random)
            count += 1
            await asyncio.sleep(wait)

    chosen = {attack: how for attack, how in ATTACKS.items() if attack.__name__ in names}
    tasks = [
        asyncio.create_task(repeat(attack, number, wait))
        for attack, (clients, wait) in chosen.items()
        for number in range(clients)
    ]
    if not tasks:
        await asyncio.sleep(seconds)
        return 0
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()  # its assertion
    for task in tasks:
        task.cancel()
    return count


def main() -> None:
    """Makes attacks and prints how many times; an AssertionError where an answer is wrong."""
    port, seconds, names = sys.argv[1:]
    print(asyncio.run(attacked(names.split(","), int(port), float(seconds))))
