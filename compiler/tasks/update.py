"""Pass: the end of a training step: gradients are clipped, then every parameter and its optimizer state are replaced by their next values.

One node a parameter, a function of `partc.optimizer` whose body is plain ONNX, behind everything that reads the parameter:

    %fc1.weight.next, %fc1.weight.momentum.next = partc.optimizer::Momentum(%fc1.weight, %fc1.weight.grad, %fc1.weight.momentum, %lr)

Each version of a parameter is updated where it lies, from the same gradient, so the versions stay equal bit by bit.

Parameters that are updated late: `staleness: k` keeps a queue of k gradients, and a step's update takes the one that is k steps old.

    step t   reads what the updates of steps up to t - 1 - k have made
             w.next = Sgd(w, w.pending.1)        the gradient of step t - k; zeros in the first k steps
             w.pending.1.next = w.pending.2, w.pending.2.next = w.grad

Exactly k, so equal to a queue in one process, whatever the ranks and their speeds. Gradients that are pending are state, and in
checkpoints; those of a table are whole tables.

The update of a table by the rows of its gradient: rows that stand several times are merged, where the update wants each once.

%t.grad.merged.ids, %t.grad.merged.rows = partc.optimizer::MergeRows(%t.grad.ids, %t.grad.rows) %t.next = partc.optimizer::SgdRowsScaled(%t,
%t.grad.merged.ids, %t.grad.merged.rows, %lr, %gradients.scale)

Sums over the shards of a parameter, in the middle of its update: norms, means of rows and of columns.

%w.squares.whole = partc.comm::AllReduce(%w.squares)      # norms of 'w'

A parameter that lies in several ways has its sums from where it is updated first: another order of a sum would be another number, and
versions must stay equal bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, TypeAlias, cast

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.computed import tensor_of
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import State, TaskKind, Value, ValueMap
from partc.compiler.ir.sharded import Group, ShardedValue, ranks_of
from partc.compiler.ir.training import ParameterOptions, Training
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.layout.moves import AllReduce
from partc.compiler.layout.reshard import lower
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.job import Job
from partc.compiler.lower.local_view import AccumulatedGradient, Gradient, Localized, LocalView
from partc.compiler.lower.reshard import reshard
from partc.compiler.sharding.values.operands import replicated_on
from partc.compiler.tasks.buckets import Buckets, Fused, can_join
from partc.compiler.tasks.duals import typed
from partc.compiler.tasks.gradient_norm import GradientNorm, UpdateWriter, number_type
from partc.compiler.training.loss_scale import STATE, STEPS, next_nodes, number
from partc.compiler.training.optimizers import (
    ShardSum,
    Step,
    clip_scale,
    merge_node,
    row_update_node,
    takes_rows_again,
    update_steps,
    without_terms,
)
from partc.runtime.artifact.format import GRADIENT_NORM

Append = Callable[[Group, Sequence[ir.Node], ValueMap], None]
_IDS = ir.TensorType(ir.DataType.INT64)


@dataclass(frozen=True)
class RowUpdates:
    """Writes the updates by rows; `append` writes nodes on the ranks of a group, over values."""

    training: Training
    job: Job
    append: Append

    def wants_each_once(self, one: Gradient, clipped: bool) -> bool:
        """Whether a gradient is by rows of which each must stand once: where it is `clipped` by its norm, or its update is not linear."""
        form = self.training.optimizer_of(one.parameter).form
        return one.ids is not None and (
            clipped or not takes_rows_again(form.function, bool(self.training.rules.clipping.value))
        )

    def merged(self, gradient: Gradient) -> Gradient:
        """The gradient with each id once."""
        assert gradient.ids is not None
        base, group = str(gradient.value).removesuffix(".rows"), gradient.owner.group
        ids, rows = (self.job.value(group, f"{base}.merged.{word}") for word in ("ids", "rows"))
        values = ValueMap()
        made = [values.of(ids, _IDS), values.of(rows, gradient.parameter.type)]
        self.append(group, [merge_node(values.of(gradient.ids), values.of(gradient.value), made)], values)
        return replace(gradient, value=rows, ids=ids, distinct=True)

    def update(
        self,
        gradient: Gradient,
        table: ir.Value,
        slots: Sequence[ir.Value],
        scalars: dict[str, ir.Value],
        outputs: Sequence[ir.Value],
        values: ValueMap,
    ) -> None:
        """Writes the update of a table and its slots, over values."""
        assert gradient.ids is not None
        learned: ParameterOptions = self.training.parameters[gradient.parameter]
        node = row_update_node(
            self.training.optimizer_of(gradient.parameter),
            table,
            values.of(gradient.ids),
            values.of(gradient.value, table.type),
            slots,
            scalars,
            outputs,
            weight_decay=learned.weight_decay,
            lr_multiplier=self.training.lr_multiplier(gradient.parameter),
            clip_value=self.training.rules.clipping.value or 0.0,
        )
        self.append(gradient.owner.group, [node], values)


@dataclass(frozen=True)
class Pending:
    """One gradient of a queue, and the value that takes its place."""

    value: Value
    next: Value


@dataclass(frozen=True)
class Queues:
    """Writes the queues of gradients.

    `append` writes nodes on the ranks of a group, over values; `keep` lists a gradient of a queue as state.
    """

    training: Training
    job: Job
    append: Callable[[Group, Sequence[ir.Node], ValueMap], None]
    keep: Callable[[Gradient, Pending, int], None]

    def late(self, gradients: Sequence[Gradient], shape: Callable[[Gradient], tuple[int, ...]]) -> list[Gradient]:
        """The gradients that update in a step, of shards of these shapes."""
        return [self._late(one, shape(one)) for one in gradients]

    def _late(self, gradient: Gradient, shape: Sequence[int]) -> Gradient:
        count = self.training.parameters[gradient.parameter].staleness
        if not count:
            return gradient

        base, group = str(gradient.value).removesuffix(".grad"), gradient.owner.group
        waiting = [self.job.value(group, f"{base}.pending.{k + 1}") for k in range(count)]
        for k, (value, source) in enumerate(zip(waiting, [*waiting[1:], gradient.value], strict=True)):
            made = self.job.derived_on(group, value, ".next")
            values = ValueMap()
            given, after = (values.of(each, gradient.parameter.type, ir.Shape(shape)) for each in (source, made))
            self.append(group, [ir.Node("", "Identity", [given], outputs=[after], name=after.name)], values)
            self.keep(gradient, Pending(value, made), k + 1)
        return replace(gradient, value=waiting[0])


Kind: TypeAlias = Literal["parameter", "optimizer", "statistics", "gradient", "scale"]
_NO_BOUND = float(np.finfo(np.float32).max)
"""A norm that no gradient is scaled down to."""


def update(program: Localized) -> Localized:
    """Writes the update of every parameter into `local`, and lists what ranks keep; does nothing for a program that trains nothing."""
    if program.training is None:
        return program
    local = program.local.begin(TaskKind.UPDATE)
    updates = Updates(program, local)
    updates.write(local.gradients)
    updates.keep_sums(local.accumulated)
    return replace(program, local=local)


class Updates(UpdateWriter):
    """Writes the updates of all parameters into `local`, and lists what ranks keep."""

    def __init__(self, program: Localized, local: LocalView) -> None:
        assert program.training is not None
        super().__init__(program, local)
        self.versions, self.at = local.versions, local.comm.values.at
        self.training: Training = program.training
        self.gathers = Buckets(local.comm, self.training.rules.bucket_bytes, "update")
        self.norm = GradientNorm(program, local)
        self.scale = self.job.number("gradients.scale")
        self.rows = RowUpdates(self.training, self.job, self._append)
        self.sums = ShardSums(program, local.comm, self._append)

    def write(self, gradients: Sequence[Gradient]) -> None:
        """Writes all updates, in the order in which the `gradients` are ready."""
        gradients = Queues(self.training, self.job, self._append, self._keep_pending).late(gradients, self._sizes)
        clipped = (self.training.rules.clipping.norm is not None or self.training.rules.guarded) and bool(gradients)
        reported = bool(gradients) and GRADIENT_NORM in (self.training.rules.report or ())
        measured = clipped or reported
        gradients = [*gradients]
        for k, gradient in enumerate(gradients):
            if self.rows.wants_each_once(
                gradient, measured
            ):  # where the parameter is updated: kernels that merge are those of CPUs
                self.target = self.program.update_targets.get(gradient.parameter, "")
                gradients[k], self.target = self.rows.merged(gradient), ""
        if measured:
            total = self.norm.of(gradients)
        if reported:
            self.norm.report(total, None if self.training.scale is None else self._divide_by_scale)
        if clipped:
            self._clip(total)
        elif self.training.scale is not None and gradients:
            self._divide_by_scale(self.scale)
        for some in self._by_bucket(gradients):
            shards = [self._shard(one) for one in some]
            scaled = clipped or self.training.scale is not None
            written = [self._update(one, shard, scaled) for one, shard in zip(some, shards, strict=True)]
            for gradient, values in zip(some, written, strict=True):
                self._replace(gradient, *values)
        if not gradients:
            self._keep_scale(None, None)
        self.gathers.flush()
        updated = {(one.parameter, one.owner) for one in gradients}
        for value in self.training.parameters:
            for home in self.versions.defs.get(value, ()):
                if (value, home) not in updated:
                    self._keep(home, self.at[home], None, tensor_of(value), "parameter")
        for value, following in self.training.statistics.items():
            for home in self.versions.defs.get(value, ()):
                made = None if following is None else self._replacing(home, following)
                self._keep(home, self.at[home], made, name_of(value), "statistics")

    def _sizes(self, one: Gradient) -> tuple[int, ...]:
        """The shape of what a rank updates of a parameter, which is known."""
        return tuple(size for size in self.values.local_shape(one.share) or () if isinstance(size, int))

    def _keep_pending(self, one: Gradient, pending: Pending, number: int) -> None:
        """Lists a gradient that waits for its update."""
        tensor, shape = tensor_of(one.parameter), ir.Shape(self._sizes(one))
        self._declare(one.owner.group, pending.value, ir.Value(name="", type=one.parameter.type, shape=shape))
        listed = self.job.derived(f"{tensor}.pending.{number}")
        self._keep(one.share, pending.value, pending.next, listed, "optimizer", tensor)

    def keep_sums(self, sums: Sequence[AccumulatedGradient]) -> None:
        """Lists the sums of gradients over the parts of a batch."""
        for one in sums:
            parameter = tensor_of(one.parameter)
            self._keep(one.version, one.value, None, str(one.value), "gradient", parameter)

    def _by_bucket(self, gradients: Sequence[Gradient]) -> Iterator[list[Gradient]]:
        """The gradients in runs whose updated shards fill a bucket, which is gathered while the next run is updated; one run without ZeRO.

        All shards of a run are cut out before the first of its updates, so a rank cuts them in one session and updates them as one. What
        has sums in the middle of its update ends a run: it runs by itself.
        """
        run, filled = list[Gradient](), 0
        for one in gradients:
            run.append(one)
            if one.share != one.owner:
                filled += prod(self._sizes(one)) * (self.values[one.parameter].item_bytes or 1)
            if filled >= self.gathers.filling.limit or not self.training.optimizer_of(one.parameter).is_elementwise:
                yield run
                run, filled = [], 0
        if run:
            yield run

    def _shard(self, gradient: Gradient) -> Value:
        """The part of a parameter that a rank updates: all that it has, or with ZeRO the shard that is cut out of it."""
        home = self.at[gradient.owner]
        if gradient.share == gradient.owner:
            return home
        shard, cause = (
            self.job.derived_on(gradient.owner.group, home, ".share"),
            f"update of '{gradient.parameter.name}'",
        )
        return reshard(self.comm, gradient.owner, home, gradient.share, shard, cause)

    def _update(self, gradient: Gradient, shard: Value, clipped: bool) -> tuple[list[Value], list[Value]]:
        """Writes the update of a shard; the slots of its optimizer, and what takes the places of the shard and of the slots."""
        optimizer = self.training.optimizer_of(gradient.parameter)
        self.target = self.program.update_targets.get(gradient.parameter, "")
        home, group = self.at[gradient.owner], gradient.owner.group
        shape, kind = self.values.local_shape(gradient.share) or (), gradient.parameter.type

        def typed_as(value: Value, ones: Sequence[int] = ()) -> ir.Value:
            dims = [1 if dim - len(shape) in ones else size for dim, size in enumerate(shape)]
            return values.of(value, kind, ir.Shape(dims))

        kept = optimizer.slots_of(len(shape))
        slots = [self.job.derived_on(group, home, f".{slot}") for slot in kept]
        following = [self.job.derived_on(group, of, ".next") for of in (shard, *slots)]
        fed = {scalar: self.job.scalar(group, name) for scalar, name in self.training.scalars_of(optimizer).items()}
        if clipped:
            fed["scale"] = self.scale
        values = ValueMap()
        slot_values = [typed_as(slot, ones) for slot, ones in zip(slots, kept.values(), strict=True)]
        outputs = [typed_as(value, ones) for value, ones in zip(following, ((), *kept.values()), strict=True)]
        scalars = {scalar: values.of(value) for scalar, value in fed.items()}
        if gradient.ids is not None:
            self.rows.update(gradient, typed_as(shard), slot_values, scalars, outputs, values)
        else:
            self._write_update(gradient, typed_as(shard), slot_values, scalars, outputs, values)
        for value, typed_value in zip((*slots, *following), (*slot_values, *outputs), strict=True):
            self._declare(group, value, typed_value)
        return slots, following

    def _replace(self, gradient: Gradient, slots: Sequence[Value], next_values: Sequence[Value]) -> None:
        """Lists what takes the places of a parameter, which is gathered from updated shards with ZeRO, and of its optimizer's slots."""
        optimizer, tensor = self.training.optimizer_of(gradient.parameter), tensor_of(gradient.parameter)
        following = next_values[0] if gradient.share == gradient.owner else self._gather(gradient, next_values[0])
        self._keep(gradient.owner, self.at[gradient.owner], following, tensor, "parameter")
        kept = optimizer.slots_of(len(self.values.local_shape(gradient.share) or ()))
        for (slot, ones), state, after in zip(kept.items(), slots, next_values[1:], strict=True):
            listed = self.job.derived(f"{tensor}.{slot}")
            lies = self._home_of_slot(gradient, listed, ones)
            self._keep(lies, state, after, listed, "optimizer", tensor, optimizer.initial(slot))

    def _write_update(
        self,
        gradient: Gradient,
        shard: ir.Value,
        slots: Sequence[ir.Value],
        scalars: Mapping[str, ir.Value],
        outputs: Sequence[ir.Value],
        values: ValueMap,
    ) -> None:
        """Writes the update of a parameter by a dense gradient: one node, or several with sums over shards between them."""
        steps = update_steps(
            self.training.optimizer_of(gradient.parameter),
            shard,
            values.of(gradient.value, shard.type, shard.shape),
            slots,
            scalars,
            outputs,
            weight_decay=self.training.parameters[gradient.parameter].weight_decay,
            lr_multiplier=self.training.lr_multiplier(gradient.parameter),
            clip_value=self.training.rules.clipping.value or 0.0,
            shape=self._shape(gradient.parameter),
            cut=self.sums.cut(gradient),
        )
        self.sums.write(gradient, steps, outputs, values)

    def _shape(self, parameter: ir.Value) -> tuple[int, ...]:
        """The shape of a whole parameter, which is known."""
        return tuple(size for size in self.values[parameter].shape or () if isinstance(size, int))

    def _home_of_slot(self, gradient: Gradient, name: str, ones: Sequence[int]) -> ShardedValue:
        """The layout of a slot: that of the parameter's share, except for dims of which the slot has one element."""
        if not ones:
            return gradient.share
        shape = self._shape(gradient.parameter)
        dims = {dim % len(shape) for dim in ones}
        whole = ir.Shape([1 if dim in dims else size for dim, size in enumerate(shape)])
        listed = typed(
            self.values, self.program.symbols, ir.Value(name=name, type=gradient.parameter.type, shape=whole)
        )[0]
        return ShardedValue(listed, gradient.share.group, normal(without_dims(gradient.share.layout, dims)))

    def _gather(self, gradient: Gradient, updated: Value) -> Value:
        """Gathers the next parameter from the shares that ranks have updated."""
        after = self.job.derived_on(gradient.owner.group, self.at[gradient.owner], ".next")
        following = ir.Value(name=str(after), type=gradient.parameter.type, shape=gradient.parameter.shape)
        self.values.add(following, self.values[gradient.parameter])
        share, whole = (ShardedValue(following, copy.group, copy.layout) for copy in (gradient.share, gradient.owner))
        self.job.declare(whole.group, after, following, self.values.local_shape(whole))
        moves = lower(share.layout, whole.layout, share.group, whole.group)
        if can_join(moves):
            shape = self.values.local_shape(share)
            assert shape is not None
            self.gathers.add(cast(Fused, moves[0]), following, updated, shape, after)
            return after
        return reshard(self.comm, share, updated, whole, after, f"update of '{gradient.parameter.name}'")

    def _keep(
        self,
        home: ShardedValue,
        value: Value,
        following: Value | None,
        tensor: str,
        kind: Kind,
        parameter: str = "",
        initial: float = 0.0,
    ) -> None:
        """Lists a state tensor on the ranks of `home`."""
        self.job.state.add(home.group, value, State(value, home, following, tensor, kind, parameter, initial))

    def _replacing(self, version: ShardedValue, following: ir.Value) -> Value:
        """Reshards the value that replaces a state tensor, made by a forward node, to the tensor's layout."""
        defs = self.versions.defs.get(following, [])
        source = next((one for one in defs if one.group == version.group), defs[0])
        at = self.versions.canonical.get(source, source)
        wanted = ShardedValue(following, version.group, version.layout)
        if at != wanted and wanted not in self.at:
            made = self.job.derived_on(version.group, self.at[version], ".next")
            cause = f"update of '{version.value.name}'"
            self.values.bind(wanted, reshard(self.comm, at, self.at[at], wanted, made, cause))
        return self.at[wanted if wanted in self.at else at]

    def _clip(self, total: Value) -> None:
        """Computes the factor that clips all gradients, of the square of their global norm."""
        everyone = self.job.everyone
        self._declare(everyone, self.scale, number_type())
        self._factor(total)
        if self.training.rules.guarded:
            # An output of every rank, which is not finite where any gradient is not.
            value = typed(self.values, self.program.symbols, number_type(str(total)))[0]
            self.job.declare(everyone, total, value, ())
            self.job.outputs.add(everyone, total, replicated_on(value, tuple(range(self.job.size))))
        scale = self.training.scale
        if scale is not None and scale.dynamic:
            state, steps = self.job.number(STATE), self.job.number(STEPS)
            values = ValueMap()
            following = next_nodes(scale, *(values.of(one) for one in (state, steps, total)))
            for one, array in following.constants.items():
                values[one] = self.job.constant(everyone, self.job.value(everyone, name_of(one)), array)
            self._append(everyone, following.nodes, values)
            self._keep_scale(*(values[one] for one in following.results))

    def _factor(self, total: Value) -> None:
        """Makes the factor of all gradients: what clips them to the norm, of which `total` is the square, over the loss scale."""
        scale, bound, everyone = self.training.scale, self.training.rules.clipping.norm, self.job.everyone
        if scale is None:
            self._clip_scale(total, self.scale, bound or _NO_BOUND)
            return
        if bound is None:
            self._divide_by_scale(self.scale)
            return
        inverse, part, square, clip = (
            self.job.number(f"gradients.{word}") for word in ("inverse", "part_norm", "own_norm", "clip")
        )
        self._divide_by_scale(inverse)
        self._emit(everyone, "Mul", [total, inverse], part)
        self._emit(everyone, "Mul", [part, inverse], square)
        self._clip_scale(square, clip, bound)
        self._emit(everyone, "Mul", [clip, inverse], self.scale)

    def _clip_scale(self, square: Value, made: Value, bound: float) -> None:
        """Makes what scales gradients down to a norm, of whose own norm `square` is the square."""
        values = ValueMap()
        scale = values.of(made, ir.TensorType(ir.DataType.FLOAT), ir.Shape(()))
        self._append(self.job.everyone, [clip_scale(values.of(square), scale, bound)], values)

    def _divide_by_scale(self, inverse: Value) -> None:
        """Makes the inverse of the loss scale, by which gradients are multiplied."""
        scale, everyone = self.training.scale, self.job.everyone
        assert scale is not None
        if scale.dynamic:
            self._emit(everyone, "Reciprocal", [self.job.number(STATE)], inverse)
            return
        self._declare(everyone, inverse, number_type())
        self.job.constant(everyone, inverse, np.array(1 / scale.first, np.float32))

    def _keep_scale(self, scale: Value | None, steps: Value | None) -> None:
        """Lists the loss scale and the count of its steps on all ranks, with what takes their places."""
        if self.training.scale is None or not self.training.scale.dynamic:
            return
        everyone = tuple(range(self.job.size))
        numbers = ((STATE, ir.DataType.FLOAT, scale, self.training.scale.first), (STEPS, ir.DataType.INT64, steps, 0))
        for name, kind, following, initial in numbers:
            value = self.job.number(name)
            self._declare(everyone, value, number("", kind))
            listed = typed(self.values, self.program.symbols, number(str(value), kind))[0]
            self.job.state.drop(value)
            self._keep(replicated_on(listed, everyone), value, following, name, "scale", initial=initial)


