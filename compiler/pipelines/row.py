"""The program of a step while its row of tasks is written, and the names of what depends on a microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.graph import bodies, captured
from partc.compiler.ir.rank_program import (
    ComputeOp,
    Constant,
    RankOp,
    RankProgram,
    TaskBody,
    made_names,
    read_names,
    with_names,
)
from partc.compiler.ir.value_info import Shape
from partc.compiler.pipelines.phases import Label, Unit


class Names:
    """Names of what is made of a value, the same ones on all ranks, for a message has one name at both ends."""

    def __init__(self, programs: Iterable[RankProgram], count: int) -> None:
        self.count = count
        self.taken = {
            name
            for one in programs
            for names in (one.types, one.constants, *(made_names(step) for step in one.steps))
            for name in names
        }
        self.bases: dict[str, str] = {}
        self.known: dict[tuple[str, str], str] = {}

    def base(self, name: str) -> str:
        """The name in bodies, of which `name.k` is that in the microbatch k: with primes where a value of any rank is called so."""
        found = self.bases.get(name)
        if found is None:
            found = name
            while any(f"{found}.{k}" in self.taken for k in range(self.count)) or (
                found != name and found in self.taken
            ):
                found += "'"
            self.taken.update((found, *(f"{found}.{k}" for k in range(self.count))))
            self.bases[name] = found
        return found

    def in_microbatch(self, name: str, k: int) -> str:
        """The name of a value in a microbatch."""
        return f"{self.base(name)}.{k}"

    def of(self, name: str, suffix: str) -> str:
        """`name.suffix`, with primes where a value of any rank is called so."""
        found = self.known.get((name, suffix))
        if found is None:
            found = f"{name}.{suffix}"
            while found in self.taken:
                found += "'"
            self.taken.add(found)
            self.known[name, suffix] = found
        return found


@dataclass
class Row:
    """The program of a step of a unit's ranks while it is written. `micro`: per microbatch the names of what depends on it."""

    unit: Unit
    steps: list[RankOp] = field(default_factory=list)
    types: dict[str, tuple[ir.Value, Shape | None]] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    micro: list[dict[str, str]] = field(default_factory=list)
    bodies: dict[Label, TaskBody] = field(default_factory=dict)
    sums: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By what is the sum of a gradient in a body the sum up to now, and the value to which the body adds."""
    calls: dict[Label, int] = field(default_factory=dict)
    """How often the body of a label was called."""

    def emit(self, op_type: str, names: Sequence[str], made: Sequence[str], **attributes: int | ir.Attr) -> None:
        """Writes a node."""
        given = [value for value in attributes.values() if isinstance(value, ir.Attr)]
        given += ir.convenience.convert_attributes({k: v for k, v in attributes.items() if isinstance(v, int)})
        node = ir.Node("", op_type, [ir.Value(name=n) for n in names], given, outputs=[ir.Value(name=n) for n in made])
        node.name = made[0]
        self.steps.append(ComputeOp(node, node))

    def put_together(self, parts: Sequence[str], made: str, summed: bool, names: Names) -> None:
        """Writes the sum of what microbatches have, or their mean: Sum and Div, as Mean has a kernel of float32 alone."""
        if summed:
            self.emit("Sum", parts, [made])
            return
        value, shape = self.types[made]
        assert value.dtype is not None
        total, count = names.of(made, "sum"), names.of(made, "count")
        self.types[total], self.constants[count] = (value, shape), np.array(len(parts), value.dtype.numpy())
        self.emit("Sum", parts, [total])
        self.emit("Div", [total, count], [made])

    def begin_sums(self, steps: Iterable[RankOp], names: Names) -> None:
        """Writes the zeros to which the first microbatch adds each gradient; `steps` are the ops of bodies."""
        for step in steps:
            if not isinstance(step, ComputeOp) or not self.unit.adds_up(step):
                continue
            (made,) = made_names(step)
            (kept,) = [name for name in read_names(step) if name in self.unit.sums]
            self.sums[made] = self._zeros(kept, names), kept

    def add_alike(self, step: ComputeOp, names: Names) -> None:
        """Writes the sum of a gradient that is the same in every microbatch, such as that of a decay of weights in the loss."""
        (made,) = made_names(step)
        (kept,) = [name for name in read_names(step) if name in self.unit.sums]
        one, times = names.of(made, "of_one"), names.of(made, "times")
        value, shape = self.types[made]
        assert value.dtype is not None
        self.types[one], self.constants[times] = (value, shape), np.array(names.count, value.dtype.numpy())
        self.steps.append(named(step, {kept: self._zeros(kept, names), made: one}))
        self.emit("Mul", [one, times], [made])

    def append_all(self, step: ComputeOp) -> None:
        """Writes an op that takes what every microbatch gives, one after the other."""
        (name,) = read_names(step)
        parts = [names.get(name, name) for names in self.micro]
        node = ir.Node("", step.node.op_type, [ir.Value(name=part) for part in parts], [*step.node.attributes.values()])
        node.outputs[0].name = node.name = made_names(step)[0]
        self.steps.append(replace(step, node=node))

    def _zeros(self, kept: str, names: Names) -> str:
        value, shape = self.types[kept]
        assert value.dtype is not None
        sizes, zeros = names.of(kept, "shape"), names.of(kept, "zeros")
        self.constants[sizes], self.types[zeros] = np.array(shape, np.int64), (value, shape)
        tensor = ir.AttrTensor("value", ir.tensor(np.zeros(1, value.dtype.numpy())))
        self.emit("ConstantOfShape", [sizes], [zeros], value=tensor)
        return zeros


def named(step: ComputeOp, names: Mapping[str, str]) -> ComputeOp:
    """An op with other names of some values, those that its bodies read included."""
    inner = dict(step.captured)
    for body in bodies(step.node):
        for value in captured(body):
            there = inner.get(value.name or "", value.name or "")
            if there in names:
                inner[value.name or ""] = names[there]
    return replace(step, node=with_names(step.node, names), captured=inner)
