"""The collectives of one schedule, by tag: what each moves, once the sizes are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from .errors import RankError
from .format import ALL_REDUCE, EXCHANGE
from .perform import Work
from .prepare import RankProgram
from .redistribute import Redistribution
from .segments import Begin
from .together import Together
from .transport import Transport

Shape: TypeAlias = tuple[int, ...]
AnyWork: TypeAlias = Work | Together | Redistribution


def works_of(
    program: RankProgram,
    promises: Mapping[int, Shape],
    shapes: dict[str, Shape],
    transport: Transport,
    wire: Mapping[int, int],
) -> dict[int, AnyWork]:
    """The collectives of known shape; the shapes of what they give are filled in. RankError for one that cannot be."""
    found: dict[int, AnyWork] = {}
    for step in program.steps:
        if not isinstance(step, Begin) or step.call.tag not in promises:
            continue
        call, promise = step.call, promises[step.call.tag]
        dtype = program.dtype(call.source or call.value)
        try:
            if call.op == EXCHANGE:
                given, taken = promise if call.source else None, shapes.get(call.result or "")
                found[call.tag] = Redistribution(call, given, taken, dtype, transport, wire[call.tag])
            elif call.parts and call.op != ALL_REDUCE:
                kept = program.state.tensors
                sizes = [dtype.bytes_of(shapes[name] if name in shapes else kept[name].shape) for name in call.given]
                found[call.tag] = Together(call, step.ranks, sizes, dtype, transport, call.tag)
            else:
                work = found[call.tag] = Work(call, step.ranks, promise, dtype, transport, call.tag)
                if call.result:
                    shapes[call.result] = work.result
        except ValueError as error:
            raise RankError(f"rank {transport.rank}: {step}: {error}") from None
    return found
