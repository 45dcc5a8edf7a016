"""Which sequences run in which slots, and what each step is given: the same on all ranks, since it follows from requests and tokens alone.

A step is either a chunk, of `chunk` tokens of each prompt that is not read yet, or one token of each sequence that is made. Both
take turns while there are sequences of both kinds: a long prompt holds the others up by one chunk a token. A slot that has no part in a
step is given no token: what the step writes there lies behind the slot's position, where nothing reads.

Requests join and are cancelled between steps; each has a number, by which its tokens are known:

    slots.admit(7, Request([1, 306]))       # it waits for a slot
    while (step := slots.next()) is not None:
        for token in slots.take(chosen_by(step)): ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ..artifact.generation import GenerationRecord
from .request import Finish, Request


@dataclass(frozen=True)
class NewToken:
    """A token of a request, by the request's number, and whether it ends its sequence.

    Where its logits are not finite there is no token: `finish` is "error", and `token` the number behind the last of the vocabulary.
    """

    request: int
    token: int
    finish: Finish


@dataclass
class _Sequence:
    """A request in a slot: so many of its tokens are in the caches, and these are to come."""

    number: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    position: int = 0

    @property
    def left(self) -> int:
        """The tokens of the prompt that no step has read."""
        return max(len(self.request.prompt) - self.position, 0)


@dataclass(frozen=True)
class Step:
    """What a step is given: `tokens` [slots, n], and by slot how many of them are meant, and how many are there before."""

    tokens: Array
    count: Array
    position: Array


class Slots:
    """The sequences of an artifact's slots, and the requests that wait for one, in the order in which they came."""

    def __init__(self, record: GenerationRecord) -> None:
        self.record = record
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence | None] = [None] * record.slots
        self._stop = frozenset(record.stop)
        self._taking: dict[int, int] = {}
        """By slot that has a part in the step under way the number of its tokens there."""
        self._last_was_chunk = False

    @property
    def used(self) -> int:
        """How many slots have a sequence."""
        return sum(one is not None for one in self._running)

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    def admit(self, number: int, request: Request) -> None:
        """A request that takes the next free slot, behind those that wait; between two steps."""
        self._waiting.append(_Sequence(number, request))

    def cancel(self, number: int) -> None:
        """Takes a request from its slot, or from those that wait, if it has not ended; between two steps."""
        self._waiting = deque(one for one in self._waiting if one.number != number)
        self._running = [None if one is None or one.number == number else one for one in self._running]

    def next(self) -> Step | None:
        """The next step; None where no request is left."""
        for slot, running in enumerate(self._running):
            if running is None and self._waiting:
                self._running[slot] = self._waiting.popleft()
        there = {slot: one for slot, one in enumerate(self._running) if one is not None}
        if not there:
            return None
        reading = {slot: one for slot, one in there.items() if one.left}
        making = {slot: one for slot, one in there.items() if not one.left}
        self._last_was_chunk = bool(reading) and not (making and self._last_was_chunk)
        return self._step(reading if self._last_was_chunk else making, there)

    def take(self, chosen: Sequence[int]) -> Iterator[NewToken]:
        """The tokens that the step under way has made; `chosen` has one by slot, of which those without a part mean nothing."""
        for slot, count in self._taking.items():
            one = self._running[slot]
            assert one is not None
            one.position += count
            token = int(chosen[slot])
            if one.left and token < self.record.vocabulary:
                continue
            finish: Finish = ""
            one.tokens.append(token)
            if token >= self.record.vocabulary:
                finish = "error"
            elif token in self._stop or token in one.request.stop:
                finish = "stop"
            elif len(one.tokens) == one.request.max_tokens:
                finish = "length"
            if finish:
                self._running[slot] = None
            yield NewToken(one.number, token, finish)

    @property
    def taking(self) -> Sequence[int]:
        """The slots that have a part in the step under way."""
        return [*self._taking]

    def drawing(self) -> Mapping[int, tuple[Request, int]]:
        """By slot whose next token the step under way draws its request, and the number of that token."""
        found: dict[int, tuple[Request, int]] = {}
        for slot, count in self._taking.items():
            one = self._running[slot]
            if one is not None and one.request.temperature and count >= one.left:
                found[slot] = one.request, len(one.tokens)
        return found

    def _step(self, part: Mapping[int, _Sequence], there: Mapping[int, _Sequence]) -> Step:
        width = self.record.chunk if self._last_was_chunk else 1
        if not self.record.padded:
            width = min([width, *(one.left or 1 for one in part.values())])
        tokens = np.zeros((self.record.slots, width), np.int64)
        count, position = np.zeros(self.record.slots, np.int64), np.zeros(self.record.slots, np.int64)
        for slot, one in there.items():
            position[slot] = one.position
        self._taking = {}
        for slot, one in part.items():
            known = one.request.prompt[one.position : one.position + width] if one.left else one.tokens[-1:]
            tokens[slot, : len(known)] = known
            self._taking[slot] = count[slot] = len(known)
        return Step(tokens, count, position)
