"""Sums of cotangents: contributions are added in their own layout, then resharded; gradients of parameters are reduced in buckets.

A parameter's gradient is wanted as the parameter is updated. Where ranks hold the same shard of it, their terms are reduced by one
AllReduce for many parameters, a bucket (`buckets.py`), which begins as soon as the last of them is there and goes on beside the
backward pass. In a bucket those that are updated alike, by one optimizer with the same numbers, are side by side.

    bucket 0   AllReduce(fc3.weight, fc3.bias, fc2.weight)     while fc1 and conv2 are differentiated

Where a parameter is updated: as it lies, or each rank its share (ZeRO, stage 1).

Ranks along a mesh axis that hold the same shard of a parameter would all do the same update, and keep the same state of the optimizer.
With `optimizer: {shard: dp}` each of them gets the sum of its share of the gradient (a ReduceScatter), updates that with its share of
the state, and the shares are gathered (an AllGather).

    weight [512, 256], whole on dp=4     ->     gradient, momentum and update [128, 256] on each
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias, cast

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import TaskKind, Value
from partc.compiler.ir.sharded import Ranks, ShardedValue, ranks_of
from partc.compiler.ir.training import Training
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal, on_common_mesh
from partc.compiler.layout.reshard import lower
from partc.compiler.lower.comm import CommLowering, computed
from partc.compiler.lower.local_view import AccumulatedGradient, Gradient
from partc.compiler.lower.reshard import reshard
from partc.compiler.tasks.buckets import Buckets, Fused, can_join
from partc.compiler.tasks.cotangent_names import brought_spellings, sum_spellings
from partc.compiler.tasks.row_gradients import RowReduction, RowTerm

Over: TypeAlias = str | Literal[True] | None
"""The mesh axis whose ranks share the work; True: all ranks that hold the same."""


def shared_out(program: Targeted, version: ShardedValue, over: Over) -> ShardedValue:
    """The version of a parameter that each rank updates: sharded further along the first divisible dim, if there is one."""
    if not over:
        return version
    axes = program.plan.axes_of(version.group) or (("", len(version.group)),)
    places = tuple(place for place, (name, _) in enumerate(axes) if over is True or name == over)
    common = on_common_mesh(version.layout, Layout(tuple(size for _, size in axes), (places,))) if places else None
    shape = program.values[version.value].shape
    if common is None or shape is None:
        return version
    layout, marked = common
    used = {axis for cuts in layout.cuts for axis in cuts}
    free = tuple(axis for axis in marked.cuts[0] if axis not in used)
    shards = math.prod(layout.mesh[axis] for axis in free)
    dim = shared_dim(program, version, shards)
    if dim is None:
        return version
    cuts = tuple(own + free if at == dim else own for at, own in enumerate(layout.cuts))
    return ShardedValue(version.value, version.group, normal(Layout(layout.mesh, cuts)))


def shared_dim(program: Targeted, version: ShardedValue, shards: int) -> int | None:
    """The dim along which ranks share the update of a parameter; where it has the same bits on any number of ranks the same for each."""
    rules, shape = program.plan.pipeline, program.values[version.value].shape
    assert shape is not None
    least = rules.shares if rules is not None and rules.parts else shards
    return divided_dim(shape, [version.layout.num_shards(dim) for dim in range(len(shape))], least)


def divided_dim(shape: Sequence[int | str], cut: Sequence[int], shards: int) -> int | None:
    """The first dim of a parameter, whose dims are cut into as many shards as `cut` says, that can be divided further into `shards`."""
    sizes = enumerate(zip(shape, cut, strict=True))
    fits = (dim for dim, (size, own) in sizes if isinstance(size, int) and size and size % (own * shards) == 0)
    return next(fits, None) if shards > 1 else None


class GradientReduction:
    """Adds cotangents up; `gradients` are those of parameters, in the order in which they are ready.

    What adds cotangents of one microbatch belongs to the backward task, and what reduces a parameter's gradient over ranks to the update.
    """

    def __init__(
        self, program: Targeted, cotangents: Mapping[ir.Value, ir.Value], comm: CommLowering, training: Training
    ) -> None:
        self.program, self.cotangents, self.training = program, cotangents, training
        self.comm, self.update, self.at = comm, comm.of_task(TaskKind.UPDATE), comm.values.at
        self.accumulated: list[AccumulatedGradient] = []
        self.totals: dict[ShardedValue, Value] = {}
        """Maps each version to its complete cotangents."""
        self.gradients: list[Gradient] = []
        self.reserved: dict[Value, Ranks] = {}
        """Maps each value to the ranks on which it is a parameter's gradient."""
        self._sent: dict[Value, Ranks] = {}
        self.buckets = Buckets(self.update, training.rules.bucket_bytes, "gradient")
        self.rows = RowReduction(self.comm, self.update, training.rules.accumulate, low=training.low_messages)
        self._sums: dict[ir.Value, tuple[Value, Value]] = {}
        """Maps each parameter to the sum of its gradients over the microbatches, before and after one more."""
        if training.rules.accumulate > 1:
            job = comm.job
            for value in training.parameters:
                total = job.value(job.everyone, f"{value.name}.grad.sum")
                self._sums[value] = total, job.derived_on(job.everyone, total, ".next")

    def total(self, given: Mapping[ShardedValue, Sequence[Value]], target: ShardedValue) -> Value:
        """The sum of a cotangent's contributions (`given`, by their layout), in the layout of `target`."""
        return self._total(self.comm, given, target, "")

    def _total(
        self, comm: CommLowering, given: Mapping[ShardedValue, Sequence[Value]], target: ShardedValue, wanted: str
    ) -> Value:
        only = len(given) == 1
        brought: list[Value] = []
        for version, values in given.items():
            one = self._sum(self.comm, version, values, final=only and version == target)
            brought.append(self._brought(comm, version, one, target, wanted, only=only))
        total = self._sum(comm, target, brought, wanted)
        self.totals.setdefault(target, total)
        return total

    def parameter(
        self, value: ir.Value, gradients: Mapping[ShardedValue, Sequence[Value]], defs: Sequence[ShardedValue]
    ) -> None:
        """Reduces the gradient of a parameter on the first of its definitions `defs`, and sends it to the others."""
        if self.training.rules.accumulate > 1:
            gradients = {
                version: [self._added(value, version, terms, at)]
                for at, (version, terms) in enumerate(gradients.items())
            }
        defs = self._own_homes(defs)
        main = defs[0]
        share = shared_out(self.program, main, self.training.rules.optimizer.shard) if len(defs) == 1 else main
        target = ShardedValue(self.cotangents[value], main.group, share.layout)
        wanted = f"{self.at[main]}.grad"
        if self.training.low_messages and value.dtype == ir.DataType.FLOAT and any(one != target for one in gradients):
            cotangent, kind = target.value, ir.TensorType(ir.DataType.BFLOAT16)
            low = ir.Value(name=f"{cotangent.name}.bfloat16", type=kind, shape=cotangent.shape)
            info = self.comm.values[cotangent]
            self.comm.values.add(low, replace(info, type=type_text(kind), item_bytes=2))
            target, wanted = ShardedValue(low, main.group, share.layout), f"{wanted}.bfloat16"
            rounded: dict[ShardedValue, list[Value]] = {}
            for one, terms in gradients.items():  # behind the sum over all parts of a batch
                whole, to = self._sum(self.comm, one, terms), ShardedValue(low, one.group, one.layout)
                made = self.comm.job.derived_on(one.group, whole, ".bfloat16")
                rounded[to] = [self._cast(one, to, whole, made)]
            gradients = rounded
        if len(gradients) == 1:
            ((version, terms),) = gradients.items()
            moves = lower(version.layout, target.layout, version.group, target.group)
            if can_join(moves):
                self._bucketed(
                    value, version, self._sum(self.comm, version, terms), target, cast(Fused, moves[0]), defs, wanted
                )
                return
        self._ready(value, self._total(self.update, gradients, target, wanted), target, defs)

    def table(
        self, value: ir.Value, terms: Sequence[RowTerm], defs: Sequence[ShardedValue], *, dense: bool = False
    ) -> None:
        """Brings the rows of a table's gradient to all of its definitions, and makes them `dense` there."""

        def ready(found: list[Gradient]) -> None:
            self.gradients += [self.rows.made_dense(one, self.cotangents[value]) for one in found] if dense else found

        self.rows.begin(value, terms, self._own_homes(defs), ready)

    def _added(self, value: ir.Value, version: ShardedValue, terms: Sequence[Value], at: int) -> Value:
        """Adds a gradient to the sum of those of the batch's earlier parts, before it is reduced over ranks; the sum."""
        total, job = self._sum(self.comm, version, terms), self.comm.job
        kept, following = self._sums[value]
        if at:
            kept = job.value(version.group, f"{value.name}.grad.sum.{at + 1}")
            following = job.derived_on(version.group, kept, ".next")
        job.declare(version.group, kept, version.value, self.comm.values.local_shape(version))
        made = self._emit(self.comm, version, "Add", [kept, total], following)
        self.accumulated.append(AccumulatedGradient(value, version, kept))
        return made

    def _own_homes(self, defs: Sequence[ShardedValue]) -> list[ShardedValue]:
        """The definitions without those whose ranks hold the same tensor by a larger one: it is updated once."""
        at, found = self.at, list[ShardedValue]()
        for home in sorted(defs, key=lambda home: -len(home.group)):
            if not any(at[one] is at[home] and {*home.group} <= {*one.group} for one in found):
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
        given: Value,
        target: ShardedValue,
        move: Fused,
        defs: Sequence[ShardedValue],
        wanted: str,
    ) -> None:
        shape, term = self.comm.values.local_shape(target), self.comm.values.local_shape(version)
        assert shape is not None
        assert term is not None
        given = self._own(version, given, f"{self.at[defs[0]]}.grad.partial")
        made = self.comm.job.value(target.group, wanted)
        self.comm.job.declare(target.group, made, target.value, shape)
        options = self.training.parameters[value]
        updated_alike = self.training.optimizer_of(value), options.weight_decay, self.training.lr_multiplier(value)
        ready = partial(self._ready, value, made, target, defs)
        self.buckets.add(move, target.value, given, term, made, ready, updated_alike)

    def _ready(self, value: ir.Value, gradients: Value, target: ShardedValue, defs: Sequence[ShardedValue]) -> None:
        """Records a gradient that is complete on the first definition of its parameter, and sends it to the others."""
        if target.value is not self.cotangents[value]:
            rounded, target = target, ShardedValue(self.cotangents[value], target.group, target.layout)
            exact = self.comm.job.value(target.group, f"{self.at[defs[0]]}.grad")
            gradients = self._cast(rounded, target, gradients, exact)
        gradients = self._own(target, gradients, f"{self.at[defs[0]]}.grad")
        share = ShardedValue(value, target.group, target.layout)
        self.gradients.append(Gradient(value, defs[0], gradients, share))
        for home in defs[1:]:
            wanted = ShardedValue(self.cotangents[value], home.group, home.layout)
            other = self._brought(self.update, target, gradients, wanted, f"{self.at[home]}.grad")
            own = self._own(wanted, other, f"{self.at[home]}.grad")
            self.gradients.append(Gradient(value, home, own, home))

    def _cast(self, version: ShardedValue, target: ShardedValue, given: Value, made: Value) -> Value:
        to = int(target.value.dtype or ir.DataType.FLOAT)
        self.update.append(version.group, computed("Cast", [given], [made], to=to))
        self.comm.job.declare(version.group, made, target.value, self.comm.values.local_shape(target))
        return made

    def _own(self, version: ShardedValue, gradients: Value, wanted: str) -> Value:
        """A value for the gradient that no other parameter has and that a node makes; an Identity makes one where there is none."""
        here = ranks_of(version.group)
        if (self.reserved.get(gradients, 0) | self.comm.job.constants.ranks(gradients)) & here:
            made = self.comm.job.value(version.group, wanted)
            gradients = self._emit(self.update, version, "Identity", [gradients], made)
        self.reserved[gradients] = self.reserved.get(gradients, 0) | here
        return gradients

    def _brought(
        self,
        comm: CommLowering,
        version: ShardedValue,
        gradients: Value,
        target: ShardedValue,
        wanted: str = "",
        *,
        only: bool = True,
    ) -> Value:
        """Reshards a cotangent to another layout or group; the value there. `only`: nothing is added to it there."""
        if version == target:
            return gradients
        job, primal = comm.job, name_of(target.value).removesuffix(".grad")
        final = sum_spellings(wanted or name_of(target.value), target)
        if not only:
            final = brought_spellings(str(gradients), wanted or name_of(target.value), target)
        if version.group != target.group:
            # Ops whose cotangents are one value (a Sum's) send it for each, and a message has a value of its own.
            here = ranks_of(version.group)
            if self._sent.get(gradients, 0) & here:
                gradients = self._emit(comm, version, "Identity", [gradients], job.value(version.group, *final))
            self._sent[gradients] = self._sent.get(gradients, 0) | here
        there = ranks_of(target.group)
        apart = not there & (ranks_of(version.group) | job.known(gradients))
        kept = apart and (str(gradients) == final[0] if wanted else not version.layout.partial or target.layout.partial)
        if not kept:
            out = job.value(ranks_of(version.group) | there, *final)
        else:  # shards of another shape are another value of the same name
            out = gradients if version.layout.shards == target.layout.shards else job.derived_on(there, gradients, "")
        return reshard(comm, version, gradients, target, out, f"gradient of '{primal}'")

    def _sum(
        self, comm: CommLowering, version: ShardedValue, terms: Sequence[Value], wanted: str = "", *, final: bool = True
    ) -> Value:
        if len(terms) == 1:
            return terms[0]
        spellings = sum_spellings(wanted or name_of(version.value), version, final=final)
        made = comm.job.value(version.group, *spellings)
        return self._emit(comm, version, "Add" if len(terms) == 2 else "Sum", terms, made)

    def _emit(
        self, comm: CommLowering, version: ShardedValue, op_type: str, given: Sequence[Value], made: Value
    ) -> Value:
        comm.append(version.group, computed(op_type, given, [made]))
        comm.job.declare(version.group, made, version.value, comm.values.local_shape(version))
        return made
