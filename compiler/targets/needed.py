"""What nothing reads falls away before copies are written: its operands would be brought to its target for nothing.

    %s = Shape(%h)     made of the sizes of inputs     ->     %h = Gather(%table, %ids) on a rank that needs its shape alone is left out

A replicated group computes forward what the backward pass of one of its ranks reads by its shape alone.
"""

from __future__ import annotations

from dataclasses import replace

from partc.compiler.ir.rank_program import RankProgram, TaskBody, TaskCall, needed_steps, read_names


def without_unread(part: RankProgram) -> RankProgram:
    """The program with the ops whose results are read, in tasks, too, and the weights and constants that these read."""
    given = {held.name for held in part.outputs} | {one.next for one in part.kept}
    bodies: dict[TaskBody, TaskBody] = {}
    for body in part.bodies:
        inside = [step for step in needed_steps(body.steps, body.outputs) if not isinstance(step, TaskCall)]
        bodies[body] = replace(body, steps=tuple(inside)) if len(inside) < len(body.steps) else body
    steps = needed_steps(part.steps, given)
    if len(steps) == len(part.steps) and all(one is other for one, other in bodies.items()):
        return part
    steps = [replace(step, body=bodies[step.body]) if isinstance(step, TaskCall) else step for step in steps]
    used = {
        name
        for some in (steps, *(body.steps for body in bodies.values()))
        for step in some
        for name in read_names(step)
    }
    used |= given
    return replace(
        part,
        steps=tuple(steps),
        weights=tuple(held for held in part.weights if held.name in used),
        constants={name: one for name, one in part.constants.items() if name in used},
    )
