"""Sums of cotangents: terms are added where they lie, brought to where they are wanted, and parameters' gradients in buckets.

A parameter's gradient is wanted as the parameter is updated. Where ranks hold the same shard of it, their terms are reduced by one
AllReduce for many parameters, a bucket (`buckets.py`), which begins as soon as the last of them is there and goes on beside the
backward pass.

    bucket 0   AllReduce(fc3.weight, fc3.bias, fc2.weight)     while fc1 and conv2 are differentiated
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import onnx_ir as ir
from partc.compiler.ir.program import ComputeOp, Program, ShardedValue
from partc.compiler.layout.reshard import lower
from partc.compiler.lower.builders import ProgramBuilders
from partc.compiler.lower.comm import CommLowering
from partc.compiler.tasks.buckets import Buckets, Together, can_join
from partc.compiler.tasks.localize import local_shape
from partc.compiler.tasks.zero import shared_out
from partc.compiler.training.config import ProgramKind, Training


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient where a copy of the parameter lies: its name there, and what each rank updates of that copy."""

    parameter: ir.Value
    home: ShardedValue
    name: str
    share: ShardedValue


@dataclass(frozen=True)
class Sum:
    """The sum of a parameter's gradients over the parts of a batch, as terms where they are made; "" where nothing replaces it."""

    parameter: ir.Value
    copy: ShardedValue
    name: str
    next: str


