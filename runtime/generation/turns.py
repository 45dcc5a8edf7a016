"""Turns of groups of slots: a step of one group is begun before the tokens of the others are there, so that pipeline stages work at once.

    turn         0      1      2      3      4
    stage 0     g0     g1     g0     g1     g0
    stage 1            g0     g1     g0     g1         the tokens of g0 are there before its turn 2 begins

Every rank begins the same steps in the same order, and waits for the tokens of a group before that group's next step alone. Each step is
closed, no message of it is left when a rank has run it, but for its tokens: these come by an agreement of the group's own, of which one is
under way at a time. So turns in any mix of chunks and tokens are as free of deadlock as a step. With one group a turn is a step with its
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .request import NewToken
from .slots import Slots, Step


class Begins(Protocol):
    """A generator, or what stands for one."""

    def begin(self, slots: Slots, step: Step) -> Callable[[], list[NewToken]]:
        """Runs this rank's program for a step; what comes back waits for its tokens, and gives them."""
        ...


class Turns:
    """The turns of the groups of some slots; collective: each rank has the same requests in them."""

    def __init__(self, generator: Begins, slots: Slots) -> None:
        self._generator, self.slots = generator, slots
        self._groups = slots.record.groups
        self._group = 0
        self._under_way: dict[int, Callable[[], list[NewToken]]] = {}

    def next(self, before: Callable[[], object] = lambda: None) -> list[NewToken] | None:
        """Runs a step of the next group that has requests, and gives the tokens that are there; None where no request is left.

        `before` is called when it is known that there is a step, before it runs.
        """
        found: list[NewToken] = []
        for _ in range(self._groups):
            group, self._group = self._group, (self._group + 1) % self._groups
            found += self._taken(group)
            if (step := self.slots.next(group)) is not None:
                before()
                taken = self._generator.begin(self.slots, step)
                if self._groups == 1:
                    return taken()
                self._under_way[group] = taken
                return found
        return found or None

    def end(self) -> None:
        """Waits for what is under way."""
        for group in sorted(self._under_way):
            self._taken(group)

    def _taken(self, group: int) -> list[NewToken]:
        """The tokens of a group's step under way, where there is one."""
        taken = self._under_way.pop(group, None)
        return [] if taken is None else taken()
