"""A batch that requests join and leave between steps, as rank 0 decides: the step-wise interface of a server.

    batch = ContinuousBatch(generator)              # on every rank
    if rank == 0:
        batch.admit(7, Request([1, 306]))
    while (made := batch.step()) is not None:       # on every rank, as often
        ...                                         # rank 0: shows tokens; batch.admit, batch.cancel, and at last batch.end()

Each step begins with a command of rank 0, from which all ranks derive the same inputs. The next command is sent before a step runs: a
request that joins or leaves meanwhile is in the command after that one, so it takes effect within two steps. If groups of slots take turns,
a step is that of one group, and returns the tokens of the group's previous step.

A command lists the requests that join, those that are cancelled, and whether the last step was the end. It is text in JSON, at most 512
bytes with its length, and empty if there is no news; a longer one continues in a second message, whose size the first one gives. Messages
are agreements of all ranks (`Agreements`): the maximum of the text, which only rank 0 contributes, and zeros. So a command is sent while
the step before it runs, and no rank waits for another one to receive it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..artifact.tensors.dtypes import dense
from ..communication.transport import Agreements
from ..execution.program import Program
from .adapters import AdapterChange
from .generator import Generator
from .request import NewToken, Request, refuse_unfit
from .turns import Turns

WORDS = 64
"""The 8-byte numbers of a first message: the length of the text, and the beginning of the text."""
_WORD = 8
_NO_NEWS = np.zeros(WORDS, np.int64)
"""The first message of an empty command."""


@dataclass(frozen=True)
class Command:
    """Requests that join, by number; numbers of cancelled requests; adapters to load or unload after these; and whether no step follows."""

    admitted: Mapping[int, Request] = field(default_factory=dict)
    cancelled: Sequence[int] = ()
    ends: bool = False
    adapters: Sequence[AdapterChange] = ()

    def dumps(self) -> str:
        """Returns the command as JSON; empty if it changes nothing."""
        if not (self.admitted or self.cancelled or self.ends or self.adapters):
            return ""
        admitted = [[number, request.packed()] for number, request in self.admitted.items()]
        adapters = [one.packed() for one in self.adapters]
        return json.dumps([admitted, [*self.cancelled], self.ends, adapters], separators=(",", ":"))

    @staticmethod
    def loads(text: str) -> Command:
        """Returns the command that `dumps` wrote."""
        if not text:
            return Command()
        admitted, cancelled, ends, adapters = json.loads(text)
        changes = tuple(AdapterChange(*one) for one in adapters)
        return Command({number: Request.unpacked(fields) for number, fields in admitted}, cancelled, ends, changes)


def begin(agreements: Agreements, own: Command | None) -> Callable[[], Command]:
    """Begins the next command, and returns a function that waits for it; `own` is rank 0's, None on the others."""
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


class ContinuousBatch:
    """This rank's end of the batch, or that of all ranks of one process; constructing it is collective.

    `shares`: whether prompts share beginnings that slots have.
    """

    def __init__(self, generator: Generator, shares: bool = True) -> None:
        self.generator = generator
        self.slots = generator.slots(shares)
        self._turns = Turns(generator, self.slots)
        program = generator.program
        several = isinstance(program, Program) and program.size > 1
        self._agreements = program.agreements() if isinstance(program, Program) and several else None
        self._leads = not isinstance(program, Program) or program.rank == 0
        self._admitted: dict[int, Request] = {}
        self._cancelled: list[int] = []
        self._changes: list[AdapterChange] = []
        self.changed: list[str] = []
        """For each adapter change since the list was last taken the reason for its failure; empty if it succeeded."""
        self._ends = False
        self._begun: Callable[[], Command] | None = None
        """The function that waits for the command that was sent before the last step."""

    def warm_up(self) -> None:
        """Runs the first steps, which take longer, with a prompt of its own; collective, before any other step."""
        record, slots = self.generator.record, self.generator.slots()
        kind = None if record.encoder is None else dense(record.encoder.type)
        given = None if record.encoder is None or kind is None else np.zeros(record.encoder.shape, kind.numpy)
        prompt = [0] * min(record.chunk + 1, record.length - 1)
        for number in range(record.groups):
            slots.admit(number, Request(prompt, max_tokens=1, encoder=given))
        turns = Turns(self.generator, slots)
        while turns.next() is not None:
            pass
        for step in slots.idle_steps():
            self.generator.begin(slots, step)()

    def admit(self, number: int, request: Request) -> None:
        """On rank 0: adds a request, under a number that no other one has; raises InputError if it cannot be met."""
        refuse_unfit([request], self.slots.record)
        self._admitted[number] = request

    def cancel(self, number: int) -> None:
        """On rank 0: removes a request, whether it runs or waits; does nothing if it has ended."""
        if self._admitted.pop(number, None) is None:
            self._cancelled.append(number)

    def change(self, change: AdapterChange) -> None:
        """On rank 0: loads or unloads an adapter after the requests that have joined; `changed` gets the results, in order."""
        self._changes.append(change)

    def end(self) -> None:
        """On rank 0: ends the batch after the command in progress."""
        self._ends = True

    @property
    def idle(self) -> bool:
        """Whether a step has nothing to do until rank 0 admits a request or ends the batch."""
        return not (
            self.slots.used or self.slots.waiting or self._admitted or self._cancelled or self._ends or self._changes
        )

    def step(self) -> list[NewToken] | None:
        """Returns the tokens of the next step, empty if there is nothing to do; None after the end. Collective."""
        begun, self._begun = self._begun or self._begin(), None
        command = begun()
        for number, request in command.admitted.items():
            self.slots.admit(number, request)
        for number in command.cancelled:
            self.slots.cancel(number)
        self.changed += map(self._adapted, command.adapters)
        if command.ends:
            self._turns.end()
            return None
        return self._turns.next(self._begin_ahead) or []

    def _adapted(self, change: AdapterChange) -> str:
        """Loads or unloads an adapter; returns the reason for a failure, empty if it succeeds."""
        names = self.slots.record.adapters
        if change.name in names:
            if change.file:
                return f"there is an adapter '{change.name}'"
            self.slots.rename(names.index(change.name) + 1, "")
            return ""
        if not change.file:
            return f"there is no adapter '{change.name}'"
        if not (place := self.slots.free_place()):
            return f"no place of {len(names)} is free"
        if not (problem := self.generator.load_adapter(place, change)):
            self.slots.rename(place, change.name)
        return problem

    def _begin_ahead(self) -> None:
        """Begins the command that follows a step, before the step runs."""
        if self._agreements is not None:
            self._begun = self._begin()

    def _begin(self) -> Callable[[], Command]:
        """Begins the next command; in one process it is not sent."""
        command: Command | None = None
        if self._leads:
            command = Command(self._admitted, self._cancelled, self._ends, self._changes)
            self._admitted, self._cancelled, self._changes = {}, [], []
        if self._agreements is not None:
            return begin(self._agreements, command)
        return lambda: command or Command()
