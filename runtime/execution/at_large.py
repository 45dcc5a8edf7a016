"""Collectives whose sizes only a run tells: each is one with its wait, at its place in the file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..artifact.format import PULL
from ..artifact.tensor import Tensor
from ..communication.collective import dynamic_collective, give_up
from ..errors import StepError
from ..lookups.lookup import Asked, Lookup
from ..program.session_values import check_promise
from ..program.steps import LookUp, StartCollective, WaitCollective
from ..program.value_table import Storage

if TYPE_CHECKING:
    from .step_plan import StepPlan


def look_up(plan: StepPlan, step: LookUp) -> Callable[[], object]:
    """What runs a Pull or a Push."""
    return partial(_look_up, plan, step, lookup_of(plan, step))


def give_up_at_large(plan: StepPlan, step: StartCollective | LookUp) -> None:
    """Takes part in a lookup, or in a collective on values of unknown shape, with nothing to give."""
    if isinstance(step, StartCollective):
        give_up(step.call, step.ranks, step.call.tag, plan.transport, step.__str__)
    elif step.call.op == PULL:
        lookup_of(plan, step).give_up()
    else:
        _push_nothing(plan, step, lookup_of(plan, step))


def lookup_of(plan: StepPlan, step: LookUp) -> Lookup:
    """The lookup of a step, one for all plans of a program."""
    call, program = step.call, plan.program
    if call.tag not in program.lookups:
        dtype = program.values.dtype(next(name for name in (call.operand, call.result) if name))
        program.lookups[call.tag] = Lookup(
            call, step.ranks, dtype, plan.transport, plan.wire[call.tag], program.looked_up, step.__str__
        )
    return program.lookups[call.tag]


def collect_at_large(plan: StepPlan, step: StartCollective) -> None:
    """Runs a collective on a value of unknown shape."""
    call, finish = step.call, WaitCollective(step.call, step.ranks)
    source = _tensor(plan, call.source or "")
    what = finish.__str__
    plan.cells[call.result or ""] = dynamic_collective(call, step.ranks, call.tag, source, plan.transport, what)


def _look_up(plan: StepPlan, step: LookUp, lookup: Lookup) -> None:
    found = _pull(plan, step, lookup) if step.call.op == PULL else _push(plan, step, lookup)
    for name, value in found.items():
        if name:
            plan.cells[name] = value


def _pull(plan: StepPlan, step: LookUp, lookup: Lookup) -> dict[str | None, Tensor | None]:
    call = step.call
    ids = _operand(plan, call.ids)
    if ids is not None and (promise := plan.promises.get(call.tag)) is not None:
        try:
            check_promise(call.ids or "", ids.shape, promise)
        except StepError:
            lookup.give_up()
            raise
    slot = call.result is not None and plan.program.values.storage[call.result] is Storage.SLOT
    result = _tensor(plan, call.result or "") if slot else None
    rows, asked = lookup.pull(_operand(plan, call.operand), ids, result)
    found = dict(zip(call.asked, (asked.ids, asked.counts, asked.places), strict=True))
    return found if slot else {**found, call.result: rows}


def _push(plan: StepPlan, step: LookUp, lookup: Lookup) -> dict[str | None, Tensor | None]:
    call = step.call
    asked = Asked(*(_operand(plan, name) for name in call.asked))
    ids, rows = lookup.push(asked, _operand(plan, call.operand))
    return {call.numbers: ids, call.result: rows}


def _push_nothing(plan: StepPlan, step: LookUp, lookup: Lookup) -> None:
    """Zeros for what a rank has asked; nothing where the Pull was given up, as it was then on all ranks."""
    call = step.call
    values = [plan.cells.get(name or "") for name in call.asked]
    ids, counts, places = (one if isinstance(one, Tensor) else None for one in values)
    if counts is not None:
        rows = None if places is None else Tensor.empty(lookup.dtype, (*places.shape, *call.row))
        if rows is not None:
            rows.data[:] = 0
        lookup.push(Asked(ids, counts, places), rows)


def _operand(plan: StepPlan, name: str | None) -> Tensor | None:
    return _tensor(plan, name) if name else None


def _tensor(plan: StepPlan, name: str) -> Tensor:
    value = plan.cells[name]
    assert isinstance(value, Tensor), name
    return value
