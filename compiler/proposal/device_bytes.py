"""How many bytes a rank needs on one of its targets: an estimate from its program with copies, at the plan's sizes.

    held      weights that are read there, and the state that lies there
    values    the largest set of others that are alive at once: activations, gradients, copies; what is updated in place takes no room

The batch of a training is the plan's, other dims have their largest size, or the smallest where no largest is named. Values whose size
only a run tells are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Call, Comm, Compute, Copy, Op, RankProgram, State, Value
from partc.compiler.ir.value_info import Shape
from partc.runtime.artifact.dim_expression import parse
from partc.runtime.artifact.format import CPU
from partc.runtime.artifact.liveness import Use, peak, spans
from partc.runtime.units import size_text


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


def sizes_of(program: Complete) -> dict[str, int]:
    """The size of each symbol at which estimates are made: a training's batch, else the largest that is legal, else the smallest."""
    found = {}
    train = program.plan.train
    batch = train.batch if train is not None else None
    firsts = {info.shape[0] for one in program.model.graph.inputs if (info := program.values.get(one)) and info.shape}
    for name, symbol in program.symbols.items():
        facts = symbol.facts
        least = max(facts.min or 0, 1)
        least += (facts.remainder - least) % facts.divisor if facts.divisor else 0
        found[name] = least if facts.max is None else facts.max
        if name in firsts and batch:
            found[name] = max(least, batch // symbol.parts)
    return found


def device_bytes(program: Complete, target: str) -> list[DeviceBytes]:
    """Per distinct program of a rank the bytes that it needs on a target."""
    sizes = sizes_of(program)
    return [_Measured(program, part, target, sizes).done() for part, _ in program.alike]


def shape_bytes(program: Complete, value: ir.Value, shape: Shape | None, sizes: Mapping[str, int]) -> int:
    """The bytes of a value of this shape; 0 where it is known only at run time."""
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
    def __init__(self, program: Complete, part: RankProgram, target: str, sizes: Mapping[str, int]) -> None:
        self.program, self.part, self.target, self.sizes = program, part, target, sizes

    def done(self) -> DeviceBytes:
        """The bytes on the target."""
        part, steps = self.part, list(self._steps())
        read = {value for step, reads, _ in steps if _runs_on(step) == self.target for value in reads}
        every = {one.version.value.name or str(one.value): self._bytes(one.value) for one in part.weights}
        weights = {
            one.version.value.name or str(one.value): size
            for one in part.weights
            if one.value in read and (size := self._bytes(one.value))
        }
        every |= {one.tensor: self._bytes(one.value) for one in part.kept if one.kind == "parameter"}
        state: Counter[str] = Counter()
        for kept in part.kept:
            if kept.target == self.target:
                self._add(kept, weights, state)
        held = {*(one.value for one in part.weights), *(one.value for one in part.kept), *part.results}
        return DeviceBytes(part.rank, self.target, weights, dict(state), self._alive(steps, held), every)

    def _add(self, kept: State, weights: dict[str, int], state: Counter[str]) -> None:
        size = self._bytes(kept.value)
        if kept.kind == "parameter":
            weights[kept.tensor] = size
        elif size:
            state[f"state of the kind '{kept.kind}'"] += size

    def _bytes(self, value: Value) -> int:
        return 0 if value.of is None else shape_bytes(self.program, value.of, value.shape, self.sizes)

    def _steps(self) -> Iterator[tuple[Op, list[Hashable], dict[Hashable, int]]]:
        """The ops with tasks in place of their calls, each with what it reads, and the bytes on the target of what it makes.

        A value that stays in a body is another one in each call.
        """
        for step in self.part.steps:
            if isinstance(step, Call):
                ends = step.ends
                for inner in step.body.steps:
                    yield self._one(
                        inner, {value: ends.get(value, (value, step)) for value in (*inner.reads, *inner.makes)}
                    )
            else:
                yield self._one(step, {value: value for value in (*step.reads, *step.makes)})

    def _one(self, step: Op, there: Mapping[Value, Hashable]) -> tuple[Op, list[Hashable], dict[Hashable, int]]:
        made = step.makes if (step.target if isinstance(step, Copy) else _runs_on(step)) == self.target else ()
        return step, [there[value] for value in step.reads], {there[value]: self._bytes(value) for value in made}

    def _alive(
        self, steps: Sequence[tuple[Op, list[Hashable], dict[Hashable, int]]], held: Collection[Hashable]
    ) -> dict[str, int]:
        """The values alive when they are most."""
        sizes = {value: size for _, _, some in steps for value, size in some.items()}
        uses = [
            Use(reads, [*some], step.node.op_type if isinstance(step, Compute) and not step.node.domain else "")
            for step, reads, some in steps
        ]
        alive = {span.value: span.bytes or 0 for span in peak(spans(uses, sizes.get, held))[1]}
        return {
            f"{value[0]}.{value[1].microbatch}" if isinstance(value, tuple) else str(value): size
            for value, size in alive.items()
        }


def _runs_on(step: Op) -> str:
    """The target on which an op reads."""
    if isinstance(step, Copy):
        return step.origin
    return CPU if isinstance(step, Comm | Call) else step.target
