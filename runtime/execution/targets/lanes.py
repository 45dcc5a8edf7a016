"""The lanes of a step: assigns each action to the lane of its target, and finds the memory that the action reads and writes.

The first lane is that of the CPU and of all communication; each other target has a lane, with the copies from it and to it. A program with
one target has no lanes, and runs in the order of its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from partc.runtime.artifact.comm.collective_node import CollectiveCall
from partc.runtime.artifact.tensors.dtypes import Bytes
from partc.runtime.artifact.tensors.tensor import Tensor

from ...artifact.format import CPU
from ...communication.transport import Transport
from ...devices.device_memory import Cell, Remote
from ...errors import RankError
from ...job.status_board import IDLE, SLOT, Board
from ...program.memory_plan import Lifetime
from ...program.steps import Collective, Copy, LookUp, PostRecv, Send, Update
from ...program.value_table import Storage
from ..collective_plans import scratch_name
from ..memory.roles import ActionKind, Role
from ..rank_program import RankProgram
from .dependencies import Access, Range, waits_of
from .workers import Action, LaneFailed, LanePlan, Workers

_FIXED = (Storage.SLOT, Storage.CONSTANT)


def lanes_of(program: RankProgram) -> dict[str, int]:
    """Maps each target to its lane; empty where only one target computes."""
    computing = {
        target for index, target in program.targets.of_steps.items() if not isinstance(program.steps[index], Copy)
    }
    others = sorted({*program.targets.of_steps.values()} - {CPU})
    return {target: lane for lane, target in enumerate([CPU, *others])} if len(computing) > 1 else {}


class Accesses:
    """Finds the accesses of the actions of a step plan; `scratch` are the places in the arena where collectives pack."""

    def __init__(
        self,
        program: RankProgram,
        lanes: Mapping[str, int],
        cells: Mapping[str, Cell],
        lives: Iterable[Lifetime],
        scratch: Mapping[tuple[int, str], Bytes],
    ) -> None:
        self.program, self.values, self.lanes, self.cells = program, program.values, lanes, cells
        sizes = {life.name: life.bytes for life in lives}
        self.scratch: dict[str, Range] = {}
        for key, place in scratch.items():
            if size := sizes[scratch_name(*key)]:
                self.scratch[scratch_name(*key)] = place.ctypes.data, place.ctypes.data + size

    def of(self, role: Role) -> Access:
        """Returns the accesses of an action."""
        match role.kind:
            case ActionKind.STEPS:
                accesses = [self._of_step(index) for index in role.steps]
                reads, writes = ([one for access in accesses for one in some(access)] for some in (_reads, _writes))
                return Access(accesses[0].lane, tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes)))
            case ActionKind.SENT:
                return self._of_end(role.index)
            case ActionKind.DROPPED:
                return Access(self.lane(role.index), (), self._ranges([role.name]))
            case ActionKind.FREED:
                assert role.place is not None
                begin, size = role.place.pointer, role.place.dtype.bytes_of(role.place.shape)
                # A place on the host is filled by the lane that has read it last, so that no other lane waits.
                target = self.values.targets.get(role.name)
                lane = self.lane(role.index) if target is None else self.lanes[target]
                return Access(lane, (), ((begin, begin + size),))

    def _of_step(self, index: int) -> Access:
        step = self.program.steps[index]
        lane = self.lane(index)
        if isinstance(step, Collective | LookUp):
            return self._of_collective(lane, step)
        guard = self.program.replacement.guard if isinstance(step, Update) else ""
        return Access(lane, self._ranges([*step.reads, guard]), self._ranges(step.makes))

    def _of_end(self, index: int) -> Access:
        """Returns the accesses of the wait for a step's send: its value is read until then."""
        step = self.program.steps[index]
        if isinstance(step, Send):
            return Access(0, self._ranges([step.value]))
        assert isinstance(step, Collective)
        return self._of_collective(0, step)

    def lane(self, index: int) -> int:
        """Returns the lane of a step; a copy is in the lane of its target that is not the CPU."""
        step = self.program.steps[index]
        target = self.program.targets.of_steps.get(index, CPU)
        if isinstance(step, Copy) and target == CPU:
            target = self.values.targets.get(step.source, CPU)
        return self.lanes[target]

    def _of_collective(self, lane: int, step: Collective | LookUp) -> Access:
        call = step.call
        ends = (call.source, call.result) if isinstance(call, CollectiveCall) else ()
        known = dict.fromkeys(name for name in (*call.inputs, *call.outputs, *ends) if name in self.values.storage)
        made = {*call.outputs, *ends[1:]}
        reads = self._ranges(name for name in known if name not in made)
        keys = [key for side in ("in", "out") if (key := scratch_name(call.tag, side)) in self.scratch]
        packed = [self.scratch[key] for key in keys]
        return Access(lane, reads, (*self._ranges(name for name in known if name in made), *packed))

    def _ranges(self, names: Iterable[str | None]) -> tuple[Range, ...]:
        return tuple(one for name in names if name for one in self._range(name))

    def _range(self, name: str) -> Iterator[Range]:
        kind = self.values.storage.get(name)
        if kind in _FIXED and isinstance(value := self.cells[name], Tensor | Remote):
            size = value.dtype.bytes_of(value.shape)
            if size:
                yield value.pointer, value.pointer + size
        elif kind is not None and kind is not Storage.INPUT:
            yield name


