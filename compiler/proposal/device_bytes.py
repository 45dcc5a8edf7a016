"""How many bytes a rank needs on one of its targets: an estimate from its program with copies, at the plan's sizes.

    held      weights that are read there, and the state that lies there
    values    the largest set of others that are alive at once: activations, gradients, copies; what is updated in place takes no room

The batch of a training is the plan's, other dims have their largest size, or the smallest where no largest is named. Values whose size
only a run tells are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import (
    CommOp,
    CopyOp,
    RankOp,
    RankProgram,
    StateTensor,
    TaskCall,
    made_names,
    read_names,
)
from partc.compiler.ir.value_info import Shape
from partc.runtime.artifact.dim_expression import parse
from partc.runtime.artifact.format import CPU
from partc.runtime.units import size_text

Types = Mapping[str, tuple[ir.Value, Shape | None]]


@dataclass(frozen=True)
class DeviceBytes:
    """The bytes of a rank on a target: of what it holds by the weight's name, of the state by kind, and of the values alive at the peak.

    `every`: all weights of the rank, on whichever target. As text: `cuda: at most 9.2 MiB on a rank: weights 1.4 MiB, ...`.
    """

    rank: int
    target: str
    weights: Mapping[str, int]
    state: Mapping[str, int]
    values: Mapping[str, int]
    every: Mapping[str, int]

    def __str__(self) -> str:
        parts = {"weights": self.weights, "optimizer": self.state, "values of a step": self.values}
        sizes = [f"{what} {size_text(sum(some.values()))}" for what, some in parts.items() if some]
        return f"{self.target}: at most {size_text(self.needed)} on a rank{': ' if sizes else ''}{', '.join(sizes)}"

    @property
    def needed(self) -> int:
        """All together."""
        return sum((*self.weights.values(), *self.state.values(), *self.values.values()))

    @property
    def largest(self) -> list[tuple[str, int]]:
        """The parts, the largest first."""
        parts = Counter({f"'{name}'": size for some in (self.weights, self.values) for name, size in some.items()})
        parts.update(self.state)
        return sorted(parts.items(), key=lambda part: (-part[1], part[0]))


def sizes_of(program: Program) -> dict[str, int]:
    """The size of each symbol at which estimates are made: a training's batch, else the largest that is legal, else the smallest."""
    found = {}
    train = program.plan.train
    batch = train.settings.get("batch", 0) if train is not None else 0
    firsts = {info.shape[0] for one in program.model.graph.inputs if (info := program.values.get(one)) and info.shape}
    for name, symbol in program.symbols.items():
        facts = symbol.facts
        least = max(facts.min or 0, 1)
        least += (facts.remainder - least) % facts.divisor if facts.divisor else 0
        found[name] = least if facts.max is None else facts.max
        if name in firsts and isinstance(batch, int) and batch:
            found[name] = max(least, batch // symbol.parts)
    return found


def device_bytes(program: Program, target: str) -> list[DeviceBytes]:
    """Per distinct program of a rank the bytes that it needs on a target."""
    sizes = sizes_of(program)
    return [_Measured(program, part, target, sizes).done() for part, _ in program.alike]


def shape_bytes(program: Program, value: ir.Value, shape: Shape | None, sizes: Mapping[str, int]) -> int:
    """The bytes of a value of this shape; 0 where only a run tells."""
    info = program.values.get(value)
    if info is None or info.item_bytes is None or shape is None:
        return 0
    found = info.item_bytes
    for dim in shape:
        try:
            found *= dim if isinstance(dim, int) else int(parse(dim, sizes)(sizes))
        except ValueError:
            return 0
    return found


class _Measured:
    def __init__(self, program: Program, part: RankProgram, target: str, sizes: Mapping[str, int]) -> None:
        self.program, self.part, self.target, self.sizes = program, part, target, sizes

    def done(self) -> DeviceBytes:
        """The bytes on the target."""
        part = self.part
        read = {name for step, (reads, _), _ in self._steps() if _runs_on(step) == self.target for name in reads}
        weights: dict[str, int] = {}
        for one in part.weights:
            if one.name in read and (size := self._bytes(one.name, part.types)):
                weights[one.version.value.name or one.name] = size
        state: Counter[str] = Counter()
        for kept in part.kept:
            if kept.target == self.target:
                self._add(kept, weights, state)
        held = {one.name for one in part.weights} | {name for one in part.kept for name in (one.name, one.next)}
        every = {one.version.value.name or one.name: self._bytes(one.name, part.types) for one in part.weights}
        every |= {one.tensor: self._bytes(one.name, part.types) for one in part.kept if one.kind == "parameter"}
        return DeviceBytes(part.rank, self.target, weights, dict(state), self._alive(held), every)

    def _add(self, kept: StateTensor, weights: dict[str, int], state: Counter[str]) -> None:
        size = self._bytes(kept.name, self.part.types)
        if kept.kind == "parameter":
            weights[kept.tensor] = size
        elif size:
            state[f"state of the kind '{kept.kind}'"] += size

    def _bytes(self, name: str, types: Types) -> int:
        value, shape = types.get(name, (None, None))
        return shape_bytes(self.program, value, shape, self.sizes) if value is not None else 0

    def _steps(self) -> Iterator[tuple[RankOp, tuple[list[str], list[str]], dict[str, int]]]:
        """The ops with tasks in place of their calls, each with the names that it reads and makes, and the bytes of these on the target."""
        for step in self.part.steps:
            if isinstance(step, TaskCall):
                names = step.names
                for inner in step.body.steps:
                    yield self._one(inner, names, step.body.types)
            else:
                yield self._one(step, {}, self.part.types)

    def _one(
        self, step: RankOp, names: Mapping[str, str], types: Types
    ) -> tuple[RankOp, tuple[list[str], list[str]], dict[str, int]]:
        reads = [names.get(name, name) for name in read_names(step)]
        made = [name for name in made_names(step) if name]
        sizes = {names.get(name, name): self._bytes(name, types) for name in made if _lies_on(step) == self.target}
        return step, (reads, list(sizes)), sizes

    def _alive(self, held: set[str]) -> dict[str, int]:
        """The values alive when they are most."""
        begin: dict[str, tuple[int, int]] = {}
        end: dict[str, int] = {}
        for at, (_, (reads, _), sizes) in enumerate(self._steps()):
            end.update(dict.fromkeys(reads, at))
            for name, size in sizes.items():
                if name not in held and name not in begin:
                    begin[name] = at, size
        changes: Counter[int] = Counter()
        for name, (at, size) in begin.items():
            changes[at] += size
            changes[end.get(name, at) + 1] -= size
        alive = most = peak = 0
        for at in sorted(changes):
            alive += changes[at]
            if alive > most:
                most, peak = alive, at
        return {name: size for name, (at, size) in begin.items() if size and at <= peak <= end.get(name, at)}


def _runs_on(step: RankOp) -> str:
    """The target on which an op reads."""
    if isinstance(step, CopyOp):
        return step.origin
    return CPU if isinstance(step, CommOp | TaskCall) else step.target


def _lies_on(step: RankOp) -> str:
    """The target on which an op's outputs lie."""
    return step.target if isinstance(step, CopyOp) else _runs_on(step)
