"""Recovers from a failed step: when it fails on one rank all ranks abandon it, and the next one runs: `load(..., on_error="recover")`.

Messages and collectives of a step complete only if every rank takes part in all of them. So a rank whose op fails continues without running
ops: their results are replaced with stand-ins, numbers of the promised shape, or where a shape is unknown an empty value. No communication
is then left under way. At the end of the step all ranks agree on whether one has failed, and raise the same StepError; without a failure
that costs one small AllReduce. Ops of other ranks may fail on stand-ins, too: of several failures the earliest in the order of
communication is reported, because no other failure can have caused it.

A failure of communication, such as a rank that has ended, cannot be recovered from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.artifact.tensors.tensor import Tensor, Value

from ..communication.coalesced import CoalescedCollective
from ..communication.transport import Transport
from ..devices.device_memory import Cell, Remote, move
from ..errors import RankError, StepError
from ..job.status_board import IDLE, SLOT, Board
from ..program.steps import Copy, LookUp, Segment, Send, StartCollective, Step, WaitCollective, WaitRecv
from ..program.value_table import Storage
from .step_plan import StepPlan


@dataclass(frozen=True)
class Failure:
    """The failure of this rank; `order` is the number of the last transfer or collective before it."""

    order: int
    text: str


def attempt(
    schedule: StepPlan, inputs: Mapping[str, Value], board: Board, step: int
) -> tuple[dict[str, Value], Failure | None]:
    """Runs a step with all its communication; returns its outputs, or the failure of an op here. RankError where communication fails."""
    write, buffer, offset = SLOT.pack_into, board.buffer, board.offset
    schedule.take(inputs)
    position, index, failure = -1, IDLE, None
    try:
        for index, action in schedule.actions:
            position += 1
            write(buffer, offset, step, index)
            action()
    except Exception as error:
        failure = _failure(schedule, position, index, error)
    if failure is not None:
        try:
            for at in range(position, len(schedule.actions)):
                index = schedule.actions[at][0]
                write(buffer, offset, step, index)
                _stand_in(schedule, at, at == position)
        except RankError:
            raise
        except Exception as error:
            raise RankError(
                f"rank {schedule.transport.rank} failed in {schedule.program.explain(index, error)}"
            ) from error
    write(buffer, offset, step, IDLE)
    if failure is None:
        return schedule.give(), None
    for name in schedule.program.transient:
        schedule.memory.cells.pop(name, None)
    return {}, failure


def settle(transport: Transport, failure: Failure | None) -> None:
    """Raises the same StepError on all ranks if any has failed; collective."""
    if not transport.all_reduce_max(np.array([failure is not None], np.int64))[0]:
        return
    told = transport.all_gather_text("" if failure is None else json.dumps([failure.order, failure.text]))
    found = [(*json.loads(text), rank) for rank, text in enumerate(told) if text]
    _, text, _ = min(found, key=lambda one: (one[0], one[2]))
    raise StepError(f"{text}\n  the step is given up on all ranks; the next one can run")


def failed(transport: Transport, error: Exception) -> Failure:
    """Returns a failure that happened before the step communicated."""
    return Failure(-1, f"rank {transport.rank} failed: {type(error).__name__}: {error}")


def _failure(schedule: StepPlan, position: int, index: int, error: Exception) -> Failure:
    """Returns the failure for an action's error; raises RankError where the communication itself failed."""
    rank, program = schedule.transport.rank, schedule.program
    text = str(error)
    if not (isinstance(error, RankError) and text.startswith("rank ")):
        text = f"rank {rank} failed in {program.explain(index, error)}"
    step = program.steps[index] if schedule.is_step(position) else None
    refused = isinstance(step, Send | StartCollective | LookUp) and isinstance(error, StepError)
    refused = refused or (isinstance(step, Send) and isinstance(error, ValueError))
    if isinstance(step, Segment) or refused:
        # A collective on values of unknown shape, and a lookup, fail after their ranks have communicated.
        met = isinstance(step, StartCollective | LookUp) and step.call.tag not in schedule.collectives.works
        return Failure(max(map(_tag, program.steps[: index + met]), default=-1), text)
    if isinstance(error, RankError) and not isinstance(error, StepError):
        raise error
    raise RankError(text) from error


def _tag(step: Step) -> int:
    """Returns the number of a step's communication in the order that all ranks share; -1 for a step without communication."""
    match step:
        case Send() | WaitRecv():
            return step.tag
        case StartCollective() | WaitCollective() | LookUp():
            return step.call.tag
    return -1


def _stand_in(schedule: StepPlan, at: int, again: bool) -> None:
    """Replaces an action of an abandoned step; `again` marks the action that failed, which has sent nothing."""
    program, (index, action) = schedule.program, schedule.actions[at]
    match program.steps[index] if schedule.is_step(at) else None:
        case Copy() as copy:
            if isinstance(schedule.memory.cells.get(copy.source), Tensor | Remote):
                action()
            else:
                schedule.memory.cells.pop(copy.result, None)
            return
        case Segment() as segment:
            for name in segment.outputs:
                if program.values.storage[name] is Storage.SLOT:
                    _refill(schedule.memory.cells[name])
                else:
                    schedule.memory.cells.pop(name, None)
            return
        case Send() as send:
            _provide(schedule, send.value, schedule.messages.promises.get(send.tag), again)
        case StartCollective() as begin if begin.call.tag in schedule.collectives.works:
            work = schedule.collectives.works[begin.call.tag]
            if begin.call.source and not isinstance(work, CoalescedCollective):
                _provide(schedule, begin.call.source, work.gives_shape, again)
        case StartCollective() | LookUp() as begin:
            if not again:
                schedule.at_large.give_up(begin)
            return
    action()


def _provide(schedule: StepPlan, name: str, shape: tuple[int, ...] | None, again: bool) -> None:
    """Puts a stand-in in the place of a value to send, if the value is missing or does not have the promised shape."""
    kind, value = schedule.program.values.storage[name], schedule.memory.cells.get(name)
    if kind in (Storage.SLOT, Storage.CONSTANT, Storage.INPUT):
        return
    dtype = dense(schedule.program.values.types[name])
    if shape is not None and dtype is not None:
        if not isinstance(value, Tensor) or value.shape != shape:
            schedule.memory.cells[name] = _fill(Tensor.empty(dtype, shape))
    elif again or name not in schedule.memory.cells:
        head = schedule.program.values.types[name].partition("(")[0]
        other: Value = {"seq": [], "map": {}, "optional": None}.get(head, np.empty(0, object))
        schedule.memory.cells[name] = Tensor.empty(dtype, (0,)) if dtype else other


def _refill(cell: Cell) -> None:
    """Overwrites a value with stand-ins."""
    if isinstance(cell, Remote):
        copy = cell.to_host()
        _fill(copy)
        move(copy, cell)
    else:
        _fill(cell)


def _fill(value: Value) -> Value:
    """Fills a value with stand-ins: ones for integers, since 1 is a legal index, size, divisor and trip count; else zeros."""
    if isinstance(value, Tensor):
        if value.dtype.bits >= 8 and value.dtype.numpy.kind in "iu":
            value.array()[...] = 1
        else:
            value.data[:] = 0
    return value
