"""Proves a step plan: each action reads the bytes that the value's own writer has left there, in every order that lanes allow.

Memory is divided at every end of a place, and each part remembers the value that it holds. An action must find its operands in all of their
parts, and a value that is coming when the wait for it ends; two values of an action may overlap only if the action is known to work in
place. So two values share bytes only if one is no longer needed when the other begins. The operands of an update of many parameters must be
adjacent. Two actions in different lanes, of which one writes bytes that the other reads or writes, must be ordered by the waits of the
lanes.

The proof follows the actions that run, and knows no lifetimes: it does not depend on the code that plans memory. A plan that fails is a
fault of partc, not of the artifact; no step runs with it.

`Effects` are the values that an action of a step plan reads and writes, by name: derived from the steps, independently of the memory plan.

A value is complete once its writer is done, and `coming` from the posting of its receive, or the begin of its collective, to the wait for
it. The values that an action checks must be in the stated condition when it begins; those that it sets are so when it ends.

    PostRecv h                     sets h, coming
    WaitRecv h                     checks h, coming; sets h
    StartCollective y = op(x)      checks x; sets y, coming          may work in place: y where x was
    WaitCollective y = op(x)       checks y, coming, and x, if y is not in its place; sets y
    SENT x                         checks x
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.artifact.tensors.tensor import Tensor

from ...artifact.format import CACHE, OTHERWISE
from ...devices.device_memory import Cell, Placed, Remote
from ...errors import RankError
from ...program.steps import (
    Border,
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
from ...updates.updater import Updater
from ..collective_plans import AnyCollective, scratch_name
from ..rank_program import RankProgram
from ..step_plan import StepPlan
from .roles import ActionKind, Role

Use: TypeAlias = tuple[str, bool]
"""A value, and whether it is coming."""
_PLACED = (Storage.SLOT, Storage.CONSTANT)


@dataclass(frozen=True)
class Effects:
    """The effects of an action. `in_place`: maps operands to results written element by element, which may share the operand's place."""

    text: str
    checks: tuple[Use, ...] = ()
    sets: tuple[Use, ...] = ()
    in_place: Mapping[str, str] = field(default_factory=dict)
    frees: bool = False
    """Whether the values that it sets are undefined afterwards, because their memory is freed."""


def effects_of(role: Role, program: RankProgram, works: Mapping[int, AnyCollective]) -> Effects:
    """Returns the effects of an action; `works` maps tags to the collectives that overlap with other actions."""
    steps = program.steps
    match role.kind:
        case ActionKind.DROPPED:
            return Effects(f"end of '{role.name}'", sets=_uses([role.name]), frees=True)
        case ActionKind.FREED:
            return Effects(f"end of '{role.name}'", sets=_uses([freed_name(role.name)]), frees=True)
        case ActionKind.SENT:
            step = steps[role.index]
            # a message itself holds memory that is only the value's
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
    """Yields the effects of the step's end: the state's tensors are replaced, and outputs are returned."""
    for kept, made in (*program.replacement.copies, *program.replacement.always):
        yield Effects(f"replacement of '{kept}'", _uses([made]), _uses([kept]))
    yield Effects("end of the step, which gives the outputs", _uses(program.outputs))


def freed_name(name: str) -> str:
    """Returns a name for all bytes of a freed place, which several values may have used."""
    return f"{name} freed\n"


def _of_step(step: Step, program: RankProgram, works: Mapping[int, AnyCollective]) -> Effects:
    text = str(step)
    match step:
        case Segment():
            sums = dict(step.sums) if step.task else {}
            appended = {one.value: one.next for one in program.replacement.records if one.kind == CACHE and one.next}
            return Effects(text, _uses(step.reads), _uses(step.makes), {**sums, **appended})
        case Update():
            guard = [program.replacement.guard] if program.replacement.guard else []
            replaced = {**{one.value: one.next for one in program.replacement.records}, **program.replacement.renewed}
            return Effects(text, _uses([*step.reads, *guard]), _uses(step.makes), replaced)
        case Copy() | Send() | LookUp():
            return Effects(text, _uses(step.reads), _uses(step.makes))
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
        case Border():
            results = step.last.outputs if step.call.op == OTHERWISE else step.makes
            return Effects(text, _uses([name for name in step.reads if name not in results]), _uses(results))


def _begun(text: str, step: StartCollective, works: Mapping[int, AnyCollective]) -> Effects:
    call = step.call
    if call.tag not in works:  # complete when it has begun
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


_SHOWN = 8
_HELP = "  help: this is a bug in partc; please report it with the artifact and the sizes of the inputs"
_NOBODY = 0


@dataclass(frozen=True)
class _Place:
    """A value's parts of memory, `begin` to `end`; they have the number `held` when it is complete, and -`held` while it is coming."""

    name: str
    begin: int
    end: int
    held: int


