"""One rank of `partc serve`: runs steps for requests, which rank 0 receives from the server and sends to the other ranks.

The server is in the process that has started the ranks; or in a thread of rank 0's process, if ranks are threads or the user has an own
launcher.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from partc.cli.interruption import refuse_stopped
from partc.cli.job.job import Job
from partc.cli.output import console
from partc.cli.output.failures import described
from partc.cli.server.link import Link
from partc.cli.server.settings import ServerSettings
from partc.cli.text.chat_template import end_of_text, find_chat_template
from partc.cli.text.tokenizer import open_tokenizer, refuse_other_vocabulary
from partc.cli.text.tool_calls import form_of
from partc.runtime.errors import ArtifactError, InputError, PartcError, UsageError, reason_of

if TYPE_CHECKING:
    from partc.cli.server.bodies import Reader
    from partc.cli.server.front import Front
    from partc.runtime import ContinuousBatch
    from partc.runtime.artifact.format import Manifest
    from partc.runtime.communication.transport import Transport
    from partc.runtime.generation.request import NewToken
    from partc.runtime.generation.slots import Slots

_Score: TypeAlias = tuple[float, Sequence[tuple[int, float]]]
_TOGETHER = 0.05
"""The longest delay of a token, in seconds: text is not read faster. Steps of 2 ms then send one message for 25 steps."""
_BEAT = 5.0
"""The seconds of idleness after which rank 0 sends an empty step, so that other ranks do not report a long wait."""


def reader_of(settings: ServerSettings, manifest: Manifest) -> Reader:
    """Returns the reader of requests for this artifact; raises PartcError if it generates no tokens or the tokenizer is wrong."""
    from partc.cli.server.bodies import Reader
    from partc.runtime.generation.adapters import stacks_of

    record = manifest.generation
    if record is None:
        fact = "the artifact makes no tokens"
        raise ArtifactError(f"{fact}\n  help: compile it with `generate: {{length: 4096}}` in the plan")
    if record.encoder is not None and not record.encoder.count:
        fact = f"its encoder is given arrays {record.encoder.shape}, and requests of a server are texts or tokens"
        raise ArtifactError(f"{fact}\n  help: use `partc generate --features`, or the library")
    name = settings.name or manifest.model.name
    if name in record.adapters:
        raise UsageError(f"the model and an adapter have the name '{name}'\n  help: give another --served-model-name")
    path, tokenizer = settings.tokenizer, open_tokenizer(settings.tokenizer)
    stacks = stacks_of(manifest)
    if path is None:
        return Reader(name, record, None, None, stacks=stacks)
    refuse_other_vocabulary(path, tokenizer, record.vocabulary)
    template = find_chat_template(path)
    calls = settings.tool_calls or (form_of(template.text, tokenizer) if template is not None else "")
    return Reader(name, record, tokenizer, template, tuple(end_of_text(path, tokenizer)), calls, path, stacks)


def open_front(settings: ServerSettings, manifest: Manifest) -> Front:
    """Starts the server and binds its port; raises PartcError if the port is taken or a package is missing."""
    from partc.cli.server.front import Front

    return Front(settings, reader_of(settings, manifest))


def report_address(front: Front) -> None:
    """Prints the server's address."""
    console.echo(f"serving on {front.address}; Ctrl-C ends it")
    sys.stdout.flush()


def report_draining(front: Front) -> None:
    """Prints that the server takes no more requests."""
    console.echo(f"ends: no more requests are taken, open ones have {front.settings.drain:g} s", err=True)


def run_server(job: Job, transport: Transport) -> int:
    """Runs this rank of the job, and returns the exit code."""
    from partc.runtime import ContinuousBatch, load_generator
    from partc.runtime.artifact.manifest import open_artifact

    assert job.serving is not None
    own: Front | None = None
    problem = ""
    if transport.rank == 0 and not job.serving.link:
        try:
            own = open_front(job.serving, open_artifact(job.folder, trust=True).manifest)
        except PartcError as error:
            problem = str(error)
    if problem := transport.all_gather_text(problem)[0]:
        raise InputError(problem)
    on_error = "abort" if job.run_dir is None else "raise"
    options = {"threads": job.threads, "trust": job.trust, "devices": job.devices, "on_error": on_error}
    with own or nullcontext(), load_generator(job.folder, transport, **options) as generator:
        batch = ContinuousBatch(generator, job.serving.shares)
        batch.warm_up()
        if transport.rank:
            for number in (signal.SIGINT, signal.SIGTERM) if job.run_dir is None else ():
                signal.signal(number, signal.SIG_IGN)  # rank 0 hears them, and says when the last step was
            for _ in iter(batch.step, None):  # rank 0 passes the tokens on
                pass
        elif own is not None:
            _lead_here(batch, own, min(_BEAT, job.stall / 3))
        else:
            with closing(_connected(job.serving.link)) as link:
                lead(batch, link, min(_BEAT, job.stall / 3))
        transport.all_gather_text("")
    return 0


def run_threads(job: Job, manifest: Manifest) -> int:
    """Runs all ranks of the job as threads of this process, and returns the exit code."""
    from partc.runtime import ContinuousBatch, load_local_generator

    assert job.serving is not None
    options = {"threads": job.threads, "trust": job.trust, "stall": job.stall, "devices": job.devices}
    with open_front(job.serving, manifest) as front, load_local_generator(job.folder, **options) as generator:
        batch = ContinuousBatch(generator, job.serving.shares)
        batch.warm_up()
        _lead_here(batch, front, _BEAT)
    return 0