class GradientSums:
    """Adds cotangents up; `gradients` are those of parameters, in the order in which they are ready."""

    def __init__(
        self,
        program: Program,
        cotangents: Mapping[ir.Value, ir.Value],
        writer: CommLowering,
        drafts: ProgramBuilders,
        training: Training,
    ) -> None:
        self.program, self.cotangents, self.writer, self.drafts = program, cotangents, writer, drafts
        self.training = training
        self.kept: list[Sum] = []
        self.totals: dict[ShardedValue, str] = {}
        """What whole cotangents are called where they lie."""
        self.gradients: list[Gradient] = []
        self.taken: dict[str, set[int]] = {}
        self._sent: dict[str, set[int]] = {}
        self.buckets = Buckets(writer, training.bucket_bytes, "gradient")

    def gathered(self, given: Mapping[ShardedValue, Sequence[str]], target: ShardedValue, name: str = "") -> str:
        """All terms added, in the layout of `target`; `given` by the layout in which they lie."""
        shards: dict[ShardedValue, list[str]] = {}
        for copy, names in given.items():
            total = self._sum(copy, names)
            shards.setdefault(target, []).append(self._brought(copy, total, target, name))
        total = self._sum(target, shards[target], name)
        self.totals.setdefault(target, total)
        return total

    def parameter(
        self, value: ir.Value, given: Mapping[ShardedValue, Sequence[str]], defs: Sequence[ShardedValue]
    ) -> None:
        """The gradient of a parameter that lies as `defs`: reduced on the first of them, and handed on to the others."""
        if self.training.accumulate > 1:
            given = {copy: [self._added(value, copy, names, at)] for at, (copy, names) in enumerate(given.items())}
            if self.training.part is ProgramKind.ACCUMULATION:
                return
        defs = self._own_homes(defs)
        main = defs[0]
        share = shared_out(self.program, main, self.training.shard) if len(defs) == 1 else main
        target = ShardedValue(self.cotangents[value], main.group, share.layout)
        wanted = f"{self.writer.names[main]}.grad"
        if len(given) == 1:
            ((copy, names),) = given.items()
            moves = lower(copy.layout, target.layout, copy.group, target.group)
            if can_join(moves):
                self._bucketed(value, copy, self._sum(copy, names), target, cast(Together, moves[0]), defs)
                return
        self._ready(value, self.gathered(given, target, wanted), target, defs)

    def _added(self, value: ir.Value, copy: ShardedValue, names: Sequence[str], at: int) -> str:
        """A gradient with those of the earlier parts of the batch, whose sum is kept where it is made, before it is reduced."""
        total = self._sum(copy, names)
        kept = self.drafts.derived(f"{value.name}.grad.sum" + (f".{at + 1}" if at else ""))
        for draft in self.drafts.of(copy.group):
            draft.types[kept] = (copy.value, local_shape(self.program, copy))
        made = self._emit(copy, "Add", [kept, total], self.drafts.derived(f"{kept}.next"))
        following = made if self.training.part is ProgramKind.ACCUMULATION else ""
        self.kept.append(Sum(value, copy, kept, following))
        return made

    def _own_homes(self, defs: Sequence[ShardedValue]) -> list[ShardedValue]:
        """The homes without those whose ranks have the same tensor by a larger one: it is updated once."""
        names, found = self.writer.names, list[ShardedValue]()
        for home in sorted(defs, key=lambda home: -len(home.group)):
            if not any(names[one] == names[home] and {*home.group} <= {*one.group} for one in found):
                found.append(home)
        return sorted(found, key=defs.index)

    def flush(self) -> None:
        """Reduces what is left."""
        self.buckets.flush()

    def _bucketed(
        self,
        value: ir.Value,
        copy: ShardedValue,
        name: str,
        target: ShardedValue,
        move: Together,
        defs: Sequence[ShardedValue],
    ) -> None:
        shape, term = local_shape(self.program, target), local_shape(self.program, copy)
        assert shape is not None
        assert term is not None
        name = self._own(copy, name, f"{self.writer.names[defs[0]]}.grad.partial")
        made = self.drafts.free(target.group, f"{self.writer.names[defs[0]]}.grad")
        for draft in self.drafts.of(target.group):
            draft.types[made] = (target.value, shape)
        self.buckets.add(move, target.value, name, term, made, partial(self._ready, value, made, target, defs))

    def _ready(self, value: ir.Value, name: str, target: ShardedValue, defs: Sequence[ShardedValue]) -> None:
        """A gradient is there on the first home of its parameter: it goes to the others, each with a value of its own."""
        name = self._own(target, name, f"{self.writer.names[defs[0]]}.grad")
        share = ShardedValue(value, target.group, target.layout)
        self.gradients.append(Gradient(value, defs[0], name, share))
        for home in defs[1:]:
            wanted = ShardedValue(self.cotangents[value], home.group, home.layout)
            other = self._brought(target, name, wanted, f"{self.writer.names[home]}.grad")
            own = self._own(wanted, other, f"{self.writer.names[home]}.grad")
            self.gradients.append(Gradient(value, home, own, home))

    def _own(self, copy: ShardedValue, name: str, wanted: str) -> str:
        """The name of a value that is nobody else's gradient, and that a node of the program made."""
        drafts = self.drafts.of(copy.group)
        own = self.taken.get(name, set()).isdisjoint(copy.group)
        made = not any(name in draft.constants for draft in drafts)
        if not own or not made:
            name = self._emit(copy, "Identity", [name], self.drafts.free(copy.group, wanted))
        self.taken.setdefault(name, set()).update(copy.group)
        return name

    def _brought(self, copy: ShardedValue, name: str, target: ShardedValue, wanted: str = "") -> str:
        """A cotangent in another layout or on another group."""
        if copy == target:
            return name
        names = self.writer.names
        final = wanted or str(target.value.name)
        if copy.group != target.group:
            # Ops whose cotangents are one value (a Sum's) send it for each, and a message has a name of its own.
            if not self._sent.get(name, set()).isdisjoint(copy.group):
                name = self._emit(copy, "Identity", [name], self.drafts.free(copy.group, final))
            self._sent.setdefault(name, set()).update(copy.group)
        apart = not wanted and {*copy.group}.isdisjoint(target.group) and self.drafts.is_free(target.group, name)
        names[copy] = name
        names[target] = name if apart else self.drafts.free(tuple(dict.fromkeys((*copy.group, *target.group))), final)
        primal = str(target.value.name).removesuffix(".grad")
        self.writer.make(copy, target, f"gradient of '{primal}'")
        del names[copy]
        return names.pop(target)

    def _sum(self, copy: ShardedValue, names: Sequence[str], wanted: str = "") -> str:
        if len(names) == 1:
            return names[0]
        made = self.drafts.free(copy.group, wanted or str(copy.value.name))
        return self._emit(copy, "Add" if len(names) == 2 else "Sum", names, made)

    def _emit(self, copy: ShardedValue, op_type: str, names: Sequence[str], made: str) -> str:
        node = ir.Node("", op_type, [ir.Value(name=name) for name in names], outputs=[ir.Value(name=made)], name=made)
        for draft in self.drafts.of(copy.group):
            draft.steps.append(ComputeOp(node, node))
            draft.types[made] = (copy.value, local_shape(self.program, copy))
        return made