@dataclass
class ShardSums:
    """Writes updates with sums over shards; `append` writes nodes on the ranks of a group, over values."""

    program: Targeted
    comm: CommLowering
    append: Append
    known: dict[ir.Value, list[tuple[ShardedValue, Value]]] = field(default_factory=dict)
    """Maps each parameter to its sums where it is updated first, in order, with their values there."""

    def cut(self, one: Gradient) -> Collection[int]:
        """The dims along which sums are made by others, too: those that are cut, or all where the sums are there already."""
        cuts = one.share.layout.cuts
        return [dim for dim in range(len(cuts)) if cuts[dim] or one.parameter in self.known]

    def write(self, gradient: Gradient, steps: Sequence[Step], made: Sequence[ir.Value], values: ValueMap) -> None:
        """Writes the steps that make a parameter's next value and slots, over values."""
        before = self.known.get(gradient.parameter)
        sums = [step for step in steps if isinstance(step, ShardSum)]
        for step in steps if before is None else without_terms(steps, made):
            if isinstance(step, ir.Node):
                self.append(gradient.owner.group, [step], values)
            elif before is None:
                self.known.setdefault(gradient.parameter, []).append(self._summed(gradient, step, values))
            elif step.total is not step.terms:
                values[step.total] = self._brought(gradient, step, *before[sums.index(step)])

    def _summed(self, gradient: Gradient, step: ShardSum, values: ValueMap) -> tuple[ShardedValue, Value]:
        """Adds terms up over the shards along the dims of a sum; the sum, and its value."""
        group, layout, name = gradient.owner.group, self._layout(gradient, step), name_of(step.total)
        local = tuple(step.terms.shape or ())
        shape = ir.Shape([size * layout.num_shards(dim) for dim, size in enumerate(local) if isinstance(size, int)])
        value = typed(self.comm.values, self.program.symbols, ir.Value(name=name, type=step.terms.type, shape=shape))[0]
        total = terms = values[step.terms]
        if step.total is not step.terms:
            total = values[step.total] = self.comm.job.value(group, name)
            axes = tuple(axis for dim in step.dims for axis in gradient.share.layout.cuts[dim])
            elements = math.prod(size for size in local if isinstance(size, int))
            self.comm.job.declare(group, total, value, tuple(size for size in local if isinstance(size, int)))
            move = AllReduce(group, layout, axes, "sum")
            self.comm.fused(move, [value], [terms], [total], elements, _cause(gradient, step))
        return ShardedValue(value, group, normal(layout)), total

    def _brought(self, gradient: Gradient, step: ShardSum, first: ShardedValue, total: Value) -> Value:
        """Brings a sum to another group; its value there."""
        target = ShardedValue(first.value, gradient.owner.group, normal(self._layout(gradient, step)))
        if target == first:
            return total
        made = self.comm.job.value(ranks_of(first.group) | ranks_of(target.group), name_of(step.total))
        return reshard(self.comm, first, total, target, made, _cause(gradient, step))

    def _layout(self, one: Gradient, step: ShardSum) -> Layout:
        """The layout of a sum at the parameter's update: the parameter's, except for dims of which the sum has one element."""
        layout = one.share.layout
        return without_dims(layout, step.ones) if step.ones else Layout(layout.mesh, ((),))


def without_dims(layout: Layout, dims: Collection[int]) -> Layout:
    """A layout with some dims whole."""
    return Layout(layout.mesh, tuple(() if dim in dims else axes for dim, axes in enumerate(layout.cuts)))


def _cause(one: Gradient, step: ShardSum) -> str:
    return f"{'means' if step.ones else 'norms'} of '{one.parameter.name}'"