def refuse_meeting(plan: StepPlan) -> None:
    """Raises RankError that names the values of a step plan that share bytes while both are needed."""
    problems = list(dict.fromkeys(meetings(plan)))
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        law = "  values that are needed at the same time have bytes of their own, and what one update runs over lies side by side"
        where = f"rank {plan.transport.rank}: the memory of a step is planned wrongly"
        raise RankError("\n".join([f"{where}: {problems[0]}", *problems[1:_SHOWN], *more, law, _HELP]))


def meetings(plan: StepPlan) -> Iterator[str]:
    """Yields the faults in the memory of a step plan, a line for each two values that overlap."""
    done = [effects_of(role, plan.program, plan.collectives.works) for role in plan.roles]
    after = list(at_the_end(plan.program))
    memory = _Memory(plan, [*done, *after])
    yield from _apart(plan)
    for one in (*done, *after):
        yield from memory.follow(one)
    if plan.lanes is not None:
        yield from _races(plan, memory, done)


class _Memory:
    """The parts of a rank's memory, while the actions of a step are followed in the order of the file."""

    def __init__(self, plan: StepPlan, every: Sequence[Effects]) -> None:
        self.plan = plan
        self.extra = _without_values(plan)
        names = dict.fromkeys(name for one in every for name, _ in (*one.checks, *one.sets))
        spans = {name: span for name in names if (span := self._span(name)) is not None}
        ends = {end: part for part, end in enumerate(sorted({end for span in spans.values() for end in span}))}
        self.addresses = list(ends)
        self.places: dict[str, _Place] = {}
        for held, name in enumerate(names, 1):
            if name in spans:
                begin, end = spans[name]
                self.places[name] = _Place(name, ends[begin], ends[end], held)
        loose = (
            name
            for name in names
            if name not in spans and self.plan.program.values.storage.get(name) in (Storage.TENSOR, Storage.OBJECT)
        )
        self.count = len(ends)
        for name in loose:
            self.places[name] = _Place(name, self.count, self.count + 1, len(names) + 1 + self.count)
            self.count += 1
        self.names = {place.held: place.name for place in self.places.values()}
        self.held = [_NOBODY] * self.count
        self.writers: dict[int, str] = {}
        replaced = {record.next for record in plan.program.replacement.records}
        storage = plan.program.values.storage
        for name, place in self.places.items():
            if storage.get(name) is Storage.CONSTANT and name not in replaced:
                self._put(place, place.held)

    def follow(self, effects: Effects) -> Iterator[str]:
        """Yields the violations of an action, then applies its effects."""
        checks = [(self.places[name], coming) for name, coming in effects.checks if name in self.places]
        sets = [(self.places[name], coming) for name, coming in effects.sets if name in self.places]
        if effects.in_place and sets:
            checks = [(place, coming) for place, coming in checks if coming or not self._came(effects, place)]
        sound = []
        for place, coming in checks:
            if self._has(place, -place.held if coming else place.held):
                sound.append((place, coming))
            else:
                yield self._missing(effects, place, coming)
        if not sets:
            return
        for place, coming in sets:
            held = _NOBODY if effects.frees else -place.held if coming else place.held
            self._put(place, held)
            self.writers[place.held] = effects.text
        if effects.frees:
            return
        made = {place.name for place, _ in sets}
        for place, coming in sets:
            if not self._has(place, -place.held if coming else place.held):
                yield self._twice(effects, place, "makes")
        for place, coming in sound:
            there = place.name in made or self._has(place, -place.held if coming else place.held)
            if not there and self._instead(effects, place) is None:
                yield self._twice(effects, place, "reads")

    def _came(self, one: Effects, place: _Place) -> bool:
        """Whether a collective's operand has already become its result, in place."""
        other = self._instead(one, place)
        return other is not None and self._has(other, -other.held)

    def _instead(self, one: Effects, place: _Place) -> _Place | None:
        """Returns the place of the result that an action writes over an operand, if both are the same bytes; else None."""
        other = self.places.get(one.in_place.get(place.name, ""))
        return other if other is not None and (place.begin, place.end) == (other.begin, other.end) else None

    def _has(self, place: _Place, held: int) -> bool:
        size = place.end - place.begin
        return self.held[place.begin] == held if size == 1 else self.held[place.begin : place.end].count(held) == size

    def _put(self, place: _Place, held: int) -> None:
        if place.end - place.begin == 1:
            self.held[place.begin] = held
        else:
            self.held[place.begin : place.end] = [held] * (place.end - place.begin)

    def _missing(self, effects: Effects, place: _Place, coming: bool) -> str:
        """Returns the reason why an action's operand is not in its memory."""
        wanted = -place.held if coming else place.held
        parts = [part for part in range(place.begin, place.end) if self.held[part] != wanted]
        other = self.held[parts[0]]
        parts = [part for part in parts if self.held[part] == other]
        said, bytes = _described(place.name), self._bytes(place, parts)
        if abs(other) == place.held:
            return f"{said}: {effects.text} needs it before it is there"
        if other == _NOBODY:
            known = place.held in self.writers
            return f"{said}{bytes} {'has been given up' if known else 'has not been made'} when {effects.text} needs it"
        name, writer = _described(self.names[abs(other)]), self.writers.get(abs(other), "the state")
        return f"{said} and {name} share{bytes}: {writer} writes {name} before {effects.text} needs {said}"

    def _twice(self, one: Effects, place: _Place, does: str) -> str:
        """Returns the reason why an action that writes or reads a value must not overwrite it with another value."""
        parts = [part for part in range(place.begin, place.end) if abs(self.held[part]) != place.held]
        name = _described(self.names[abs(self.held[parts[0]])])
        return f"{_described(place.name)} and {name} share{self._bytes(place, parts)}: {one.text} {does} the one and makes the other"

    def _bytes(self, place: _Place, parts: Sequence[int]) -> str:
        """Describes the offsets of parts, from the begin of the arena that contains them; "" for a value without a fixed place."""
        if not parts or place.begin >= len(self.addresses):
            return ""
        begin, end = self.addresses[parts[0]], self.addresses[parts[-1] + 1]
        for target, arena in self.plan.memory.blocks.items():
            base = arena.pointer
            if base <= begin < base + arena.dtype.bytes_of(arena.shape):
                return f" bytes {begin - base} to {end - base} of the arena of {target}"
        return f" {end - begin} bytes outside of the arenas"

    def _span(self, name: str) -> tuple[int, int] | None:
        """Returns the addresses of a value that has a fixed place and at least a byte; else None."""
        plan = self.plan
        place: Cell | None
        if name in self.extra:
            place = self.extra[name]
        elif plan.program.values.storage.get(name) in (Storage.SLOT, Storage.CONSTANT):
            place = plan.memory.cells.get(name)
        else:
            return None
        if not isinstance(place, Tensor | Remote):
            return None
        size = place.dtype.bytes_of(place.shape)
        return (place.pointer, place.pointer + size) if size else None


