"""`partc verify` for a plan that generates: compares the tokens after several prompts at once with those of the unsharded model for each.

The unsharded model runs in torch where it is a torch module, else in onnxruntime, with a past that grows, and where it has an encoder, with
the encoder in each step. Two tokens whose scores differ by less than rounding are both right: after such a position a sequence is not
compared, and a note says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from partc.cli.comparison.verdict import Case, Verdict, of_torch_named, unsharded_session
from partc.compiler.comparison.compare import compare
from partc.runtime.artifact.generation import GenerationRecord
from partc.runtime.artifact.tensors.dtypes import Array, dense
from partc.runtime.errors import InputError
from partc.runtime.units import count as count_text

if TYPE_CHECKING:
    from partc.runtime import Request

TIE = 1e-4
"""Scores that differ by less count as equal; the margin is larger where products round activations to int8, which may round either way."""
_PROMPTS, _TOKENS, _LONGEST = 6, 16, 40
_STEP = 64
"""The most tokens of a step whose scores are in memory at once."""


@dataclass(frozen=True)
class Reference:
    """The tokens after a prompt, the margin of each token's score over the next best score, and the effect of rounding on that margin."""

    tokens: list[int]
    margins: list[float]
    noise: list[float]


def verdict(case: Case, seed: int) -> Verdict:
    """Compares every token after random prompts; there are more prompts than slots, so that slots are reused."""

    record = case.report.manifest.generation
    assert record is not None
    rng = np.random.default_rng(seed)
    count = min(_TOKENS, record.length - 1)
    lengths = rng.integers(1, min(_LONGEST, record.length - count) + 1, max(_PROMPTS, record.slots + 2))
    prompts = [_request(rng, record, size, count) for size in lengths.tolist()]
    alone = _Unsharded(case, record)
    wanted = [alone.tokens(prompt, count) for prompt in prompts]
    found = _over_mpi(case, prompts, count) if case.mpi else _in_process(case, prompts, count)
    notes, whole, compiled = list[str](), dict[str, Array](), dict[str, Array]()
    for number, (reference, tokens) in enumerate(zip(wanted, found, strict=True)):
        first = next(
            (k for k, pair in enumerate(zip(reference.tokens, tokens, strict=True)) if pair[0] != pair[1]), count
        )
        if first < count and reference.margins[first] < reference.noise[first]:
            notes.append(f"prompt {number}: two tokens score alike at token {first}; what follows is not compared")
            tokens = [*tokens[:first], *reference.tokens[first:]]
        name = f"prompt {number}, {count_text(prompts[number].read, 'token')}"
        whole[name], compiled[name] = np.asarray(reference.tokens), np.asarray(tokens)
    rows = compare(whole, compiled, None, None)
    return Verdict(of_torch_named(rows, [] if case.torch_model is None else whole), notes)


def perplexity(case: Case, ids: Sequence[int]) -> float:
    """Returns the unsharded model's perplexity of a text, in pieces as long as a sequence of the plan, each from an empty past."""
    record = case.report.manifest.generation
    assert record is not None
    alone = _Unsharded(case, record)
    pieces = [ids[begin : begin + record.length + 1] for begin in range(0, len(ids) - 1, record.length)]
    return math.exp(sum(map(alone.surprise, pieces)) / (len(ids) - 1))


def _request(rng: np.random.Generator, record: GenerationRecord, size: int, count: int) -> Request:
    """Returns a request with a random prompt of `size` tokens.

    For a model with an encoder the random values are the encoder's input, and the prompt is the decoder's start.
    """
    from partc.runtime import Request

    encoder = record.encoder
    if encoder is None:
        return Request(rng.integers(0, record.vocabulary, size).tolist(), max_tokens=count)
    start = encoder.start or rng.integers(0, record.vocabulary, 1).tolist()
    if encoder.count:
        known = encoder.vocabulary or record.vocabulary
        return Request(start, max_tokens=count, encoder=rng.integers(0, known, min(size, encoder.length)).tolist())
    kind = dense(encoder.type)
    assert kind is not None
    return Request(start, max_tokens=count, encoder=rng.standard_normal(encoder.shape).astype(kind.numpy))


