"""Runs a step: the actions of a rank for given bindings, with every buffer bound once.

A step plan has one callable per action, made when the bindings are new: run a bound session, post a receive, begin a send or a collective,
wait. Values are in cells: fixed (an arena, a constant) or set in each step (an input, a value of unknown shape, a string). Each of the
rank's targets has an arena, and if several targets compute, a lane each: lanes run at the same time (`targets/`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from partc.runtime.artifact.tensors.dtypes import BY_NAME, Array, Bytes
from partc.runtime.artifact.tensors.tensor import Tensor, Value

from ..artifact.format import CPU
from ..communication.coalesced import CoalescedCollective
from ..communication.collective import BoundCollective, CollectivePlan, nothing
from ..communication.exchange import Redistribution
from ..communication.transport import Request, Transport
from ..devices.device_memory import Cell, Placed, Remote, move, on_host, part, shapes_of
from ..errors import RankError
from ..job.status_board import IDLE, SLOT, Board
from ..program.flat_buffers import copy_runs
from ..program.memory_plan import Lifetime
from ..program.session_values import check_promise
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
from ..program.value_table import Storage
from .collective_plans import plan_collectives, scratch_lifetimes, scratch_name
from .memory.freed import PoisonFreed, fill, fills_freed
from .memory.layout import arenas, at_sizes
from .memory.roles import ActionKind, Role
from .moves import AtLarge, MessageCalls
from .rank_program import RankProgram
from .symbol_bindings import Bindings
from .targets.counts import switches
from .targets.lanes import Accesses, Lanes, lanes_of
from .targets.session_calls import SessionCalls
from .targets.workers import Action

Shape: TypeAlias = tuple[int, ...]
BYTE = BY_NAME["uint8"]


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
        self.program, self.values = program, program.values
        self.bindings = bindings
        self.widest = bindings
        """The sizes for which its places were laid out."""
        self.transport = transport
        self.wire, self.at_once = wire, at_once
        symbols = program.binder.manifest.symbols
        self.shapes = {name: at_sizes(shape, symbols, bindings) for name, shape in program.values.shapes.items()}
        self.promises = {tag: at_sizes(shape, symbols, bindings) for tag, shape in program.messages.promises.items()}
        self.works = plan_collectives(
            program.steps, self.values, shapes_of(program.constants), self.promises, self.shapes, transport, wire
        )
        self.cells: dict[str, Cell] = dict(program.constants)
        self.shown: dict[str, Array] = {}
        """Maps each output that stays in place to its memory as an array."""
        self.sessions = SessionCalls(program, self.cells)
        self.at_large = AtLarge(program, transport, wire, self.promises, self.cells)
        # cells of no use after the step, which hold memory that is not the schedule's
        self.transient = [
            name
            for name, kind in program.values.storage.items()
            if kind is Storage.INPUT or (kind in (Storage.TENSOR, Storage.OBJECT) and name in self.program.outputs)
        ]
        self.requests: list[Request] = [None] * len(program.steps)
        self.messages = MessageCalls(program, transport, wire, self.promises, self.cells, self.requests)
        self.scratch: dict[tuple[int, str], Bytes] = {}
        self.begun: dict[int, tuple[list[Request], Action | None]] = {}
        self.last: dict[str, tuple[int, Shape]] = {}
        self.actions: list[tuple[int, Action]] = []
        self.first_slot = program.rows.first if program.rows is not None else 0
        """The first of the slots whose rows of caches are bound, if a step binds only some."""
        self.cells.update(program.rows.places() if program.rows is not None else {})
        self.places: dict[int, int] = {}
        self.beside = during_messages(program.steps, at_once)
        self.runs = {run[-1]: run for run in copy_runs(program.steps)}
        self.roles: list[Role] = []
        self.switches = switches(program.targets.of_steps, program.steps)
        self.lanes: Lanes | None = None
        self.freed: PoisonFreed | None = None
        lanes = lanes_of(program) if together else {}
        lives = self.values.lifetimes(program.arenas.aliases, self.shapes)
        lives += scratch_lifetimes(program.steps, self.works)
        self.capacity = {life.name: life.bytes for life in lives}
        waits = self._lay_out(lives)
        accesses = Accesses(program, lanes, self.cells, lives, self.scratch) if lanes else None
        self._plan(waits, accesses)
        if accesses is not None:
            self.lanes = Lanes(program, transport, self.actions, [accesses.of(role) for role in self.roles], len(lanes))

    def take(self, inputs: Mapping[str, Value]) -> None:
        """Binds the inputs of a step, and the rows of caches that it uses."""
        if (rows := self.program.rows) is not None and rows.first != self.first_slot:
            self.cells.update(rows.places())
            self.sessions.bind_rows()
            self.first_slot = rows.first
        if self.freed is not None:
            self.freed.renew()
        self.cells.update(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and self.last.get(name) != (value.pointer, value.shape):
                self.last[name] = (value.pointer, value.shape)
                for binding, code, formal in self.sessions.readers.get(name, ()):
                    binding.bind_input(formal, "cpu", 0, code, value.shape, value.pointer)

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
        self.program.targets.counts.add_step(self.switches)
        outputs = {name: self._delivered(name, lent) for name in self.program.outputs}
        for name in self.transient:
            del self.cells[name]
        return outputs

    def _delivered(self, name: str, lent: bool) -> Value:
        """Returns an output for the caller; memory that the next step overwrites is copied."""
        if (array := self.shown.get(name)) is None:
            value, kind = on_host(self.cells[name]), self.values.storage[name]
            if not isinstance(value, Tensor):
                return value
            array = value.array()
            if kind is Storage.TENSOR or value.dtype.bits < 8:
                return array
            if kind is Storage.SLOT and value is self.cells[name]:
                self.shown[name] = array
        return array if lent else array.copy()

    def _lay_out(self, lives: Sequence[Lifetime]) -> dict[int, list[int]]:
        """Gives every value of known shape its place in the arena; maps each step to the sends to wait for before it."""
        targets, own = self.values.targets, self.program.arenas
        planned = arenas(lives, targets, own.memories)
        self.memory = memory = own.on_host(planned[CPU].bytes)
        offsets = {name: at for one in planned.values() for name, at in one.offsets.items()}
        blocks: dict[str, Placed] = {}
        for target, there in own.memories.items():
            block = own.on(target, planned[target].bytes)
            blocks[target] = Remote(BYTE, (block.size,), block.pointer, there, block)
        host = Tensor(BYTE, (memory.size,), memory)
        self.arenas = {
            target: (one.pointer, one.dtype.bytes_of(one.shape)) for target, one in {CPU: host, **blocks}.items()
        }
        if fills_freed():
            places = {
                life.name: part(blocks.get(targets.get(life.name, ""), host), offsets[life.name], BYTE, (life.bytes,))
                for life in lives
            }
            self.freed = PoisonFreed(lives, places, [host, *blocks.values()])
        self.offsets, self.blocks = offsets, {CPU: host, **blocks}
        for name in self.shapes:
            self.lay(name)
        scratch = ((tag, side) for tag in self.works for side in ("in", "out"))
        self.scratch = {key: memory[offsets[scratch_name(*key)] :] for key in scratch}
        return planned[CPU].waits

    def lay(self, name: str) -> None:
        """Sets a value's place, for its current size."""
        dtype = self.values.dtype(name)
        buffer, at = self.values.flat_places.get(name, (name, 0))
        place = self.program.arenas.aliases.get(buffer, buffer)
        whole = self.blocks[self.values.targets.get(place, CPU)]
        self.shown.pop(name, None)
        self.cells[name] = part(whole, self.offsets[place] + dtype.bytes_of((at,)), dtype, self.shapes[name])

    def _plan(self, waits: Mapping[int, Sequence[int]], accesses: Accesses | None) -> None:
        unused, runs, sends = self.program.last_uses(), self.runs, dict[int, None]()
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
                    self._add(Role(ActionKind.DROPPED, (index,), name), partial(self.cells.pop, name, None))
                self._free(index, self.freed.after_step(one) if self.freed is not None else ())
        for index in sends:
            self._await_sent(index, len(self.program.steps))

    def _action(self, index: int, step: Step) -> Action:
        match step:
            case Segment():
                return self.sessions.segment(index)
            case Copy():
                return self.sessions.copies(self.runs[index])
            case Send():
                return self.messages.send(index, step)
            case PostRecv():
                return self.messages.post(index, step)
            case WaitRecv():
                return self.messages.receive(step)
            case LookUp():
                return self.at_large.look_up(step)
            case StartCollective():
                return self._begin(index, step)
            case WaitCollective():
                return self._finish(step)
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
        self._add(Role(ActionKind.SENT, (index,)), self._complete(index))
        self._free(index, self.freed.after_send(index, now) if self.freed is not None else ())

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
        return not (guard := self.program.replacement.guard) or bool(np.isfinite(self._tensor(guard).array()).all())

    def _begin(self, index: int, step: StartCollective) -> Action:
        call, work = step.call, self.works.get(step.call.tag)
        if work is None:
            return partial(self.at_large.collect, step)
        if isinstance(work, Redistribution):
            return partial(self._begin_redistribution, index, step, work)
        if isinstance(work, CoalescedCollective):
            sources, results = (
                [self._tensor(name) for name in names] for names in (step.call.inputs, step.call.outputs)
            )
            packed, landing = self.scratch[step.call.tag, "out"], self.scratch[step.call.tag, "in"]
            return self._begin_bound(
                index, step, work.bind(sources, results, packed, landing, step.call.tag in self.at_once)
            )
        if call.source and self.values.storage[call.source] not in (Storage.SLOT, Storage.CONSTANT):
            return partial(self._begin_anew, index, step, work)
        return self._begin_bound(index, step, self._bound(step, work))

    def _begin_bound(self, index: int, step: StartCollective, bound: BoundCollective) -> Action:
        start, begun, tag = bound.start, self.begun, step.call.tag
        if not step.call.outputs:
            return partial(self._leave, index, bound)

        def begin() -> None:
            if bound.before:
                bound.before()
            begun[tag] = ([start()], bound.after)

        return begin

    def _bound(self, step: StartCollective, work: CollectivePlan) -> BoundCollective:
        """Returns a collective bound to the current memory of its values."""
        call = step.call
        source = self._tensor(call.source) if call.source else None
        if source is not None:
            check_promise(call.source or "", source.shape, work.shape)
        packed, landing = self.scratch[call.tag, "out"], self.scratch[call.tag, "in"]
        result = self._tensor(call.result) if call.result else None
        return work.bind(source, result, packed, landing, call.tag in self.at_once)

    def _leave(self, index: int, bound: BoundCollective) -> None:
        """Begins a collective without a result on this rank: like a send, it is waited for when its memory is needed."""
        if bound.before:
            bound.before()
        self.requests[index] = bound.start()

    def _begin_anew(self, index: int, step: StartCollective, work: CollectivePlan) -> None:
        """Begins a collective whose input has another place each time."""
        bound = self._bound(step, work)
        if not step.call.outputs:
            self._leave(index, bound)
            return
        if bound.before:
            bound.before()
        self.begun[step.call.tag] = ([bound.start()], bound.after)

    def _begin_redistribution(self, index: int, step: StartCollective, work: Redistribution) -> None:
        call = step.call
        source = self._tensor(call.source) if call.source else None
        if source is not None:
            check_promise(call.source or "", source.shape, work.given or ())
        result = self._tensor(call.result) if call.result else None
        packed, landing = self.scratch[call.tag, "out"], self.scratch[call.tag, "in"]
        leaving, coming, after = work.begin(source, result, packed, landing)
        self.requests[index] = leaving
        self.begun[call.tag] = (coming, after)

    def _finish(self, step: WaitCollective) -> Action:
        if step.call.tag not in self.works:
            return nothing
        wait, what, begun, tag = self.transport.wait, step.__str__, self.begun, step.call.tag

        def finish() -> None:
            requests, after = begun[tag]
            for request in requests:
                if request is not None:
                    wait(request, what)
            if after:
                after()

        return finish

    def _complete(self, index: int) -> Action:
        """Returns the function that waits for a send."""
        step, wait, requests = self.program.steps[index], self.transport.wait, self.requests

        def complete() -> None:
            request = requests[index]
            for one in request if isinstance(request, list) else (request,):
                wait(one, step.__str__)
            requests[index] = None

        return complete

    def _tensor(self, name: str) -> Tensor:
        value = self.cells[name]
        assert isinstance(value, Tensor), name
        return value


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
