"""Changes of a request's logits before a token is drawn from them: penalties, biases, and forbidden tokens.

Every rank has the same requests and tokens, so it changes the logits of its own shards by itself; no change is sent. Changes are applied
in the order of `changes_of`, which is that of transformers' processors, and in float32 as there:

    repetition_penalty r    of tokens of the prompt and the answer   logit / r where it is positive, else logit * r
    presence, frequency     of tokens of the answer                  logit - presence - frequency * (number of occurrences)
    logit_bias              of its tokens                            logit + bias
    suppress, .._first      of its tokens; only the first token's    -inf
    forced_first, .._last   of all other tokens, at that position    -inf
    min_tokens              of ends, before this many tokens         -inf
    schema                  of tokens that it does not allow next    -inf

A further change is a class with the method `change`, and a line in `changes_of`. If no finite logit remains the request ends with an
error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ..artifact.generation import GenerationRecord
from .request import Request
from .schema import AllowedTokens


class LogitChange(Protocol):
    """A change of the logits of one sequence."""

    def change(self, logits: Array, begin: int, tokens: Sequence[int]) -> None:
        """Changes, in place, the float32 logits of the tokens from `begin` on that may follow the answer's `tokens`.

        A step calls it for each shard of the vocabulary that this rank has, and again with the same tokens where a draw needs more
        candidates; a rank without logits never does.
        """
        ...


@dataclass(frozen=True)
class Drawing:
    """A token to draw: its request, the tokens of the answer before it, and the changes of its logits."""

    request: Request
    tokens: Sequence[int]
    changes: Sequence[LogitChange] = ()

    @property
    def number(self) -> int:
        """The token's number within its answer, from 0."""
        return len(self.tokens)


def depend_on_number(changes: Iterable[LogitChange]) -> bool:
    """Whether changes depend on the number of tokens before alone, not on which these are."""
    return all(isinstance(one, (Bias, Forced)) for one in changes)


def changes_of(request: Request, record: GenerationRecord) -> tuple[LogitChange, ...]:
    """The changes that a request needs, in their order; most requests have no changes."""
    return tuple(_changes_of(request, record))


def _changes_of(request: Request, record: GenerationRecord) -> Iterator[LogitChange]:
    if request.repetition_penalty != 1:
        yield Repetition(request.repetition_penalty, request.prompt)
    if request.presence_penalty or request.frequency_penalty:
        yield Occurrence(request.presence_penalty, request.frequency_penalty)
    if request.logit_bias:
        yield Bias(request.logit_bias.keys(), np.array([*request.logit_bias.values()], np.float32))
    if request.suppress:
        yield Bias(request.suppress, np.full(len(request.suppress), -np.inf, np.float32))
    if request.suppress_first:
        yield Bias(request.suppress_first, np.full(len(request.suppress_first), -np.inf, np.float32), until=1)
    if request.forced_first is not None:
        yield Forced(request.forced_first, 0)
    if request.forced_last is not None:
        yield Forced(request.forced_last, request.most(record) - 1)
    if request.min_tokens and (ends := request.ends(record)):
        yield Bias(ends, np.full(len(ends), -np.inf, np.float32), until=request.min_tokens)
    if request.schema is not None:
        yield AllowedTokens(request.schema, request.ends(record), record.vocabulary, request.most(record))


class Bias:
    """Adds a bias to the logit of each of some tokens; if `until` is not None, only for the answer's first `until` tokens."""

    def __init__(self, tokens: Iterable[int], biases: Array, until: int | None = None) -> None:
        self._tokens, self._biases, self._until = np.array([*tokens], np.int64), biases, until

    def change(self, logits: Array, begin: int, tokens: Sequence[int]) -> None:
        """See `LogitChange`."""
        if self._until is None or len(tokens) < self._until:
            here, places = _here(self._tokens, begin, logits)
            logits[places] += self._biases[here]


class Forced:
    """Allows only one token at an index of the answer."""

    def __init__(self, token: int, number: int) -> None:
        self._token, self._number = token, number

    def change(self, logits: Array, begin: int, tokens: Sequence[int]) -> None:
        """See `LogitChange`."""
        if len(tokens) == self._number:
            logits[:] = -np.inf
            _, places = _here(np.array([self._token], np.int64), begin, logits)
            logits[places] = 0


class Repetition:
    """The penalty of tokens that are in the prompt or the answer."""

    def __init__(self, penalty: float, prompt: Sequence[int]) -> None:
        self._penalty, self._tokens, self._seen = np.float32(penalty), {*prompt}, 0

    def change(self, logits: Array, begin: int, tokens: Sequence[int]) -> None:
        """See `LogitChange`."""
        self._tokens.update(tokens[self._seen :])
        self._seen = len(tokens)
        _, places = _here(np.array([*self._tokens], np.int64), begin, logits)
        chosen = logits[places]
        logits[places] = np.where(chosen < 0, chosen * self._penalty, chosen / self._penalty)


class Occurrence:
    """The penalties of tokens that are in the answer: `presence` once for each token, `frequency` for each of its occurrences."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency, self._count, self._seen = presence, frequency, Counter[int](), 0

    def change(self, logits: Array, begin: int, tokens: Sequence[int]) -> None:
        """See `LogitChange`."""
        self._count.update(tokens[self._seen :])
        self._seen = len(tokens)
        here, places = _here(np.array([*self._count], np.int64), begin, logits)
        times = np.array([*self._count.values()], np.float32)[here]
        logits[places] -= np.float32(self._presence) + np.float32(self._frequency) * times


def _here(tokens: Array, begin: int, logits: Array) -> tuple[Array, Array]:
    """Returns a mask of the tokens that are in the shard of `logits` from the token `begin` on, and their places in it."""
    places = np.subtract(tokens, begin)
    here = np.logical_and(places >= 0, places < len(logits))
    return here, places[here]
