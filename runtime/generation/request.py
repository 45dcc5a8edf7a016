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
"""The reason for the end of a sequence: a stop token, the most tokens requested, or non-finite logits; empty while it continues."""
_SEED = 1 << 64
_LEAST_TEMPERATURE = 1e-30
"""The least temperature, by which logits can be divided and stay finite."""
MOST_BIASES = 1024
"""The most tokens for which a request may have a bias."""
MOST_LOGPROBS = 20
"""The most likeliest tokens that may come with a token's score."""
_CHANGES = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "logprobs", "schema"),
    *("suppress", "suppress_first", "forced_first", "forced_last"),
)
"""Fields that need the logits."""
_MOST_PENALTY = 1_000_000
_MOST = 128
"""The most tokens of an answer to a request that does not give a number."""


@dataclass(frozen=True, kw_only=True)
class LogitOptions:
    """The options of a request about the logits, other than the drawing of a token.

    `logprobs`: each token of the answer comes with its score, and with those of this many of the likeliest tokens; None: without scores.
    With `scores_prompt` so does each token of the prompt except the first: the prompt is read like an answer, a token a step, and
    `max_tokens` may be 0.

    `suppress`: tokens that the answer does not have; `suppress_first`: tokens with which it does not begin. `forced_first`: its first
    token; `forced_last`: the last one of `max_tokens`. The penalties, `logit_bias` and `min_tokens`, before which the answer does not end,
    change the logits before a token is drawn (`changes.py`).
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
    """A prompt, as numbers of tokens, and the options of its continuation.

    `encoder`: the input of an encoder before the decoder: at most its length of tokens, or an array of its input's shape, without the
    batch. The prompt is then the decoder's; an empty one stands for the tokens with which the model begins.

    `max_tokens`: the most tokens of the answer; None for as many as fit into a sequence after the prompt, at most 128.

    `temperature` 0 takes the likeliest token; above it tokens are drawn with probabilities that it sharpens (below 1) or flattens, among
    the `top_k` likeliest (0: all), the fewest whose probabilities together reach `top_p`, and those with at least `min_p` times the largest
    probability. The drawn token depends only on `seed` and the number of the token. `stop`: tokens after which the sequence ends, in
    addition to those of the artifact; with `ignore_end` instead of them.

    `adapter`: the name of the adapter that is added to the model; empty: none.

    `schema` limits the tokens that its answer may have (`schema.py`).

    `embeds`: whether it asks for the embedding of its prompt instead of an answer; the prompt is then read whole.
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
        """Returns the request with the prompt for which an empty one stands, and the most tokens of its answer as a number."""
        start = record.encoder.start if record.encoder is not None else ()
        one = self if self.prompt or not start else replace(self, prompt=[*start])
        return replace(one, max_tokens=one.most(record))

    def most(self, record: GenerationRecord) -> int:
        """Returns the most tokens of the answer: the requested number, else the number that fits; 0 for an embedding."""
        if self.embeds and self.max_tokens is None:
            return 0
        return max(1, min(_MOST, record.length - len(self.prompt))) if self.max_tokens is None else self.max_tokens

    @property
    def entries(self) -> int:
        """The number of entries of its encoder's input."""
        return 0 if self.encoder is None else len(self.encoder)

    @property
    def read(self) -> int:
        """The number of its tokens that are read, including an encoder's tokens, but not its features."""
        given = self.encoder
        return len(self.prompt) + (0 if isinstance(given, np.ndarray) else self.entries)

    def ends(self, record: GenerationRecord) -> list[int]:
        """Returns the tokens after which its sequence ends."""
        return sorted({*self.stop, *(() if self.ignore_end else record.stop)})

    def packed(self) -> dict[str, Any]:
        """Returns the request as JSON, without fields that have their defaults: an array is its type, shape and bytes."""
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
        """Returns the request that `packed` wrote."""
        given = fields["encoder"]
        if isinstance(given, dict):
            given = np.frombuffer(base64.b64decode(given["data"]), given["type"]).reshape(given["shape"])
        schema = SchemaBound(*fields["schema"]) if "schema" in fields else None
        return cls(**{**fields, "encoder": given, "logit_bias": dict(fields.get("logit_bias", ())), "schema": schema})


_DEFAULTS = {name: getattr(Request(), name) for name in Request.__dataclass_fields__}