def _in_process(case: Case, prompts: Sequence[Request], count: int) -> list[list[int]]:
    from partc.runtime import load_local_generator

    with load_local_generator(case.report.out, trust=True, devices=case.devices) as generator:
        answers = generator.run(prompts)
    return [_whole(answer.tokens, count) for answer in answers]


def _over_mpi(case: Case, prompts: Sequence[Request], count: int) -> list[list[int]]:
    """Runs the prompts with `partc generate`, through files as a user would."""
    from partc.cli.job.job import GenerationJob, Job, Reporting
    from partc.cli.launch.launch import launch
    from partc.cli.launch.launcher import WITHOUT_MPI, Hosts
    from partc.runtime.files.regular import read_regular
    from partc.runtime.files.writers import new_file

    given, answers_file = case.scratch / "prompts.jsonl", case.scratch / "answers.jsonl"
    with new_file(given) as out:
        out.write("".join(json.dumps(_line(case, k, one)) + "\n" for k, one in enumerate(prompts)).encode())
    generation = GenerationJob(file=str(given), output=str(answers_file), options={"max_tokens": count})
    job = Job(str(case.report.out), generation=generation, reporting=Reporting(quiet=True), devices=case.devices)
    code = launch(job, case.report.manifest, Hosts(None, None), (), WITHOUT_MPI)
    if code:
        raise click.exceptions.Exit(code)
    rows = [json.loads(line) for line in read_regular(answers_file).decode().splitlines()]
    return [_whole(row["ids"], count) for row in sorted(rows, key=lambda row: int(row["request"]))]


def _line(case: Case, number: int, request: Request) -> dict[str, Any]:
    """Returns a request as a line of a file of prompts; an array goes into a file next to it."""
    from partc.runtime.files.writers import new_file

    if request.encoder is None:
        return {"ids": [*request.prompt]}
    if not isinstance(request.encoder, np.ndarray):
        return {"ids": [*request.encoder], "decoder_ids": [*request.prompt]}
    path = case.scratch / f"features_{number}.npy"
    with new_file(path) as out:
        np.save(out, request.encoder)
    return {"features": path.name, "decoder_ids": [*request.prompt]}


def _whole(tokens: list[int], count: int) -> list[int]:
    """Returns an answer, filled up with -1 to `count` tokens."""
    return tokens + [-1] * (count - len(tokens))


