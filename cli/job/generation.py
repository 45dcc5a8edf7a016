"""One rank of `partc generate`: generates the tokens after prompts with the other ranks; rank 0 shows them as they arrive.

Text needs a tokenizer (`cli/text/`). Without one, answers are token ids.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.cli.job.job import GenerationJob, Job
from partc.cli.job.prompts import requests_of
from partc.cli.output import console
from partc.cli.text.tokenizer import TextStream, open_tokenizer
from partc.runtime.files.replace import replacing
from partc.runtime.units import count, seconds

if TYPE_CHECKING:
    from partc.runtime import Generator, Request
    from partc.runtime.artifact.format import Manifest
    from partc.runtime.communication.transport import Transport
    from partc.runtime.generation.request import NewToken, TokenScore


def run_generation(job: Job, transport: Transport, requests: Sequence[Request], begin: float) -> int:
    """Runs this rank of the job, with the `requests` that rank 0 has read; returns the exit code."""
    from partc.runtime import Request, load_generator

    text = json.dumps([one.packed() for one in requests]) if transport.rank == 0 else ""
    requests = [Request.unpacked(one) for one in json.loads(transport.all_gather_text(text)[0])]
    on_error = "abort" if job.run_dir is None else "raise"
    options = {"threads": job.threads, "trust": job.trust, "devices": job.devices, "on_error": on_error}
    with load_generator(job.folder, transport, **options) as generator:
        _make(job, generator, requests, transport.rank == 0, begin)
        transport.all_gather_text("")
    return 0


def run_threads(job: Job, manifest: Manifest) -> int:
    """Runs the job with all ranks as threads of this process; returns the exit code."""
    from partc.runtime import load_local_generator

    assert job.generation is not None
    begin = time.perf_counter()
    requests = requests_of(job.generation, manifest)
    options = {"threads": job.threads, "trust": job.trust, "stall": job.stall, "devices": job.devices}
    with load_local_generator(job.folder, **options) as generator:
        _make(job, generator, requests, True, begin)
    return 0


def _make(job: Job, generator: Generator, requests: Sequence[Request], shows: bool, begin: float) -> None:
    """Generates all tokens; the rank with `shows` shows them."""
    assert job.generation is not None
    loaded, started = time.perf_counter() - begin, time.perf_counter()
    shown = _Shown(job, job.generation, requests) if shows else None
    for made in generator.each(requests):
        if shown is not None:
            shown.add(made)
    if shown is not None:
        shown.end(loaded, time.perf_counter() - started)


@dataclass
class _Shown:
    """The user's output: for one prompt its answer as it is generated, for several each answer when it ends; or a file of all answers."""

    job: Job
    settings: GenerationJob
    requests: Sequence[Request]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    scores: dict[int, list[TokenScore]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokenizer = open_tokenizer(self.settings.tokenizer)
        self.stream = self.tokenizer and TextStream(self.tokenizer)

    def add(self, token: NewToken) -> None:
        """Records a token, and shows it."""
        tokens = self.tokens.setdefault(token.request, [])
        tokens.append(token.token)
        if token.score is not None:
            self.scores.setdefault(token.request, []).append(token.score)
        if token.finish:
            self.finished[token.request] = token.finish
        if self.job.reporting.json or self.settings.output is not None:
            return
        if len(self.requests) == 1:
            gap = " " if tokens[1:] else ""
            text = f"{gap}{token.token}" if self.stream is None else self.stream.add(token.token)
            if self.stream is not None and token.finish:
                text += self.stream.end()
            console.echo(text, nl=bool(token.finish))
            sys.stdout.flush()
        elif token.finish:
            console.echo(self._line(token.request))

    def end(self, loaded: float, taken: float) -> None:
        """Writes or shows the rest: the answers, and the time that they took."""
        from partc.cli.job.outputs import hand_over

        read, made_tokens = sum(one.read for one in self.requests), sum(map(len, self.tokens.values()))
        if self.settings.output is not None:
            with replacing(Path(self.settings.output)) as out:
                out.write("".join(f"{self._line(number)}\n" for number in sorted(self.tokens)).encode())
        if self.job.reporting.json:
            answers = [self._answer(number) for number in sorted(self.tokens)]
            hand_over(
                self.job, {"answers": answers, "loaded": loaded, "seconds": taken, "read": read, "made": made_tokens}
            )
        elif not self.job.reporting.quiet:
            rate = f"{made_tokens / taken:.3g} tokens/s" if taken else ""
            tokens = f"read {count(read, 'token')} and made {count(made_tokens, 'token')}"
            text = f"loaded in {seconds(loaded)}; {tokens} in {seconds(taken)}, {rate}"
            console.echo(text, err=True)

    def _line(self, number: int) -> str:
        return json.dumps(self._answer(number), ensure_ascii=False)

    def _answer(self, number: int) -> dict[str, Any]:
        tokens = self.tokens[number]
        text = {} if self.tokenizer is None else {"text": self.tokenizer.decode(tokens)}
        scores = [{"logprob": one.logprob, "top": dict(one.top)} for one in self.scores.get(number, ())]
        more = {"logprobs": scores} if scores else {}
        return {"request": number, **text, "ids": tokens, "finish": self.finished[number], **more}
