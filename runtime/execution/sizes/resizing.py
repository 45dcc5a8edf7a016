"""Changes a step plan to other sizes: values that depend on them are placed and bound again, within each place's memory.

A plan's places hold values of the sizes for which it was made, so that smaller ones fit where they are, and what was proven of the
places holds. What does not fit, or runs on several targets at the same time, is planned anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...program.session_values import bind_tensor
from ...program.steps import Segment
from ..collective_plans import plan_collectives, scratch_name
from ..memory.layout import at_sizes
from ..step_plan import StepPlan
from ..symbol_bindings import Bindings
from .reach import reached


def resize(plan: StepPlan, bindings: Bindings) -> bool:
    """Changes `plan` to these bindings; returns False and leaves it unchanged if a new plan must be made."""
    program, symbols = plan.program, plan.program.binder.manifest.symbols
    if plan.lanes is not None:
        return False
    changed = frozenset(name for name, size in bindings.items() if plan.bindings[name] != size)
    if changed not in plan.reaches:
        plan.reaches[changed] = reached(program, changed)
    reach = plan.reaches[changed]
    if reach is None:
        return False
    shapes, promises = dict(plan.shapes), dict(plan.promises)
    known: dict[Sequence[int | str], tuple[int, ...]] = {}  # most values of a step have one of few shapes
    for name in reach.names:
        shape = tuple(program.values.shapes[name] or ())
        if shape not in known:
            known[shape] = at_sizes([*shape], symbols, bindings)
        shapes[name] = known[shape]
    promises |= {tag: at_sizes(program.messages.promises[tag], symbols, bindings) for tag in reach.tags}
    kept = {name: tensor.shape for name, tensor in program.state.tensors.items()}
    works = plan_collectives(reach.moved, plan.values, kept, promises, shapes, plan.transport, plan.wire)
    names = [name for name in shapes if shapes[name] != plan.shapes.get(name)]
    aliases = program.arenas.aliases
    needed = [(aliases.get(name, name), plan.values.dtype(name).bytes_of(shapes[name])) for name in names]
    needed += [(scratch_name(tag, "out"), work.packed) for tag, work in works.items()]
    needed += [(scratch_name(tag, "in"), work.landing) for tag, work in works.items()]
    if not all(size <= plan.capacity[place] for place, size in needed):
        return False
    plan.bindings = bindings
    plan.shapes.update(shapes)
    plan.promises.update(promises)
    plan.works.update(works)
    for name in names:
        plan.lay(name)
    new = {*names}
    for index, own in reach.steps.items():
        step = program.steps[index]
        if isinstance(step, Segment):
            _bind(plan, index, new.intersection(own))
        else:
            plan.replace(index, step)
    return True


def _bind(plan: StepPlan, index: int, names: Collection[str]) -> None:
    """Binds values of a segment where they lie now; what is bound in each step is left to it."""
    binding = plan.sessions.bindings.get(index)
    if binding is None:
        return
    segment = plan.program.runners[index].segment
    for bind, ends in ((binding.bind_input, segment.operands), (binding.bind_output, segment.output_pairs)):
        for formal, name in ends:
            if name in names:
                bind_tensor(bind, formal, plan.sessions.place(name))
