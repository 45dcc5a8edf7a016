"""The collectives of a program: those that begin at their wait, and the plan of each by tag once the sizes are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from partc.runtime.artifact.comm.collective_node import result_shape
from partc.runtime.artifact.comm.collectives import COLLECTIVES, LOOKUPS

from ..artifact.format import ALL_REDUCE, EXCHANGE, PULL, RETURN, Manifest
from ..communication.coalesced import CoalescedCollective
from ..communication.collective import CollectivePlan
from ..communication.exchange import Redistribution
from ..communication.nccl import GpuCollective, NcclLinks
from ..communication.transport import Transport
from ..errors import RankError
from ..program.memory_plan import Lifetime
from ..program.steps import LookUp, StartCollective, Step, WaitCollective
from ..program.value_table import ValueTable

if TYPE_CHECKING:
    from .rank_program import RankProgram


Shape: TypeAlias = tuple[int, ...]
AnyCollective: TypeAlias = CollectivePlan | CoalescedCollective | Redistribution | GpuCollective


def plan_collectives(
    steps: Sequence[Step],
    values: ValueTable,
    kept: Mapping[str, Shape],
    promises: Mapping[int, Shape],
    shapes: dict[str, Shape],
    transport: Transport,
    wire: Mapping[int, int],
    links: NcclLinks | None = None,
) -> dict[int, AnyCollective]:
    """Plans the collectives of known shape, and fills in the shapes of their results; raises RankError for one that is not possible.

    `kept`: the shapes of the rank's weights, and of its state. `links`: those of its GPU, which has the collectives with a target.
    """
    plans: dict[int, AnyCollective] = {}
    for step in steps:
        if (
            isinstance(step, LookUp)
            and step.call.tag in promises
            and step.call.op in (PULL, RETURN)
            and step.call.result
        ):
            shapes[step.call.result] = (*promises[step.call.tag], *step.call.row)
        if not isinstance(step, StartCollective) or step.call.tag not in promises:
            continue
        call, promise = step.call, promises[step.call.tag]
        dtype = values.dtype(call.source or call.value)
        try:
            if call.kind.boxes:
                given, taken = promise if call.source else None, shapes.get(call.result or "")
                plans[call.tag] = Redistribution(call, given, taken, dtype, transport, wire[call.tag])
            elif step.target and links is not None:
                result = result_shape(call, promise, len(step.ranks))
                plans[call.tag] = GpuCollective(links, call, step.ranks, dtype, promise, result)
                shapes |= {call.result: result} if call.result else {}
            elif call.parts and not call.in_one_buffer:
                sizes = [dtype.bytes_of(shapes[name] if name in shapes else kept[name]) for name in call.inputs]
                plans[call.tag] = CoalescedCollective(call, step.ranks, sizes, dtype, transport, call.tag)
            else:
                plan = plans[call.tag] = CollectivePlan(call, step.ranks, promise, dtype, transport, call.tag)
                if call.result:
                    shapes[call.result] = plan.result
        except ValueError as error:
            raise RankError(f"rank {transport.rank}: {step}: {error}") from None
    return plans


def connected(program: RankProgram, manifest: Manifest, transport: Transport) -> frozenset[int]:
    """Prepares the transport for the collectives of a program; returns the tags of those that may begin at their wait. All ranks call it.

    A collective for which every rank waits as soon as it has begun may be one blocking call, if each rank has a core; so may all
    collectives if all ranks wait for all in one order. An AllReduce works in place if it can do so on every rank, as MPI requires.
    """
    collectives = manifest.collectives
    if not collectives:
        return frozenset()
    used = {one.group for one in collectives if one.op != EXCHANGE}
    lists = {tuple(ranks) for group in used for ranks in manifest.groups[group] if len(ranks) > 1}
    transport.create_groups(sorted(lists))
    groups = manifest.groups_of(transport.rank)
    adjacent, in_place = program.adjacent() & program.messages.promises.keys(), program.in_place()
    if _waits_alike(program, manifest, transport):
        adjacent = {one.tag for one in collectives}
    flags = [
        (
            not transport.has_own_core or (one.group in groups and one.tag not in adjacent),
            one.group in groups and one.op == ALL_REDUCE and one.tag not in in_place,
        )
        for one in collectives
    ]
    agreed = transport.all_reduce_max(np.array(flags, np.int64).reshape(-1)).reshape(-1, 2).tolist()
    program.in_place({one.tag for one, (_, apart) in zip(collectives, agreed, strict=True) if apart})
    return frozenset(one.tag for one, (later, _) in zip(collectives, agreed, strict=True) if not later)


def _waits_alike(program: RankProgram, manifest: Manifest, transport: Transport) -> bool:
    """Whether all ranks, on one machine, take part in every collective, wait for them in one order, and have no other messages.

    Then a collective can be called when it is waited for: in shared memory MPI's non-blocking calls make no progress while a rank computes,
    and take twice the time of the blocking ones.
    """
    collectives = manifest.collectives
    waited = [step.call.tag for step in program.steps if isinstance(step, WaitCollective)]
    everyone = tuple(range(transport.size))
    alone = transport.single_host and not manifest.transfers and program.messages.promises.keys() >= set(waited)
    alone = alone and all(manifest.groups[one.group] == [list(everyone)] for one in collectives)
    alone = alone and not any(one.op in LOOKUPS for one in collectives)  # over when they have begun
    places = {tag: place for place, tag in enumerate(waited)}
    row = np.array([places.get(one.tag, -1) for one in collectives], np.int64)
    most = transport.all_reduce_max(np.concatenate([[not alone], row, -row]))
    return bool(not most[0] and (most[1 : 1 + len(row)] == -most[1 + len(row) :]).all())


def scratch_lifetimes(steps: Sequence[Step], plans: Mapping[int, AnyCollective]) -> list[Lifetime]:
    """Returns the memory that collectives need besides their values, with its lifetimes."""
    finishes = {step.call.tag: index for index, step in enumerate(steps) if isinstance(step, WaitCollective)}
    scratch = []
    for index, step in enumerate(steps):
        if isinstance(step, StartCollective) and step.call.tag in plans:
            tag, plan = step.call.tag, plans[step.call.tag]
            end = finishes.get(tag, index)
            leaves = step.call.leaves
            sends = (index,) if leaves else ()
            scratch.append(Lifetime(scratch_name(tag, "out"), plan.packed, index, index if leaves else end, sends))
            scratch.append(Lifetime(scratch_name(tag, "in"), plan.landing, index, end))
    return scratch


def scratch_name(tag: int, side: str) -> str:
    """Returns a name that no value of a program has."""
    return f"{tag} {side}\n"


def wire_tags(manifest: Manifest, largest: int) -> dict[int, int]:
    """Maps the manifest's tags to the transport's: the same, or if those are too large, a count for each pair of ranks.

    Messages between many pairs have one tag, and each pair gets its own count. An Exchange, a Pull or a Push is a message between every two
    ranks of its lists; the other collectives need no tag of the transport.
    """
    paired = {op.name for op in COLLECTIVES.values() if op.boxes} | LOOKUPS.keys()
    exchanges = [one for one in manifest.collectives if one.op in paired]
    every = [one.tag for one in manifest.transfers] + [one.tag for one in exchanges]
    if all(tag <= largest for tag in every):
        return {tag: tag for tag in every}
    count: dict[tuple[int, int], int] = {}
    tags: dict[int, int] = {}
    for one in manifest.transfers:
        pairs = [(source, target) for source, target in manifest.groups.get(one.group, [[one.source, one.target]])]
        tags[one.tag] = max(count.get(pair, 0) for pair in pairs)
        count |= dict.fromkeys(pairs, tags[one.tag] + 1)
    first = max(count.values(), default=0)
    return tags | {one.tag: first + index for index, one in enumerate(exchanges)}