def _reads(access: Access) -> tuple[Range, ...]:
    return access.reads


def _writes(access: Access) -> tuple[Range, ...]:
    return access.writes


class Lanes:
    """The lanes of a step plan, which run at the same time; `accesses` are those of `actions`, to which a last one is added."""

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        actions: list[tuple[int, Action]],
        accesses: Sequence[Access],
        count: int,
    ) -> None:
        self._program, self._transport, self._actions = program, transport, actions
        lanes: list[list[int]] = [[] for _ in range(count)]
        for place, access in enumerate(accesses):
            lanes[access.lane].append(place)
        waits = waits_of(accesses, count)
        # The last action of the first lane waits for all others.
        lanes[0].append(len(actions))
        waits.append(tuple((lane, len(places)) for lane, places in enumerate(lanes) if lane and places))
        actions.append((len(program.steps) - 1, _nothing))
        self.order = LanePlan(lanes, waits)
        self._wait: Action = _nothing
        communicates = any(isinstance(step, Send | PostRecv | Collective) for step in program.steps)
        self._waiting = transport.with_progress(self._run_wait) if communicates else self._run_wait

    def run(self, board: Board, step: int) -> None:
        """Runs the actions of a step; RankError where one has failed."""
        program = self._program
        write, buffer, offset = SLOT.pack_into, board.buffer, board.offset
        at = IDLE

        def show(index: int) -> None:
            nonlocal at
            at = index
            write(buffer, offset, step, index)

        if program.targets.workers is None:
            program.targets.workers = Workers(len(self.order.lanes), str(program.rank))
        try:
            program.targets.workers.run(self.order, self._actions, show, self._while_waiting, self._interrupt)
        except LaneFailed as failed:
            raise self._error(failed.index, failed.cause) from failed.cause
        except RankError:
            raise
        except Exception as error:
            raise self._error(at, error) from error
        write(buffer, offset, step, IDLE)

    def _error(self, index: int, error: Exception) -> RankError:
        if isinstance(error, RankError):
            return error
        return RankError(f"rank {self._transport.rank} failed in {self._program.explain(index, error)}")

    def _interrupt(self, index: int, error: Exception) -> None:
        self._transport.interrupt(str(self._error(index, error)))

    def _while_waiting(self, wait: Action) -> None:
        """Waits for another lane, while messages make progress."""
        self._wait = wait
        self._waiting()

    def _run_wait(self) -> None:
        self._wait()


def _nothing() -> None:
    pass