@dataclass(frozen=True)
class TokenScore:
    """The log probability of a token, and the likeliest tokens with theirs, in descending order."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class NewToken:
    """A token of a request, by the request's number, and the reason if it ends its sequence.

    If its logits are not finite there is no token: `finish` is "error", and `token` the number after the last of the vocabulary. `cached`:
    for a request's first token, the number of prompt tokens that were not read, since a slot had them; else 0. `score`: set if the request
    has `logprobs`. `of_prompt`: whether it is a token of the prompt, which comes for its score, or for the `embedding` of the prompt.
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
    """The tokens after a prompt, including the one that ends them, and the reason for the end.

    `scores`: for each token, if the request has `logprobs`. `prompt_scores`: for each token of the prompt except the first, if requested.
    `embedding`: of the prompt, float32 of length 1, if requested.
    """

    tokens: list[int] = field(default_factory=list)
    finish: Finish = ""
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    embedding: Array | None = field(default=None, compare=False)

    def add(self, new_token: NewToken) -> None:
        """Adds the next token of the request."""
        self.finish = new_token.finish
        if new_token.embedding is not None:
            self.embedding = new_token.embedding
        if not new_token.of_prompt:
            self.tokens.append(new_token.token)
        if new_token.score is not None:
            (self.prompt_scores if new_token.of_prompt else self.scores).append(new_token.score)


def refuse_unfit(requests: Iterable[Request], record: GenerationRecord) -> None:
    """Raises InputError with all faults of the requests."""
    problems = [f"request {number}: {fact}" for number, one in enumerate(requests) for fact in faults_of(one, record)]
    if problems:
        raise InputError("\n".join(problems))


def faults_of(request: Request, record: GenerationRecord) -> Iterator[str]:
    """Yields the faults of a request, a text for each."""
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
    """Yields the faults of a request for the embedding of its prompt."""
    if record.embedding is None:
        fact = "it asks for an embedding, and the artifact makes tokens alone"
        yield f"{fact}\n  help: compile with `generate: {{embeddings: mean}}` in the plan"
    for name in ("max_tokens", "temperature", *_CHANGES):
        if getattr(request, name) not in (_DEFAULTS[name], 0):
            yield f"it asks for an embedding and has {name}, and an embedding has no tokens\n  help: leave it out"


def _faults_of_changes(request: Request, record: GenerationRecord) -> Iterator[str]:
    """Yields the faults of a request's options about logits."""
    asked = [name for name in _CHANGES if getattr(request, name) != _DEFAULTS[name]]
    tokens = [
        *request.suppress,
        *request.suppress_first,
        *(of for of in (request.forced_first, request.forced_last) if of is not None),
    ]
    if outside := [token for token in tokens if not 0 <= token < record.vocabulary]:
        yield f"{outside[0]} is not a token; tokens are 0 to {record.vocabulary - 1}"
    if asked and not record.logits:
        fact = f"it asks for {asked[0]}, and the artifact gives the likeliest token alone ('sampling: false')"
        yield f"{fact}\n  help: leave it out, or compile with 'sampling: true'"
    if not 0 < request.repetition_penalty < _MOST_PENALTY:
        yield f"its repetition_penalty is {request.repetition_penalty}; it is above 0 and below {_MOST_PENALTY:,}"
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(request, name) <= 2:
            yield f"its {name} is {getattr(request, name)}; it is -2 to 2"
    if len(request.logit_bias) > MOST_BIASES:
        yield f"its logit_bias has {len(request.logit_bias):,} tokens; at most {MOST_BIASES:,}"
    elif outside := [token for token in request.logit_bias if not 0 <= token < record.vocabulary]:
        yield f"its logit_bias has {outside[0]}, which is not a token; tokens are 0 to {record.vocabulary - 1}"
    elif outside := [token for token, bias in request.logit_bias.items() if not -100 <= bias <= 100]:
        yield f"its logit_bias of {outside[0]} is {request.logit_bias[outside[0]]}; it is -100 to 100"
    if not 0 <= request.min_tokens <= (most := request.most(record)):
        yield f"its min_tokens is {request.min_tokens}; it is 0 to {most}, the most tokens of its answer"


def _faults_of_encoder(one: Request, record: EncoderRecord | None) -> Iterator[str]:
    """Yields the faults of a request's input of an encoder."""
    encoder_input = one.encoder
    if record is None:
        if encoder_input is not None:
            fact = "it has an input for an encoder, and the model is a decoder alone"
            yield f"{fact}\n  help: leave it out, or give its tokens as the prompt"
        return
    what = f"at most {record.length} tokens" if record.count else f"an array {record.shape}, {record.type}"
    if encoder_input is None:
        yield f"it has no input for the encoder\n  help: give {what} as 'encoder'"
        return
    array = np.asarray(encoder_input)
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
