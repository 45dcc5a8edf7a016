"""The collectives of one schedule, by tag: what each moves, once the sizes are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ..artifact.comm_node import result_shape
from ..artifact.format import PULL
from ..communication.coalesced import CoalescedCollective
from ..communication.collective import CollectivePlan
from ..communication.exchange import Redistribution
from ..communication.transport import Transport
from ..errors import RankError
from ..program.memory_plan import Lifetime
from ..program.steps import StartCollective, Step, WaitCollective
from ..program.value_table import ValueTable

Shape: TypeAlias = tuple[int, ...]
AnyCollective: TypeAlias = CollectivePlan | CoalescedCollective | Redistribution


def plan_collectives(
    steps: Sequence[Step],
    values: ValueTable,
    kept: Mapping[str, Shape],
    promises: Mapping[int, Shape],
    shapes: dict[str, Shape],
    transport: Transport,
    wire: Mapping[int, int],
) -> dict[int, AnyCollective]:
    """The collectives of known shape; the shapes of what they give are filled in. RankError for one that cannot be.

    `kept`: the shapes of the tensors that the rank keeps from step to step.
    """
    found: dict[int, AnyCollective] = {}
    for step in steps:
        if not isinstance(step, StartCollective) or step.call.tag not in promises:
            continue
        call, promise = step.call, promises[step.call.tag]
        if call.kind.looks_up:
            if call.result and call.op == PULL:
                shapes[call.result] = result_shape(call, promise, len(step.ranks))
            continue
        dtype = values.dtype(call.source or call.value)
        try:
            if call.kind.boxes:
                given, taken = promise if call.source else None, shapes.get(call.result or "")
                found[call.tag] = Redistribution(call, given, taken, dtype, transport, wire[call.tag])
            elif call.parts and not call.in_one_buffer:
                sizes = [dtype.bytes_of(shapes[name] if name in shapes else kept[name]) for name in call.given]
                found[call.tag] = CoalescedCollective(call, step.ranks, sizes, dtype, transport, call.tag)
            else:
                plan = found[call.tag] = CollectivePlan(call, step.ranks, promise, dtype, transport, call.tag)
                if call.result:
                    shapes[call.result] = plan.result
        except ValueError as error:
            raise RankError(f"rank {transport.rank}: {step}: {error}") from None
    return found


def scratch_lifetimes(steps: Sequence[Step], plans: Mapping[int, AnyCollective]) -> list[Lifetime]:
    """The memory that collectives need besides their values, each as long as it is used."""
    finishes = {step.call.tag: index for index, step in enumerate(steps) if isinstance(step, WaitCollective)}
    found = []
    for index, step in enumerate(steps):
        if isinstance(step, StartCollective) and step.call.tag in plans:
            tag, plan = step.call.tag, plans[step.call.tag]
            end = finishes.get(tag, index)
            leaves = step.call.leaves
            sends = (index,) if leaves else ()
            found.append(Lifetime(scratch_name(tag, "out"), plan.packed, index, index if leaves else end, sends))
            found.append(Lifetime(scratch_name(tag, "in"), plan.landing, index, end))
    return found


def scratch_name(tag: int, side: str) -> str:
    """A name that no value of a program has."""
    return f"{tag} {side}\n"
