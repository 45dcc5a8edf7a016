"""What rank 0 tells the others before each step: which requests join, which are cancelled, and whether it was the last.

A command is text in JSON, at most 512 bytes with its length, and empty where there is no news; a longer one goes on in a second message,
whose size the first one says. Messages are agreements of all ranks (`Agreements`): the maximum of the text, which rank 0 alone gives, and
zeros. So a command is sent while the step before it runs, and no rank waits for another one to take it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..communication.transport import Agreements
from .request import Request

WORDS = 64
"""Numbers of 8 bytes of a first message: the text's bytes, and as much of the text as there is room for."""
_WORD = 8
_NO_NEWS = np.zeros(WORDS, np.int64)
"""The first message of an empty command."""


@dataclass(frozen=True)
class Command:
    """Requests that join, by number; numbers of those that are cancelled; and whether no step follows."""

    admitted: Mapping[int, Request] = field(default_factory=dict)
    cancelled: Sequence[int] = ()
    ends: bool = False

    def dumps(self) -> str:
        """The command as JSON; empty where it changes nothing."""
        if not (self.admitted or self.cancelled or self.ends):
            return ""
        admitted = [[number, request.packed()] for number, request in self.admitted.items()]
        return json.dumps([admitted, [*self.cancelled], self.ends], separators=(",", ":"))

    @staticmethod
    def loads(text: str) -> Command:
        """The command that `dumps` wrote."""
        if not text:
            return Command()
        admitted, cancelled, ends = json.loads(text)
        return Command({number: Request.unpacked(fields) for number, fields in admitted}, cancelled, ends)


def begin(agreements: Agreements, own: Command | None) -> Callable[[], Command]:
    """Begins the next command, and gives what waits for it; `own` is rank 0's, None on the others."""
    text = b"" if own is None else own.dumps().encode()
    sent = _NO_NEWS  # most steps have none, and their command takes no new array
    if text:
        sent = np.zeros(max(1 + -(-len(text) // _WORD), WORDS), np.int64)
        sent[0] = len(text)
        sent.view(np.uint8)[_WORD : _WORD + len(text)] = np.frombuffer(text, np.uint8)
    wait = agreements.begin(sent[:WORDS])

    def finish() -> Command:
        first = wait()
        size, words = int(first[0]), first[1:]
        if (more := -(-size // _WORD) - words.size) > 0:
            rest = sent[WORDS:] if own is not None else np.zeros(more, np.int64)
            words = np.concatenate([words, agreements.begin(rest)()])
        if own is not None:
            return own
        return Command.loads(words.view(np.uint8)[:size].tobytes().decode()) if size else Command()

    return finish
