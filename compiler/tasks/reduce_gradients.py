"""Sums of cotangents: contributions are added in their own layout, then resharded; gradients of parameters are reduced in buckets.

A parameter's gradient is wanted as the parameter is updated. Where ranks hold the same shard of it, their terms are reduced by one
AllReduce for many parameters, a bucket (`buckets.py`), which begins as soon as the last of them is there and goes on beside the
backward pass.

    bucket 0   AllReduce(fc3.weight, fc3.bias, fc2.weight)     while fc1 and conv2 are differentiated
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import ComputeOp, TaskKind
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.ir.training import Training
from partc.compiler.layout.reshard import lower
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.local_view import AccumulatedGradient, Gradient
from partc.compiler.lower.reshard import reshard
from partc.compiler.tasks.buckets import Buckets, Fused, can_join
from partc.compiler.tasks.cotangent_names import brought_spellings, first_free, sum_spellings
from partc.compiler.tasks.row_gradients import RowReduction, RowTerm
from partc.compiler.tasks.zero import shared_out


class GradientReduction:
    """Adds cotangents up; `gradients` are those of parameters, in the order in which they are ready.

    What adds cotangents of one microbatch belongs to the backward task, and what reduces a parameter's gradient over ranks to the update.
    """

    def __init__(
        self, program: Program, cotangents: Mapping[ir.Value, ir.Value], comm: CommLowering, training: Training
    ) -> None:
        self.program, self.cotangents, self.training = program, cotangents, training
        self.comm, self.update, self.names = comm, comm.of_task(TaskKind.UPDATE), comm.values.names
        self.accumulated: list[AccumulatedGradient] = []
        self.totals: dict[ShardedValue, str] = {}
        """By version the name of each cotangent that is complete."""
        self.gradients: list[Gradient] = []
        self.taken: dict[str, set[int]] = {}
        """By name the ranks on which it is a parameter's gradient."""
        self._sent: dict[str, set[int]] = {}
        self.buckets = Buckets(self.update, training.bucket_bytes, "gradient")
        self.rows = RowReduction(self.comm, self.update, training.accumulate, low=training.messages)
        if training.accumulate > 1:  # a node called `sum` contributes under another name
            for value, end in itertools.product(training.parameters, ("", ".next")):
                comm.builders.free(tuple(range(program.plan.ranks)), f"{value.name}.grad.sum{end}")

    def total(self, given: Mapping[ShardedValue, Sequence[str]], target: ShardedValue) -> str:
        """The name of the sum of a cotangent's contributions (`given`, by their layout), in the layout of `target`."""
        return self._total(self.comm, given, target, "")

    def _total(
        self, comm: CommLowering, given: Mapping[ShardedValue, Sequence[str]], target: ShardedValue, wanted: str
    ) -> str:
        only = len(given) == 1
        brought: list[str] = []
        for version, names in given.items():
            name = self._sum(self.comm, version, names, final=only and version == target)
            brought.append(self._brought(comm, version, name, target, wanted, only=only))
        total = self._sum(comm, target, brought, wanted)
        self.totals.setdefault(target, total)
        return total

    def parameter(
        self, value: ir.Value, given: Mapping[ShardedValue, Sequence[str]], defs: Sequence[ShardedValue]
    ) -> None:
        """Reduces the gradient of a parameter on the first of its definitions `defs`, and sends it to the others."""
        if self.training.accumulate > 1:
            given = {
                version: [self._added(value, version, names, at)] for at, (version, names) in enumerate(given.items())
            }
        defs = self._own_homes(defs)
        main = defs[0]
        share = shared_out(self.program, main, self.training.shard) if len(defs) == 1 else main
        target = ShardedValue(self.cotangents[value], main.group, share.layout)
        wanted = f"{self.names[main]}.grad"
        if self.training.messages and value.dtype == ir.DataType.FLOAT and any(one != target for one in given):
            low = self._low(target.value)
            target, wanted = ShardedValue(low, main.group, share.layout), f"{wanted}.bfloat16"
            given = {
                ShardedValue(low, one.group, one.layout): [self._rounded(one, low, self._sum(self.comm, one, names))]
                for one, names in given.items()
            }
        if len(given) == 1:
            ((version, names),) = given.items()
            moves = lower(version.layout, target.layout, version.group, target.group)
            if can_join(moves):
                self._bucketed(
                    value, version, self._sum(self.comm, version, names), target, cast(Fused, moves[0]), defs, wanted
                )
                return
        self._ready(value, self._total(self.update, given, target, wanted), target, defs)

    def table(
        self, value: ir.Value, terms: Sequence[RowTerm], defs: Sequence[ShardedValue], *, dense: bool = False
    ) -> None:
        """Brings the rows of a table's gradient to all of its definitions, and makes them `dense` there."""

        def ready(found: list[Gradient]) -> None:
            self.gradients += [self.rows.made_dense(one, self.cotangents[value]) for one in found] if dense else found

        self.rows.begin(value, terms, self._own_homes(defs), ready)

    def _added(self, value: ir.Value, version: ShardedValue, names: Sequence[str], at: int) -> str:
        """Adds a gradient to the sum of those of the batch's earlier parts, before it is reduced over ranks; the sum's name."""
        total = self._sum(self.comm, version, names)
        kept = self.comm.builders.derived(f"{value.name}.grad.sum" + (f".{at + 1}" if at else ""))
        self.comm.builders.declare(version.group, kept, version.value, self.comm.values.local_shape(version))
        made = self._emit(self.comm, version, "Add", [kept, total], self.comm.builders.derived(f"{kept}.next"))
        self.accumulated.append(AccumulatedGradient(value, version, kept))
        return made

    def _own_homes(self, defs: Sequence[ShardedValue]) -> list[ShardedValue]:
        """The definitions without those whose ranks hold the same tensor by a larger one: it is updated once."""
        names, found = self.names, list[ShardedValue]()
        for home in sorted(defs, key=lambda home: -len(home.group)):
            if not any(names[one] == names[home] and {*home.group} <= {*one.group} for one in found):
                found.append(home)
        return sorted(found, key=defs.index)

    def flush(self) -> None:
        """Reduces the gradients of buckets that are not full, and gathers rows."""
        take_apart = self.rows.flush()
        self.buckets.flush()
        take_apart()

    def _bucketed(
        self,
        value: ir.Value,
        version: ShardedValue,
        name: str,
        target: ShardedValue,
        move: Fused,
        defs: Sequence[ShardedValue],
        wanted: str,
    ) -> None:
        shape, term = self.comm.values.local_shape(target), self.comm.values.local_shape(version)
        assert shape is not None
        assert term is not None
        name = self._own(version, name, f"{self.names[defs[0]]}.grad.partial")
        made = self.comm.builders.free(target.group, wanted)
        self.comm.builders.declare(target.group, made, target.value, shape)
        self.buckets.add(move, target.value, name, term, made, partial(self._ready, value, made, target, defs))

    def _ready(self, value: ir.Value, name: str, target: ShardedValue, defs: Sequence[ShardedValue]) -> None:
        """Records a gradient that is complete on the first definition of its parameter, and sends it to the others."""
        if target.value is not self.cotangents[value]:
            rounded, target = target, ShardedValue(self.cotangents[value], target.group, target.layout)
            name = self._cast(
                rounded, target, name, self.comm.builders.free(target.group, f"{self.names[defs[0]]}.grad")
            )
        name = self._own(target, name, f"{self.names[defs[0]]}.grad")
        share = ShardedValue(value, target.group, target.layout)
        self.gradients.append(Gradient(value, defs[0], name, share))
        for home in defs[1:]:
            wanted = ShardedValue(self.cotangents[value], home.group, home.layout)
            other = self._brought(self.update, target, name, wanted, f"{self.names[home]}.grad")
            own = self._own(wanted, other, f"{self.names[home]}.grad")
            self.gradients.append(Gradient(value, home, own, home))

    def _low(self, cotangent: ir.Value) -> ir.Value:
        """A value for a parameter's gradient in bfloat16."""
        kind = ir.TensorType(ir.DataType.BFLOAT16)
        value = ir.Value(name=f"{cotangent.name}.bfloat16", type=kind, shape=cotangent.shape)
        info = self.comm.values[cotangent]
        return self.comm.values.add(value, replace(info, type=type_text(kind), item_bytes=2))

    def _rounded(self, version: ShardedValue, low: ir.Value, name: str) -> str:
        """Rounds a term of a gradient to bfloat16, behind the sum over all parts of a batch; its name."""
        wanted = self.comm.builders.free(version.group, f"{name}.bfloat16")
        return self._cast(version, ShardedValue(low, version.group, version.layout), name, wanted)

    def _cast(self, version: ShardedValue, target: ShardedValue, name: str, made: str) -> str:
        to = ir.AttrInt64("to", int(target.value.dtype or ir.DataType.FLOAT))
        node = ir.Node("", "Cast", [ir.Value(name=name)], [to], outputs=[ir.Value(name=made)], name=made)
        self.update.append(version.group, ComputeOp(node, node))
        self.comm.builders.declare(version.group, made, target.value, self.comm.values.local_shape(target))
        return made

    def _own(self, version: ShardedValue, name: str, wanted: str) -> str:
        """A name for the gradient that no other parameter has and that a node makes; an Identity makes one where there is none."""
        builders = self.comm.builders.of(version.group)
        own = self.taken.get(name, set()).isdisjoint(version.group)
        made = not any(name in builder.constants for builder in builders)
        if not own or not made:
            name = self._emit(self.update, version, "Identity", [name], self.comm.builders.free(version.group, wanted))
        self.taken.setdefault(name, set()).update(version.group)
        return name

    def _brought(
        self,
        comm: CommLowering,
        version: ShardedValue,
        name: str,
        target: ShardedValue,
        wanted: str = "",
        *,
        only: bool = True,
    ) -> str:
        """Reshards a cotangent to another layout or group; its name there. `only`: nothing is added to it there."""
        if version == target:
            return name
        builders, primal = comm.builders, str(target.value.name).removesuffix(".grad")
        final = sum_spellings(wanted or str(target.value.name), target)
        if not only:
            final = brought_spellings(name, wanted or str(target.value.name), target)
        if version.group != target.group:
            # Ops whose cotangents are one value (a Sum's) send it for each, and a message has a name of its own.
            if not self._sent.get(name, set()).isdisjoint(version.group):
                name = self._emit(comm, version, "Identity", [name], first_free(builders, version.group, final))
            self._sent.setdefault(name, set()).update(version.group)
        apart = {*version.group}.isdisjoint(target.group) and builders.is_free(target.group, name)
        kept = apart and (name == final[0] if wanted else not version.layout.partial or target.layout.partial)
        out = name if kept else first_free(builders, tuple(dict.fromkeys((*version.group, *target.group))), final)
        return reshard(comm, version, name, target, out, f"gradient of '{primal}'")

    def _sum(
        self, comm: CommLowering, version: ShardedValue, names: Sequence[str], wanted: str = "", *, final: bool = True
    ) -> str:
        if len(names) == 1:
            return names[0]
        spellings = sum_spellings(wanted or str(version.value.name), version, final=final)
        made = first_free(comm.builders, version.group, spellings)
        return self._emit(comm, version, "Add" if len(names) == 2 else "Sum", names, made)

    def _emit(self, comm: CommLowering, version: ShardedValue, op_type: str, names: Sequence[str], made: str) -> str:
        node = ir.Node("", op_type, [ir.Value(name=name) for name in names], outputs=[ir.Value(name=made)], name=made)
        comm.append(version.group, ComputeOp(node, node))
        comm.builders.declare(version.group, made, version.value, comm.values.local_shape(version))
        return made
