"""The seconds and bytes of the tasks of a pipeline's stages, from their ops and local shapes.

    time      of F, B and W: the work of their ops (`cost/node.py`) at middling sizes of all symbols
    saved     what F makes or receives and B or W reads: kept from F to the end of B
    deferred  what F or B makes or receives and W reads: kept from B to the end of W, where these are apart
    fixed     parameters, state, sums of gradients, the batch, what is made once; and the most that a task has for itself alone

Of the ranks of a stage the one that takes or keeps most counts. Bytes are expressions in the symbols of the whole batch; a limit is held
against them at the largest sizes. A value that several stages of one rank read is kept by the one that makes it, or reads it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
from partc.compiler.cost.node import work
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.reading import read, symbol
from partc.compiler.ir.program import Lowered
from partc.compiler.ir.programs import Compute, Value
from partc.compiler.pipelines.phases import UPDATE, Label, Labels, Phase, Unit, split_backward
from partc.compiler.placement.typical_sizes import TypicalSizes
from partc.compiler.schedule.costs import BYTES, Costs, StageCost
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.liveness import Span, Use, peak, spans

_PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)
_SCALES = ((1e9, "billion operations"), (1e6, "million operations"), (1e3, "thousand operations"), (1.0, "operations"))
PRECISION = 0.01
"""The part of a time below which differences are no more than those of the estimate."""

Amount = Counter[tuple[str, ...]]
"""Bytes: by the dynamic dims of a value, sorted, how many bytes there are for each of their elements."""


def task_costs(program: Lowered, units: Sequence[Unit], labels: Labels, stages: Stages, microbatches: int) -> Costs:
    """The costs of stages whose ops have labels of unsplit backward passes. `units`: the programs of one microbatch."""
    apart = Labels([list(some) for some in labels.steps], labels.order)
    split_backward(units, apart, {s for s in range(len(stages)) if stages.splittable[s]})
    taken = [_UnitCosts(unit, some, stages) for unit, some in zip(units, apart.steps, strict=True)]
    sizes, middling = _Sizes(program), TypicalSizes(program)
    every = range(len(stages))
    there = {Phase.FORWARD: [True for _ in every], Phase.BACKWARD: stages.backward, Phase.WEIGHT: stages.splittable}
    times = {
        Label(phase, s): max(1, *(one.time(Label(phase, s), middling) for one in taken)) if there[phase][s] else 0
        for phase in _PASSES
        for s in every
    }
    most = max(times.values())
    scale, clock = next((scale, word) for scale, word in _SCALES if most >= scale)
    saved = [sizes.largest(one.saved[s] for one in taken) for s in every]
    deferred = [sizes.largest(one.deferred[s] for one in taken) for s in every]
    fixed = [
        max(sizes.largest_of(one.fixed(microbatches)) + one.alone(sizes) for one in taken if ranks & one.unit.ranks)
        for ranks in map(frozenset, stages.ranks)
    ]
    costs = []
    for s in every:
        forward, backward, weight = (times[Label(phase, s)] / scale for phase in _PASSES)
        kept, late = sizes.largest_of(saved[s]), sizes.largest_of(deferred[s])
        costs.append(StageCost(forward, backward, weight, saved=kept, deferred=late))
    shares = {symbol(n): symbol(n) / microbatches for n, info in program.symbols.items() if info.parts > 1}
    whole = {n: middling.dim(n) * (microbatches if info.parts > 1 else 1) for n, info in program.symbols.items()}
    texts = [(_expression(saved[s], shares), _expression(deferred[s], shares)) for s in every]
    return Costs(
        tuple(costs),
        unit=BYTES,
        clock=clock,
        fixed=tuple(fixed),
        expressions=tuple(texts),
        unbounded=sizes.unbounded,
        sizes=", ".join(f"{name}={size}" for name, size in whole.items()),
        precision=PRECISION,
    )


class _Sizes:
    """Bytes at the largest sizes of all symbols; `unbounded` says of the first of them that has no largest one."""

    def __init__(self, program: Lowered) -> None:
        self.known = {name: info.facts for name, info in program.symbols.items()}
        self.middling = TypicalSizes(program)
        self.unbounded = ""
        self.dims: dict[str, int] = {}

    def largest_of(self, amount: Amount) -> float:
        total = 0.0
        for dims, count in amount.items():
            size = float(count)
            for dim in dims:
                size *= self._largest(dim)
            total += size
        return total

    def largest(self, amounts: Iterable[Amount]) -> Amount:
        """The one with most bytes."""
        return max(amounts, key=self.largest_of)

    def _largest(self, dim: str) -> int:
        if dim not in self.dims:
            high = facts_of(dim, self.known).max
            if high is None:
                self.unbounded = self.unbounded or dim
                high = self.middling.dim(dim)
            self.dims[dim] = max(0, high)
        return self.dims[dim]


def _expression(amount: Amount, shares: Mapping[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
    """Bytes as an expression in the symbols of the whole batch."""
    terms = [sympy.Mul(count, *(read(dim) or symbol(dim) for dim in dims)) for dims, count in amount.items()]
    return sympy.expand(sympy.Add(*terms).subs(shares, simultaneous=True))


@dataclass
class _UnitCosts:
    """The seconds and bytes of the ops of a unit, by their labels."""

    unit: Unit
    labels: Sequence[Label]
    stages: Stages
    saved: list[Amount] = field(init=False)
    deferred: list[Amount] = field(init=False)
    own: dict[Label, list[Span[Value, Amount]]] = field(default_factory=dict)
    """Maps each task to the values that no other task reads."""

    def __post_init__(self) -> None:
        count = len(self.stages)
        self.saved, self.deferred = [Amount() for _ in range(count)], [Amount() for _ in range(count)]
        self.once, self.places = Amount(), dict[Label, list[int]]()
        self.hosted = {
            s
            for s in range(count)
            if any(not self.unit.ranks.isdisjoint(self.stages.ranks[h]) for h in self.stages.stage_ranks[s])
        }
        makers = {value: k for k, step in enumerate(self.unit.steps) for value in step.makes}
        for k, label in enumerate(self.labels):
            self.places.setdefault(label, []).append(k)
        for span in spans([Use(step.reads, step.makes) for step in self.unit.steps], self.amount):
            if span.value in makers or span.value in self.unit.batch:
                self._value(span, makers.get(span.value, -1))

    def _value(self, span: Span[Value, Amount], k: int) -> None:
        """Counts a value where it is kept, by the tasks that read it and the op that makes it, -1 for one of the batch."""
        label = self.labels[k] if k >= 0 else Label(Phase.ONCE)
        reading = {self.labels[at] for at in span.uses if at != k} - {UPDATE}
        amount = span.bytes or Amount()
        if label.phase is Phase.ONCE:
            if k >= 0 and reading:
                self.once += amount
        elif label.phase in _PASSES and reading <= {label}:
            self.own.setdefault(label, []).append(span)
        elif label.phase is Phase.FORWARD:
            later = {one.stage for one in reading if one.phase in (Phase.BACKWARD, Phase.WEIGHT)}
            if later:
                first = {one.stage for one in reading if one.phase is Phase.FORWARD} & self.hosted
                self.saved[label.stage if label.stage in self.hosted else min(first or later)] += amount
        for stage in {one.stage for one in reading if one.phase is Phase.WEIGHT}:
            if label != Label(Phase.WEIGHT, stage) and label.phase in (Phase.FORWARD, Phase.BACKWARD):
                self.deferred[stage] += amount
                if label.phase is Phase.BACKWARD:  # made while all that is saved is there, too
                    self.own.setdefault(label, []).append(replace(span, last=len(self.labels)))

    def amount(self, value: Value) -> Amount:
        """The bytes of a value; nothing for one whose shape only a run tells."""
        if value.of is None or value.shape is None:
            return Amount()
        size = (value.of.dtype.bitwidth if value.of.dtype is not None else 0) / 8
        for dim in value.shape:
            size *= dim if isinstance(dim, int) else 1
        return Amount({tuple(sorted([dim for dim in value.shape if isinstance(dim, str)])): int(size + 0.5)})

    def time(self, label: Label, middling: TypicalSizes) -> int:
        """The work of a task's ops."""
        total = 0
        for k in self.places.get(label, ()):
            step = self.unit.steps[k]
            if isinstance(step, Compute):
                operands = dict.fromkeys(one for one in (*step.inputs, *step.outputs) if one is not None)
                moved = sum(self._at(one, middling.dim) for one in operands)
                given, made = ([_sizes(one, middling) for one in some] for some in (step.inputs, step.outputs))
                total += work(step.node, given, made, moved)
        return total

    def _at(self, value: Value, dim: Callable[[str], int]) -> int:
        total = 0
        for dims, count in self.amount(value).items():
            for one in dims:
                count *= dim(one)
            total += count
        return total

    def fixed(self, microbatches: int) -> Amount:
        """The memory that a rank keeps over the whole step."""
        program = self.unit.program
        total = Amount(self.once)
        for value in dict.fromkeys([*(one.value for one in program.weights), *(one.value for one in program.state)]):
            total += self.amount(value)
        for value in sorted(self.unit.batch, key=str):
            total += Amount({dims: count * microbatches for dims, count in self.amount(value).items()})
        return total

    def alone(self, sizes: _Sizes) -> float:
        """The most bytes of values that a task makes and reads itself, at one time."""
        tasks = (
            [Span(one.value, one.first, one.last, (), int(sizes.largest_of(one.bytes or Amount()))) for one in values]
            for values in self.own.values()
        )
        return max((peak(values)[0] for values in tasks), default=0)


def _sizes(value: Value | None, middling: TypicalSizes) -> list[int] | None:
    """The sizes of an operand; those of a constant are its own."""
    if value is None:
        return None
    shape = value.constant.shape if value.shape is None and value.constant is not None else value.shape
    return None if shape is None else [middling.dim(dim) for dim in shape]
