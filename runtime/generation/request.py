"""Requests to a generator, and its answers."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from ..artifact.generation import EncoderRecord, GenerationRecord
from ..artifact.tensors.dtypes import Array, dense
from ..errors import InputError
from .schema import SchemaBound, faults_of_schema

Finish: TypeAlias = Literal["", "stop", "length", "error"]
"""The reason why a sequence ended: a token after which it stops, the most tokens that were requested, or logits that are not finite;
empty where it continues.
"""
_SEED = 1 << 64
_LEAST_TEMPERATURE = 1e-30
"""Logits divided by it are finite."""
MOST_BIASES = 1024
"""How many tokens a request may have a bias for."""
MOST_LOGPROBS = 20
"""How many of the likeliest tokens come with the score of a token."""
_CHANGES = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "logprobs", "schema"),
    *("suppress", "suppress_first", "forced_first", "forced_last"),
)
"""Fields that need the logits."""
_MOST_PENALTY = 1_000_000
_MOST = 128
"""The most tokens of an answer to a request that does not say how many."""


@dataclass(frozen=True, kw_only=True)
class LogitOptions:
    """What a request asks of the logits, besides how a token is drawn of them.

    `logprobs`: each token of the answer comes with its score, and with those of so many of the likeliest tokens; None: without. With
    `scores_prompt` so does each token of the prompt but the first: it is read as an answer is made, a token a step, and `max_tokens` may be
    0.

    `suppress`: tokens that the answer does not have; `suppress_first`: that it does not begin with. `forced_first`: its first token;
    `forced_last`: the last one of `max_tokens`. The penalties, `logit_bias` and `min_tokens`, before which no end follows, change the
    logits before a token is drawn (`changes.py`).
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    suppress: Sequence[int] = ()
    suppress_first: Sequence[int] = ()
    forced_first: int | None = None
    forced_last: int | None = None
    logprobs: int | None = None
    scores_prompt: bool = False


@dataclass(frozen=True)
class Request(LogitOptions):
    """A prompt, as numbers of tokens, and how it is continued.

    `encoder`: of a model with an encoder before its decoder what that is given: at most its length of tokens, or an array of its input's
    shape, without the batch. The prompt is then the decoder's; an empty one stands for the tokens with which the model begins.

    `max_tokens`: the most tokens of the answer; None for as many as fit into a sequence behind the prompt, at most 128.

    `temperature` 0 takes the likeliest token; above it tokens are drawn with probabilities that it sharpens (below 1) or flattens, of the
    `top_k` likeliest alone (0: of all), of the fewest whose probabilities together reach `top_p`, and of those with at least `min_p` times
    the largest probability. What is drawn follows from `seed` and the number of the token alone. `stop`: tokens behind which the sequence
    ends, beside those of the artifact; with `ignore_end` those alone.

    `adapter`: the name of the adapter that is added to the model for it; empty: none.

    `schema` leaves the tokens that its answer may have (`schema.py`).

    `embeds`: it has no answer but the embedding of its prompt, which is read whole.
    """

    prompt: Sequence[int] = ()
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[int] = ()
    ignore_end: bool = False
    min_p: float = 0.0
    schema: SchemaBound | None = None
    adapter: str = ""
    embeds: bool = False
    encoder: Sequence[int] | Array | None = field(default=None, compare=False)

    def begun(self, record: GenerationRecord) -> Request:
        """The request with the prompt that an empty one stands for, and the most tokens of its answer as a number."""
        start = record.encoder.start if record.encoder is not None else ()
        one = self if self.prompt or not start else replace(self, prompt=[*start])
        return replace(one, max_tokens=one.most(record))

    def most(self, record: GenerationRecord) -> int:
        """The most tokens of the answer after its prompt: the requested number, else the number that fits; 0 of an embedding."""
        if self.embeds and self.max_tokens is None:
            return 0
        return max(1, min(_MOST, record.length - len(self.prompt))) if self.max_tokens is None else self.max_tokens

    @property
    def entries(self) -> int:
        """The number of entries of its encoder's input."""
        return 0 if self.encoder is None else len(self.encoder)

    @property
    def read(self) -> int:
        """The number of its tokens that are read, those of an encoder included, its features not."""
        given = self.encoder
        return len(self.prompt) + (0 if isinstance(given, np.ndarray) else self.entries)

    def ends(self, record: GenerationRecord) -> list[int]:
        """The tokens behind which its sequence ends."""
        return sorted({*self.stop, *(() if self.ignore_end else record.stop)})

    def packed(self) -> dict[str, Any]:
        """The request as JSON has it, without fields that ask for nothing: an array is its type, shape and bytes."""
        fields = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        fields = {name: value for name, value in fields.items() if name == "encoder" or value != _DEFAULTS[name]}
        if self.schema is not None:
            fields["schema"] = [self.schema.tokenizer, self.schema.schema]
        if self.logit_bias:
            fields["logit_bias"] = [*self.logit_bias.items()]
        if isinstance(self.encoder, np.ndarray):
            data = base64.b64encode(np.ascontiguousarray(self.encoder).tobytes()).decode()
            fields["encoder"] = {"type": self.encoder.dtype.str, "shape": self.encoder.shape, "data": data}
        return fields

    @classmethod
    def unpacked(cls, fields: Mapping[str, Any]) -> Self:
        """The request that `packed` wrote."""
        given = fields["encoder"]
        if isinstance(given, dict):
            given = np.frombuffer(base64.b64decode(given["data"]), given["type"]).reshape(given["shape"])
        schema = SchemaBound(*fields["schema"]) if "schema" in fields else None
        return cls(**{**fields, "encoder": given, "logit_bias": dict(fields.get("logit_bias", ())), "schema": schema})


