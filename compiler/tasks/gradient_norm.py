"""Writes the ops of updates, and the square of the global norm of all gradients, in which each element counts once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.constants import RankConstant
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.programs import Compute, Value, ValueMap
from partc.compiler.ir.sharded import Group, Ranks, ShardedValue, ranks_of, split
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.layout.moves import AllReduce
from partc.compiler.layout.reshard import lower
from partc.compiler.lower.comm import computed
from partc.compiler.lower.local_view import Gradient, Localized, LocalView
from partc.compiler.plan.training.graph_nodes import MOST_AT_ONCE
from partc.compiler.sharding.values.operands import replicated_on, shared_dim
from partc.compiler.tasks.buckets import Buckets, Fused
from partc.compiler.tasks.duals import typed
from partc.runtime.artifact.format import GRADIENT_NORM


class UpdateWriter:
    """Writes ops of one target, by default the rank's own, after the ranks' ops so far."""

    def __init__(self, program: Localized, local: LocalView) -> None:
        self.program, self.comm = program, local.comm
        self.job, self.values = local.comm.job, local.comm.values
        self.target = ""
        """The target of the ops that are written, which is that of one parameter."""

    def _emit(self, ranks: Group | Ranks, op_type: str, given: Sequence[Value], made: Value, **attributes: int) -> None:
        self._declare(ranks, made, number_type())
        self._write(ranks, computed(op_type, given, [made], None, None, **attributes))

    def _append(self, ranks: Group | Ranks, nodes: Sequence[ir.Node], values: ValueMap) -> None:
        """Writes nodes over values, and adds their results to `values`."""
        for value in (value for node in nodes for value in node.outputs if value.name):
            if value not in values:
                values[value] = self.job.value(ranks, name_of(value))
            if value.type is not None:
                self._declare(ranks, values[value], value)
        self._write(ranks, *values.ops(nodes))

    def _write(self, ranks: Group | Ranks, *steps: Compute) -> None:
        self.comm.append(ranks, *(replace(step, target=self.target) for step in steps))

    def _declare(self, ranks: Group | Ranks, value: Value, kind: ir.Value) -> None:
        """Lists a value with the type and shape of `kind` on those ranks that do not list it yet."""
        if ranks_of(ranks) & ~self.job.listed.ranks(value):
            own = ir.Value(name=str(value), type=kind.type, shape=kind.shape)
            self.job.declare(ranks, value, *typed(self.values, self.program.symbols, own))


class GradientNorm(UpdateWriter):
    """The square of the norm of all gradients, on all ranks."""

    def __init__(self, program: Localized, local: LocalView) -> None:
        super().__init__(program, local)
        self.squares, self.total = (self.job.number(f"gradients.{word}") for word in ("squares", "square_norm"))
        self._sums: dict[ir.Value, ir.Value] = {}

    def of(self, gradients: Sequence[Gradient]) -> Value:
        """Writes the square of the global norm of all gradients, in which each element counts once, on all ranks."""
        terms: dict[Group, dict[str, list[Value]]] = {}
        """Maps each group, and the process group whose ranks have the same shard, to the squares of gradients."""
        seen: set[ir.Value] = set()
        rows: list[tuple[Gradient, Value, Value]] = []
        rules, training = self.program.plan.pipeline, self.program.training
        if rules is not None and rules.parts and training is not None:  # which are ready first differs with the ranks
            places = {parameter: place for place, parameter in enumerate(training.parameters)}
            gradients = sorted(gradients, key=lambda one: places[one.parameter])
        for gradient in gradients:
            if gradient.parameter in seen:
                continue
            seen.add(gradient.parameter)
            group = gradient.owner.group
            squares = self.job.derived_on(group, gradient.value, ".squares")
            self.target = self.program.update_targets.get(gradient.parameter, "")
            dim = self._row_dim(gradient)
            if dim is None:
                self._add_squares(group, gradient, squares)
            else:
                rows.append((gradient, squares, self._row_squares(gradient, dim)))
            self.target = ""
            shards = (gradient.share if dim is None else gradient.owner).holders
            apart = len(shards) == len(gradient.share.group)  # every rank has a shard of its own
            holding = "" if apart else self.comm.group(tuple(ranks for _, ranks in shards))
            terms.setdefault(group, {}).setdefault(holding, []).append(squares)
        self._add_rows(rows)
        counted: list[tuple[Ranks, Value]] = []
        for group, by_holders in terms.items():
            for holders, squared in by_holders.items():
                made = squared if not holders else [self._counted(group, holders, squared)]
                counted += [(ranks_of(group), value) for value in made]
        everyone = self.job.everyone
        for ranks in split(everyone, {ranks for ranks, _ in counted}):
            if summed := [value for some, value in counted if some & ranks]:
                self._emit(ranks, "Sum", summed, self.squares)
                continue
            self._declare(ranks, self.squares, number_type())
            self.job.constant(ranks, self.squares, np.zeros((), np.float32))
        total, count = self.squares, self.job.size
        if count > 1:
            total = self.total
            self._declare(everyone, total, number_type())
            move = AllReduce(tuple(range(count)), Layout.replicated((count,), 0), (0,), "sum")
            value = typed(self.values, self.program.symbols, number_type(str(total)))[0]
            self.comm.fused(move, [value], [self.squares], [total], 1, "norm of all gradients")
        return total

    def report(self, total: Value, divide: Callable[[Value], None] | None) -> None:
        """Makes the norm of the gradients, divided by the loss scale, an output of rank 0."""
        first, (norm, root, inverse) = (
            (0,),
            (self.job.number(GRADIENT_NORM + word) for word in ("", ".root", ".inverse")),
        )
        self._emit(first, "Sqrt", [total], norm if divide is None else root)
        if divide is not None:
            divide(inverse)
            self._emit(first, "Mul", [root, inverse], norm)
        value = typed(self.values, self.program.symbols, number_type(str(norm)))[0]
        self.job.outputs.add(first, norm, replicated_on(value, first))

    def _row_dim(self, gradient: Gradient) -> int | None:
        """Returns the dim by whose rows squares are added, if bits must not depend on the number of ranks; else None."""
        rules, training = self.program.plan.pipeline, self.program.training
        if (
            rules is None
            or not rules.parts
            or training is None
            or not training.rules.optimizer.shard
            or gradient.ids is not None
        ):
            return None
        return shared_dim(self.program, gradient.owner, 1)

    def _row_squares(self, gradient: Gradient, dim: int) -> Value:
        """Writes the squares of a gradient's shard, added for each index of a dim element by element: in the same order in any shard."""
        group, shape = gradient.owner.group, self.values.local_shape(gradient.share) or ()
        kind = gradient.parameter.type

        def written(
            op_type: str, operands: Sequence[Value], word: str, sizes: Sequence[int | str], **attributes: Any
        ) -> Value:
            made = self.job.derived_on(group, gradient.value, f".squares.{word}")
            self._declare(group, made, ir.Value(name="", type=kind, shape=ir.Shape(sizes)))
            self._write(group, computed(op_type, operands, [made], **attributes))
            return made

        def constant(word: str, numbers: Sequence[int]) -> Value:
            made = self.job.derived_on(group, gradient.value, f".squares.{word}")
            return self.job.constant(group, made, np.array(numbers, np.int64))

        squares, size = written("Mul", [gradient.value, gradient.value], "each", shape), shape[dim]
        if len(shape) == 1:
            return squares
        if dim != len(shape) - 1:
            order = [*(axis for axis in range(len(shape)) if axis != dim), dim]
            squares = written("Transpose", [squares], "turned", [shape[axis] for axis in order], perm=order)
        others = math.prod(other for axis, other in enumerate(shape) if axis != dim and isinstance(other, int))
        flat = written("Reshape", [squares, constant("rows", [others, int(size)])], "flat", [others, size])
        return written("ReduceSum", [flat, constant("axis", [0])], "sums", [size], keepdims=0)

    def _add_rows(self, rows: Sequence[tuple[Gradient, Value, Value]]) -> None:
        """Gathers the sums of rows of all shards, and adds them on every rank."""
        buckets, whole = Buckets(self.comm, 1 << 62, "norm"), list[tuple[Gradient, Value, Value]]()
        for gradient, squares, sums in rows:
            share, owner = (self._of_rows(gradient, version) for version in (gradient.share, gradient.owner))
            moves = lower(share.layout, owner.layout, gradient.share.group, gradient.owner.group)
            if not moves:
                whole.append((gradient, squares, sums))
                continue
            gathered = self.job.derived_on(gradient.owner.group, gradient.value, ".squares.gathered")
            self._declare(
                gradient.owner.group, gathered, ir.Value(name="", type=gradient.parameter.type, shape=share.value.shape)
            )
            shape = self.values.local_shape(share)
            assert shape is not None
            buckets.add(cast(Fused, moves[0]), share.value, sums, shape, gathered)
            whole.append((gradient, squares, gathered))
        buckets.flush()
        for gradient, squares, sums in whole:
            self._emit(gradient.owner.group, "ReduceSum", [sums], squares, keepdims=0)

    def _of_rows(self, gradient: Gradient, version: ShardedValue) -> ShardedValue:
        """Returns the version of a gradient's sums of rows for a version of the gradient."""
        dim = self._row_dim(gradient)
        assert dim is not None
        if gradient.parameter not in self._sums:
            size = (self.values[gradient.parameter].shape or ())[dim]
            own = ir.Value(
                name=f"{gradient.parameter.name}.grad.squares", type=gradient.parameter.type, shape=ir.Shape([size])
            )
            self._sums[gradient.parameter] = typed(self.values, self.program.symbols, own)[0]
        layout = version.layout
        return ShardedValue(
            self._sums[gradient.parameter], version.group, normal(Layout(layout.mesh, (layout.cuts[dim],)))
        )

    def _add_squares(self, group: Group, gradient: Gradient, total: Value) -> None:
        """Writes the sum of a gradient's squares, a float32 like all norms; that of a large gradient is the sum of its rows' sums."""
        dtype, shape = gradient.parameter.dtype, self.values.local_shape(gradient.share) or ()
        if dtype in (None, ir.DataType.FLOAT):
            first = 0 if gradient.ids is not None else _dims_of_rows(shape)
            if not first:
                self._emit(group, "ReduceSumSquare", [gradient.value], total, keepdims=0)
                return
            rows, axes = (self.job.derived_on(group, total, word) for word in (".rows", ".axes"))
            within = self.job.constant(group, axes, np.arange(first, len(shape)))
            self._declare(group, rows, ir.Value(name="", type=gradient.parameter.type, shape=ir.Shape(shape[:first])))
            self._write(group, computed("ReduceSumSquare", [gradient.value, within], [rows], keepdims=0))
            self._emit(group, "ReduceSum", [rows], total, keepdims=0)
            return
        wide = self.job.derived_on(group, total, f".{dtype.name.lower()}")
        self._declare(group, wide, ir.Value(name="", type=ir.TensorType(dtype), shape=ir.Shape(())))
        self._write(group, computed("ReduceSumSquare", [gradient.value], [wide], keepdims=0))
        self._emit(group, "Cast", [wide], total, to=ir.DataType.FLOAT.value)

    def _counted(self, group: Group, holders: str, squares: Sequence[Value]) -> Value:
        """Writes the sum of squares of shards that several ranks have, on the first of these; 0 on the others."""
        wanted = f"{self.squares}.of.{holders}"
        total = squares[0]
        if len(squares) > 1:
            total = self.job.value(group, wanted)
            self._emit(group, "Sum", squares, total)
        once, made = (self.job.value(group, f"{wanted}.{word}") for word in ("once", "counted"))
        self.job.constant(group, once, RankConstant.first(holders, np.float32))
        self._emit(group, "Mul", [total, once], made)
        return made


def _dims_of_rows(shape: Sequence[int | str]) -> int:
    """Returns how many leading dims count the rows whose squares are added each by itself; 0 for a tensor that is added at once."""
    sizes = [size for size in shape if isinstance(size, int)]
    if len(sizes) < len(shape) or len(sizes) < 2 or math.prod(sizes) <= MOST_AT_ONCE:
        return 0
    return next((axis for axis in range(1, len(sizes)) if math.prod(sizes[axis:]) <= MOST_AT_ONCE), len(sizes) - 1)


def number_type(name: str = "") -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(()))
