"""Turns of groups of slots: a step of one group begins before the others' tokens have arrived, so that pipeline stages work in parallel.

    turn         0      1      2      3      4
    stage 0     g0     g1     g0     g1     g0
    stage 1            g0     g1     g0     g1         the tokens of g0 have arrived before its turn 2 begins

Every rank begins the same steps in the same order, and waits for a group's tokens only before that group's next step. Each step is
closed: once a rank has run it, no message of it is outstanding except its tokens. These come by an agreement of the group's own, of which
one is under way at a time. So turns with any mix of chunks and tokens are as free of deadlock as a step. With one group, a turn is a step
that includes waiting for its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .request import NewToken
from .slots import Slots, Step


class Begins(Protocol):
    """A generator, or an object with the same method."""

    def begin(self, slots: Slots, step: Step) -> Callable[[], list[NewToken]]:
        """Runs this rank's program for a step; returns a function that waits for the step's tokens and returns them."""
        ...


class Turns:
    """The turns of the groups of `slots`. Collective: all ranks must have the same requests in their slots."""

    def __init__(self, generator: Begins, slots: Slots) -> None:
        self._generator, self.slots = generator, slots
        self._groups = slots.record.groups
        self._group = 0
        self._under_way: dict[int, Callable[[], list[NewToken]]] = {}

    def next(self, before: Callable[[], object] = lambda: None) -> list[NewToken] | None:
        """Runs a step of the next group that has requests, and returns the tokens that have arrived; None where no request is left.

        `before` is called once it is known that there is a step, before the step runs.
        """
        tokens: list[NewToken] = []
        for _ in range(self._groups):
            group, self._group = self._group, (self._group + 1) % self._groups
            tokens += self._taken(group)
            if (step := self.slots.next(group)) is not None:
                before()
                taken = self._generator.begin(self.slots, step)
                if self._groups == 1:
                    return taken()
                self._under_way[group] = taken
                return tokens
        return tokens or None

    def end(self) -> None:
        """Waits for the steps that are under way."""
        for group in sorted(self._under_way):
            self._taken(group)

    def _taken(self, group: int) -> list[NewToken]:
        """Waits for the group's step under way, if there is one, and returns its tokens."""
        taken = self._under_way.pop(group, None)
        return [] if taken is None else taken()
