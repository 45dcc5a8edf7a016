"""What the tasks of a pipeline's stages take and keep, out of the ops that they are made of and their local shapes.

    time      of F, B and W: the work of their ops (`analysis/operations.py`) at middling sizes of all symbols
    saved     what F makes or receives and B or W reads: kept from F to the end of B
    deferred  what F or B makes or receives and W reads: kept from B to the end of W, where these are apart
    fixed     parameters, state, sums of gradients, the batch, what is made once; and the most that a task has for itself alone

Of the ranks of a stage the one that takes or keeps most counts. Bytes are expressions in the symbols of the whole batch; a limit is held
against them at the largest sizes. A value that several stages of one rank read is kept by the one that makes it, or reads it first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
import sympy
from partc.compiler.analysis.operations import work
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.reading import read, symbol
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import ComputeOp, made_names, read_names
from partc.compiler.ir.value_info import Shape
from partc.compiler.pipelines.phases import UPDATE, Label, Labels, Phase, Unit, split_backward
from partc.compiler.placement.middling import Middling
from partc.compiler.schedule.costs import BYTES, Costs, StageCost
from partc.compiler.schedule.stages import Stages

_PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)
_SCALES = ((1e9, "billion operations"), (1e6, "million operations"), (1e3, "thousand operations"), (1.0, "operations"))
PRECISION = 0.01
"""The part of a time below which differences are no more than those of the estimate."""

Amount = Counter[tuple[str, ...]]
"""Bytes: by the dynamic dims of a value, sorted, how many bytes there are for each of their elements."""


def task_costs(program: Program, units: Sequence[Unit], labels: Labels, stages: Stages, microbatches: int) -> Costs:
    """The costs of stages whose ops have labels of unsplit backward passes. `units`: the programs of one microbatch."""
    apart = Labels([list(some) for some in labels.steps], labels.order)
    split_backward(units, apart, {s for s in range(len(stages)) if stages.splittable[s]})
    taken = [_Taken(unit, some, stages) for unit, some in zip(units, apart.steps, strict=True)]
    sizes, middling = _Sizes(program), Middling(program)
    times = {
        Label(phase, s): max(1, *(one.time(Label(phase, s), middling) for one in taken))
        if _has(phase, s, stages)
        else 0
        for phase in _PASSES
        for s in range(len(stages))
    }
    most = max(times.values())
    scale, clock = next((scale, word) for scale, word in _SCALES if most >= scale)
    every = range(len(stages))
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
    texts = [(_expression(saved[s], shares), _expression(deferred[s], shares)) for s in every]
    return Costs(
        tuple(costs),
        unit=BYTES,
        clock=clock,
        fixed=tuple(fixed),
        expressions=tuple(texts),
        unbounded=sizes.unbounded,
        sizes=_said(program, middling, microbatches),
        precision=PRECISION,
    )


def _has(phase: Phase, s: int, stages: Stages) -> bool:
    """Whether a stage has tasks of a phase."""
    return phase is Phase.FORWARD or (stages.splittable[s] if phase is Phase.WEIGHT else stages.backward[s])


def _said(program: Program, middling: Middling, microbatches: int) -> str:
    """The sizes of symbols at which times are, of the whole batch: `batch=128, seq=128`."""
    sizes = {n: middling.dim(n) * (microbatches if info.parts > 1 else 1) for n, info in program.symbols.items()}
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


class _Sizes:
    """Bytes at the largest sizes of all symbols; `unbounded` says of the first of them that has no largest one."""

    def __init__(self, program: Program) -> None:
        self.known = {name: info.facts for name, info in program.symbols.items()}
        self.middling = Middling(program)
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
class _Taken:
    """What the ops of a unit take and keep, by their labels."""

    unit: Unit
    labels: Sequence[Label]
    stages: Stages
    saved: list[Amount] = field(init=False)
    deferred: list[Amount] = field(init=False)
    own: dict[Label, list[tuple[int, int, str]]] = field(default_factory=dict)
    """Per task the values that no other task reads, each with the op that makes it and the last that reads it."""

    def __post_init__(self) -> None:
        count = len(self.stages)
        self.saved, self.deferred = [Amount() for _ in range(count)], [Amount() for _ in range(count)]
        self.once, self.places = Amount(), dict[Label, list[int]]()
        self.hosted = {s for s in range(count) if any(self._is_home(h) for h in self.stages.homes[s])}
        made: dict[str, tuple[Label, int]] = {name: (Label(Phase.ONCE), -1) for name in self.unit.batch}
        read: dict[str, list[tuple[Label, int]]] = {}
        for k, (step, label) in enumerate(zip(self.unit.steps, self.labels, strict=True)):
            self.places.setdefault(label, []).append(k)
            for name in read_names(step):
                read.setdefault(name, []).append((label, k))
            made.update(dict.fromkeys(made_names(step), (label, k)))
        for name, (label, k) in made.items():
            self._value(name, label, k, read.get(name, []))

    def _is_home(self, home: int) -> bool:
        return not self.unit.ranks.isdisjoint(self.stages.ranks[home])

    def _value(self, name: str, label: Label, k: int, readers: Sequence[tuple[Label, int]]) -> None:
        """Counts a value where it is kept, by the tasks that make and read it."""
        reading = {one for one, _ in readers if one != UPDATE}
        amount = self.amount(name)
        if label.phase is Phase.ONCE:
            if k >= 0 and reading:
                self.once += amount
        elif label.phase in _PASSES and reading <= {label}:
            self.own.setdefault(label, []).append((k, max((at for _, at in readers), default=k), name))
        elif label.phase is Phase.FORWARD:
            later = {one.stage for one in reading if one.phase in (Phase.BACKWARD, Phase.WEIGHT)}
            if later:
                first = {one.stage for one in reading if one.phase is Phase.FORWARD} & self.hosted
                self.saved[label.stage if label.stage in self.hosted else min(first or later)] += amount
        for stage in {one.stage for one in reading if one.phase is Phase.WEIGHT}:
            if label != Label(Phase.WEIGHT, stage) and label.phase in (Phase.FORWARD, Phase.BACKWARD):
                self.deferred[stage] += amount
                if label.phase is Phase.BACKWARD:  # made while all that is saved is there, too
                    self.own.setdefault(label, []).append((k, len(self.labels), name))

    def amount(self, name: str) -> Amount:
        """The bytes of a value; nothing for one whose shape only a run tells."""
        value, shape = self.unit.program.types.get(name, (None, None))
        return Amount() if value is None or shape is None else _amount(value, shape)

    def time(self, label: Label, middling: Middling) -> int:
        """The work of a task's ops."""
        total = 0
        for k in self.places.get(label, ()):
            step = self.unit.steps[k]
            if isinstance(step, ComputeOp):
                given = [None if value is None else value.name or "" for value in step.node.inputs]
                made = made_names(step)
                moved = sum(self._at(name, middling.dim) for name in {*filter(None, given), *made})
                total += work(
                    step.node,
                    [self._sizes(n, middling) for n in given],
                    [self._sizes(n, middling) for n in made],
                    moved,
                )
        return total

    def _at(self, name: str, dim: Callable[[str], int]) -> int:
        total = 0
        for dims, count in self.amount(name).items():
            for one in dims:
                count *= dim(one)
            total += count
        return total

    def _sizes(self, name: str | None, middling: Middling) -> list[int] | None:
        _, shape = self.unit.program.types.get(name or "", (None, None))
        if shape is None and (constant := self.unit.program.constants.get(name or "")) is not None:
            shape = constant.shape
        return None if shape is None else [middling.dim(dim) for dim in shape]

    def fixed(self, microbatches: int) -> Amount:
        """What a rank keeps over the whole step."""
        program = self.unit.program
        names = {held.name for held in program.weights} | {one.name for one in program.kept}
        total = Amount(self.once)
        for name in sorted(names):
            total += self.amount(name)
        for name in sorted(self.unit.batch):
            total += Amount({dims: count * microbatches for dims, count in self.amount(name).items()})
        return total

    def alone(self, sizes: _Sizes) -> float:
        """The most bytes of values that a task makes and reads itself, at one time."""
        most = 0.0
        for values in self.own.values():
            changes: dict[int, float] = {}
            for first, last, name in values:
                size = sizes.largest_of(self.amount(name))
                changes[first] = changes.get(first, 0.0) + size
                changes[last + 1] = changes.get(last + 1, 0.0) - size
            most = max(most, *itertools.accumulate(changes[k] for k in sorted(changes)))
        return most


def _amount(value: ir.Value, shape: Shape) -> Amount:
    """The bytes of a value of this local shape."""
    size = (value.dtype.bitwidth if value.dtype is not None else 0) / 8
    for dim in shape:
        size *= dim if isinstance(dim, int) else 1
    return Amount({tuple(sorted(dim for dim in shape if isinstance(dim, str))): int(size + 0.5)})