def _lead_here(batch: ContinuousBatch, front: Front, beat: float) -> None:
    """Runs the steps with the server in a thread of this process, until a signal or a failure ends both."""
    near, far = socket.socketpair()
    with closing(Link(near)) as link, _ending(front):
        front.attach(far)
        try:
            lead(batch, link, beat, lambda: report_address(front))
        except BaseException as error:
            front.fail(described(error)[1] if isinstance(error, Exception) else "the server was interrupted")
            raise


@contextmanager
def _ending(front: Front) -> Iterator[None]:
    """A context in which the first signal to end stops new requests and lets open ones finish; the second signal ends at once."""

    def note(number: int, frame: object) -> None:
        if front.is_draining:
            raise KeyboardInterrupt
        report_draining(front)
        front.drain()

    refuse_stopped()
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def lead(batch: ContinuousBatch, link: Link, beat: float, began: Callable[[], None] = lambda: None) -> None:
    """Runs the steps of the requests that arrive over the link, until it ends; without requests runs an empty step every `beat` seconds."""
    link.send({"ready": True, "adapters": batch.slots.record.adapters})
    began()
    news = _News(link)
    while True:
        for message in link.receive(beat if batch.idle else 0.0):
            _heed(batch, message)
        begin, before = time.perf_counter(), batch.slots.used
        made = batch.step()
        if made is None:
            return
        seconds = time.perf_counter() - begin if made or before else None
        news.add(made, batch.slots, seconds)
        if batch.changed:
            link.send({"changed": batch.changed, "adapters": batch.slots.record.adapters})
            batch.changed.clear()


class _News:
    """Collects the results of steps for the server: a request's first and last token are sent at once, those between in groups.

    The ranks need the cores more than a reader needs a letter some milliseconds earlier. Tokens wait if the next step, assuming that it
    takes as long as this one, ends within `_TOGETHER` seconds of the last message.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._made: dict[int, list[int]] = {}
        self._cached: dict[int, int] = {}
        self._scores: dict[int, tuple[list[_Score], list[_Score]]] = {}
        """Maps each request with `logprobs` to the scores of its tokens and those of its prompt."""
        self._embeddings: list[tuple[int, str]] = []
        self._seconds: list[float] = []
        self._begun: set[int] = set()
        """The requests in slots whose first token has been made."""
        self._used = 0
        self._drafts = 0, 0
        """The numbers of drafts, and of right ones, that the server knows."""
        self._sent = 0.0

    def add(self, new: Sequence[NewToken], slots: Slots, seconds: float | None) -> None:
        """Adds the tokens of a step; `seconds` is the step's time, or None for an empty step."""
        finishes, urgent, held = dict[int, str](), list[int](), self._made
        for token in new:
            if token.finish:
                finishes[token.request] = token.finish
            if token.finish or (token.request not in self._begun and not token.of_prompt):
                urgent.append(token.request)
            if token.cached:
                self._cached[token.request] = token.cached
            if token.score is not None:
                self._scores.setdefault(token.request, ([], []))[token.of_prompt].append(
                    (token.score.logprob, token.score.top)
                )
            if token.embedding is not None:
                self._embeddings.append((token.request, b64encode(token.embedding.astype("<f4").tobytes()).decode()))
            if token.of_prompt:
                held.setdefault(token.request, [])
            elif token.request in held:
                held[token.request].append(token.token)
            else:
                held[token.request] = [token.token]
        if urgent:
            self._begun = self._begun.union(urgent) & slots.running
        if seconds is not None:
            self._seconds.append(seconds)
        now = time.perf_counter()
        if held and now + (seconds or 0.0) > self._sent + _TOGETHER:
            urgent, self._sent = [*held], now
        used = slots.used
        if urgent or used != self._used:
            made_rows = [
                (request, held.pop(request), finishes.get(request, ""), *self._scores.pop(request, ()))
                for request in dict.fromkeys(urgent)
            ]
            cached = [*self._cached.items()]
            counts = {"used": used, "waiting": slots.waiting, "seconds": self._seconds, "cached": cached}
            more: dict[str, Any] = {"embedded": self._embeddings} if self._embeddings else {}
            if (drafts := (slots.drafted, slots.accepted)) != self._drafts:
                more["drafts"] = [now - before for now, before in zip(drafts, self._drafts, strict=True)]
                self._drafts = drafts
            self._link.send({"made": made_rows, **counts, **more})
            self._seconds, self._cached, self._embeddings, self._used = [], {}, [], used


def _heed(batch: ContinuousBatch, message: dict[str, Any]) -> None:
    """Applies a message of the server to the batch."""
    from partc.runtime import Request
    from partc.runtime.generation.adapters import AdapterChange

    match message:
        case {"admit": number, "request": fields}:
            batch.admit(number, Request.unpacked(fields))
        case {"cancel": number}:
            batch.cancel(number)
        case {"change": fields}:
            batch.change(AdapterChange(*fields))
        case {"end": True}:
            batch.end()


def _connected(path: str) -> Link:
    """Connects rank 0 to the link; raises UsageError if the launching process is on another machine."""
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(path)
    except OSError as error:
        fact = f"rank 0 does not reach the server that has started it: {reason_of(error)}"
        help = "help: run rank 0 on the machine of `partc serve`, or start all ranks by your own launcher: mpiexec -n 2 partc serve"
        raise UsageError(f"{fact}\n  {help}") from None
    return Link(end)
