"""Runs a step: the actions of a rank for given bindings, with every buffer bound once.

A step plan has one callable per action, made when the bindings are new: run a bound session, post a receive, begin a send or a collective,
wait. Values are in cells: fixed (an arena, a constant) or set in each step (an input, a value of unknown shape, a string). Each of the
rank's targets has an arena, and if several targets compute, a lane each: lanes run at the same time (`targets/`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from partc.runtime.artifact.tensors.tensor import Value

from ..communication.collective import nothing
from ..communication.transport import Transport
from ..devices.device_memory import Placed, move, shapes_of
from ..errors import RankError
from ..job.status_board import IDLE, SLOT, Board
from ..program.steps import (
    Border,
    Copy,
    LookUp,
    PostRecv,
    Segment,
    Send,
    StartCollective,
    Step,
    Update,
    WaitCollective,
    WaitRecv,
)
from .collective_plans import plan_collectives
from .memory.freed import fill
from .memory.layout import at_sizes
from .memory.roles import ActionKind, Role
from .memory.step_memory import StepMemory
from .moves import AtLarge, CollectiveCalls, MessageCalls
from .rank_program import RankProgram
from .symbol_bindings import Bindings
from .targets.lanes import Accesses, Lanes, lanes_of
from .targets.session_calls import SessionCalls
from .targets.workers import Action


class StepPlan:
    """The actions of one rank for one set of bindings; `run` executes a step."""

    def __init__(
        self,
        program: RankProgram,
        bindings: Bindings,
        transport: Transport,
        wire: Mapping[int, int],
        at_once: frozenset[int] = frozenset(),
        together: bool = True,
    ) -> None:
        self.program, self.transport, self.bindings = program, transport, bindings
        self.widest = bindings
        """The sizes for which its places were laid out."""
        symbols = program.binder.manifest.symbols
        shapes = {name: at_sizes(shape, symbols, bindings) for name, shape in program.values.shapes.items()}
        promises = {tag: at_sizes(shape, symbols, bindings) for tag, shape in program.messages.promises.items()}
        works = plan_collectives(
            program.steps,
            program.values,
            shapes_of(program.constants),
            promises,
            shapes,
            transport,
            wire,
            program.messages.links,
        )
        self.memory = memory = StepMemory(program, shapes, works)
        memory.cells.update(program.rows.places() if program.rows is not None else {})
        self.first_slot = program.rows.first if program.rows is not None else 0
        """The first of the slots whose rows of caches are bound, if a step binds only some."""
        self.sessions = SessionCalls(program, memory.cells)
        self.messages = MessageCalls(program, transport, wire, promises, memory)
        self.at_large = AtLarge(program, transport, wire, promises, memory)
        self.collectives = CollectiveCalls(self.messages, works, at_once)
        self.actions: list[tuple[int, Action]] = []
        self.roles: list[Role] = []
        self.places: dict[int, int] = {}
        """Maps each step to its action."""
        self.beside = during_messages(program.steps, at_once)
        lanes = lanes_of(program) if together else {}
        accesses = Accesses(program, lanes, memory.cells, memory.lives, memory.scratch) if lanes else None
        self._plan(accesses)
        self.lanes: Lanes | None = None
        if accesses is not None:
            self.lanes = Lanes(program, transport, self.actions, [accesses.of(role) for role in self.roles], len(lanes))

    def take(self, inputs: Mapping[str, Value]) -> None:
        """Binds the inputs of a step, and the rows of caches that it uses."""
        if (rows := self.program.rows) is not None and rows.first != self.first_slot:
            self.memory.cells.update(rows.places())
            self.sessions.bind_rows()
            self.first_slot = rows.first
        if self.memory.freed is not None:
            self.memory.freed.renew()
        self.sessions.bind_inputs(inputs)

    def run(self, inputs: Mapping[str, Value], board: Board, step: int, lent: bool = False) -> dict[str, Value]:
        """Executes the step; returns the outputs delivered to this rank, in memory of their own unless `lent`."""
        self.take(inputs)
        if self.lanes is not None:
            self.lanes.run(board, step)
            return self.give(lent)
        write, buffer, offset, index = SLOT.pack_into, board.buffer, board.offset, IDLE
        jumps, at = self.sessions.bodies.jumps, 0
        try:
            for index, action in self.actions if not jumps else ():
                write(buffer, offset, step, index)
                action()
            while jumps and at < len(self.actions):
                index, action = self.actions[at]
                write(buffer, offset, step, index)
                action()
                at = jumps[at]() if at in jumps else at + 1
        except RankError:
            raise
        except Exception as error:
            raise RankError(f"rank {self.transport.rank} failed in {self.program.explain(index, error)}") from error
        write(buffer, offset, step, IDLE)
        return self.give(lent)

    def give(self, lent: bool = False) -> dict[str, Value]:
        """Returns the outputs of a step that has run, and copies the new values into the state; `lent`: without copies of outputs."""
        replacement = self.program.replacement
        if replacement.copies or replacement.always:
            replaced = replacement.copies if self._may_replace() else []
            for kept, made in (*replaced, *replacement.always):
                move(self.sessions.place(made), self.sessions.place(kept))
        self.program.targets.counts.add_step(self.program.switches)
        outputs = {name: self.memory.delivered(name, lent) for name in self.program.outputs}
        for name in self.program.transient:
            del self.memory.cells[name]
        return outputs

    def _plan(self, accesses: Accesses | None) -> None:
        waits, freed = self.memory.waits, self.memory.freed
        unused, runs, sends = self.program.last_uses(), self.program.copies_at_once, dict[int, None]()
        for index, step in enumerate(self.program.steps):
            # what has left in a turn or a branch has arrived when it ends, and what left before it when it begins
            for earlier in [*sends] if isinstance(step, Border) else waits.get(index, ()):
                if earlier in sends:
                    self._await_sent(earlier, index)
                    del sends[earlier]
            if isinstance(step, Copy) and index not in runs:
                continue  # one action with the copies after it
            action = self._action(index, step)
            if isinstance(step, Send) or (isinstance(step, StartCollective) and step.call.leaves):
                sends[index] = None
            if accesses is not None and accesses.lane(index):
                self.beside.discard(index)  # MPI is called in the first lane alone.
            done = tuple(runs.get(index, [index]))
            self.places[index] = len(self.actions)
            if isinstance(step, Border):
                self.sessions.bodies.add(step, len(self.actions))
            self._add(Role(ActionKind.STEPS, done), self._progressing(index, action))
            for one in done:
                for name in unused.get(one, ()):
                    self._add(Role(ActionKind.DROPPED, (index,), name), partial(self.memory.cells.pop, name, None))
                self._free(index, freed.after_step(one) if freed is not None else ())
        for index in sends:
            self._await_sent(index, len(self.program.steps))

    def _action(self, index: int, step: Step) -> Action:
        match step:
            case Segment():
                return self.sessions.segment(index)
            case Copy():
                return self.sessions.copies(self.program.copies_at_once[index])
            case Send():
                return self.messages.send(index, step)
            case PostRecv():
                return self.messages.post(index, step)
            case WaitRecv():
                return self.messages.receive(step)
            case LookUp():
                return self.at_large.look_up(step)
            case StartCollective():
                return self.collectives.begin(index, step, self.at_large)
            case WaitCollective():
                return self.collectives.finish(step)
            case Update():
                return self._update(index)
            case Border():
                return nothing

    def _progressing(self, index: int, action: Action) -> Action:
        """Returns the action of a step, which drives messages in progress if there are any."""
        return self.transport.with_progress(action) if index in self.beside else action

    def replace(self, index: int, step: Step) -> None:
        """Makes the action of a step anew, since its values have another place or size."""
        place = self.places[index]
        self.actions[place] = self.actions[place][0], self._progressing(index, self._action(index, step))

    def _await_sent(self, index: int, now: int) -> None:
        """Waits for the messages that a step has sent, before the step `now`."""
        self._add(Role(ActionKind.SENT, (index,)), self.messages.sent(index))
        freed = self.memory.freed
        self._free(index, freed.after_send(index, now) if freed is not None else ())

    def _free(self, index: int, places: Iterable[tuple[str, Placed]]) -> None:
        for name, place in places:
            self._add(Role(ActionKind.FREED, (index,), name, place), partial(fill, place))

    def is_step(self, place: int) -> bool:
        """Whether an action is a step, not a wait for a send or the release of values."""
        return place < len(self.roles) and self.roles[place].kind is ActionKind.STEPS

    def _add(self, role: Role, action: Action) -> None:
        self.actions.append((role.index, action))
        self.roles.append(role)

    def _update(self, index: int) -> Action:
        """Returns the updates of a step, each of many parameters at once."""
        update = self.sessions.updates(self.program.replacement.updates[index])

        def guarded() -> None:
            if self._may_replace():
                update()

        return guarded if self.program.replacement.guard else update

    def _may_replace(self) -> bool:
        """Whether a step may change the state: the guard is finite, or there is none."""
        return not (guard := self.program.replacement.guard) or bool(
            np.isfinite(self.memory.tensor(guard).array()).all()
        )


def during_messages(steps: Sequence[Step], at_once: Collection[int]) -> set[int]:
    """Returns the indices of segments and updates that run while messages may be in progress.

    A send may be in progress until the step ends. A collective in `at_once` begins at its wait.
    """
    indices: set[int] = set()
    coming: set[int] = set()
    sent = False
    for index, step in enumerate(steps):
        match step:
            case Segment() | Update() if sent or coming:
                indices.add(index)
            case Send():
                sent = True
            case PostRecv():
                coming.add(step.tag)
            case WaitRecv():
                coming.discard(step.tag)
            case StartCollective() if step.call.tag not in at_once:
                sent |= step.call.leaves
                coming.add(step.call.tag)
            case WaitCollective():
                coming.discard(step.call.tag)
    return indices
