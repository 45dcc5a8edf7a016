"""Collectives whose sizes only a run tells: each is one with its wait, at its place in the file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..artifact.tensor import Tensor
from ..communication.collective import dynamic_collective, give_up
from ..errors import StepError
from ..lookups.lookup import Lookup, look_up
from ..program.session_values import check_promise
from ..program.steps import StartCollective, WaitCollective
from ..program.value_table import Storage

if TYPE_CHECKING:
    from .step_plan import StepPlan


def begin_at_large(plan: StepPlan, step: StartCollective) -> Callable[[], object]:
    """What runs a collective on values of unknown shape, a Pull or a Push."""
    if step.call.kind.looks_up:
        return partial(_look_up, plan, step, lookup_of(plan, step))
    return partial(_collect, plan, step)


def give_up_at_large(plan: StepPlan, step: StartCollective) -> None:
    """Takes part in such a collective with nothing to give."""
    if step.call.kind.looks_up:
        lookup_of(plan, step).give_up()
    else:
        give_up(step.call, step.ranks, step.call.tag, plan.transport, step.__str__)


def lookup_of(plan: StepPlan, step: StartCollective) -> Lookup:
    """The lookup of a step, one for all plans of a program."""
    call, program = step.call, plan.program
    if call.tag not in program.lookups:
        dtype = program.values.dtype(next(name for name in (call.operand, call.result) if name))
        what = WaitCollective(call, step.ranks, step.task).__str__
        program.lookups[call.tag] = Lookup(
            call, step.ranks, dtype, plan.transport, plan.wire[call.tag], program.looked_up, what
        )
    return program.lookups[call.tag]


def _collect(plan: StepPlan, step: StartCollective) -> None:
    call, finish = step.call, WaitCollective(step.call, step.ranks)
    source = _tensor(plan, call.source or "")
    what = finish.__str__
    plan.cells[call.result or ""] = dynamic_collective(call, step.ranks, call.tag, source, plan.transport, what)


def _look_up(plan: StepPlan, step: StartCollective, lookup: Lookup) -> None:
    call = step.call
    values = [_tensor(plan, name) if name else None for name in (call.source, call.operand)]
    if values[0] is not None and (promise := plan.promises.get(call.tag)) is not None:
        try:
            check_promise(call.source or "", values[0].shape, promise)
        except StepError:
            lookup.give_up()
            raise
    slot = call.result is not None and plan.program.values.storage[call.result] is Storage.SLOT
    result = _tensor(plan, call.result or "") if slot else None
    found = look_up(lookup, values, result)
    for name, value in zip(call.made, found, strict=False):
        if not (slot and isinstance(value, Tensor)):
            plan.cells[name] = value


def _tensor(plan: StepPlan, name: str) -> Tensor:
    value = plan.cells[name]
    assert isinstance(value, Tensor), name
    return value
