"""The routes of the server, as an ASGI application of starlette."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from heapq import heappop, heappush
from hmac import compare_digest
from pathlib import Path
from typing import Any, TypeVar

from partc.cli.server.answer import Answer, Delta, Letters, embedding_of, likeliest, shortened, usage_of
from partc.cli.server.bodies import MOST_BYTES, Completion, Reader
from partc.cli.server.engine import Engine, State, Ticket
from partc.cli.server.logprobs import TokenTexts
from partc.cli.server.refusals import RefusedError, error_body
from partc.cli.server.responses import ResponseStream, document
from partc.cli.server.settings import ServerSettings
from partc.cli.server.stream import EventStream, ended_when_left
from partc.cli.text.tool_calls import FORMS
from partc.runtime.files import counted
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

_BODY_SECONDS = 30.0
_SHORT_BYTES = 1024
"""A body up to this size is read at once: starting another thread takes longer than tokenizing this much text."""
_PAGE_BYTES = 1 << 20
_MOST_CHATS = 8
"""The number of conversations that may wait for the template."""
_WAITING_BYTES = 4 * MOST_BYTES
"""The number of bytes that may wait in bodies of one kind."""
_LOCAL = {"localhost", "127.0.0.1", "::1"}
_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/models"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/tokenize", "/detokenize", "/health", "/metrics"),
)
_OPEN_PATHS = {"/", "/health"}
"""Paths that are answered without a key."""
_PAGE_POLICY = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


T = TypeVar("T")
Read = Callable[[bytes | bytearray], list[Completion]]


class Document(JSONResponse):
    """JSON that ends with a newline, for readers in a terminal."""

    def render(self, content: Any) -> bytes:
        """Returns the body as bytes."""
        return super().render(content) + b"\n"


class Turns:
    """Reads bodies in another thread, one at a time, the shortest first; at most `most` may wait, or any number if it is None."""

    def __init__(self, most: int | None = None) -> None:
        self._most, self._is_taken, self._count = most, False, 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def run(self, read: Callable[[bytes | bytearray], T], body: bytes | bytearray, short: int = 0) -> T:
        """Reads a body, a `short` one at once in this thread; raises RefusedError if too many wait."""
        if short and len(body) <= short:
            return read(body)
        if self._is_taken:
            if self._most is not None and len(self._waiting) >= self._most:
                raise RefusedError(429, f"{self._most} conversations wait for the template", code="queue_full", retry=1)
            if sum(size for size, *_ in self._waiting) + len(body) > _WAITING_BYTES:
                fact = f"more than {_WAITING_BYTES:,} bytes wait to be read; short bodies are taken"
                raise RefusedError(429, fact, code="queue_full", retry=1)
            turn = asyncio.get_running_loop().create_future()
            self._count += 1
            heappush(self._waiting, (len(body), self._count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            return await asyncio.to_thread(read, body)
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Lets the shortest waiting body be read."""
        self._is_taken = False
        for _ in range(len(self._waiting)):
            turn = heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                self._is_taken = True
                return


