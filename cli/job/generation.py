"""One rank of `partc generate`: reads the prompts, makes their tokens with the other ranks, and on rank 0 shows them as they come.

Text needs a tokenizer (`cli/text/`). Without one prompts and answers are numbers.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.cli.job.job import GenerationJob, Job
from partc.cli.output import console
from partc.cli.text.tokenizer import TextStream, open_tokenizer
from partc.runtime.errors import ArtifactError, InputError, UsageError
from partc.runtime.files import counted
from partc.runtime.files.replace import refuse_other, replacing
from partc.runtime.units import count, seconds

if TYPE_CHECKING:
    from partc.runtime import Generator, Request
    from partc.runtime.artifact.format import Manifest
    from partc.runtime.communication.transport import Transport
    from partc.runtime.generation.slots import NewToken

_KEYS = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
"""Keys of a request that a line of the prompts' file may have beside its prompt."""


def requests_of(job: GenerationJob, manifest: Manifest) -> Sequence[Request]:
    """The requests of a job, read and checked, where they are not yet; PartcError with everything that is wrong with them."""
    from partc.runtime.generation.request import refuse_unfit

    if job.requests is not None:
        return job.requests
    if manifest.generation is None:
        fact = "the artifact makes no tokens"
        raise ArtifactError(f"{fact}\n  help: compile it with `generate: {{length: 4096}}` in the plan")
    found = _from_file(job) if job.file is not None else [_request(job, {"ids": [*ids]}, "--ids") for ids in job.ids]
    found += [_request(job, {"prompt": text}, "--prompt") for text in job.texts]
    refuse_unfit(found, manifest.generation)
    if job.output is not None:
        refuse_other(Path(job.output))
    return found


def run_generation(job: Job, transport: Transport, requests: Sequence[Request], begin: float) -> int:
    """This rank's part of the job, with the `requests` that rank 0 has read; the exit code."""
    from partc.runtime import Request, load_generator

    text = json.dumps([dataclasses.asdict(one) for one in requests]) if transport.rank == 0 else ""
    requests = [Request(**one) for one in json.loads(transport.all_gather_text(text)[0])]
    on_error = "abort" if job.run_dir is None else "raise"
    options = {"threads": job.threads, "trust": job.trust, "devices": job.devices, "on_error": on_error}
    with load_generator(job.folder, transport, **options) as generator:
        _make(job, generator, requests, transport.rank == 0, begin)
        transport.all_gather_text("")
    return 0


def run_threads(job: Job, manifest: Manifest) -> int:
    """The job with all ranks as threads of this process; the exit code."""
    from partc.runtime import load_local_generator

    assert job.generation is not None
    begin = time.perf_counter()
    requests = requests_of(job.generation, manifest)
    options = {"threads": job.threads, "trust": job.trust, "stall": job.stall, "devices": job.devices}
    with load_local_generator(job.folder, **options) as generator:
        _make(job, generator, requests, True, begin)
    return 0


