"""What nothing reads falls away before copies are written: its operands would be brought to its target for nothing.

    %s = Shape(%h)     made of the sizes of inputs     ->     %h = Gather(%table, %ids) on a rank that needs its shape alone is left out

A replicated group computes forward what the backward pass of one of its ranks reads by its shape alone.
"""

from __future__ import annotations

from dataclasses import replace

from partc.compiler.ir.programs import Body, Call, Op, RankProgram, needed


def without_unread(part: RankProgram) -> RankProgram:
    """The program with the ops whose results are read, in tasks, too, and the weights that these read."""
    bodies: dict[Body, Body] = {}
    for body in part.bodies:
        inside = [step for step in needed(body.steps, body.outputs) if not isinstance(step, Call)]
        bodies[body] = replace(body, steps=tuple(inside)) if len(inside) < len(body.steps) else body
    steps = needed(part.steps, part.results)
    if len(steps) == len(part.steps) and all(one is other for one, other in bodies.items()):
        return part
    steps = [replace(step, body=bodies[step.body]) if isinstance(step, Call) else step for step in steps]
    every: list[Op] = [*steps, *(step for body in bodies.values() for step in body.steps)]
    used = {*part.results, *(value for step in every for value in step.reads)}
    return replace(part, steps=tuple(steps), weights=tuple(held for held in part.weights if held.value in used))