class Server:
    """The state that routes share: the reader of bodies, the engine with the open requests, and the host names under which it is served."""

    def __init__(self, reader: Reader, engine: Engine, settings: ServerSettings) -> None:
        self._reader, self.engine, self.timeout = reader, engine, settings.timeout
        self._adapters, self._changes = settings.adapters, Turns(_MOST_CHATS)
        self.hosts = {_host_of(name) for name in (settings.host, *settings.hosts)} | _LOCAL
        self.origins, self._key = settings.origins, settings.api_key
        self.created = int(time.time())
        self._texts, self._chats = Turns(), Turns(_MOST_CHATS)
        self._token_texts = TokenTexts(reader.tokenizer)
        self._page = counted.read_text(Path(__file__).with_name("page.html"), _PAGE_BYTES)

    @property
    def reader(self) -> Reader:
        """The reader of bodies, with the adapters that are loaded now."""
        record, names = self._reader.record, self.engine.adapters
        if names and record.adapters != names:
            self._reader = replace(self._reader, record=record.model_copy(update={"adapters": names}))
        return self._reader

    def app(self) -> ASGIApp:
        """Returns the application."""
        routes = [  # in this order a path is looked for
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/", self.page, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
        ]
        handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {  # starlette runs others in threads
            RefusedError: self.refused,
            HTTPException: _http_error,
            Exception: _fault,
        }
        served = Starlette(routes=routes, exception_handlers=handlers)

        allowed = refusing(served, self._refuse_without_key)
        if self.origins:
            methods = ["GET", "POST"]
            allowed = CORSMiddleware(
                allowed, self.origins, methods, allow_headers=["*"], expose_headers=["Retry-After"]
            )
        return refusing(allowed, self._refuse_other_host)

    def _refuse_without_key(self, scope: Scope) -> None:
        """Raises RefusedError if the server has a key and a request lacks it; the comparison takes the same time for any wrong key."""
        if self._key is None or scope["path"] in _OPEN_PATHS:
            return
        given = b"".join(value for name, value in scope["headers"] if name == b"authorization")
        kind, _, key = given.partition(b" ")
        if kind.lower() != b"bearer" or not compare_digest(key.strip(), self._key.encode()):
            self.engine.metrics.requests["refused"] += 1
            raise RefusedError(
                401, "the header 'Authorization: Bearer KEY' has no key, or a wrong one", code="invalid_api_key"
            )

    def _refuse_other_host(self, scope: Scope) -> None:
        """Raises RefusedError for a request to another host name.

        A stranger may point a name at this machine's address, and browsers then take this server for the origin of the stranger's page.
        """
        names = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        served = self.hosts | {_host_of(scope["server"][0])} if scope["server"] else self.hosts
        if any(_host_of(name) not in served for name in names) or len(names) > 1:
            fact = f"the host '{', '.join(names)}' is not served here; --allow-host gives the server a further name"
            self.engine.metrics.requests["refused"] += 1
            raise RefusedError(421, fact, code="host")

    def _refuse_other_origin(self, request: Request) -> None:
        """Raises RefusedError for a request from another server's page, which would use this server in the name of the page's viewer."""
        origin, host = request.headers.get("origin"), request.headers.get("host")
        if origin is None or origin.partition("://")[2] == host or not {origin, "*"}.isdisjoint(self.origins):
            return
        fact = "requests of other pages are refused; --cors gives the server the origin of a page"
        raise RefusedError(403, fact, code="origin")

    async def page(self, request: Request) -> Response:
        """Returns the page for trying out the server."""
        return HTMLResponse(self._page, headers={"Content-Security-Policy": _PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        """Returns whether requests are taken."""
        state = self.engine.state
        return Document({"status": state.value}, 200 if state is State.READY else 503)

    async def metrics(self, request: Request) -> Response:
        """Returns counts for Prometheus."""
        return PlainTextResponse(self.engine.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """Returns the list of the model and its adapters."""
        return Document({"object": "list", "data": [self._model(name) for name in self.reader.models]})

    async def model(self, request: Request) -> Response:
        """Returns the model, or one of its adapters, by its name."""
        self.reader.refuse_other(name := request.path_params["model"])
        return Document(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        record = self.reader.record
        sizes = {"max_model_len": record.length, "vocabulary": record.vocabulary}
        texts = {"text": self.reader.tokenizer is not None, "chat": self.reader.template is not None}
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "partc",
            **({"parent": self.reader.model} if name != self.reader.model else {}),
            **sizes,
            **texts,
        }

    async def completions(self, request: Request) -> Response:
        """Continues a prompt."""
        return await self._answer(request, self.reader.completion, self._texts, _SHORT_BYTES)

    async def chat(self, request: Request) -> Response:
        """Answers a conversation."""
        return await self._answer(request, self.reader.chat, self._chats)

    async def responses(self, request: Request) -> Response:
        """Answers a conversation in the newer form of the API."""
        (answer,) = await self._begun(request, self.reader.response, self._chats)
        if answer.completion.streams:
            return ResponseStream(answer, self.engine)
        with ended_when_left(request.receive, self.engine, [answer.ticket]):
            return Document(document(answer, await self._deltas(answer)))

    async def embeddings(self, request: Request) -> Response:
        """Returns the embeddings of texts; as many are read at the same time as there are slots."""
        self._refuse_other_origin(request)
        body, tickets, vectors = await _body(request), list[Ticket](), list[str]()
        with self.engine.place():
            asked = await self._texts.run(self.reader.embeddings, body, _SHORT_BYTES)
            timeout = self.timeout if asked.timeout is None else asked.timeout
            with ended_when_left(request.receive, self.engine, tickets):
                for one in asked.requests:
                    if len(tickets) - len(vectors) == self.reader.record.slots:
                        vectors.append(await embedding_of(tickets[len(vectors)]))
                    tickets.append(self.engine.submit(one, timeout))
                vectors += [await embedding_of(ticket) for ticket in tickets[len(vectors) :]]
        data = [
            {"object": "embedding", "index": index, "embedding": shortened(one, asked.dimensions, asked.base64)}
            for index, one in enumerate(vectors)
        ]
        read = sum(one.read for one in asked.requests)
        usage = {"prompt_tokens": read, "total_tokens": read}
        return Document({"object": "list", "data": data, "model": asked.model, "usage": usage})

    async def load_adapter(self, request: Request) -> Response:
        """Loads an adapter; later requests can name it as their model."""
        self._refuse_other_origin(request)
        reader = self.reader
        change = await self._changes.run(lambda body: reader.change(body, self._adapters), await _body(request))
        await self.engine.change(change)
        return PlainTextResponse(f"Success: LoRA adapter '{change.name}' added successfully.\n")

    async def unload_adapter(self, request: Request) -> Response:
        """Unloads an adapter; its open requests continue."""
        self._refuse_other_origin(request)
        change = self.reader.leaving(await _body(request))
        await self.engine.change(change)
        return PlainTextResponse(f"Success: LoRA adapter '{change.name}' removed successfully.\n")

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or a conversation."""
        self._refuse_other_origin(request)
        return Document(await self._chats.run(self.reader.tokens, await _body(request)))

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        self._refuse_other_origin(request)
        return Document(await self._texts.run(self.reader.text, await _body(request), _SHORT_BYTES))

    async def refused(self, request: Request, error: RefusedError) -> Response:
        """Returns the response to a refused request."""
        self.engine.metrics.requests["refused"] += 1
        headers = {"Retry-After": str(error.retry)} if error.retry else None
        return Document(error.body(), error.status, headers=headers)

    async def _answer(self, request: Request, read: Read, turns: Turns, short: int = 0) -> Response:
        """Returns the answer to a request, with all its choices."""
        answers = await self._begun(request, read, turns, short)
        if answers[0].completion.streams:
            return EventStream(answers, self.engine)
        with ended_when_left(request.receive, self.engine, [one.ticket for one in answers]):
            documents = [one.document(await self._deltas(one)) for one in answers]
        found = likeliest(answers, [choice for one in documents for choice in one["choices"]])
        return Document({**documents[0], "choices": found, "usage": usage_of(answers)})

    async def _begun(self, request: Request, read: Read, turns: Turns, short: int = 0) -> list[Answer]:
        """Starts the choices of an answer; `read` reads the request's body in one of `turns`, or at once if it is `short`."""
        self._refuse_other_origin(request)
        body = await _body(request)
        with self.engine.place():
            choices = await turns.run(read, body, short)
            self.engine.refuse_too_many(len(choices))
            completion = choices[0]
            timeout = self.timeout if completion.timeout is None else completion.timeout
            tickets = [self.engine.submit(one.request, timeout) for one in choices]
        del body
        return [
            Answer(
                one,
                one.request.adapter or self.reader.model,
                ticket,
                self._letters(one),
                tickets[0].number,
                self._token_texts,
            )
            for one, ticket in zip(choices, tickets, strict=True)
        ]

    def _letters(self, choice: Completion) -> Letters:
        controls = () if choice.tools is None else FORMS[choice.tools.form].controls
        return Letters(self.reader.tokenizer, choice.stops, controls)

    async def _deltas(self, answer: Answer) -> list[Delta]:
        """Returns all deltas of a choice, up to its end."""
        deltas = [await answer.next(self.engine)]
        while not deltas[-1].finish:
            deltas.append(await answer.next(self.engine))
        return deltas


async def _body(request: Request) -> bytearray:
    """Returns the request's body; raises RefusedError if it is encoded or too long, takes too long, or breaks off."""
    received, coding = bytearray(), request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise RefusedError(415, f"the body is coded as '{coding[:80]}'; send it as it is", code="coding")
    if int(request.headers.get("content-length") or 0) > MOST_BYTES:
        raise _too_long()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for data in request.stream():
                received += data
                if len(received) > MOST_BYTES:
                    raise _too_long()
    except TimeoutError:
        raise RefusedError(408, f"the body did not come within {_BODY_SECONDS:.0f} s") from None
    except ClientDisconnect:
        raise RefusedError(400, f"the client left after {len(received):,} bytes of its body") from None
    return received


def refusing(served: ASGIApp, refuse: Callable[[Scope], None]) -> ASGIApp:
    """Returns an application that calls `refuse` on each request first."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            refuse(scope)
        except RefusedError as error:
            await Document(error.body(), error.status)(scope, receive, send)
        else:
            await served(scope, receive, send)

    return application


def _too_long() -> RefusedError:
    return RefusedError(413, f"the body has more than {MOST_BYTES:,} bytes", code="too_large")


def _host_of(name: str) -> str:
    """Returns the host of an address with or without a port, without the brackets of IPv6."""
    name = name.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name if name.count(":") > 1 else name.partition(":")[0]


async def _http_error(request: Request, error: HTTPException) -> Response:
    words = {
        404: f"there is no such path; there are {', '.join(_PATHS)}",
        405: f"{request.method} is not a method of this path",
    }
    fact = words.get(error.status_code, error.detail)
    return Document(error_body(fact, "invalid_request_error"), error.status_code, headers=error.headers)


async def _fault(request: Request, error: Exception) -> Response:
    """Returns the response for a fault of the server itself."""
    return Document(error_body(f"{type(error).__name__}: {error}", "server_error"), 500)