def _apart(plan: StepPlan) -> Iterator[str]:
    """Yields the operands and results of updates that run as one over a range but are not adjacent in it."""
    groups = (
        one.group
        for updates in plan.program.replacement.updates.values()
        for one in updates
        if isinstance(one, Updater)
    )
    for names in (names for group in groups for names in (*group.operands, *group.outputs)):
        if len(names) == 1:
            continue  # a number may be an input, whose place is not known before a step
        places = [plan.sessions.place(name) for name in names]
        for name, one, other, after in zip(names, places, places[1:], names[1:], strict=False):
            if one.pointer + one.dtype.bytes_of(one.shape) != other.pointer:
                yield f"{_described(after)} does not lie behind {_described(name)}, and their updates run as one over both"


def _without_values(plan: StepPlan) -> dict[str, Placed]:
    """Returns memory that belongs to no value: the scratch of collectives, and the memory that is filled."""
    found: dict[str, Placed] = {freed_name(role.name): role.place for role in plan.roles if role.place is not None}
    for tag, work in plan.collectives.works.items():
        for side, size in (("out", work.packed), ("in", work.landing)):
            found[scratch_name(tag, side)] = Tensor(BY_NAME["uint8"], (size,), plan.memory.scratch[tag, side][:size])
    return found


def _described(name: str) -> str:
    """Returns the name of a value for messages; the scratch of a collective has no name of its own."""
    tag, _, side = name.removesuffix("\n").partition(" ")
    return f"what collective {tag} packs ({side})" if name.endswith("\n") else f"'{name}'"


def _races(plan: StepPlan, memory: _Memory, done: Sequence[Effects]) -> Iterator[str]:
    """Yields the actions of two lanes that use the same bytes and may run at the same time."""
    assert plan.lanes is not None
    order = plan.lanes.order
    lanes = len(order.lanes)
    turn = {place: (lane, count) for lane, places in enumerate(order.lanes) for count, place in enumerate(places, 1)}
    known = [[0] * lanes for _ in range(lanes)]
    after: list[list[list[int]]] = [[] for _ in range(lanes)]
    written = [(0, 0, -1)] * memory.count
    read = [[0] * memory.count for _ in range(lanes)]
    for place, effects in enumerate(done):
        lane, count = turn[place]
        mine = known[lane]
        for other, needed in order.waits[place]:
            if needed > len(after[other]):
                yield f"{effects.text} waits for what comes after it in the lanes"
                return
            mine = [max(pair) for pair in zip(mine, after[other][needed - 1], strict=True)]
        mine[lane] = count
        known[lane] = [*mine]
        after[lane].append([*mine])
        for name, writes in (
            *((name, False) for name, _ in effects.checks),
            *((name, True) for name, _ in effects.sets),
        ):
            if (at := memory.places.get(name)) is None:
                continue
            for part in range(at.begin, at.end):
                who, when, before = written[part]
                late = when > mine[who]
                if not late and writes:
                    for other in range(lanes):
                        late = late or read[other][part] > mine[other]
                if late:
                    met = done[before].text if when > mine[who] else "an earlier reader"
                    yield f"{_described(name)}: {effects.text} does not wait for {met}, which is in another lane and uses the same bytes"
                    break
                if writes:
                    written[part] = lane, count, place
                else:
                    read[lane][part] = max(read[lane][part], count)
