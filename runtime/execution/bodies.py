"""Runs the bodies of If and Loop in which ranks communicate: the actions of a step between borders, and jumps over them.

    Begin Loop      the states take their first values; to the action after it, or where no turn follows behind the End
    End Loop        the states take the values that the turn gave; to the action after the Begin, or behind the End
    Begin If        to the one branch or the other; Otherwise and End give the results of the branch that ran

Every rank of the group decides by itself, by a condition that all have alike (`partc check` proves it): no message is sent for it. A body
has its memory in the arena of the step, as if it had one turn.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from partc.runtime.artifact.comm.border_node import IF, BorderCall
from partc.runtime.artifact.tensors.dtypes import Dtype
from partc.runtime.artifact.tensors.tensor import Tensor

from ..artifact.format import BEGIN
from ..devices.device_memory import Cell, move
from ..errors import StepError
from ..program.steps import Border
from ..program.value_table import Storage, ValueTable

Jump = Callable[[], int]


@dataclass
class Bodies:
    """The borders of a step plan by the places of their actions; each is called in place of its action, and returns the next place."""

    values: ValueTable
    cells: MutableMapping[str, Cell]
    jumps: dict[int, Jump] = field(default_factory=dict)
    _open: list[_Body] = field(default_factory=list)

    def add(self, step: Border, place: int) -> None:
        """Adds the border whose action has this place."""
        if step.call.op == BEGIN:
            self._open.append(_Body(self, step.first, step.last))
        body = self._open[-1]
        body.places.append(place)
        if step.call.kind == IF:
            of_step = body.choose if step.call.op == BEGIN else partial(body.give, step.call.states)
        else:
            of_step = body.begin if step.call.op == BEGIN else body.turn
        self.jumps[place] = of_step
        if step.call is step.last:
            self._open.pop()

    def dense(self, name: str) -> Tensor:
        """The value of a name, which is on the host."""
        value = self.cells[name]
        assert isinstance(value, Tensor), name
        return value

    def set(self, name: str, value: Tensor, source: str) -> None:
        """Gives a value to a name, in its place of the arena, or in memory of its own where its shape is not known before."""
        if self.values.storage[name] is not Storage.SLOT:
            self.cells[name] = Tensor.of(value.array().copy(), value.dtype)
            return
        place = self.dense(name)
        if place.shape != value.shape:
            raise StepError(
                f"'{name}' was promised with shape {list(place.shape)}, and '{source}' has {list(value.shape)}"
            )
        move(value, place)


@dataclass
class _Body:
    """The bodies of one node; `places` are those of its borders."""

    bodies: Bodies
    first: BorderCall
    last: BorderCall
    places: list[int] = field(default_factory=list)
    turns: int = 0
    most: int | None = None
    stacks: list[list[Tensor]] = field(default_factory=list)

    def choose(self) -> int:
        return (self.places[0] if self._is_set(self.first.condition) else self.places[1]) + 1

    def give(self, names: Sequence[str]) -> int:
        """Gives what a branch made as the results of the If."""
        for name, result in zip(names, self.last.carried, strict=True):
            if result:
                self.bodies.set(result, self.bodies.dense(name), name)
        return self.places[-1] + 1

    def begin(self) -> int:
        self.turns = 0
        self.most = int(self.bodies.dense(self.first.count).array().reshape(())) if self.first.count else None
        self.stacks = [[] for _ in self.last.carried[len(self.first.carried) :]]
        for name, state in zip(self.first.states, self.first.carried, strict=True):
            self.bodies.set(state, self.bodies.dense(name), name)
        return self._next(not self.first.condition or self._is_set(self.first.condition))

    def turn(self) -> int:
        """Ends a turn."""
        self.turns += 1
        states = self.first.carried
        for name, state in zip(self.last.states, states, strict=False):
            self.bodies.set(state, self.bodies.dense(name), name)
        for name, stack in zip(self.last.states[len(states) :], self.stacks, strict=True):
            value = self.bodies.dense(name)
            stack.append(Tensor.of(value.array().copy(), value.dtype))
        return self._next(self._is_set(self.last.condition))

    def _next(self, going: bool) -> int:
        """The place after the Begin where a turn follows, with the turn's number; else that behind the End, with the results."""
        if going and (self.most is None or self.turns < self.most):
            for name, number in zip(self.first.results[:2], (self.turns, True), strict=True):
                if name:
                    self.bodies.dense(name).array()[...] = number
            return self.places[0] + 1
        states = self.first.carried
        for state, result in zip(states, self.last.carried, strict=False):
            if result:
                self.bodies.set(result, self.bodies.dense(state), state)
        for result, stack, name in zip(
            self.last.carried[len(states) :], self.stacks, self.last.states[len(states) :], strict=True
        ):
            if result:
                self.bodies.set(result, self._stacked(stack, name), name)
        return self.places[-1] + 1

    def _stacked(self, stack: Sequence[Tensor], name: str) -> Tensor:
        """The values of all turns along a new dim; of no turn none, in the shape that a turn would have given."""
        if stack:
            return Tensor.of(np.stack([one.array() for one in stack]), stack[0].dtype)
        shape = self.bodies.values.shapes.get(name)
        dtype: Dtype = self.bodies.values.dtype(name)
        dims = [] if shape is None else [dim if isinstance(dim, int) else 0 for dim in shape]
        value = self.bodies.cells.get(name)
        return Tensor.empty(dtype, (0, *(value.shape if isinstance(value, Tensor) else dims)))

    def _is_set(self, name: str) -> bool:
        return bool(self.bodies.dense(name).array().all())
