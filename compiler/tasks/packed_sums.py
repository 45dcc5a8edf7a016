"""Sums of gradients that are sent in eight bits: an AllToAll and an AllGather of blocks of integers, each block with its scale.

Each of P ranks has a partial sum: the gradients of a bucket, concatenated and divided into P shares of L numbers; a share is whole blocks.

    codes   [P, L] int8       with scales (`lower/eight_bits.py`)
    AllToAll                  of codes, and of scales: each rank gets its share of all partial sums
    share   [L] float32       the sum of codes * scale in the order of the ranks
    AllGather                 of the share's codes and scales: all ranks get the same bits

With ZeRO, and of stored parameters, there is no AllGather: each rank updates its share. Shards that replicas have too are then added up
in the same way. With `keep_rest` the rounding error of a partial sum, and of a share, is state, and is added in the next step.

The inputs and outputs of these collectives do not have a partial layout: the partial sums of all ranks are the rows of one value [P, P, L],
sharded along its first dim before the AllToAll and along its second after it. The Reshape to blocks says so (`stacks` of `partc.factors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.ir.programs import State, Value
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.ir.value_info import ValueInfo
from partc.compiler.layout import moves as mv
from partc.compiler.layout.layout import Layout
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.eight_bits import EightBits
from partc.compiler.lower.reshard import reshard
from partc.compiler.plan.precision import GradientMessages
from partc.runtime.artifact.format import REST

Sum: TypeAlias = mv.AllReduce | mv.ReduceScatter
Cuts: TypeAlias = tuple[tuple[int, ...], ...]


def can_be_packed(moves: Sequence[mv.Move]) -> bool:
    """Whether a reshard is sums over ranks alone."""
    return bool(moves) and all(isinstance(move, Sum) and move.reduce == "sum" for move in moves)


def row_kind(move: mv.Move) -> str:
    """A key that is equal for sums whose gradients can share a row: the scattered dim, and the axes along which ranks have other shards."""
    return f"{move.dim if isinstance(move, mv.ReduceScatter) else ''} {_other_axes(move)}"


def _other_axes(move: mv.Move) -> tuple[int, ...]:
    axes = {axis for cut in move.after.cuts for axis in cut} | {axis for axis, _ in move.after.partial}
    return tuple(sorted(axes - {*move.axes})) if isinstance(move, Sum) else ()


def packed_sum(
    comm: CommLowering,
    rules: GradientMessages,
    move: mv.Move,
    partial: Sequence[Value],
    outputs: Sequence[Value],
    elements: int,
    cause: str,
) -> Callable[[], None]:
    """Sends `partial` gradients, of `elements` in all; returns a function that writes their sums over ranks, or shares of the sums.

    The function's nodes wait for the messages, so it is called after other nodes have been written that can run meanwhile.
    """
    assert isinstance(move, Sum)
    return _PackedSum(comm, rules, move, outputs[0], cause).begin(partial, outputs, elements)


class _PackedSum(EightBits):
    """Writes the sum of one bucket; its values are named after `base`."""

    def __init__(self, comm: CommLowering, rules: GradientMessages, move: Sum, base: Value, cause: str) -> None:
        super().__init__(comm, move.group, base)
        self.rules, self.move, self.cause = rules, move, cause
        self.mesh, self.axes, self.others = move.after.mesh, move.axes, _other_axes(move)
        self.ranks = math.prod(self.mesh[axis] for axis in self.axes)

    def begin(self, partial: Sequence[Value], outputs: Sequence[Value], elements: int) -> Callable[[], None]:
        """Writes the nodes that send the gradients; returns a function that writes the rest."""
        share = -(-elements // (self.ranks * self.rules.block)) * self.rules.block
        scatters, whole, others = isinstance(self.move, mv.ReduceScatter), self.ranks * share, self.others
        row = self._row(partial, elements, share)
        stacks = f"{'..' if scatters else '.'},.->..; linear 0; stacks"
        rows = self._packed(row, whole, "part", stacks)
        rows = self._moved(rows, (self.ranks, self.ranks, share), (self.axes, (), others), ((), self.axes, others))

        def finish() -> None:
            parts = self._unpacked(rows, [self.ranks, share], "parts")
            total = self.op("ReduceSum", [parts, self.constant("rows", [0])], "share", keepdims=0)
            if not scatters:
                shares = self._moved(self._packed(total, share, "share"), (1, whole), (others, self.axes), (others, ()))
                total = self._unpacked(shares, [whole], "sums")
            self._take_apart(total, share if scatters else whole, outputs)

        return finish

    def _row(self, partial: Sequence[Value], elements: int, share: int) -> Value:
        """Concatenates the gradients and pads them with zeros; with ZeRO the result has a row for each rank's shares."""
        scatters = isinstance(self.move, mv.ReduceScatter)
        rows = [self._shares(one) if scatters else self.reshaped(one, [-1], "flat") for one in partial]
        row = rows[0] if len(rows) == 1 else self.op("Concat", rows, "joined", axis=int(scatters))
        fill = share - elements // self.ranks if scatters else self.ranks * share - elements
        pads = [0, 0, 0, fill] if scatters else [0, fill]
        return self.op("Pad", [row, self.constant("pads", pads)], "filled") if fill else row

    def _shares(self, partial: Value) -> Value:
        """Reshapes a gradient to one row for each rank's share."""
        assert isinstance(self.move, mv.ReduceScatter)
        dim, shape = self.move.dim, _sizes(partial)
        if dim:
            shape = [*shape[:dim], self.ranks, shape[dim] // self.ranks, *shape[dim + 1 :]]
            order = [dim, *(k for k in range(len(shape)) if k != dim)]
            partial = self.op("Transpose", [self.reshaped(partial, shape, "divided")], "ranks_first", perm=order)
        return self.reshaped(partial, [self.ranks, -1], "shares")

    def _packed(self, numbers: Value, count: int, word: str, factors: str = "") -> tuple[Value, Value]:
        """Writes the codes and scales of `count` numbers; with `keep_rest` adds the last step's rounding error, and stores the new one."""
        shape = [count // self.rules.block, self.rules.block]
        blocks = self.reshaped(numbers, shape, f"{word}.blocks", factors)
        rest = self.comm.job.derived_on(self.group, self.base, f".{word}.{REST}")
        if self.rules.keep_rest:
            blocks = self.op("Add", [blocks, rest], f"{word}.carried")
        codes, scales = self.encoded(blocks, word)
        if self.rules.keep_rest:
            sent = self.decoded(codes, scales, f"{word}.sent")
            following = self.comm.job.derived_on(self.group, rest, ".next")
            self.write("Sub", [blocks, sent], [following])
            self._keep(rest, following, shape)
        return codes, scales

    def _moved(
        self, packed: tuple[Value, Value], shape: Sequence[int], before: Cuts, after: Cuts
    ) -> tuple[Value, Value]:
        """Moves codes and scales to another layout; `shape` is the shape of the codes, except along `others`, where shards differ."""
        moved = []
        for part, kind, numbers in zip(
            packed, (ir.DataType.INT8, ir.DataType.FLOAT), (1, self.rules.block), strict=True
        ):
            apart = [math.prod(self.mesh[axis] for axis in self.others if axis in cut) for cut in before]
            whole = [size * times for size, times in zip([*shape[:-1], shape[-1] // numbers], apart, strict=True)]
            value = self._value(str(part), kind, whole)
            source, target = (ShardedValue(value, self.group, Layout(self.mesh, cuts)) for cuts in (before, after))
            local = [int(size) for size in self.comm.values.local_shape(source) or ()]
            leaves = self.comm.job.derived_on(self.group, part, ".leaving")
            self.write("Reshape", [part, self.constant("local", local)], [leaves])
            self.comm.declare(source, leaves)
            arrives = self.comm.job.derived_on(self.group, part, ".arrived")
            moved.append(reshard(self.comm, source, leaves, target, arrives, self.cause))
        codes, scales = moved
        return codes, scales

    def _unpacked(self, packed: tuple[Value, Value], shape: Sequence[int], word: str) -> Value:
        codes, scales = packed
        codes = self.reshaped(codes, [-1, self.rules.block], f"{word}.codes")
        scales = self.reshaped(scales, [-1], f"{word}.scales")
        return self.reshaped(self.decoded(codes, scales, f"{word}.blocks"), shape, word)

    def _take_apart(self, total: Value, length: int, outputs: Sequence[Value]) -> None:
        """Splits the sums of the bucket into the sum of each gradient."""
        counts = [math.prod(_sizes(one)) for one in outputs]
        flat = [self.comm.job.derived_on(self.group, one, ".flat") for one in outputs]
        if fill := length - sum(counts):
            counts.append(fill)
            flat.append(self.comm.job.derived_on(self.group, self.base, ".fill"))
        if len(flat) == 1:
            flat = [total]
        else:
            self.write("Split", [total, self.constant("counts", counts)], flat, axis=0)
        for row, one in zip(flat, outputs, strict=False):
            self.write("Reshape", [row, self.constant("shape", _sizes(one))], [one])

    def _keep(self, rest: Value, following: Value, shape: Sequence[int]) -> None:
        """Lists a rounding error as state: a tensor of which each rank has its own blocks."""
        axes = (*self.others, *self.axes)
        shards = math.prod(self.mesh[axis] for axis in axes)
        value = self._value(str(rest), ir.DataType.FLOAT, [shape[0] * shards, shape[1]])
        home = ShardedValue(value, self.group, Layout(self.mesh, (axes, ())))
        for one in (rest, following):
            self.comm.declare(home, one)
        state = State(rest, home, following, self.comm.job.derived(str(rest)), "rest")
        self.comm.job.state.add(self.group, rest, state)

    def _value(self, name: str, kind: ir.DataType, shape: Sequence[int]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))
        return self.comm.values.add(value, ValueInfo(type_text(value.type), tuple(shape), kind.bitwidth // 8))


def _sizes(value: Value) -> list[int]:
    return [int(size) for size in value.shape or ()]