_DEFAULTS = {name: getattr(Request(), name) for name in Request.__dataclass_fields__}


@dataclass(frozen=True)
class TokenScore:
    """The logarithm of a token's probability, and the likeliest tokens there with theirs, falling."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class NewToken:
    """A token of a request, by the request's number, and whether it ends its sequence.

    Where its logits are not finite there is no token: `finish` is "error", and `token` the number behind the last of the vocabulary.
    `cached`: of a request's first token how many tokens of its prompt were not read, since a slot had them; else 0.
    `score`: where the request has `logprobs`. `of_prompt`: it is a token of the prompt, which comes for its score, or for the `embedding`
    of all of it.
    """

    request: int
    token: int
    finish: Finish
    cached: int = 0
    score: TokenScore | None = None
    of_prompt: bool = False
    embedding: Array | None = field(default=None, compare=False)


@dataclass
class Answer:
    """The tokens behind a prompt, those that end it included, and why there are no more.

    `scores`: of each token, where the request has `logprobs`. `prompt_scores`: of each token of the prompt but the first, where it asks.
    `embedding`: of the prompt, float32 of length 1, where it asks.
    """

    tokens: list[int] = field(default_factory=list)
    finish: Finish = ""
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    embedding: Array | None = field(default=None, compare=False)

    def add(self, made: NewToken) -> None:
        """Takes the next token of the request."""
        self.finish = made.finish
        if made.embedding is not None:
            self.embedding = made.embedding
        if not made.of_prompt:
            self.tokens.append(made.token)
        if made.score is not None:
            (self.prompt_scores if made.of_prompt else self.scores).append(made.score)


def refuse_unfit(requests: Iterable[Request], record: GenerationRecord) -> None:
    """InputError with everything that is wrong with any of the requests."""
    problems = [f"request {number}: {fact}" for number, one in enumerate(requests) for fact in faults_of(one, record)]
    if problems:
        raise InputError("\n".join(problems))


def faults_of(request: Request, record: GenerationRecord) -> Iterator[str]:
    """The faults of a request, a text for each."""
    yield from _faults_of_encoder(request, record.encoder)
    if request.adapter and request.adapter not in record.adapters:
        known = ", ".join(filter(None, record.adapters))
        help_ = f"those of the artifact are {known}" if known else "compile with `adapters` in the plan"
        yield f"there is no adapter '{request.adapter}'\n  help: {help_}"
    request = request.begun(record)
    size, most = len(request.prompt), request.most(record)
    if not size and record.encoder is not None:
        fact = "its prompt has no token for the decoder"
        yield f"{fact}\n  help: give the token with which the model's decoder begins, or compile with 'start'"
    elif not size:
        yield "its prompt has no token\n  help: begin with the token that the model knows for a begin"
    if outside := [token for token in (*request.prompt, *request.stop) if not 0 <= token < record.vocabulary]:
        yield f"{outside[0]} is not a token; tokens are 0 to {record.vocabulary - 1}"
    if request.embeds:
        yield from _faults_of_embedding(request, record)
    if most < (least := 0 if request.scores_prompt or request.embeds else 1):
        yield f"it asks for {most} tokens; at least {least}"
    elif size + most > record.length:
        fact = f"a prompt of {size} tokens and {most} more are {size + most}; a sequence has at most {record.length}"
        yield f"{fact}\n  help: ask for fewer, or compile with a larger 'length'"
    if not 0 <= request.temperature < float("inf"):
        yield f"its temperature is {request.temperature}; it is 0 or more"
    elif 0 < request.temperature < _LEAST_TEMPERATURE:
        yield f"its temperature is {request.temperature}; it is 0, which takes the likeliest token, or at least {_LEAST_TEMPERATURE}"
    elif request.temperature and not record.logits:
        fact = "it draws tokens, and the artifact gives the likeliest alone ('sampling: false')"
        yield f"{fact}\n  help: leave out 'temperature', or compile with 'sampling: true'"
    yield from _faults_of_changes(request, record)
    if request.logprobs is not None and not 0 <= request.logprobs <= MOST_LOGPROBS:
        yield f"its logprobs is {request.logprobs}; it is 0 to {MOST_LOGPROBS}"
    if request.scores_prompt and request.logprobs is None:
        yield "it asks for the scores of its prompt without logprobs\n  help: give logprobs, 0 for those of its tokens alone"
    if request.schema is not None and record.logits:
        if request.min_tokens:
            yield "it has a schema and min_tokens, and the schema says when it ends\n  help: leave one out"
        yield from faults_of_schema(request.schema, request.ends(record), record.vocabulary, most)
    if request.top_k < 0:
        yield f"its top_k is {request.top_k}; it is 0 (all tokens) or more"
    if not 0 < request.top_p <= 1:
        yield f"its top_p is {request.top_p}; it is above 0 and at most 1"
    if not 0 <= request.min_p <= 1:
        yield f"its min_p is {request.min_p}; it is 0 to 1"
    if not 0 <= request.seed < _SEED:
        yield f"its seed is {request.seed}; it is 0 to 2**64 - 1"


def _faults_of_embedding(request: Request, record: GenerationRecord) -> Iterator[str]:
    """The faults of a request that asks for the embedding of its prompt."""
    if record.embedding is None:
        fact = "it asks for an embedding, and the artifact makes tokens alone"
        yield f"{fact}\n  help: compile with `generate: {{embeddings: mean}}` in the plan"
    for name in ("max_tokens", "temperature", *_CHANGES):
        if getattr(request, name) not in (_DEFAULTS[name], 0):
            yield f"it asks for an embedding and has {name}, and an embedding has no tokens\n  help: leave it out"


def _faults_of_changes(one: Request, record: GenerationRecord) -> Iterator[str]:
    """What is wrong with what a request asks of logits."""
    asked = [name for name in _CHANGES if getattr(one, name) != _DEFAULTS[name]]
    tokens = [*one.suppress, *one.suppress_first, *(of for of in (one.forced_first, one.forced_last) if of is not None)]
    if outside := [token for token in tokens if not 0 <= token < record.vocabulary]:
        yield f"{outside[0]} is not a token; tokens are 0 to {record.vocabulary - 1}"
    if asked and not record.logits:
        fact = f"it asks for {asked[0]}, and the artifact gives the likeliest token alone ('sampling: false')"
        yield f"{fact}\n  help: leave it out, or compile with 'sampling: true'"
    if not 0 < one.repetition_penalty < _MOST_PENALTY:
        yield f"its repetition_penalty is {one.repetition_penalty}; it is above 0 and below {_MOST_PENALTY:,}"
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(one, name) <= 2:
            yield f"its {name} is {getattr(one, name)}; it is -2 to 2"
    if len(one.logit_bias) > MOST_BIASES:
        yield f"its logit_bias has {len(one.logit_bias):,} tokens; at most {MOST_BIASES:,}"
    elif outside := [token for token in one.logit_bias if not 0 <= token < record.vocabulary]:
        yield f"its logit_bias has {outside[0]}, which is not a token; tokens are 0 to {record.vocabulary - 1}"
    elif outside := [token for token, bias in one.logit_bias.items() if not -100 <= bias <= 100]:
        yield f"its logit_bias of {outside[0]} is {one.logit_bias[outside[0]]}; it is -100 to 100"
    if not 0 <= one.min_tokens <= (most := one.most(record)):
        yield f"its min_tokens is {one.min_tokens}; it is 0 to {most}, the most tokens of its answer"


def _faults_of_encoder(one: Request, record: EncoderRecord | None) -> Iterator[str]:
    """The faults of a request's input of an encoder."""
    given = one.encoder
    if record is None:
        if given is not None:
            fact = "it has an input for an encoder, and the model is a decoder alone"
            yield f"{fact}\n  help: leave it out, or give its tokens as the prompt"
        return
    what = f"at most {record.length} tokens" if record.count else f"an array {record.shape}, {record.type}"
    if given is None:
        yield f"it has no input for the encoder\n  help: give {what} as 'encoder'"
        return
    array = np.asarray(given)
    wanted = dense(record.type)
    assert wanted is not None
    if not record.count:
        if array.shape != tuple(record.shape):
            yield f"its input for the encoder has the shape {[*array.shape]}; it is {record.shape}"
        elif array.dtype != wanted.numpy:
            yield f"its input for the encoder is {array.dtype}; it is {wanted.shown}"
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            yield "its input for the encoder is not finite"
        return
    if array.ndim != len(record.shape) or (array.size and array.dtype.kind != wanted.numpy.kind):
        yield f"its input for the encoder is {array.dtype} of the shape {[*array.shape]}; it is whole numbers, one for each token"
    elif not array.size:
        yield "its input for the encoder has no token"
    elif array.size > record.length:
        fact = f"its input for the encoder has {array.size} tokens; there is room for {record.length}"
        yield f"{fact}\n  help: give fewer, or compile with a larger 'encoder_length'"
    elif record.vocabulary is not None and (outside := [int(id) for id in array if not 0 <= id < record.vocabulary]):
        yield f"{outside[0]} is not a token of the encoder; tokens are 0 to {record.vocabulary - 1}"
