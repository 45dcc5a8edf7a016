"""The server's thread: it listens before any rank starts, outlives the ranks of a job, and ends when the last answer is sent.

    front = Front(settings, reader)                 # UsageError where the port is in use
    with front:
        front.listen(folder / "link")               # rank 0 connects here; or `attach`, with a socket
        ...                                         # the job runs
        front.fail("rank 1 was killed ...")         # open requests end with this text

Its methods may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from partc.cli.server.bodies import MOST_BYTES as BODY_BYTES
from partc.cli.server.bodies import Reader
from partc.cli.server.connections import HEAD_BYTES, HEAD_SECONDS, Connections, most_connections
from partc.cli.server.engine import Engine, State
from partc.cli.server.link import MOST_BYTES
from partc.cli.server.metrics import Metrics
from partc.cli.server.settings import ServerSettings
from partc.runtime.errors import UsageError, reason_of

_LAST_SECONDS = 2
_LINE_SECONDS = 60
_BACKLOG = 1024
_PATH_BYTES = 100


class Front:
    """The server of one model, on the settings' port."""

    def __init__(self, settings: ServerSettings, reader: Reader) -> None:
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise UsageError(f'a server needs the package {error.name}\n  help: pip install "partc[serve]"') from None
        self.settings, self._reader = settings, reader
        self._socket = _bound(settings.host, settings.port)
        self._loop = asyncio.new_event_loop()
        self._engine: Engine | None = None
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._links: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._problem: BaseException | None = None
        self.drained = threading.Event()
        """Set after `drain`, when no request is open any more and the loop of steps has been notified to end."""
        self._thread = threading.Thread(target=self._run, name="partc-server", daemon=True)

    @property
    def address(self) -> str:
        """The URL at which it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def is_ready(self) -> bool:
        """Whether the ranks have loaded and take requests."""
        return self._engine is not None and self._engine.state is State.READY

    @property
    def is_draining(self) -> bool:
        """Whether the server takes no more requests."""
        return self._engine is not None and self._engine.state is State.DRAINING

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            raise self._problem
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail("the server has ended")
        self._call(self._end)
        if self._reader.template is not None:
            self._reader.template.close()
        self._thread.join(_LAST_SECONDS + 3)
        self._socket.close()

    def listen(self, path: Path) -> None:
        """Listens for rank 0 of the next job, which connects at `path`."""
        if len(bytes(path)) > _PATH_BYTES:
            raise UsageError(f"{path}: is too long for a socket\n  help: set TMPDIR to a shorter path")
        self._await(self._listen(path))

    def attach(self, end: socket.socket) -> None:
        """Connects to the loop of steps in this process, at the other end of the socket."""
        self._await(self._attach(end))

    def restarting(self) -> None:
        """Refuses requests while the ranks are started again, until they have loaded."""
        self._call(self._restarting)

    def fail(self, text: str) -> None:
        """Ends every open request with this text: the ranks have failed."""
        assert self._engine is not None
        self._call(lambda: self._engine.fail(text) if self._engine else None)

    def drain(self) -> None:
        """Takes no more requests, lets open ones end, and then ends the loop of steps; returns at once."""
        self._call(self._drain)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._problem = error
            self._ready.set()
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        import uvicorn
        from partc.cli.server.app import Server

        self._stop = asyncio.Event()
        record = self._reader.record
        engine = self._engine = Engine(record.slots, self.settings.queue, Metrics(slots=record.slots))
        connections = Connections(most_connections(engine.most), BODY_BYTES)
        app = Server(self._reader, engine, self.settings).app()
        config = uvicorn.Config(
            connections.around(app),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http="auto",  # httptools where it is installed; with h11 a stream takes a fifth more CPU
            loop="asyncio",
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=2 * HEAD_BYTES,
            timeout_keep_alive=HEAD_SECONDS,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
        config.load()
        server = uvicorn.Server(config)
        protocol: Any = config.http_protocol_class
        protocol = partial(protocol, config=config, server_state=server.server_state)
        serving = asyncio.create_task(server.serve(sockets=[]))
        accepting = asyncio.create_task(connections.serve(self._socket, protocol))
        self._ready.set()
        stop = asyncio.ensure_future(self._stop.wait())
        with few_lines("uvicorn.error", "asyncio"):
            await asyncio.wait({serving, accepting, stop}, return_when=asyncio.FIRST_COMPLETED)
            accepting.cancel()
            server.should_exit = True
            await serving
        self._tasks.add(accepting)
        for link in self._links:
            link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, path: Path) -> None:
        assert self._engine is not None
        link = await asyncio.start_unix_server(self._engine.converse, path, limit=MOST_BYTES)
        self._links.append(link)

    async def _attach(self, end: socket.socket) -> None:
        assert self._engine is not None
        streams = await asyncio.open_connection(sock=end, limit=MOST_BYTES)
        self._keep(self._engine.converse(*streams))

    def _restarting(self) -> None:
        assert self._engine is not None
        if self._engine.state is not State.DRAINING:
            self._engine.state = State.STARTING
            self._engine.metrics.restarts += 1

    def _drain(self) -> None:
        self._keep(self._drained())

    async def _drained(self) -> None:
        assert self._engine is not None
        await self._engine.drain(self.settings.drain)
        self.drained.set()

    def _end(self) -> None:
        assert self._stop is not None
        self._stop.set()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a task and holds a reference to it, which the event loop does not do."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _call(self, action: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(action)

    def _await(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


@contextmanager
def few_lines(*loggers: str) -> Iterator[None]:
    """A context in which each line of code that writes to these loggers does so only once in `_LINE_SECONDS`.

    The next written line states the number of lines that were left out.
    """
    due, left_out = dict[object, float](), Counter[object]()

    def is_written(record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), time.monotonic()
        if now < due.get(place, 0.0):
            left_out[place] += 1
            return False
        due[place] = now + _LINE_SECONDS
        if count := left_out.pop(place, 0):
            record.msg, record.args = f"{record.getMessage()} (and {count:,} times since the last such line)", ()
        return True

    for name in loggers:
        logging.getLogger(name).addFilter(is_written)
    try:
        yield
    finally:
        for name in loggers:
            logging.getLogger(name).removeFilter(is_written)


def _bound(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises UsageError where the address is not available."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listening = socket.socket(family, kind)
    except OSError as error:
        raise UsageError(f"--host {host}: {reason_of(error)}\n  help: give an address of this machine") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        fact = f"cannot listen on {host}, port {port}: {reason_of(error)}"
        raise UsageError(f"{fact}\n  help: give another --port, or 0 for a free one") from None
    return listening