class _Unsharded:
    """The unsharded model; it runs one sequence at a time."""

    def __init__(self, case: Case, record: GenerationRecord) -> None:
        self._torch = case.torch_model
        self._session: Any = unsharded_session(case.unsharded()) if self._torch is None else None
        unrounded = case.unrounded() if self._torch is None else None
        self._unrounded: Any = None if unrounded is None else unsharded_session(unrounded)
        self._record = record
        self._caches = {
            str(past.name): str(present.name)
            for past, present in case.report.program.caches.items()
            if present is not None
        }
        self._sizes = {str(past.name): [*(past.shape or ())] for past in case.report.program.caches}
        graph = case.source.model.graph
        self._given = {str(one.name): one for one in graph.inputs}
        made = [str(one.name) for one in graph.outputs if one.name not in self._caches.values()]
        self._scores = record.logits or made[0]

    def _run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Returns the scores and the caches of a step; torch runs it where the model is a torch module."""
        names = [self._scores, *self._caches.values()]
        if self._torch is None:
            made: list[Array] = self._session.run(names, {**feeds})
            return made
        found = self._torch.run(feeds)
        return [found[name] for name in names]

    def _noise(self, feeds: Mapping[str, Array], scores: Array) -> float:
        """Returns the most by which rounding may change the difference of two scores; rounding activations to int8 changes both."""
        if self._unrounded is None:
            return TIE
        exact = self._unrounded.run([self._scores], {**feeds})[0]
        return max(TIE, 2 * float(np.abs(exact[0, -1] - scores[0, -1]).max()))

    def tokens(self, request: Request, count: int) -> Reference:
        """Returns the likeliest tokens after a prompt, filled up with -1 after a token that stops."""
        encoder, prompt = self._record.encoder, request.prompt
        encoded = (
            {} if encoder is None else {encoder.input: self._typed(encoder.input, np.asarray(request.encoder)[None])}
        )
        past: dict[str, Any] = {name: self._empty(name) for name in self._caches}
        ids, reference, before = np.asarray([prompt]), Reference([], [], []), 0
        while len(reference.tokens) < count and not (reference.tokens and reference.tokens[-1] in self._record.stop):
            for part in np.split(ids, ids.shape[1], axis=1) if self._record.states else [ids]:
                feeds = self._feeds(part, past, before, request.entries) | encoded
                scores, *present = self._run(feeds)
                past, before = dict(zip(self._caches, present, strict=True)), before + part.shape[1]
            reference.noise.append(self._noise(feeds, scores))
            order = np.argsort(-scores[0, -1], kind="stable")
            reference.tokens.append(int(order[0]))
            reference.margins.append(float(scores[0, -1, order[0]] - scores[0, -1, order[1]]))
            ids = np.asarray([reference.tokens[-1:]])
        missing = count - len(reference.margins)
        return Reference(
            _whole(reference.tokens, count), reference.margins + [1.0] * missing, reference.noise + [TIE] * missing
        )

    def surprise(self, ids: Sequence[int]) -> float:
        """Returns the sum of the negative logarithms of each token's probability after the tokens before it, from the second token on."""
        past: dict[str, Any] = {name: self._empty(name) for name in self._caches}
        total, step = 0.0, 1 if self._record.states else _STEP
        for begin in range(0, len(ids) - 1, step):
            part, following = ids[begin : begin + step][: len(ids) - 1 - begin], ids[begin + 1 : begin + 1 + step]
            scores, *present = self._run(self._feeds(np.asarray([part]), past, begin, 0))
            past = dict(zip(self._caches, present, strict=True))
            rows = scores[0].astype(np.float64)
            if len(rows) != len(part):
                raise InputError(
                    f"--text: the model has scores of {len(rows)} of {len(part)} tokens\n  help: export it with all"
                )
            most = rows.max(axis=-1)
            total += float(
                (most + np.log(np.exp(rows - most[:, None]).sum(axis=-1)) - rows[range(len(part)), following]).sum()
            )
        return total

    def _feeds(self, ids: Array, past: Mapping[str, Array], before: int, entries: int) -> dict[str, Array]:
        """Returns the inputs of a step whose tokens follow `before` others."""
        width = ids.shape[1]
        positions = {
            "encoder_attention_mask": np.ones((1, entries)),
            "position_ids": np.arange(before, before + width)[None],
            "attention_mask": np.ones((1, before + width)),
        }
        feeds = {self._record.tokens: self._typed(self._record.tokens, ids), **past}
        return feeds | {name: self._typed(name, array) for name, array in positions.items() if name in self._given}

    def _empty(self, name: str) -> Array:
        """Returns an empty past of one sequence: the first dynamic dim after the batch, which grows, has size 0.

        Any other dynamic dim has the cache's size.
        """
        dims = [*(self._given[name].shape or ())]
        grows = next((k for k, dim in enumerate(dims) if k and not isinstance(dim, int)), 0)
        sizes = [dim if isinstance(dim, int) else self._sizes[name][k] for k, dim in enumerate(dims)]
        return self._typed(name, np.zeros([1, *(0 if k == grows else size for k, size in enumerate(sizes) if k)]))

    def _typed(self, name: str, array: Array) -> Array:
        kind = self._given[name].dtype
        assert kind is not None
        return array.astype(kind.numpy())
