"""Running a step: the actions of a rank for given bindings, with every buffer bound once.

A step plan holds one callable per action, made when the bindings are new: run a bound session, post a receive, begin a send or
a collective, wait. Values lie in cells: fixed (an arena, a constant) or set in each step (an input, a value of unknown shape, a
string). Each of the rank's targets has an arena, and where several compute a lane: lanes run at the same time (`targets/`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from ..artifact.dtypes import BY_NAME, Bytes
from ..artifact.format import CPU
from ..artifact.tensor import Tensor, Value, aligned
from ..communication.coalesced import CoalescedCollective
from ..communication.collective import BoundCollective, CollectivePlan, nothing
from ..communication.exchange import Redistribution
from ..communication.message import HEADER, decode, encode, payload_size
from ..communication.transport import Request, Transport
from ..devices.device_memory import Cell, Placed, Remote, move, on_host, part
from ..errors import RankError
from ..job.status_board import IDLE, SLOT, Board
from ..program.copy_runs import copy_runs
from ..program.memory_plan import Lifetime, assign
from ..program.session_values import check_promise
from ..program.steps import Copy, LookUp, PostRecv, Segment, Send, StartCollective, Update, WaitCollective, WaitRecv
from ..program.value_table import Storage
from .at_large import AtLarge
from .collective_plans import plan_collectives, scratch_lifetimes, scratch_name
from .memory.freed import Freed, fill, fills_freed
from .memory.proof import refuse_meeting
from .memory.roles import Kind, Role
from .rank_program import RankProgram
from .symbol_bindings import Bindings
from .targets.counts import switches
from .targets.lanes import Accesses, Lanes, lanes_of
from .targets.session_calls import SessionCalls
from .targets.workers import Action
from .under_way import beside_messages

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
        self.transport = transport
        self.wire = wire
        self.at_once = at_once
        self.shapes = {name: program.evaluated(shape, bindings) for name, shape in program.values.shapes.items()}
        self.promises = {tag: program.evaluated(shape, bindings) for tag, shape in program.promises.items()}
        kept = {name: tensor.shape for name, tensor in program.state.tensors.items()}
        self.works = plan_collectives(program.steps, self.values, kept, self.promises, self.shapes, transport, wire)
        self.cells: dict[str, Cell] = dict(program.constants)
        self.sessions = SessionCalls(program, self.cells)
        self.at_large = AtLarge(program, transport, wire, self.promises, self.cells)
        self.transient = [name for name, kind in program.values.storage.items() if self._passes(name, kind)]
        self.requests: list[Request] = [None] * len(program.steps)
        self.scratch: dict[tuple[int, str], Bytes] = {}
        self.begun: dict[int, tuple[list[Request], Action | None]] = {}
        self.posts = {step.tag: index for index, step in enumerate(program.steps) if isinstance(step, PostRecv)}
        self.headers = {tag: aligned(HEADER) for tag in self.posts if tag not in self.promises}
        self.last: dict[str, tuple[int, Shape]] = {}
        self.actions: list[tuple[int, Action]] = []
        self.roles: list[Role] = []
        self.switches = switches(program.step_targets, program.steps)
        self.lanes: Lanes | None = None
        self.freed: Freed | None = None
        lanes = lanes_of(program) if together else {}
        lives = [*program.lifetimes(self.shapes), *scratch_lifetimes(program.steps, self.works)]
        waits = self._lay_out(lives)
        accesses = Accesses(program, lanes, self.cells, lives, self.scratch) if lanes else None
        self._plan(waits, accesses)
        if accesses is not None:
            self.lanes = Lanes(program, transport, self.actions, [accesses.of(role) for role in self.roles], len(lanes))
        refuse_meeting(self)

    def take(self, inputs: Mapping[str, Value]) -> None:
        """Bind the inputs of a step."""
        if self.freed is not None:
            self.freed.renew()
        self.cells.update(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and self.last.get(name) != (value.pointer, value.shape):
                self.last[name] = (value.pointer, value.shape)
                for binding, code, formal in self.sessions.readers.get(name, ()):
                    binding.bind_input(formal, "cpu", 0, code, value.shape, value.pointer)

    def run(self, inputs: Mapping[str, Value], board: Board, step: int) -> dict[str, Value]:
        """Execute the step; what comes back are the outputs delivered to this rank, in memory of their own."""
        self.take(inputs)
        if self.lanes is not None:
            self.lanes.run(board, step)
            return self.give()
        write, buffer, offset, index = SLOT.pack_into, board.buffer, board.offset, IDLE
        try:
            for index, action in self.actions:
                write(buffer, offset, step, index)
                action()
        except RankError:
            raise
        except Exception as error:
            raise RankError(f"rank {self.transport.rank} failed in {self.program.explain(index, error)}") from error
        write(buffer, offset, step, IDLE)
        return self.give()

    def give(self) -> dict[str, Value]:
        """The outputs of a step that has run, with what it makes in place of what is kept."""
        replaced = self.program.replaced if self._may_replace() else []
        for kept, made in (*replaced, *self.program.replaced_always):
            move(self.sessions.place(made), self.sessions.place(kept))
        self.program.counts.add_step(self.switches)
        outputs = {name: self._delivered(name) for name in self.program.outputs}
        for name in self.transient:
            del self.cells[name]
        return outputs

    def _delivered(self, name: str) -> Value:
        """An output as the caller sees it; memory that the next step overwrites is copied."""
        value = on_host(self.cells[name])
        if not isinstance(value, Tensor):
            return value
        fresh = self.values.storage[name] is Storage.TENSOR or value.dtype.bits < 8
        return value.array() if fresh else value.array().copy()

    def _passes(self, name: str, kind: Storage) -> bool:
        """Whether a cell is of no use after the step, and holds memory that is not the schedule's."""
        return kind is Storage.INPUT or (kind in (Storage.TENSOR, Storage.OBJECT) and name in self.program.outputs)

    def _lay_out(self, lives: Sequence[Lifetime]) -> dict[int, list[int]]:
        """Give every value of known shape its place in the arena; by step, the sends to wait for before it."""
        targets = self.values.targets
        arena = assign([life for life in lives if life.name not in targets])
        memory = self.program.block(arena.bytes)
        offsets = arena.offsets
        blocks: dict[str, Placed] = {}
        for target in self.program.memories:
            there = assign([life for life in lives if targets.get(life.name) == target])
            block = self.program.block_of(target, there.bytes)
            blocks[target] = Remote(BYTE, (block.size,), block.pointer, self.program.memories[target], block)
            offsets |= there.offsets
        host = Tensor(BYTE, (memory.size,), memory)
        self.arenas = {
            target: (one.pointer, one.dtype.bytes_of(one.shape)) for target, one in {CPU: host, **blocks}.items()
        }
        if fills_freed():
            places = {
                life.name: part(blocks.get(targets.get(life.name, ""), host), offsets[life.name], BYTE, (life.bytes,))
                for life in lives
            }
            self.freed = Freed(lives, places, [host, *blocks.values()])
        for name, shape in self.shapes.items():
            dtype = self.values.dtype(name)
            buffer, at = self.values.flat_places.get(name, (name, 0))
            place = self.program.in_place_aliases.get(buffer, buffer)
            whole = blocks[targets[place]] if place in targets else host
            self.cells[name] = part(whole, offsets[place] + dtype.bytes_of((at,)), dtype, shape)
        keys = [(tag, side) for tag in self.works for side in ("in", "out")]
        self.scratch = {key: memory[offsets[scratch_name(*key)] :] for key in keys}
        return arena.waits

    def _plan(self, waits: Mapping[int, Sequence[int]], accesses: Accesses | None) -> None:
        unused, beside = self.program.last_uses(), beside_messages(self.program.steps, self.at_once)
        sends: dict[int, None] = {}
        runs = {run[-1]: run for run in copy_runs(self.program.steps)}
        for index, step in enumerate(self.program.steps):
            for earlier in waits.get(index, ()):
                self._await_sent(earlier, index)
                del sends[earlier]
            match step:
                case Segment():
                    action = self.sessions.segment(self.program.runners[index])
                case Copy():
                    if index not in runs:
                        continue  # one action with the copies after it
                    action = self.sessions.copies(runs[index])
                case Send():
                    action = self._send(index, step)
                    sends[index] = None
                case PostRecv():
                    action = self._post(index, step)
                case WaitRecv():
                    action = self._receive(step)
                case LookUp():
                    action = self.at_large.look_up(step)
                case StartCollective():
                    action = self._begin(index, step)
                    if step.call.leaves:
                        sends[index] = None
                case WaitCollective():
                    action = self._finish(step)
                case Update():
                    action = self._update(index)
            # MPI is called in the first lane alone.
            beside_it = index in beside and (accesses is None or accesses.lane(index) == 0)
            done = tuple(runs.get(index, [index]))
            self._add(Role(Kind.STEPS, done), self.transport.with_progress(action) if beside_it else action)
            for one in done:
                for name in unused.get(one, ()):
                    self._add(Role(Kind.DROPPED, (index,), name), partial(self.cells.pop, name, None))
                self._free(index, self.freed.after_step(one) if self.freed is not None else ())
        for index in sends:
            self._await_sent(index, len(self.program.steps))

    def _await_sent(self, index: int, now: int) -> None:
        """Wait for what a step has sent, before the step `now`."""
        self._add(Role(Kind.SENT, (index,)), self._complete(index))
        self._free(index, self.freed.after_send(index, now) if self.freed is not None else ())

    def _free(self, index: int, places: Iterable[tuple[str, Placed]]) -> None:
        for name, place in places:
            self._add(Role(Kind.FREED, (index,), name, place), partial(fill, place))

    def is_step(self, place: int) -> bool:
        """Whether an action is a step, not a wait for a send or an end of values."""
        return place < len(self.roles) and self.roles[place].kind is Kind.STEPS

    def _add(self, role: Role, action: Action) -> None:
        self.actions.append((role.index, action))
        self.roles.append(role)

    def _update(self, index: int) -> Action:
        """The updates of a step, each of many parameters at once."""
        update = self.sessions.updates(self.program.updates[index])

        def guarded() -> None:
            if self._may_replace():
                update()

        return guarded if self.program.guard else update

    def _may_replace(self) -> bool:
        """Whether a step may change what is kept."""
        return not self.program.guard or bool(np.isfinite(self._tensor(self.program.guard).array()).all())

    def _send(self, index: int, step: Send) -> Action:
        tag, peer, isend = self.wire[step.tag], step.peer, self.transport.isend
        promise = self.promises.get(step.tag)
        if promise is None:
            return partial(self._send_encoded, index, step)
        kind = self.values.storage[step.value]
        if kind in (Storage.SLOT, Storage.CONSTANT):
            tensor = self._tensor(step.value)
            check_promise(step.value, tensor.shape, promise)
            data = tensor.data

            def send_fixed() -> None:
                self.requests[index] = isend(data, peer, tag)

            return send_fixed

        def send() -> None:
            tensor = self._tensor(step.value)
            check_promise(step.value, tensor.shape, promise)
            self.requests[index] = isend(tensor.data, peer, tag)

        return send

    def _send_encoded(self, index: int, step: Send) -> None:
        tag = self.wire[step.tag]
        self.requests[index] = [
            self.transport.isend(part, step.peer, tag) for part in encode(on_host(self.cells[step.value]))
        ]

    def _post(self, index: int, step: PostRecv) -> Action:
        tag, peer, irecv, requests = self.wire[step.tag], step.peer, self.transport.irecv, self.requests
        data = self._tensor(step.value).data if step.tag in self.promises else self.headers[step.tag]

        def post() -> None:
            requests[index] = irecv(data, peer, tag)

        return post

    def _receive(self, step: WaitRecv) -> Action:
        post, wait, what, requests = self.posts[step.tag], self.transport.wait, step.__str__, self.requests

        def receive() -> None:
            wait(requests[post], what)

        return receive if step.tag in self.promises else partial(self._receive_encoded, post, step)

    def _receive_encoded(self, post: int, step: WaitRecv) -> None:
        transport, header = self.transport, self.headers[step.tag]
        transport.wait(self.requests[post], step.__str__)
        payload = aligned(payload_size(header))
        transport.wait(transport.irecv(payload, step.peer, self.wire[step.tag]), step.__str__)
        self.cells[step.value] = decode(header, payload)

    def _begin(self, index: int, step: StartCollective) -> Action:
        call, work = step.call, self.works.get(step.call.tag)
        if work is None:
            return partial(self.at_large.collect, step)
        if isinstance(work, Redistribution):
            return partial(self._begin_redistribution, index, step, work)
        if isinstance(work, CoalescedCollective):
            return self._begin_bound(index, step, self._bound_together(step, work))
        if call.source and self.values.storage[call.source] not in (Storage.SLOT, Storage.CONSTANT):
            return partial(self._begin_anew, index, step, work)
        return self._begin_bound(index, step, self._bound(step, work))

    def _bound_together(self, step: StartCollective, work: CoalescedCollective) -> BoundCollective:
        sources, results = ([self._tensor(name) for name in names] for names in (step.call.given, step.call.made))
        packed, landing = self.scratch[step.call.tag, "out"], self.scratch[step.call.tag, "in"]
        return work.bind(sources, results, packed, landing, step.call.tag in self.at_once)

    def _begin_bound(self, index: int, step: StartCollective, bound: BoundCollective) -> Action:
        start, begun, tag = bound.start, self.begun, step.call.tag
        if not step.call.made:
            return partial(self._leave, index, bound)

        def begin() -> None:
            if bound.before:
                bound.before()
            begun[tag] = ([start()], bound.after)

        return begin

    def _bound(self, step: StartCollective, work: CollectivePlan) -> BoundCollective:
        """A collective on the memory of its values as they are now."""
        call = step.call
        source = self._tensor(call.source) if call.source else None
        if source is not None:
            check_promise(call.source or "", source.shape, work.shape)
        packed, landing = self.scratch[call.tag, "out"], self.scratch[call.tag, "in"]
        result = self._tensor(call.result) if call.result else None
        return work.bind(source, result, packed, landing, call.tag in self.at_once)

    def _leave(self, index: int, bound: BoundCollective) -> None:
        """Begin a collective that gives this rank nothing: like a send, it is waited for when its memory is needed."""
        if bound.before:
            bound.before()
        self.requests[index] = bound.start()

    def _begin_anew(self, index: int, step: StartCollective, work: CollectivePlan) -> None:
        """Begin a collective whose input has another place each time."""
        bound = self._bound(step, work)
        if not step.call.made:
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
        """Wait for a send."""
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
