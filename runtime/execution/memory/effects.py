"""The values that each action of a step plan reads and writes, by name: derived from the steps, independently of the memory plan.

A value is complete where its writer is done, and `coming` from the posting of its receive, or the begin of its collective, to the wait for
it. What an action checks must be as it says when it begins; what it sets is so when it ends.

    PostRecv h                     sets h, coming
    WaitRecv h                     checks h, coming; sets h
    StartCollective y = op(x)      checks x; sets y, coming          may work in place: y where x was
    WaitCollective y = op(x)       checks y, coming, and x, if y is not in its place; sets y
    SENT x                         checks x
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ...artifact.format import CACHE
from ...program.steps import (
    Collective,
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
from ...program.value_table import Storage
from ..collective_plans import AnyCollective, scratch_name
from .roles import ActionKind, Role

if TYPE_CHECKING:
    from ..rank_program import RankProgram

Use: TypeAlias = tuple[str, bool]
"""A value, and whether it is coming."""
_PLACED = (Storage.SLOT, Storage.CONSTANT)


@dataclass(frozen=True)
class Effects:
    """An action. `in_place`: by what it reads what it writes of it element by element, so that both may be in one place."""

    text: str
    checks: tuple[Use, ...] = ()
    sets: tuple[Use, ...] = ()
    in_place: Mapping[str, str] = field(default_factory=dict)
    frees: bool = False
    """Whether what it sets has no number then."""


def effects_of(role: Role, program: RankProgram, works: Mapping[int, AnyCollective]) -> Effects:
    """The effect of an action; `works` are the collectives that run at the same time."""
    steps = program.steps
    match role.kind:
        case ActionKind.DROPPED:
            return Effects(f"end of '{role.name}'", sets=_uses([role.name]), frees=True)
        case ActionKind.FREED:
            return Effects(f"end of '{role.name}'", sets=_uses([freed_name(role.name)]), frees=True)
        case ActionKind.SENT:
            step = steps[role.index]
            # memory of a value's own is kept by the message itself
            given = [step.value] if isinstance(step, Send) else []
            if isinstance(step, Collective) and step.call.tag in works:
                given = [*step.call.inputs, scratch_name(step.call.tag, "out")]
            return Effects(
                f"end of the {steps[role.index]}",
                checks=_uses([name for name in given if program.values.storage.get(name, Storage.SLOT) in _PLACED]),
            )
        case ActionKind.STEPS:
            found = [_of_step(steps[index], program, works) for index in role.steps]
            if len(found) == 1:
                return found[0]
            checks = tuple(use for one in found for use in one.checks)
            sets = tuple(use for one in found for use in one.sets)
            return Effects(f"{found[0].text} and {len(found) - 1} more", checks, sets)


def at_the_end(program: RankProgram) -> Iterator[Effects]:
    """The effect of the step's end: the state's tensors are replaced, and outputs are returned."""
    for kept, made in (*program.replacement.copies, *program.replacement.always):
        yield Effects(f"replacement of '{kept}'", _uses([made]), _uses([kept]))
    yield Effects("end of the step, which gives the outputs", _uses(program.outputs))


def freed_name(name: str) -> str:
    """A name for all bytes of a place that is free, which several values may have had."""
    return f"{name} freed\n"


def _of_step(step: Step, program: RankProgram, works: Mapping[int, AnyCollective]) -> Effects:
    text = str(step)
    match step:
        case Segment():
            sums = dict(step.sums) if step.task else {}
            appended = {one.value: one.next for one in program.replacement.records if one.kind == CACHE and one.next}
            return Effects(text, _uses(step.inputs), _uses(step.outputs), {**sums, **appended})
        case Copy():
            return Effects(text, _uses([step.source]), _uses([step.result]))
        case Update():
            guard = [program.replacement.guard] if program.replacement.guard else []
            replaced = {**{one.value: one.next for one in program.replacement.records}, **program.replacement.renewed}
            made = [name for node in step.nodes for name in node.output]
            return Effects(text, _uses([*step.inputs, *guard]), _uses(made), replaced)
        case Send():
            return Effects(text, _uses([step.value]))
        case PostRecv():
            placed = program.values.storage[step.value] in _PLACED
            return Effects(text, sets=_uses([step.value], coming=True) if placed else ())
        case WaitRecv():
            placed = program.values.storage[step.value] in _PLACED
            return Effects(text, _uses([step.value], coming=True) if placed else (), _uses([step.value]))
        case StartCollective():
            return _begun(text, step, works)
        case WaitCollective():
            return _finished(text, step, works)
        case LookUp():
            return Effects(text, _uses(step.call.inputs), _uses(step.call.outputs))


def _begun(text: str, step: StartCollective, works: Mapping[int, AnyCollective]) -> Effects:
    call = step.call
    if call.tag not in works:  # over when it has begun
        return Effects(text, _uses(call.inputs), _uses(call.outputs))
    packed, landing = (scratch_name(call.tag, side) for side in ("out", "in"))
    sets = (*_uses(call.outputs, coming=True), *_uses([landing], coming=True), *_uses([packed]))
    return Effects(text, _uses(call.inputs), sets, _in_place(step))


def _finished(text: str, step: WaitCollective, works: Mapping[int, AnyCollective]) -> Effects:
    call = step.call
    if call.tag not in works:
        return Effects(text)
    packed, landing = (scratch_name(call.tag, side) for side in ("out", "in"))
    still = () if call.kind.boxes else (*_uses(call.inputs), *_uses([packed]))
    checks = (*_uses([*call.outputs, landing], coming=True), *still)
    return Effects(text, checks, _uses(call.outputs), _in_place(step))


def _in_place(step: Collective) -> dict[str, str]:
    """Maps each operand of a collective to the result that may reuse its memory: of equal size, and without another operand."""
    call = step.call
    if call.in_one_buffer:
        return dict(call.parts)
    alone = len(step.ranks) == 1 and not call.kind.boxes
    fits = not call.parts and (call.kind.keeps_size or alone)
    return {call.source: call.result} if fits and call.source and call.result else {}


def _uses(names: Iterable[str], coming: bool = False) -> tuple[Use, ...]:
    return tuple((name, coming) for name in dict.fromkeys(names) if name)
