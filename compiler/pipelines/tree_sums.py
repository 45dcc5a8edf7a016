"""Sums over the parts of a batch in one order for any number of ranks: by the tree of `artifact/tasks/sum_tree.py`.

Each microbatch of a rank is a part. Its terms are added as soon as both halves of a tree node are computed. The rank then has some nodes of
each sum, its roots, and these collectives replace the reduction over ranks:

    ReduceScatter   the roots of each rank's shard are sent to it (AllToAll), and it adds the roots of all ranks
    AllReduce       the same, and the shards are gathered (AllGather); of few elements, all ranks get all roots and add them in one order

A rank with fewer roots than others sends zeros in their place, which no op reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.programs import Comm, Compute, Event, Op, TaskKind, Value, added
from partc.runtime.artifact import format as fmt
from partc.runtime.artifact.tasks.sum_tree import Node, halves, nodes, roots, run_of

_FEW = 4096
"""A sum of fewer elements than this is computed on all ranks."""
_REDUCES = (fmt.ALL_REDUCE, fmt.REDUCE_SCATTER, fmt.REDUCE_TO)


@dataclass(frozen=True)
class Reduction:
    """The collectives that replace a reduction: the exchange, the gather, and the numbers of elements and roots.

    A rank's shard of a root has `block` elements; small sums are exchanged whole, one row per root.
    """

    ranks: int
    most_roots: int
    block: int
    exchange: tuple[Event, Value] | None
    gather: tuple[Event, Value] | None

    @property
    def is_small(self) -> bool:
        """Whether all ranks get all roots."""
        return self.exchange is None


def reduction(
    event: Event, step: Comm, parts: int, item_bytes: int, base: Value, list_event: Callable[[Event], int]
) -> Reduction:
    """Returns the collectives that replace `event`; `list_event` lists an event and returns its tag, `base` gives their names."""
    (group,) = event.ranks
    ranks = len(group)
    most = max(len(roots((0, parts), run_of(place, ranks, parts))) for place in range(ranks))
    elements = sum(elements_of(value) for value in step.reads)
    small = event.op_type != fmt.REDUCE_SCATTER and elements < max(_FEW, ranks)
    block = elements if small else -(-elements // ranks)

    def listed(op: str, word: str, shape: tuple[int, int], result: tuple[int, int]) -> tuple[Event, Value]:
        value, amount = Value(word, base, event.value, result), math.prod(shape) * item_bytes
        sent = amount * (ranks - 1) // (1 if op == fmt.ALL_GATHER else ranks)
        one = replace(event, op_type=op, output=value, shape=shape, bytes=str(sent), way=None)
        return replace(one, tag=list_event(one)), value

    exchange = gather = None
    if not small:
        exchange = listed(fmt.ALL_TO_ALL, ".exchanged", (ranks, most * block), (ranks, most * block))
    if small:
        gather = listed(fmt.ALL_GATHER, ".gathered", (most, block), (ranks * most, block))
    elif event.op_type != fmt.REDUCE_SCATTER:
        gather = listed(fmt.ALL_GATHER, ".gathered", (1, block), (ranks, block))
    return Reduction(ranks, most, block, exchange, gather)


def elements_of(value: Value) -> int:
    """The number of elements of a value whose shape is known."""
    assert value.shape is not None
    return math.prod(size for size in value.shape if isinstance(size, int))


@dataclass
class TreeSums:
    """The sums over parts while one rank's program is written: `write` appends an op; `run` is the rank's run of all `parts`."""

    parts: int
    run: Node
    where: str
    write: Callable[[Op], None]
    known: dict[Value, list[tuple[Node, Value]]] = field(default_factory=dict)
    """Maps each value of a microbatch's program to the tree nodes of its sum, in order, each with its value."""

    def add(self, of: Value, whole: Value, k: int, term: Value) -> None:
        """Adds the term of the rank's part `k` to the sum of `of`; `whole` is the value of the sum over all parts."""
        begin, stack = self.run[0], self.known.setdefault(of, [])
        stack.append(((begin + k, begin + k + 1), term))
        while len(stack) > 1 and (node := (stack[-2][0][0], stack[-1][0][1])) in self._nodes and self._is_sum(stack):
            (_, right), (_, left) = stack.pop(), stack.pop()
            name = f".of_{node[0] - begin}_{node[1] - begin}"
            made = whole if node == (0, self.parts) else whole.derived(name)
            self.write(added("Add", [left, right], [made]))
            stack.append((node, made))

    @cached_property
    def _nodes(self) -> frozenset[Node]:
        return frozenset(nodes((0, self.parts)))

    def _is_sum(self, stack: Sequence[tuple[Node, Value]]) -> bool:
        """Whether the last two nodes are the halves of one."""
        left, right = stack[-2][0], stack[-1][0]
        return halves((left[0], right[1])) == (left, right)

    def reads(self, step: Op) -> bool:
        """Whether an op reads sums over the rank's own parts; raises CompileError if such an op is not a reduction or an Identity."""
        if self.run == (0, self.parts) or not any(value in self.known for value in step.reads):
            return False
        if isinstance(step, Compute) and step.is_op("Identity"):
            ((given,), (made,)) = step.reads, step.makes
            self.known[made] = self.known[given]
            return True
        together = isinstance(step, Comm) and step.op_type in _REDUCES and step.attributes[fmt.REDUCE] == fmt.SUM
        if not together or not all(value in self.known for value in step.reads):
            name = step.op_type if isinstance(step, Comm) else step.node.op_type if isinstance(step, Compute) else "op"
            fact = f"{name} reads '{next(value for value in step.reads if value in self.known)}', a sum over some of the parts"
            law = "sums over parts are added up as they are"
            raise CompileError(Problem(self.where, fact, law, "leave out 'parts'"))
        return True

    def reduce(self, step: Comm, how: Reduction, whole: Callable[[Value], Value]) -> None:
        """Writes the reduction of sums over the rank's parts: the packing of roots, the collectives, and the remaining additions of the
        tree.

        `whole`: maps a result of the old reduction to the value to write.
        """
        values, results = step.reads, [whole(value) for value in step.makes]
        base = (how.exchange or how.gather or (None, None))[1]
        assert base is not None
        axis = step.attributes.get(fmt.AXIS, 0)
        assert isinstance(axis, int)
        stacks = [self.known[value] for value in values]
        ops, rows = _Ops(self.write, base), how.ranks if not how.is_small else 1
        packed_roots = [
            self._row([stack[at][1] for stack in stacks], ops, how, axis if step.op_type == fmt.REDUCE_SCATTER else 0)
            for at in range(len(stacks[0]))
        ]
        if (missing := how.most_roots - len(packed_roots)) > 0:
            packed_roots.append(ops.zeros([missing, how.block] if how.is_small else [rows, missing * how.block]))
        packed = ops.joined(packed_roots, 0 if how.is_small else 1)
        if how.exchange is not None:
            packed = self._moved(step, how.exchange, packed, {fmt.SPLIT_AXIS: 0, fmt.CONCAT_AXIS: 0})
            packed = ops.reshaped(packed, [how.ranks * how.most_roots, how.block])
        elif how.gather is not None:
            packed = self._moved(step, how.gather, packed, {fmt.AXIS: 0})
        if not results and (how.is_small or how.gather is None):
            return
        total = self._total(packed, how, ops)
        if how.exchange is not None and how.gather is not None:
            total = ops.reshaped(self._moved(step, how.gather, total, {fmt.AXIS: 0}), [1, how.ranks * how.block])
        sizes, width = [elements_of(value) for value in results], how.block
        if how.exchange is not None and how.gather is not None:
            width *= how.ranks
        for value, share in zip(results, ops.split(total, sizes, width), strict=True):
            ops.reshaped(share, value.shape or (), value)

    def _row(self, values: Sequence[Value], ops: _Ops, how: Reduction, axis: int) -> Value:
        """Packs one root of all values: a row for each rank's shard, or one row if the sum is small."""
        if how.is_small:
            return ops.joined([ops.reshaped(value, [1, elements_of(value)]) for value in values], 1)
        if how.gather is not None:
            flat = [ops.reshaped(value, [elements_of(value)]) for value in values]
            if padding := how.block * how.ranks - sum(map(elements_of, values)):
                flat.append(ops.zeros([padding]))
            return ops.reshaped(ops.joined(flat, 0), [how.ranks, how.block])
        shares = []
        for value in values:
            before, elements = (
                math.prod(size for size in (value.shape or ())[:axis] if isinstance(size, int)),
                elements_of(value),
            )
            if before > 1:
                value = ops.turned(ops.reshaped(value, [before, how.ranks, elements // before // how.ranks]), [1, 0, 2])
            shares.append(ops.reshaped(value, [how.ranks, elements // how.ranks]))
        return ops.joined(shares, 1)

    def _moved(self, step: Comm, link: tuple[Event, Value], operand: Value, attributes: Mapping[str, int]) -> Value:
        event, output = link
        group = step.attributes[fmt.GROUP]
        how = {fmt.GROUP: group, **attributes}
        self.write(
            replace(
                step,
                op_type=event.op_type,
                inputs=(operand,),
                outputs=(output,),
                attributes=how,
                tag=event.tag,
                bytes=event.bytes,
            )
        )
        return output

    def _total(self, gathered: Value, how: Reduction, ops: _Ops) -> Value:
        """Adds the roots of all ranks, which are the rows of `gathered`, by the tree."""
        rows = ops.split_rows(gathered, how.ranks * how.most_roots)
        there: dict[Node, Value] = {}
        for place in range(how.ranks):
            own = roots((0, self.parts), run_of(place, how.ranks, self.parts))
            there |= {node: rows[place * how.most_roots + at] for at, node in enumerate(own)}

        def total(node: Node) -> Value:
            if node not in there:
                there[node] = ops.op("Add", [total(half) for half in halves(node)], f".of_{node[0]}_{node[1]}")
            return there[node]

        return total((0, self.parts))


@dataclass
class _Ops:
    """Writes ops, and names their results after one value."""

    write: Callable[[Op], None]
    base: Value
    count: int = 0

    def op(self, op_type: str, inputs: Sequence[Value], word: str = "", **attributes: int | ir.Attr) -> Value:
        return self._emit(op_type, inputs, [self._next(word)], attributes)[0]

    def _emit(
        self, op_type: str, inputs: Sequence[Value], outputs: list[Value], attributes: Mapping[str, int | ir.Attr]
    ) -> list[Value]:
        self.write(replace(added(op_type, inputs, outputs, attributes), task=TaskKind.UPDATE))
        return outputs

    def _next(self, word: str = "") -> Value:
        self.count += 1
        return self.base.derived_untyped(word or f".{self.count}")

    def number(self, numbers: Sequence[int]) -> Value:
        return self.base.derived_untyped(".shape", np.array(numbers, np.int64))

    def reshaped(self, value: Value, shape: Sequence[int | str], output: Value | None = None) -> Value:
        sizes = self.number([size for size in shape if isinstance(size, int)])
        return self._emit("Reshape", [value, sizes], [output or self._next()], {})[0]

    def turned(self, value: Value, perm: Sequence[int]) -> Value:
        return self.op("Transpose", [value], perm=ir.AttrInt64s("perm", perm))

    def joined(self, values: Sequence[Value], axis: int) -> Value:
        return values[0] if len(values) == 1 else self.op("Concat", values, axis=axis)

    def zeros(self, shape: Sequence[int]) -> Value:
        assert self.base.of is not None
        assert self.base.of.dtype is not None
        tensor = ir.AttrTensor("value", ir.tensor(np.zeros(1, self.base.of.dtype.numpy())))
        return self.op("ConstantOfShape", [self.number(shape)], value=tensor)

    def split_rows(self, value: Value, count: int) -> list[Value]:
        attributes = {"axis": 0, "num_outputs": count}
        return self._emit("Split", [value], [self._next() for _ in range(count)], attributes)

    def split(self, value: Value, sizes: Sequence[int], width: int) -> list[Value]:
        """Splits a row of `width` elements into values of these sizes; elements after them are padding."""
        if [*sizes] == [width]:
            return [value]
        rest = [width - sum(sizes)] if width > sum(sizes) else []
        made = [self._next() for _ in (*sizes, *rest)]
        return self._emit("Split", [value, self.number([*sizes, *rest])], made, {"axis": 1})[: len(sizes)]
