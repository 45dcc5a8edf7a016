"""Which sequences run in which slots, and what each step is given: the same on all ranks, since it follows from requests and tokens alone.

A step is either a chunk, of `chunk` tokens of each prompt that is not read yet, or one token of each sequence that is made. Both
take turns while there are sequences of both kinds: a long prompt holds the others up by one chunk a token. A slot that has no part in a
step is given no token: what the step writes there lies behind the slot's position, where nothing reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ..artifact.generation import GenerationRecord
from .request import Answer, Finish, Request


@dataclass(frozen=True)
class NewToken:
    """A token of a request, by the request's number, and whether it ends its sequence."""

    request: int
    token: int
    finish: Finish


@dataclass
class _Sequence:
    """A request in a slot: so many of its tokens are in the caches, and these are to come."""

    number: int
    request: Request
    answer: Answer
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
    """The sequences of an artifact's slots, and the requests that wait for one."""

    def __init__(self, record: GenerationRecord, requests: Sequence[Request]) -> None:
        self.record = record
        self.answers = [Answer() for _ in requests]
        self._waiting = deque(enumerate(requests))
        self._running: list[_Sequence | None] = [None] * record.slots
        self._stop = frozenset(record.stop)
        self._taking: dict[int, int] = {}
        """By slot that has a part in the step under way the number of its tokens there."""
        self._last_was_chunk = False

    def next(self) -> Step | None:
        """The next step; None where every request is answered."""
        for slot, running in enumerate(self._running):
            if running is None and self._waiting:
                number, request = self._waiting.popleft()
                self._running[slot] = _Sequence(number, request, self.answers[number])
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
            if one.left:
                continue
            token = int(chosen[slot])
            one.answer.tokens.append(token)
            if token in self._stop or token in one.request.stop:
                one.answer.finish = "stop"
            elif len(one.answer.tokens) == one.request.max_tokens:
                one.answer.finish = "length"
            if one.answer.finish:
                self._running[slot] = None
            yield NewToken(one.number, token, one.answer.finish)

    def drawing(self) -> Mapping[int, tuple[Request, int]]:
        """By slot whose next token the step under way draws its request, and the number of that token."""
        found: dict[int, tuple[Request, int]] = {}
        for slot, count in self._taking.items():
            one = self._running[slot]
            if one is not None and one.request.temperature and count >= one.left:
                found[slot] = one.request, len(one.answer.tokens)
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
            known = one.request.prompt[one.position : one.position + width] if one.left else one.answer.tokens[-1:]
            tokens[slot, : len(known)] = known
            self._taking[slot] = count[slot] = len(known)
        return Step(tokens, count, position)