def _make(job: Job, generator: Generator, requests: Sequence[Request], shows: bool, begin: float) -> None:
    """Makes all tokens; of the ranks one shows them."""
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
    """What the user sees: one prompt's answer as it is made, of several prompts each answer when it ends; or a file of all answers."""

    job: Job
    asked: GenerationJob
    requests: Sequence[Request]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokenizer = open_tokenizer(self.asked.tokenizer)
        self.stream = self.tokenizer and TextStream(self.tokenizer)

    def add(self, made: NewToken) -> None:
        """Takes a token, and shows it."""
        tokens = self.tokens.setdefault(made.request, [])
        tokens.append(made.token)
        if made.finish:
            self.finished[made.request] = made.finish
        if self.job.reporting.json or self.asked.output is not None:
            return
        if len(self.requests) == 1:
            gap = " " if tokens[1:] else ""
            text = f"{gap}{made.token}" if self.stream is None else self.stream.add(made.token)
            if self.stream is not None and made.finish:
                text += self.stream.end()
            console.echo(text, nl=bool(made.finish))
            sys.stdout.flush()
        elif made.finish:
            console.echo(self._line(made.request))

    def end(self, loaded: float, taken: float) -> None:
        """Writes or shows what remains: the answers, and how long it took."""
        from partc.cli.job.outputs import hand_over

        read, made = sum(len(one.prompt) for one in self.requests), sum(map(len, self.tokens.values()))
        if self.asked.output is not None:
            with replacing(Path(self.asked.output)) as out:
                out.write("".join(f"{self._line(number)}\n" for number in sorted(self.tokens)).encode())
        if self.job.reporting.json:
            answers = [self._answer(number) for number in sorted(self.tokens)]
            hand_over(self.job, {"answers": answers, "loaded": loaded, "seconds": taken, "read": read, "made": made})
        elif not self.job.reporting.quiet:
            rate = f"{made / taken:.3g} tokens/s" if taken else ""
            text = f"loaded in {seconds(loaded)}; read {count(read, 'token')} and made {count(made, 'token')} in {seconds(taken)}, {rate}"
            console.echo(text, err=True)

    def _line(self, number: int) -> str:
        return json.dumps(self._answer(number), ensure_ascii=False)

    def _answer(self, number: int) -> dict[str, Any]:
        tokens = self.tokens[number]
        text = {} if self.tokenizer is None else {"text": self.tokenizer.decode(tokens)}
        return {"request": number, **text, "ids": tokens, "finish": self.finished[number]}


def _from_file(job: GenerationJob) -> list[Request]:
    """A request for each line of a file of JSON lines."""
    path, found, problems = Path(job.file or ""), list["Request"](), list[str]()
    try:
        text = counted.read_text(path, counted.SCHEDULE_BYTES)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: is not UTF-8 text: {error}\n  help: write one line of JSON for each prompt"
        ) from None
    for at, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise InputError('a line is a mapping such as {"prompt": "Once"} or {"ids": [1, 306]}')
            found.append(_request(job, entry, f"{path}:{at}"))
        except json.JSONDecodeError as error:
            problems.append(f"{path}:{at}: is not JSON: {error.msg}")
        except InputError as error:
            problems.append(f"{path}:{at}: {error}")
    if not found and not problems:
        problems.append(f'{path}: has no line\n  help: write one for each prompt, {{"ids": [1, 306]}}')
    if problems:
        raise InputError("\n".join(problems))
    return found


def _request(job: GenerationJob, entry: dict[str, Any], where: str) -> Request:
    from partc.runtime import Request

    unknown = [key for key in entry if key not in ("prompt", "ids", *_KEYS)]
    if unknown or ("prompt" in entry) == ("ids" in entry):
        known = ", ".join(("prompt", "ids", *_KEYS))
        fact = f"'{unknown[0]}' is not a key" if unknown else "it has one of 'prompt' and 'ids'"
        raise InputError(f"{fact}\n  help: the keys are {known}")
    ids = entry.get("ids")
    if ids is None:
        tokenizer = open_tokenizer(job.tokenizer)
        if tokenizer is None:
            raise UsageError(
                f"{where}: text needs a tokenizer\n  help: give --tokenizer tokenizer.json, or the prompt's --ids"
            )
        ids = tokenizer.encode(str(entry["prompt"])).ids
    if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise InputError("'ids' is a list of whole numbers")
    said = {key: entry[key] for key in _KEYS if key in entry}
    wrong = [key for key, value in said.items() if not _is_of(key, value)]
    if wrong:
        raise InputError(f"'{wrong[0]}' is {json.dumps(said[wrong[0]])}")
    return Request(ids, **{**job.options, **said})


def _is_of(key: str, value: object) -> bool:
    """Whether a value has the type of its key."""
    if key == "stop":
        return isinstance(value, list) and all(type(one) is int for one in value)
    return type(value) in ((int, float) if key in ("temperature", "top_p") else (int,))
