"""Sums of cotangents: contributions are added in their own layout, then resharded; gradients of parameters are reduced in buckets.

A parameter's gradient is required in the layout in which the parameter is updated. If ranks have the same shard, their terms are reduced by
one AllReduce for many parameters, a bucket (`buckets.py`), which begins as soon as its last term is ready and overlaps the backward pass.
In a bucket, gradients that are updated by one optimizer with the same hyperparameters are adjacent.

    bucket 0   AllReduce(fc3.weight, fc3.bias, fc2.weight)     while fc1 and conv2 are differentiated

A parameter is updated in its own layout, or each rank updates its share (ZeRO, stage 1).

Ranks along a mesh axis that have the same shard of a parameter would all do the same update, and store the same state of the optimizer.
With `optimizer: {shard: dp}` each of them gets the sum of its share of the gradient (a ReduceScatter), updates it with its share of the
state, and the shares are gathered (an AllGather).

    weight [512, 256], whole on dp=4     ->     gradient, momentum and update [128, 256] on each
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import TaskKind, Value
from partc.compiler.ir.sharded import Ranks, ShardedValue, ranks_of
from partc.compiler.ir.training import Training
from partc.compiler.layout import moves as mv
from partc.compiler.layout.mesh import normal
from partc.compiler.layout.reshard import lower
from partc.compiler.lower.comm import CommLowering, computed
from partc.compiler.lower.local_view import AccumulatedGradient, Gradient
from partc.compiler.lower.reshard import reshard
from partc.compiler.plan.pipeline import MICROBATCH
from partc.compiler.sharding.values.operands import shared_out
from partc.compiler.tasks.buckets import Buckets, Fused, can_join
from partc.compiler.tasks.duals import brought_spellings, sum_spellings
from partc.compiler.tasks.packed_sums import can_be_packed
from partc.compiler.tasks.row_gradients import RowReduction, RowTerm
from partc.runtime.units import first_of

_MOST_MOVES = 2
"""The most collectives in sequence if ranks store shards that others also have: a ReduceScatter, and an AllReduce of shards."""


def _moves(source: ShardedValue, target: ShardedValue) -> tuple[mv.Move, ...]:
    return lower(source.layout, target.layout, source.group, target.group)


def _sent(source: ShardedValue, target: ShardedValue) -> list[mv.Move]:
    """Returns the moves of a reshard without those that slice, which send nothing."""
    return [move for move in _moves(source, target) if not isinstance(move, mv.Slice)]


class GradientReduction:
    """Adds up cotangents; `gradients` are those of parameters, in the order in which they are ready.

    Ops that add cotangents of one microbatch belong to the backward task, and ops that reduce a parameter's gradient over ranks to the
    update.
    """

    def __init__(
        self, program: Targeted, cotangents: Mapping[ir.Value, ir.Value], comm: CommLowering, training: Training
    ) -> None:
        self.program, self.cotangents, self.training = program, cotangents, training
        self.comm, self.update, self.at = comm, comm.of_task(TaskKind.UPDATE), comm.values.at
        self.accumulated: list[AccumulatedGradient] = []
        self.totals: dict[ShardedValue, Value] = {}
        """Maps each version to its complete cotangent."""
        self.gradients: list[Gradient] = []
        self.reserved: dict[Value, Ranks] = {}
        """Maps each value to the ranks on which it is a parameter's gradient."""
        self._sent: dict[Value, Ranks] = {}
        messages = program.plan.messages
        self.packed = messages.gradients if messages is not None else None
        self.buckets = Buckets(self.update, training.rules.bucket_bytes, "gradient", self.packed)
        self.parts = Buckets(self.comm, training.rules.bucket_bytes, "gradient", self.packed)
        """The buckets of gradients that are reduced in each microbatch."""
        self.refused: list[str] = []
        """Parameters whose gradients cannot be sent in eight bits as the plan says, each with the reason."""
        self.rows = RowReduction(self.comm, self.update, training.rules.accumulate, low=training.low_messages)
        self.waiting = Counter(
            unit.name
            for value, unit in program.pinned.units.items()
            if value in training.parameters and not training.parameters[value].frozen
        )
        """Maps each unit of stored parameters to the number of gradients to come."""
        self._sums: dict[ir.Value, tuple[Value, Value]] = {}
        """Maps each parameter to the sum of its gradients over the microbatches, before and after one more."""
        if training.rules.accumulate > 1:
            job = comm.job
            for value in training.parameters:
                total = job.value(job.everyone, f"{value.name}.grad.sum")
                self._sums[value] = total, job.derived_on(job.everyone, total, ".next")

    def total(self, given: Mapping[ShardedValue, Sequence[Value]], target: ShardedValue) -> Value:
        """Returns the sum of a cotangent's contributions (`given`, by their layout), in the layout of `target`."""
        return self._total(self.comm, given, target, "")

    def sum_of(self, version: ShardedValue, values: Sequence[Value]) -> Value:
        """Returns the sum of contributions that have one layout, in this layout."""
        return self._sum(self.comm, version, values)

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
        each = (
            self.training.rules.accumulate > 1
            and bool(self._unit(value))
            and self.program.plan.stored.reduce == MICROBATCH
        )
        if self.training.rules.accumulate > 1 and not each:
            gradients = {
                version: [self._added(value, version, terms, at)]
                for at, (version, terms) in enumerate(gradients.items())
            }
        self._reduce(value, gradients, self._own_homes(defs), each)
        self._close(value)

    def _close(self, value: ir.Value) -> None:
        """Closes the buckets of a stored parameter's unit, if this is the last of its gradients."""
        if unit := self._unit(value):
            self.waiting[unit] -= 1
            if not self.waiting[unit]:
                self.parts.close(unit)
                self.buckets.close(unit)

    def _unit(self, value: ir.Value) -> str:
        """Returns the unit of a stored parameter; empty for another one."""
        return self.program.pinned.units[value].name if value in self.program.pinned.units else ""

    def _reduce(
        self,
        value: ir.Value,
        gradients: Mapping[ShardedValue, Sequence[Value]],
        defs: Sequence[ShardedValue],
        each: bool,
    ) -> None:
        """Reduces a gradient, and sends it to all definitions. `each`: whether it is per microbatch, and the sum updates the parameter."""
        main, comm = defs[0], self.comm if each else self.update
        share = shared_out(self.program, main, self.training.rules.optimizer.shard) if len(defs) == 1 else main
        if self.packed and not all(one.layout == share.layout or can_be_packed(_sent(one, share)) for one in gradients):
            share = main  # what is not sums alone all ranks update
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
                rounded[to] = [self._cast(comm, to, whole, made)]
            gradients = rounded
        if len(gradients) == 1:
            ((version, terms),) = gradients.items()
            sums = _sent(version, target)
            if self.packed:
                joins = can_be_packed(sums) and value.dtype == ir.DataType.FLOAT
            else:
                joins = 1 <= len(sums) <= _MOST_MOVES and all(can_join((move,)) for move in sums)
            if joins:
                total = self._sum(self.comm, version, terms)
                self._bucketed(value, version, total, target, _moves(version, target), defs, wanted, each)
                return
        if self.packed and (len(gradients) > 1 or any(one != target for one in gradients)):
            self.refused.append(f"'{value.name}'")
        total = self._total(comm, gradients, target, wanted)
        if each:
            target, total = self._added_up(value, target, total)
        self._ready(value, total, target, defs)

    def table(
        self, value: ir.Value, terms: Sequence[RowTerm], defs: Sequence[ShardedValue], *, dense: bool = False
    ) -> None:
        """Sends the rows of a table's gradient to all of its definitions, and makes them `dense` there."""

        def ready(found: list[Gradient]) -> None:
            self.gradients += [self.rows.made_dense(one, self.cotangents[value]) for one in found] if dense else found

        self.rows.begin(value, terms, self._own_homes(defs), ready)
        self._close(value)

    def _added_up(self, value: ir.Value, version: ShardedValue, reduced: Value) -> tuple[ShardedValue, Value]:
        """Adds the reduced gradient of a microbatch to the sum of the earlier ones; returns the sum's version and the sum."""
        exact = ShardedValue(self.cotangents[value], version.group, version.layout)
        if exact != version:
            reduced = self._cast(self.comm, exact, reduced, self.comm.job.derived_on(exact.group, reduced, ".exact"))
        return exact, self._added(value, exact, [reduced], 0)

    def _added(self, value: ir.Value, version: ShardedValue, terms: Sequence[Value], at: int) -> Value:
        """Adds a gradient to the sum of the batch's earlier microbatches, before it is reduced over ranks; returns the sum."""
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
        """Returns the definitions without those whose ranks have the same tensor as part of a larger group's: it is updated once."""
        at, found = self.at, list[ShardedValue]()
        for home in sorted(defs, key=lambda home: -len(home.group)):
            if not any(at[one] is at[home] and {*home.group} <= {*one.group} for one in found):
                found.append(home)
        return sorted(found, key=defs.index)

    def flush(self) -> None:
        """Reduces the gradients of buckets that are not full, and gathers rows; raises CompileError if one cannot be packed."""
        messages = self.comm.program.plan.messages
        if messages is not None and self.refused:
            fact = f"the gradients of {first_of(self.refused)} do not travel in eight bits"
            law = "a gradient of float32 does, whose terms one set of ranks adds up"
            help_ = "leave it out, or write precision: {messages: bfloat16}; or place the readers of each parameter on one group"
            raise CompileError(Problem(messages.where("gradients"), fact, law, help_))
        take_apart = self.rows.flush()
        self.parts.flush()
        self.buckets.flush()
        take_apart()

    def _bucketed(
        self,
        value: ir.Value,
        version: ShardedValue,
        gradient: Value,
        target: ShardedValue,
        moves: Sequence[mv.Move],
        defs: Sequence[ShardedValue],
        wanted: str,
        each: bool,
    ) -> None:
        """Reduces a gradient along with others by the first of `moves`, and its result by the others; `each`: as in `_reduce`."""
        move, *others = moves
        to = ShardedValue(target.value, target.group, normal(move.after)) if others else target
        comm = self.comm if each else self.update
        if isinstance(move, mv.Slice):
            shard = self.comm.job.derived_on(to.group, gradient, ".shard")
            shard = reshard(comm, version, gradient, to, shard, f"gradient of '{value.name}'")
            if others:
                self._bucketed(value, to, shard, target, others, defs, wanted, each)
            else:
                self._ready(value, shard, to, defs)
            return
        shape, term = self.comm.values.local_shape(to), self.comm.values.local_shape(version)
        assert shape is not None
        assert term is not None
        gradient = self._own(version, gradient, f"{self.at[defs[0]]}.grad.partial", comm)
        result = self.comm.job.value(to.group, f"{wanted}.scattered" if others else wanted)
        self.comm.job.declare(to.group, result, self.comm.values.local_value(to), shape)
        options = self.training.parameters[value]
        updated_alike = self.training.optimizer_of(value), options.weight_decay, self.training.lr_multiplier(value)

        def ready() -> None:
            after, reduced = self._added_up(value, to, result) if each else (to, result)
            if others:
                if not each:  # what one collective puts next to others another one puts next to others of its own
                    own = self.comm.job.derived_on(after.group, reduced, ".own")
                    reduced = self._emit(self.update, after, "Identity", [reduced], own)
                final = ShardedValue(after.value, target.group, target.layout)
                self._bucketed(value, after, reduced, final, others, defs, f"{self.at[defs[0]]}.grad", False)
            else:
                self._ready(value, reduced, after, defs)

        unit = self._unit(value)
        (self.parts if each else self.buckets).add(
            cast(Fused, move), to.value, gradient, term, result, ready, updated_alike, unit
        )

    def _ready(self, value: ir.Value, gradients: Value, target: ShardedValue, defs: Sequence[ShardedValue]) -> None:
        """Records a gradient that is complete on the first definition of its parameter, and sends it to the others."""
        if target.value is not self.cotangents[value]:
            target = ShardedValue(self.cotangents[value], target.group, target.layout)
            exact = self.comm.job.value(target.group, f"{self.at[defs[0]]}.grad")
            gradients = self._cast(self.update, target, gradients, exact)
        gradients = self._own(target, gradients, f"{self.at[defs[0]]}.grad")
        share = ShardedValue(value, target.group, target.layout)
        self.gradients.append(Gradient(value, defs[0], gradients, share))
        for home in defs[1:]:
            wanted = ShardedValue(self.cotangents[value], home.group, home.layout)
            other = self._brought(self.update, target, gradients, wanted, f"{self.at[home]}.grad")
            own = self._own(wanted, other, f"{self.at[home]}.grad")
            self.gradients.append(Gradient(value, home, own, home))

    def _cast(self, comm: CommLowering, target: ShardedValue, given: Value, made: Value) -> Value:
        to = int(target.value.dtype or ir.DataType.FLOAT)
        comm.append(target.group, computed("Cast", [given], [made], to=to))
        self.comm.declare(target, made)
        return made

    def _own(self, version: ShardedValue, gradients: Value, wanted: str, comm: CommLowering | None = None) -> Value:
        """Returns a value for the gradient that a node makes and no other parameter has, through an Identity if necessary."""
        here = ranks_of(version.group)
        if (self.reserved.get(gradients, 0) | self.comm.job.constants.ranks(gradients)) & here:
            made = self.comm.job.value(version.group, wanted)
            gradients = self._emit(comm or self.update, version, "Identity", [gradients], made)
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
        """Reshards a cotangent to another layout or group, and returns its value there. `only`: whether it is the only term there."""
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
        comm.declare(version, made)
        return made
