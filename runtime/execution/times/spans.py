"""The actions of a step plan as a trace shows them: a name, a kind, the task and module, bytes, and the other end of a message."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...artifact.tensors.dtypes import dense
from ...program.steps import Collective, Copy, LookUp, Segment, Send, Step, Update, WaitRecv
from ..memory.roles import ActionKind
from ..targets.lanes import lanes_of

if TYPE_CHECKING:
    from ..step_plan import StepPlan

_TASK = re.compile(r"\d+[A-Z](\d+)")
_BESIDE = {ActionKind.SENT: "end of ", ActionKind.DROPPED: "memory after ", ActionKind.FREED: "memory after "}


def spans_of(plan: StepPlan) -> list[dict[str, Any]]:
    """For each action, in order: `name`, `kind` (what it does), `lane`, and where there is one `task`, `microbatch`, `module`, `bytes`.

    A message has `link`, [sender, receiver, tag], and `sends`; a collective its `ranks`.
    """
    lanes: dict[int, int] = {}
    if plan.lanes is not None:
        for lane in lanes_of(plan.program).values():
            lanes.update(dict.fromkeys(plan.lanes.order.lanes[lane], lane))
    found = []
    for place, (index, _) in enumerate(plan.actions):
        step = plan.program.steps[index]
        span: dict[str, Any] = {"name": str(step), "kind": type(step).__name__, "lane": lanes.get(place, 0)}
        if not plan.is_step(place):
            kind = plan.roles[place].kind if place < len(plan.roles) else ActionKind.FREED
            found.append(
                {**span, "name": f"{_BESIDE[kind]}{step}", "kind": "Wait" if kind is ActionKind.SENT else "Memory"}
            )
            continue
        found.append(span | dict(_details(plan, step)))
    return found


def _details(plan: StepPlan, step: Step) -> Iterator[tuple[str, Any]]:
    if task := getattr(step, "task", ""):
        yield "task", task
        if number := _TASK.fullmatch(task):
            yield "microbatch", int(number[1])
    if module := _module(step):
        yield "module", module
    if isinstance(step, Send | WaitRecv):
        own, sends = plan.program.rank, isinstance(step, Send)
        yield "link", [own, step.peer, step.tag] if sends else [step.peer, own, step.tag]
        yield "sends", sends
        yield from _bytes(plan, step.value)
    elif isinstance(step, Collective | LookUp):
        yield "ranks", list(step.ranks)
        yield from _bytes(plan, step.call.value)
    elif isinstance(step, Copy):
        yield from _bytes(plan, step.source if step.source in plan.shapes else step.result)


def _module(step: Step) -> str:
    """The dotted path that the step's first node has in the model."""
    if isinstance(step, Segment):
        return step.nodes[0].name
    if isinstance(step, Update):
        return ""
    return step.call.path if isinstance(step, Collective | LookUp) else step.path


def _bytes(plan: StepPlan, name: str) -> Iterator[tuple[str, int]]:
    """The bytes of a value, where its type and its shape at this plan's sizes are known."""
    dtype, shape = dense(plan.values.types.get(name, "")), plan.shapes.get(name)
    if dtype is not None and shape is not None and all(isinstance(dim, int) for dim in shape):
        yield "bytes", math.prod(int(dim) for dim in shape) * dtype.numpy.itemsize
