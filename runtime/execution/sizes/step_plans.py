"""The step plans of a program by sizes: a cache of the most recent ones, and how plans for new sizes are made."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...artifact.legal_sizes import largest_legal
from ...errors import InputError
from ..memory.layout import MOST_PLANS
from ..rank_program import RankProgram
from ..step_plan import StepPlan
from ..symbol_bindings import Bindings
from .resizing import resize

if TYPE_CHECKING:
    from ..times.profiler import Profiler


class StepPlans:
    """At most eight plans. Once there were as many, each new size is taken by a plan that has the room, as of a past that grows."""

    def __init__(self, program: RankProgram, make: Callable[[Bindings], StepPlan]) -> None:
        self._program, self._make = program, make
        self._plans: OrderedDict[tuple[tuple[str, int], ...], StepPlan] = OrderedDict()
        self._many = False
        self._last: tuple[Bindings, StepPlan] | None = None
        self.profiler: Profiler | None = None

    def measured_by(self, profiler: Profiler) -> Profiler:
        """Lets a profiler measure all plans, and those that are made later."""
        self.profiler = profiler
        profiler.add(self.values())
        return profiler

    def of(self, bindings: Bindings) -> StepPlan:
        """The plan of a step of these sizes; InputError, on all ranks alike, where a value has no size with them."""
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
        """The plan longest unused of those that take these sizes, where sizes are many; its own are gone then."""
        if not self._many or (self.profiler is not None and not self.profiler.has_stopped):
            return None
        for key, plan in list(self._plans.items()):
            if all(size <= plan.widest[name] for name, size in bindings.items()) and resize(plan, bindings):
                del self._plans[key]
                return plan
        return None

    def _new(self, bindings: Bindings) -> StepPlan:
        """A new plan; one with room for larger sizes where sizes are many."""
        room = self._room(bindings) if self._many else bindings
        plan = self._make(room)
        if room != bindings and not resize(plan, bindings):
            plan = self._make(bindings)
        for key in [key for key, other in self._plans.items() if other.memory is not plan.memory]:
            del self._plans[key]  # it would keep an arena beside the larger one
        if self.profiler is not None:
            self.profiler.watch(plan)
        return plan

    def _room(self, bindings: Bindings) -> Bindings:
        """Half as much again of each size that is larger than in any plan, as far as that is legal; else the sizes themselves."""
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
