"""What a rank of a decoder that generates needs of memory, and how many slots have room in a limit.

    weights    once, since sessions that both programs have alike are one
    caches     of all slots of the rank
    step       the most that values of a step take at once, of the largest program: those of decode grow with the slots

Values whose size only a run tells are left out, and so is what onnxruntime holds for itself; `partc inspect` estimates that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Compute, RankProgram, Value
from partc.runtime.artifact.liveness import Use, peak, spans
from partc.runtime.units import size_text


@dataclass(frozen=True)
class DecoderMemory:
    """Bytes of one rank, which has `slots` of all; `decode` and `prefill`: of the values of a step, the latter of an encoder's where
    these are more.
    """

    rank: int
    slots: int
    weights: int
    caches: int
    decode: int
    prefill: int

    @classmethod
    def of(cls, decode: RankProgram, beside: Sequence[RankProgram], groups: int) -> Self:
        """What a rank needs; a step of decode has the slots of one of the groups."""
        caches = [one for one in decode.kept if one.kind == "cache"]
        shape = caches[0].value.shape if caches else None
        slots = shape[0] if shape else 1
        assert isinstance(slots, int)
        own = {str(held.value): held.value for part in (*beside, decode) for held in part.weights}
        others = max(map(_of_step, beside))
        weights = sum(map(_bytes, own.values()))
        return cls(decode.rank, groups * slots, weights, groups * cache_bytes(decode), _of_step(decode), others)

    def at(self, slots: int) -> int:
        """All bytes where the rank has so many slots."""
        return (
            self.weights + (self.caches * slots) // self.slots + max((self.decode * slots) // self.slots, self.prefill)
        )

    def room(self, limit: int) -> int:
        """The most slots of the rank that fit into a limit; 0 where not one does."""
        low, high = 0, max(1, limit)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at(middle) <= limit else (low, middle - 1)
        return low


def decoder_memories(decode: Complete, beside: Sequence[Complete]) -> Iterator[DecoderMemory]:
    """The memory of each distinct program of ranks; `beside`: the other programs over its caches."""
    groups = decode.plan.generate.groups if decode.plan.generate is not None else 1
    return (DecoderMemory.of(part, [one.parts[part.rank] for one in beside], groups) for part, _ in decode.alike)


def cache_bytes(part: RankProgram) -> int:
    """The bytes of a rank's caches, of one group of slots."""
    return sum(_bytes(one.value) for one in part.kept if one.kind == "cache")


def most_slots(decode: Complete, prefill: Complete, encode: Complete | None = None) -> int | None:
    """The most slots that fit into the plan's `memory`; None without one. CompileError where its slots do not, with what a rank needs."""
    rules = decode.plan.generate
    if rules is None or rules.memory is None:
        return None
    found = [*decoder_memories(decode, [prefill, *([encode] if encode is not None else [])])]
    most = max(found, key=lambda one: one.at(one.slots))
    room = min(one.room(rules.memory) * (rules.slots // one.slots) for one in found) // rules.groups * rules.groups
    if most.at(most.slots) <= rules.memory:
        return room
    step = size_text(max(most.decode, most.prefill))
    parts = f"weights {size_text(most.weights)}, caches {size_text(most.caches)}, values of a step {step}"
    fact = f"rank {most.rank} needs {size_text(most.at(most.slots), at_least=True)} of memory: {parts}"
    law = f"'memory' allows {size_text(rules.memory)}"
    help_ = (
        f"write slots: {room}, the most that fit"
        if room
        else "not one slot fits: use more ranks, a smaller 'length', or more memory"
    )
    raise CompileError(Problem(rules.where("memory"), fact, law, help_))


def _of_step(part: RankProgram) -> int:
    """The most bytes of a step's values that are there at once."""
    apart = {*(held.value for held in part.weights), *(one.value for one in part.kept)}
    apart |= {one.next for one in part.kept if one.next is not None}
    uses = [Use(step.reads, step.makes, step.node.op_type if isinstance(step, Compute) else "") for step in part.steps]
    outputs = [held.value for held in part.outputs]
    return peak(spans(uses, _bytes, apart, outputs))[0]


def _bytes(value: Value) -> int:
    """The bytes of a value; 0 of one whose size only a run tells."""
    if value.of is None or value.of.dtype is None or value.shape is None:
        return 0
    size = value.of.dtype.bitwidth
    for dim in value.shape:
        size *= dim if isinstance(dim, int) else 0
    return -(-size // 8)
