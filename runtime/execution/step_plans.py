"""The step plans of a program by sizes: a cache of the most recent ones, and the making of plans for new sizes.

To change a plan to other sizes, the values that depend on them are placed and bound again, within each place's memory. A plan's places have
room for the sizes for which it was made, so that smaller values fit, and the proven facts about the places hold. A plan that does not fit,
or that runs on several targets at the same time, is made anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..artifact.dim_expression import symbols_in
from ..artifact.format import Shape, SymbolRecord
from ..artifact.legal_sizes import largest_legal
from ..devices.device_memory import shapes_of
from ..errors import InputError
from ..program.session_values import bind_tensor
from ..program.steps import Border, Copy, LookUp, Segment, StartCollective, Step, Update, WaitCollective, WaitRecv
from .collective_plans import plan_collectives, scratch_name
from .memory.layout import MOST_PLANS, at_sizes
from .rank_program import RankProgram
from .step_plan import StepPlan
from .symbol_bindings import Bindings

if TYPE_CHECKING:
    from .times.profiler import Profiler


class StepPlans:
    """At most eight plans. Once there are eight, each new size uses a plan that has the room, such as for a past that grows."""

    def __init__(self, program: RankProgram, make: Callable[[Bindings], StepPlan]) -> None:
        self._program, self._make = program, make
        self._plans: OrderedDict[tuple[tuple[str, int], ...], StepPlan] = OrderedDict()
        self._ranges: dict[frozenset[str], SizeRange | None] = {}
        self._many = False
        self._last: tuple[Bindings, StepPlan] | None = None
        self.profiler: Profiler | None = None

    def measured_by(self, profiler: Profiler) -> Profiler:
        """Makes a profiler measure all plans, including those that are made later."""
        self.profiler = profiler
        profiler.add(self.values())
        return profiler

    def of(self, bindings: Bindings) -> StepPlan:
        """Returns the plan for a step of these sizes; raises InputError, on all ranks, if a value has no size with them."""
        if self._last is not None and self._last[0] is bindings:
            return self._last[1]
        self._last = None
        plan = self._found(bindings)
        self._last = bindings, plan
        return plan

    def _found(self, bindings: Bindings) -> StepPlan:
        plans, key = self._plans, tuple(bindings.items())
        if key in plans:
            plans.move_to_end(key)
            return plans[key]
        self._program.binder.check_promises(bindings)
        plan = self._resized(bindings) or self._new(bindings)
        plans[key] = plan
        self._many |= len(plans) == MOST_PLANS
        if len(plans) > MOST_PLANS:
            plans.popitem(last=False)
        return plan

    def _resized(self, bindings: Bindings) -> StepPlan | None:
        """Returns the least recently used plan with room for these sizes, changed to them, once the cache has been full; else None.

        The plan's old sizes are forgotten.
        """
        if not self._many or (self.profiler is not None and not self.profiler.has_stopped):
            return None
        for key, plan in list(self._plans.items()):
            if all(size <= plan.widest[name] for name, size in bindings.items()) and resize(
                plan, bindings, self._ranges
            ):
                del self._plans[key]
                return plan
        return None

    def _new(self, bindings: Bindings) -> StepPlan:
        """Returns a new plan, with room for larger sizes once the cache has been full."""
        room = self._room(bindings) if self._many else bindings
        plan = self._make(room)
        if room != bindings and not resize(plan, bindings, self._ranges):
            plan = self._make(bindings)
        for key in [key for key, other in self._plans.items() if other.memory.host is not plan.memory.host]:
            del self._plans[key]  # it would keep an arena beside the larger one
        if self.profiler is not None:
            self.profiler.watch(plan)
        return plan

    def _room(self, bindings: Bindings) -> Bindings:
        """Returns each size that exceeds those of all plans increased by half, as far as that is legal; else the sizes themselves."""
        symbols = self._program.binder.manifest.symbols
        room = dict(bindings)
        for name, size in bindings.items():
            if all(plan.widest[name] < size for plan in self._plans.values()):
                room[name] = largest_legal(size + size // 2, symbols[name])
        try:
            self._program.binder.check_promises(room)
        except InputError:
            return bindings
        return room

    def values(self) -> Iterable[StepPlan]:
        """All plans."""
        return self._plans.values()

    def clear(self) -> None:
        """Forgets all plans."""
        self._plans.clear()
        self._last = None


def resize(plan: StepPlan, bindings: Bindings, ranges: dict[frozenset[str], SizeRange | None]) -> bool:
    """Changes `plan` to these bindings; returns False and leaves it unchanged if a new plan must be made.

    `ranges`: maps the symbols that change to the parts of the program that depend on them, as far as it is known.
    """
    program, symbols = plan.program, plan.program.binder.manifest.symbols
    if plan.lanes is not None:
        return False
    changed = frozenset(name for name, size in bindings.items() if plan.bindings[name] != size)
    if changed not in ranges:
        ranges[changed] = reached(program, changed)
    reach = ranges[changed]
    if reach is None:
        return False
    memory, own_promises = plan.memory, plan.messages.promises
    shapes, promises = dict(memory.shapes), dict(own_promises)
    known: dict[Sequence[int | str], tuple[int, ...]] = {}  # most values of a step have one of few shapes
    for name in reach.names:
        shape = tuple(program.values.shapes[name] or ())
        if shape not in known:
            known[shape] = at_sizes([*shape], symbols, bindings)
        shapes[name] = known[shape]
    promises |= {tag: at_sizes(program.messages.promises[tag], symbols, bindings) for tag in reach.tags}
    works = plan_collectives(
        reach.moved,
        program.values,
        shapes_of(program.constants),
        promises,
        shapes,
        plan.transport,
        plan.messages.wire,
        program.messages.links,
    )
    names = [name for name in shapes if shapes[name] != memory.shapes.get(name)]
    aliases = program.arenas.aliases
    needed = [(aliases.get(name, name), program.values.dtype(name).bytes_of(shapes[name])) for name in names]
    needed += [(scratch_name(tag, "out"), work.packed) for tag, work in works.items()]
    needed += [(scratch_name(tag, "in"), work.landing) for tag, work in works.items()]
    if not all(size <= memory.capacity[place] for place, size in needed):
        return False
    plan.bindings = bindings
    memory.shapes.update(shapes)
    own_promises.update(promises)
    plan.collectives.works.update(works)
    for name in names:
        memory.lay(name)
    new = {*names}
    for index, own in reach.steps.items():
        step = program.steps[index]
        if isinstance(step, Segment):
            _bind(plan, index, new.intersection(own))
        else:
            plan.replace(index, step)
    return True


def _bind(plan: StepPlan, index: int, names: Collection[str]) -> None:
    """Binds values of a segment at their current places, except values that each step binds."""
    binding = plan.sessions.bindings.get(index)
    if binding is None:
        return
    segment = plan.program.runners[index].segment
    for bind, ends in ((binding.bind_input, segment.operands), (binding.bind_output, segment.output_pairs)):
        for formal, name in ends:
            if name in names:
                bind_tensor(bind, formal, plan.sessions.place(name))


@dataclass(frozen=True)
class SizeRange:
    """The dependents of some symbols in a program: values, promises by tag, collectives and lookups, and the bound values of steps."""

    names: Collection[str]
    tags: Collection[int]
    moved: list[Step]
    steps: dict[int, list[str]]


def reached(program: RankProgram, changed: Set[str]) -> SizeRange | None:
    """Returns the dependents of symbols; None if one of them is a step that cannot be changed."""
    values, symbols = program.values, program.binder.manifest.symbols
    names = dict.fromkeys(name for name, shape in values.shapes.items() if _has(shape, symbols, changed))
    tags = [tag for tag, promise in program.messages.promises.items() if _has(promise, symbols, changed)]
    moved: list[Step] = []
    for step in program.steps:
        if isinstance(step, StartCollective | LookUp) and step.call.tag in program.messages.promises:
            ends = (*step.reads, *step.makes) if isinstance(step, StartCollective) else ()
            if step.call.tag in tags or not names.keys().isdisjoint(ends):
                moved.append(step)
                names.update(dict.fromkeys(step.makes) if isinstance(step, StartCollective) else {})
    steps = dict[int, list[str]]()
    for index, step in enumerate(program.steps):
        if isinstance(step, WaitRecv | WaitCollective | LookUp | Border):
            continue  # its action has no place of a value of its own
        own = [name for name in (*step.reads, *step.makes) if name in names]
        own += [""] if isinstance(step, StartCollective) and step in moved else []
        if own and isinstance(step, Copy | Update):
            return None
        if own:
            steps[index] = own
    if any(name in values.flat_places for name in names):
        return None
    return SizeRange([name for name in names if name in values.shapes], tags, moved, steps)


def _has(shape: Shape, symbols: Mapping[str, SymbolRecord], changed: Set[str]) -> bool:
    return any(not changed.isdisjoint(symbols_in(dim, symbols)) for dim in shape or ())
