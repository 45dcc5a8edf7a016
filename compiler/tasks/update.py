"""Pass: the end of a training step: gradients clipped, then every parameter and what the optimizer keeps of it replaced by its next value.

One node a parameter, a function of `partc.optimizer` whose body is plain ONNX, behind everything that reads the parameter:

    %fc1.weight.next, %fc1.weight.momentum.next = partc.optimizer::Momentum(%fc1.weight, %fc1.weight.grad, %fc1.weight.momentum, %lr)

Each version of a parameter is updated where it lies, from the same gradient, so the versions stay equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, cast

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.packed import tensor_of
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import ComputeOp, LocalTensor, RankConstant, StateTensor, TaskKind
from partc.compiler.ir.sharded import Group, ShardedValue
from partc.compiler.ir.training import Training
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.layout.moves import AllReduce
from partc.compiler.layout.reshard import lower
from partc.compiler.lower.local_view import AccumulatedGradient, Gradient, LocalView
from partc.compiler.lower.reshard import reshard
from partc.compiler.sharding.operands import replicated_on
from partc.compiler.tasks.buckets import Buckets, Fused, can_join
from partc.compiler.tasks.duals import typed
from partc.compiler.tasks.late import Pending, Queues
from partc.compiler.tasks.shard_sums import ShardSums, without_dims
from partc.compiler.tasks.update_rows import RowUpdates
from partc.compiler.training.loss_scale import STATE, STEPS, next_nodes, number
from partc.compiler.training.optimizers import clip_scale, update_steps

Kind: TypeAlias = Literal["parameter", "optimizer", "statistics", "gradient", "scale"]
_NO_BOUND = float(np.finfo(np.float32).max)
"""A norm that no gradient is scaled down to."""


def update(program: Program) -> Program:
    """Writes the update of every parameter into `local`, and lists what ranks keep; does nothing for a program that trains nothing."""
    if program.training is None:
        return program
    assert program.local is not None
    local = program.local.begin(TaskKind.UPDATE)
    updates = Updates(program, local)
    updates.write(local.gradients)
    updates.keep_sums(local.accumulated)
    return replace(program, local=local)


class Updates:
    """Writes the updates of all parameters into `local`, and lists what ranks keep."""

    def __init__(self, program: Program, local: LocalView) -> None:
        assert program.training is not None
        self.program, self.versions, self.comm = program, local.versions, local.comm
        self.builders, self.values, self.names = local.comm.builders, local.comm.values, local.comm.values.names
        self.training: Training = program.training
        self.gathers = Buckets(local.comm, self.training.bucket_bytes, "update")
        names = ("gradients.squares", "gradients.square_norm", "gradients.scale")
        self.squares, self.total, self.scale = (self.builders.derived(name) for name in names)
        self.rows = RowUpdates(self.training, self.builders, self._append)
        self.target = ""
        """The target of what is written, of one parameter."""
        self.sums = ShardSums(program, local.comm, self._append)

    def write(self, gradients: Sequence[Gradient]) -> None:
        """Writes all updates, in the order in which the `gradients` are ready."""
        gradients = Queues(self.training, self.builders, self._append, self._keep_pending).late(gradients, self._sizes)
        clipped = (self.training.clip_norm is not None or self.training.guarded) and bool(gradients)
        gradients = [self._merged(one) if self.rows.wants_each_once(one, clipped) else one for one in gradients]
        if clipped:
            self._clip(gradients)
        elif self.training.scale is not None and gradients:
            self._divide_by_scale()
        for one in gradients:
            self._update(one, clipped or self.training.scale is not None)
        if not gradients:
            self._keep_scale("", "")
        self.gathers.flush()
        updated = {(one.parameter, one.home) for one in gradients}
        for value in self.training.parameters:
            for home in self.versions.defs.get(value, ()):
                if (value, home) not in updated:
                    self._keep(home, self.names[home], "", tensor_of(value), "parameter")
        for value, following in self.training.statistics.items():
            for home in self.versions.defs.get(value, ()):
                made = "" if following is None else self._replacing(home, following)
                self._keep(home, self.names[home], made, value.name or "", "statistics")

    def _sizes(self, one: Gradient) -> tuple[int, ...]:
        """The shape of what a rank updates of a parameter, which is known."""
        return tuple(size for size in self.values.local_shape(one.share) or () if isinstance(size, int))

    def _merged(self, one: Gradient) -> Gradient:
        """A gradient by rows with each id once, made where the parameter is updated: kernels that merge are those of CPUs."""
        self.target = self.program.update_targets.get(one.parameter, "")
        merged, self.target = self.rows.merged(one), ""
        return merged

    def _keep_pending(self, one: Gradient, pending: Pending, number: int) -> None:
        """Lists a gradient that waits for its update."""
        tensor, shape = tensor_of(one.parameter), ir.Shape(self._sizes(one))
        self._types(one.home.group, [ir.Value(name=pending.name, type=one.parameter.type, shape=shape)])
        listed = self.builders.derived(f"{tensor}.pending.{number}")
        self._keep(one.share, pending.name, pending.next, listed, "optimizer", tensor)

    def keep_sums(self, sums: Sequence[AccumulatedGradient]) -> None:
        """Lists the sums of gradients over the parts of a batch."""
        for one in sums:
            parameter = tensor_of(one.parameter)
            self._keep(one.version, one.name, "", one.name, "gradient", parameter)

    def _update(self, one: Gradient, clipped: bool) -> None:
        optimizer = self.training.optimizer_of(one.parameter)
        self.target = self.program.update_targets.get(one.parameter, "")
        name, group, tensor = self.names[one.home], one.home.group, tensor_of(one.parameter)
        shared = one.share != one.home
        shape = self.values.local_shape(one.share) or ()
        shard = self._share(one, name) if shared else name
        kind = one.parameter.type

        def value(name: str, ones: Sequence[int] = ()) -> ir.Value:
            dims = [1 if dim - len(shape) in ones else size for dim, size in enumerate(shape)]
            return ir.Value(name=name, type=kind, shape=ir.Shape(dims))

        kept = optimizer.slots_of(len(shape))
        slots = [value(self.builders.derived(f"{name}.{slot}"), ones) for slot, ones in kept.items()]
        nexts = [(shard, ()), *zip([str(slot.name) for slot in slots], kept.values(), strict=True)]
        made = [value(self.builders.derived(f"{of}.next"), ones) for of, ones in nexts]
        fed = self.training.scalars_of(optimizer)
        scalars = {scalar: ir.Value(name=name) for scalar, name in fed.items()}
        if clipped:
            scalars["scale"] = ir.Value(name=self.scale)
        if one.ids:
            self.rows.update(one, value(shard), slots, scalars, made)
        else:
            self._write_update(one, value(shard), slots, scalars, made)
        for builder in self.builders.of(group):
            builder.scalars |= dict.fromkeys(fed.values())
        self._types(group, [*slots, *made])
        if shared:
            self._gather(one, name, str(made[0].name))
        self._keep(one.home, name, self.builders.derived(f"{name}.next"), tensor, "parameter")
        for (slot, ones), state, following in zip(kept.items(), slots, made[1:], strict=True):
            listed = self.builders.derived(f"{tensor}.{slot}")
            self._keep(
                self._home_of_slot(one, listed, ones),
                str(state.name),
                str(following.name),
                listed,
                "optimizer",
                tensor,
                optimizer.initial(slot),
            )

    def _write_update(
        self,
        one: Gradient,
        shard: ir.Value,
        slots: Sequence[ir.Value],
        scalars: Mapping[str, ir.Value],
        made: Sequence[ir.Value],
    ) -> None:
        """Writes the update of a parameter by a dense gradient: one node, or several with sums over shards between them."""
        steps = update_steps(
            self.training.optimizer_of(one.parameter),
            shard,
            ir.Value(name=one.name, type=shard.type, shape=shard.shape),
            slots,
            scalars,
            made,
            weight_decay=self.training.parameters[one.parameter].weight_decay,
            lr_multiplier=self.training.lr_multiplier(one.parameter),
            clip_value=self.training.clip_value or 0.0,
            shape=self._shape(one.parameter),
            cut=self.sums.cut(one),
        )
        self.sums.write(one, steps, made)

    def _shape(self, parameter: ir.Value) -> tuple[int, ...]:
        """The shape of a whole parameter, which is known."""
        return tuple(size for size in self.values[parameter].shape or () if isinstance(size, int))

    def _home_of_slot(self, one: Gradient, name: str, ones: Sequence[int]) -> ShardedValue:
        """How a slot lies: as the parameter's share does, but for dims that it has one element of."""
        if not ones:
            return one.share
        shape = self._shape(one.parameter)
        dims = {dim % len(shape) for dim in ones}
        whole = ir.Shape([1 if dim in dims else size for dim, size in enumerate(shape)])
        listed = typed(self.values, self.program.symbols, ir.Value(name=name, type=one.parameter.type, shape=whole))[0]
        return ShardedValue(listed, one.share.group, normal(without_dims(one.share.layout, dims)))

    def _share(self, one: Gradient, name: str) -> str:
        """Slices each rank's share of a parameter out of the version that it holds; the share's name."""
        wanted = self.builders.free(one.home.group, f"{name}.share")
        return reshard(self.comm, one.home, name, one.share, wanted, f"update of '{one.parameter.name}'")

    def _gather(self, one: Gradient, name: str, made: str) -> None:
        """Gathers the next parameter from the shares that ranks have updated."""
        after = self.builders.derived(f"{name}.next")
        following = ir.Value(name=after, type=one.parameter.type, shape=one.parameter.shape)
        self.values.add(following, self.values[one.parameter])
        share, whole = (ShardedValue(following, copy.group, copy.layout) for copy in (one.share, one.home))
        self.builders.declare(whole.group, after, following, self.values.local_shape(whole))
        moves = lower(share.layout, whole.layout, share.group, whole.group)
        if can_join(moves):
            shape = self.values.local_shape(share)
            assert shape is not None
            self.gathers.add(cast(Fused, moves[0]), following, made, shape, after)
            return
        reshard(self.comm, share, made, whole, after, f"update of '{one.parameter.name}'")

    def _keep(
        self,
        home: ShardedValue,
        name: str,
        made: str,
        tensor: str,
        kind: Kind,
        parameter: str = "",
        initial: float = 0.0,
    ) -> None:
        """Lists a state tensor on the ranks of `home`."""
        for builder in self.builders.of(home.group):
            builder.kept.setdefault(name, StateTensor(name, home, made, tensor, kind, parameter, initial))

    def _replacing(self, home: ShardedValue, following: ir.Value) -> str:
        """Reshards the value that replaces a state tensor, made by a forward node, to the tensor's layout; its name there."""
        defs = self.versions.defs.get(following, [])
        source = next((one for one in defs if one.group == home.group), defs[0])
        at = self.versions.canonical.get(source, source)
        wanted = ShardedValue(following, home.group, home.layout)
        if at != wanted and wanted not in self.names:
            name = self.builders.free(home.group, f"{self.names[home]}.next")
            cause = f"update of '{home.value.name}'"
            self.values.bind(wanted, reshard(self.comm, at, self.names[at], wanted, name, cause))
        return self.names[wanted if wanted in self.names else at]

    def _clip(self, gradients: Sequence[Gradient]) -> None:
        """Computes the factor that clips all gradients: from their global norm, in which each element counts once."""
        terms: dict[Group, dict[str, list[str]]] = {}
        seen: set[ir.Value] = set()
        for one in gradients:
            if one.parameter in seen:
                continue
            seen.add(one.parameter)
            name, group = self.builders.derived(f"{one.name}.squares"), one.home.group
            self.target = self.program.update_targets.get(one.parameter, "")
            self._add_squares(group, one, name)
            self.target = ""
            terms.setdefault(group, {}).setdefault(self._holding(one.share), []).append(name)
        counted: dict[int, list[str]] = {}
        for group, by_holders in terms.items():
            for holders, names in by_holders.items():
                made = names if not holders else [self._counted(group, holders, names)]
                for rank in group:
                    counted.setdefault(rank, []).extend(made)
        everyone: Group = tuple(range(self.program.plan.ranks))
        alike: dict[tuple[str, ...], list[int]] = {}
        for rank in everyone:
            alike.setdefault(tuple(counted.get(rank, ())), []).append(rank)
        for summed, ranks in alike.items():
            if summed:
                self._emit(tuple(ranks), "Sum", summed, self.squares)
                continue
            self._types(tuple(ranks), [_number(self.squares)])
            for builder in self.builders.of(tuple(ranks)):
                builder.constants[self.squares] = np.zeros((), np.float32)
        total = self.squares
        if len(everyone) > 1:
            total = self.total
            self._types(everyone, [_number(self.total)])
            move = AllReduce(everyone, Layout.whole((len(everyone),), 0), (0,), "sum")
            value = typed(self.values, self.program.symbols, _number(self.total))[0]
            self.comm.fused(move, [value], [self.squares], [self.total], 1, "norm of all gradients")
        self._types(everyone, [_number(self.scale)])
        self._factor(everyone, total)
        if self.training.guarded:
            self._guard(everyone, total)
        scale = self.training.scale
        if scale is not None and scale.dynamic:
            state, steps = self.builders.derived(STATE), self.builders.derived(STEPS)
            following = next_nodes(scale, state, steps, total)
            for builder in self.builders.of(everyone):
                builder.constants.update(following.constants)
            self._append(everyone, following.nodes)
            self._keep_scale(f"{state}.next", f"{steps}.next")

    def _factor(self, everyone: Group, total: str) -> None:
        """Makes the factor of all gradients: what clips them to the norm, of which `total` is the square, over the loss scale."""
        scale, bound = self.training.scale, self.training.clip_norm
        if scale is None:
            self._append(everyone, [clip_scale(ir.Value(name=total), _number(self.scale), bound or _NO_BOUND)])
            return
        if bound is None:
            self._divide_by_scale()
            return
        inverse, part, square, clip = (
            self.builders.derived(f"gradients.{word}") for word in ("inverse", "part_norm", "own_norm", "clip")
        )
        self._divide_by_scale(inverse)
        self._emit(everyone, "Mul", [total, inverse], part)
        self._emit(everyone, "Mul", [part, inverse], square)
        self._append(everyone, [clip_scale(ir.Value(name=square), _number(clip), bound)])
        self._emit(everyone, "Mul", [clip, inverse], self.scale)

    def _divide_by_scale(self, name: str = "") -> None:
        """Makes the inverse of the loss scale, by which gradients are multiplied."""
        scale, everyone = self.training.scale, tuple(range(self.program.plan.ranks))
        assert scale is not None
        made = name or self.scale
        if scale.dynamic:
            self._emit(everyone, "Reciprocal", [self.builders.derived(STATE)], made)
            return
        self._types(everyone, [_number(made)])
        for builder in self.builders.of(everyone):
            builder.constants[made] = np.array(1 / scale.first, np.float32)

    def _keep_scale(self, scale: str, steps: str) -> None:
        """Lists the loss scale and the count of its steps on all ranks, with what takes their places."""
        if self.training.scale is None or not self.training.scale.dynamic:
            return
        everyone = tuple(range(self.program.plan.ranks))
        numbers = ((STATE, ir.DataType.FLOAT, scale, self.training.scale.first), (STEPS, ir.DataType.INT64, steps, 0))
        for name, kind, following, initial in numbers:
            value = number(self.builders.derived(name), kind)
            self._types(everyone, [value])
            listed = typed(self.values, self.program.symbols, value)[0]
            for builder in self.builders.of(everyone):
                builder.kept.pop(str(value.name), None)
            self._keep(replicated_on(listed, everyone), str(value.name), following, name, "scale", initial=initial)

    def _guard(self, everyone: Group, total: str) -> None:
        """Makes the sum of all squares an output of every rank: it is not finite where any gradient is not."""
        value = typed(self.values, self.program.symbols, _number(total))[0]
        copy = replicated_on(value, everyone)
        held = LocalTensor(total, copy, 0)
        for builder in self.builders.of(everyone):
            builder.types[total] = (value, ())
            builder.outputs[total] = held

    def _holding(self, home: ShardedValue) -> str:
        """The group whose lists hold one shard each; "" where every rank has a shard of its own."""
        holders = home.holders
        return "" if len(holders) == len(home.group) else self.comm.group(tuple(ranks for _, ranks in holders))

    def _add_squares(self, group: Group, one: Gradient, made: str) -> None:
        """Writes the sum of a gradient's squares, a float32 as all norms are."""
        dtype = one.parameter.dtype
        if dtype in (None, ir.DataType.FLOAT):
            self._emit(group, "ReduceSumSquare", [one.name], made, keepdims=0)
            return
        kind, wide = ir.TensorType(dtype), self.builders.free(group, f"{made}.{dtype.name.lower()}")
        summed = ir.Value(name=wide, type=kind, shape=ir.Shape(()))
        operand, keepdims = [ir.Value(name=one.name)], ir.convenience.convert_attributes({"keepdims": 0})
        self._append(group, [ir.Node("", "ReduceSumSquare", operand, keepdims, outputs=[summed], name=wide)])
        self._emit(group, "Cast", [wide], made, to=ir.DataType.FLOAT.value)

    def _counted(self, group: Group, holders: str, names: Sequence[str]) -> str:
        """The sum of squares of shards that several ranks hold, on the first of these; 0 on the others."""
        wanted = f"{self.squares}.of.{holders}"
        total = names[0]
        if len(names) > 1:
            total = self.builders.free(group, wanted)
            self._emit(group, "Sum", names, total)
        once, made = (self.builders.free(group, f"{wanted}.{word}") for word in ("once", "counted"))
        for builder in self.builders.of(group):
            builder.constants[once] = RankConstant.first(holders, np.float32)
        self._emit(group, "Mul", [total, once], made)
        return made

    def _emit(self, ranks: Group, op_type: str, names: Sequence[str], made: str, **attributes: int) -> None:
        operands = [ir.Value(name=name) for name in names]
        extra = ir.convenience.convert_attributes(attributes)
        self._types(ranks, [_number(made)])
        self._append(ranks, [ir.Node("", op_type, operands, extra, outputs=[_number(made)], name=made)])

    def _append(self, ranks: Group, nodes: Sequence[ir.Node]) -> None:
        for node in nodes:
            self._types(ranks, [value for value in node.outputs if value.type is not None])
        self.comm.append(ranks, *(ComputeOp(node, node, target=self.target) for node in nodes))

    def _types(self, ranks: Group, values: Sequence[ir.Value]) -> None:
        for value in values:
            for builder in self.builders.of(ranks):
                if value.name not in builder.types:
                    builder.types[str(value.name)] = typed(self.values, self.program.symbols, value)


def _number(name: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(()))
