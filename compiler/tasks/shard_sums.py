"""Sums over the shards of a parameter, in the middle of its update: norms, means of rows and of columns.

%w.squares.whole = partc.comm::AllReduce(%w.squares)      # norms of 'w'

A parameter that lies in several ways has its sums from where it is updated first: another order of a sum would be another number, and
versions must stay equal bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import Group, ShardedValue, ranks_of
from partc.compiler.ir.value_map import ValueMap
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.layout.moves import AllReduce
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.local_view import Gradient
from partc.compiler.lower.reshard import reshard
from partc.compiler.tasks.duals import typed
from partc.compiler.training.whole_updates import ShardSum, Step, without_terms

Append = Callable[[Group, Sequence[ir.Node], ValueMap], None]


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

    def write(self, one: Gradient, steps: Sequence[Step], made: Sequence[ir.Value], values: ValueMap) -> None:
        """Writes the steps that make a parameter's next value and slots, over values."""
        before = self.known.get(one.parameter)
        sums = [step for step in steps if isinstance(step, ShardSum)]
        for step in steps if before is None else without_terms(steps, made):
            if isinstance(step, ir.Node):
                self.append(one.owner.group, [step], values)
            elif before is None:
                self.known.setdefault(one.parameter, []).append(self._summed(one, step, values))
            elif step.total is not step.terms:
                values[step.total] = self._brought(one, step, *before[sums.index(step)])

    def _summed(self, one: Gradient, step: ShardSum, values: ValueMap) -> tuple[ShardedValue, Value]:
        """Adds terms up over the shards along the dims of a sum; the sum, and its value."""
        group, layout, name = one.owner.group, self._layout(one, step), name_of(step.total)
        local = tuple(step.terms.shape or ())
        shape = ir.Shape([size * layout.num_shards(dim) for dim, size in enumerate(local) if isinstance(size, int)])
        value = typed(self.comm.values, self.program.symbols, ir.Value(name=name, type=step.terms.type, shape=shape))[0]
        total = terms = values[step.terms]
        if step.total is not step.terms:
            total = values[step.total] = self.comm.job.value(group, name)
            axes = tuple(axis for dim in step.dims for axis in one.share.layout.cuts[dim])
            elements = math.prod(size for size in local if isinstance(size, int))
            self.comm.job.declare(group, total, value, tuple(size for size in local if isinstance(size, int)))
            move = AllReduce(group, layout, axes, "sum")
            self.comm.fused(move, [value], [terms], [total], elements, _cause(one, step))
        return ShardedValue(value, group, normal(layout)), total

    def _brought(self, one: Gradient, step: ShardSum, first: ShardedValue, total: Value) -> Value:
        """Brings a sum to another group; its value there."""
        target = ShardedValue(first.value, one.owner.group, normal(self._layout(one, step)))
        if target == first:
            return total
        made = self.comm.job.value(ranks_of(first.group) | ranks_of(target.group), name_of(step.total))
        return reshard(self.comm, first, total, target, made, _cause(one, step))

    def _layout(self, one: Gradient, step: ShardSum) -> Layout:
        """The layout of a sum at the parameter's update: the parameter's, except for dims of which the sum has one element."""
        layout = one.share.layout
        return without_dims(layout, step.ones) if step.ones else Layout(layout.mesh, ((),))


def without_dims(layout: Layout, dims: Collection[int]) -> Layout:
    """A layout with some dims whole."""
    return Layout(layout.mesh, tuple(() if dim in dims else axes for dim, axes in enumerate(layout.cuts)))


def _cause(one: Gradient, step: ShardSum) -> str:
    return f"{'means' if step.ones else 'norms'} of '{one.parameter.name}'"
