"""Reads the prompts of `partc generate` as requests: from options, or from a file of JSON lines.

    {"prompt": "Once"}    {"ids": [1, 306], "max_tokens": 20}    {"features": "a.npy", "decoder_ids": [50258, 50259]}

For a model with an encoder these are the encoder's inputs, and `decoder_ids` is the decoder's prompt, by default the model's own start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from partc.cli.job.job import GenerationJob
from partc.cli.text.tokenizer import open_tokenizer
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.data.npy import BROKEN, read_array, reason
from partc.runtime.errors import ArtifactError, InputError, UsageError
from partc.runtime.files import counted
from partc.runtime.files.replace import refuse_other

if TYPE_CHECKING:
    from partc.runtime import Request
    from partc.runtime.artifact.format import Manifest
    from partc.runtime.artifact.generation import GenerationRecord

_GIVEN = ("prompt", "ids", "features")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
OPTIONS = (*_NUMBERS, "max_tokens", "top_k", "seed", "logit_bias", "min_tokens", "logprobs", "adapter")
"""Options of a request, as options of the command and as keys in a line of the prompts' file."""
_KEYS = (*OPTIONS, "stop")
"""Keys that a line of the prompts' file may have in addition to its prompt."""


def requests_of(job: GenerationJob, manifest: Manifest) -> Sequence[Request]:
    """Returns the checked requests of a job, and reads them where the job has none. Raises PartcError with all their problems."""
    from partc.runtime.generation.request import refuse_unfit

    if job.requests is not None:
        return job.requests
    if manifest.generation is None:
        fact = "the artifact makes no tokens"
        raise ArtifactError(f"{fact}\n  help: compile it with `generate: {{length: 4096}}` in the plan")
    record = manifest.generation
    requests = (
        _from_file(job, record)
        if job.file is not None
        else [_request(job, record, entry, where) for entry, where in _entries(job)]
    )
    refuse_unfit(requests, record)
    if job.output is not None:
        refuse_other(Path(job.output))
    return requests


def _from_file(job: GenerationJob, record: GenerationRecord) -> list[Request]:
    """Returns a request for each line of a file of JSON lines."""
    path, requests, problems = Path(job.file or ""), list["Request"](), list[str]()
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
            requests.append(_request(job, record, entry, f"{path}:{at}"))
        except json.JSONDecodeError as error:
            problems.append(f"{path}:{at}: is not JSON: {error.msg}")
        except InputError as error:
            problems.append(f"{path}:{at}: {error}")
    if not requests and not problems:
        problems.append(f'{path}: has no line\n  help: write one for each prompt, {{"ids": [1, 306]}}')
    if problems:
        raise InputError("\n".join(problems))
    return requests


def _request(job: GenerationJob, record: GenerationRecord, entry: dict[str, Any], where: str) -> Request:
    from partc.runtime import Request

    unknown = [key for key in entry if key not in (*_GIVEN, "decoder_ids", *_KEYS)]
    given = [key for key in _GIVEN if key in entry]
    if unknown or len(given) != 1:
        known = ", ".join((*_GIVEN, "decoder_ids", *_KEYS))
        fact = f"'{unknown[0]}' is not a key" if unknown else "it has one of 'prompt', 'ids' and 'features'"
        raise InputError(f"{fact}\n  help: the keys are {known}")
    if record.encoder is None and "decoder_ids" in entry:
        raise InputError("'decoder_ids' are of a model with an encoder\n  help: write them behind its 'ids'")
    ids = entry.get("ids")
    if ids is None and "prompt" in entry:
        tokenizer = open_tokenizer(job.tokenizer)
        if tokenizer is None:
            raise UsageError(
                f"{where}: text needs a tokenizer\n  help: give --tokenizer tokenizer.json, or the prompt's --ids"
            )
        ids = tokenizer.encode(str(entry["prompt"])).ids
    for key, value in (("ids", ids), ("decoder_ids", entry.get("decoder_ids"))):
        if value is not None and not _is_of("stop", value):
            raise InputError(f"'{key}' is a list of whole numbers")
    said = {key: entry[key] for key in _KEYS if key in entry}
    wrong = [key for key, value in said.items() if not _is_of(key, value)]
    if wrong:
        raise InputError(f"'{wrong[0]}' is {json.dumps(said[wrong[0]])}")
    options = {**record.defaults.options, **job.options, **said}
    if "logit_bias" in options:  # JSON has its tokens as texts
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
    if record.encoder is None and ids is not None:
        return Request(ids, **options)
    features = _features(job, entry["features"]) if ids is None else None
    return Request(entry.get("decoder_ids", ()), encoder=ids if features is None else features, **options)


def _entries(job: GenerationJob) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the prompts of options in the form of a file's lines, each with the name of its option."""
    more = {"decoder_ids": [*job.decoder_ids]} if job.decoder_ids else {}
    for ids in job.ids:
        yield {"ids": [*ids], **more}, "--ids"
    for text in job.texts:
        yield {"prompt": text, **more}, "--prompt"
    for path in job.features:
        yield {"features": path, **more}, "--features"


def _features(job: GenerationJob, name: object) -> Array:
    """Returns the array of a file; in a file of prompts, its name is relative to that file's folder."""
    if not isinstance(name, str):
        raise InputError("'features' is the name of a .npy file")
    path = Path(job.file or "").parent / name
    try:
        return np.array(read_array(path))
    except BROKEN as error:
        raise InputError(f"{path}: {reason(error)}\n  help: write it with numpy.save") from error


def _is_of(key: str, value: object) -> bool:
    """Whether a value has the type of its key."""
    if key == "stop":
        return isinstance(value, list) and all(type(one) is int for one in value)
    if key == "adapter":
        return isinstance(value, str)
    if key == "logit_bias":
        is_token = isinstance(value, dict) and all(token.isdecimal() for token in value)
        return is_token and isinstance(value, dict) and all(type(bias) in (int, float) for bias in value.values())
    return type(value) in ((int, float) if key in _NUMBERS else (int,))
