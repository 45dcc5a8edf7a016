"""Removes passes over large tensors that gradient rules cannot avoid, since each rule sees its own node only.

    e = Expand(v), y = Mul(e, x)              y = Mul(v, x)                    x is as large as e: the op broadcasts by itself
    s = Scatter(zeros, i, u), y = Add(a, s)   y = Scatter(a, i, u)             both add, and no zeros are made
    s = Scatter(zeros, i, u), y = Sum(a, b, s)   s = Sum(a, b), y = Scatter(s, i, u)
    y = Sum(a, b, c)                          t = Add(a, b), y = Add(t, c)
    t = Gemm(a, b), y = Transpose(t)          y = Gemm(b, a), both operands exchanged and transposed

So the gradient of a cross entropy is the exponentials times a number for each position, minus that number at each label; that of a table
that is both looked up and multiplied with is the product's, with the looked-up rows added in. The last rule is for the gradient of a weight
that a model stores transposed, as PyTorch does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.programs import Comm, Compute, Value

_BROADCASTING = ("Add", "Sub", "Mul", "Div", "Sum")
_ADDING = ("ScatterElements", "ScatterND")
_OF_INTEREST = frozenset((*_BROADCASTING, *_ADDING, "Transpose", "Gemm", "Expand", "ConstantOfShape", "Shape"))


def simplify(steps: Sequence[Compute | Comm], kept: Collection[Value]) -> list[Compute | Comm]:
    """Returns the steps without superfluous ops, whose readers read the ops' inputs instead; `kept`: the values read after the last step.

    A value's shape is None where one of its dims is not known; equal shapes mean equal sizes.
    """
    changed = _Lean(steps, kept).run()
    return [one for index, step in enumerate(steps) for one in changed.get(index, (step,))]


class _Lean:
    """The ops that may be simplified, by their index among the steps; all other steps only read, and stay."""

    def __init__(self, steps: Sequence[Compute | Comm], kept: Collection[Value]) -> None:
        self.now: list[tuple[Compute, ...]] = [() for _ in steps]
        self.changed: dict[int, tuple[Compute, ...]] = {}
        self.producers: dict[Value, int] = {}
        self.reads = dict.fromkeys(kept, 1)
        self.readers: dict[Value, set[int]] = {}
        for index, step in enumerate(steps):
            if isinstance(step, Compute) and step.node.op_type in _OF_INTEREST and step.is_op(*_OF_INTEREST):
                self.now[index] = (step,)
                self._count(index, (step,))
            else:
                for one in step.reads:
                    self.reads[one] = self.reads.get(one, 0) + 1

    def run(self) -> dict[int, tuple[Compute, ...]]:
        """Simplifies the ops; maps each changed index to the ops that are there now."""
        for index in self._all("Add", "Sum"):
            self._scatter_into(index)
        for index in self._all("Transpose"):
            self._product_transposed(index)
        for index in self._all("Expand"):
            self._spread_by_itself(index)
        for index, here in enumerate(self.now):
            if here and any(one.is_op("Sum") and len(one.reads) > 2 for one in here):
                self._in_pairs(index)
        return self.changed

    def _all(self, *op_types: str) -> list[int]:
        return [k for k, here in enumerate(self.now) if len(here) == 1 and here[0].node.op_type in op_types]

    def _scatter_into(self, index: int) -> None:
        (op,) = self.now[index]
        total, terms = op.makes[0], op.reads
        for term in terms:
            scatter = self._producer(term, *_ADDING)
            if scatter is None or self.reads[term] != 1 or len(terms) < 2:
                continue
            zeros, *rest = scatter.reads
            others = [one for one in terms if one is not term]
            same = all(_same(one, total) for one in (term, *others))
            adds = scatter.node.attributes.get_string("reduction", "none") == "add"
            if not same or not adds or not self._is_zeros(zeros):
                continue
            into = others[0] if len(others) == 1 else term
            added = _with(op, [into, *rest], total, op.label, scatter.node)
            summed = _with(op, others, term, term, op_type="Add" if len(others) == 2 else "Sum")
            before = self.producers[term]
            self._place(index, (added,) if into is not term else (summed, added))
            self._place(before, ())
            return

    def _product_transposed(self, index: int) -> None:
        (op,) = self.now[index]
        (operand,) = op.reads
        product = self._producer(operand, "Gemm")
        if product is None or self.reads[operand] != 1 or len(product.reads) != 2:
            return
        if [*op.node.attributes.get_ints("perm", [1, 0])] != [1, 0]:
            return
        first, second = (product.node.attributes.get_int(side, 0) for side in ("transA", "transB"))
        before = self.producers[operand]
        swapped = _with(op, product.reads[::-1], op.makes[0], op.label, product.node)
        swapped.node.attributes["transA"] = ir.AttrInt64("transA", 1 - second)
        swapped.node.attributes["transB"] = ir.AttrInt64("transB", 1 - first)
        self._place(index, (swapped,))
        self._place(before, ())

    def _spread_by_itself(self, index: int) -> None:
        (op,) = self.now[index]
        spread, source = op.makes[0], op.reads[0]
        readers = self.readers.get(spread, set())
        inner = [one for at in readers for one in self.now[at] if spread in one.reads]
        if self.reads.get(spread, 0) != sum(one.reads.count(spread) for one in inner):
            return
        if not inner or not all(self._broadcasts(one, spread) for one in inner):
            return
        for at in sorted(readers):
            self._place(at, tuple([_reading(one, spread, source) for one in self.now[at]]))

    def _in_pairs(self, index: int) -> None:
        """Replaces a Sum of several operands by Adds, the large ones first: onnxruntime takes less time for these."""
        adds: list[Compute] = []
        for op in self.now[index]:
            if not op.is_op("Sum") or len(op.reads) < 3:
                adds.append(op)
                continue
            made = op.makes[0]
            terms = sorted(op.reads, key=lambda one: not _same(one, made))
            total = terms[0]
            for at, term in enumerate(terms[1:], 2):
                following = made if at == len(terms) else made.derived_untyped(f".of{at}")
                adds.append(_with(op, [total, term], following, following, op_type="Add"))
                total = following
        self._place(index, tuple(adds))

    def _broadcasts(self, op: Compute, value: Value) -> bool:
        """Whether the op gives the same result from the operand of the Expand that made `value`: another operand is as large."""
        others = [one for one in op.reads if self._producer(one, "Expand") is None]
        return op.is_op(*_BROADCASTING) and any(_same(one, value) for one in others)

    def _place(self, index: int, ops: tuple[Compute, ...]) -> None:
        """Replaces the ops at an index; zeros, copies or shapes that only the old ops read are removed."""
        before = self.now[index]
        self._count(index, before, -1)
        self.now[index] = self.changed[index] = ops
        self._count(index, ops)
        for value in dict.fromkeys([one for op in before for one in op.reads]):
            source = self.producers.get(value)
            if not self.reads.get(value) and source is not None and source != index:
                here = self.now[source]
                if len(here) == 1 and here[0].is_op("ConstantOfShape", "Shape", "Expand"):
                    self._place(source, ())

    def _count(self, index: int, ops: Sequence[Compute], by: int = 1) -> None:
        for op in ops:
            for value in op.reads:
                self.reads[value] = self.reads.get(value, 0) + by
                at = self.readers.setdefault(value, set())
                at.add(index) if by > 0 else at.discard(index)
            for value in op.makes:
                if by > 0:
                    self.producers[value] = index
                elif self.producers.get(value) == index:
                    del self.producers[value]

    def _producer(self, value: Value, *op_types: str) -> Compute | None:
        """Returns the op that makes a value, if its type is one of these."""
        here = self.now[self.producers[value]] if value in self.producers else ()
        return here[0] if len(here) == 1 and here[0].is_op(*op_types) else None

    def _is_zeros(self, value: Value) -> bool:
        op = self._producer(value, "ConstantOfShape")
        number = op.node.attributes.get("value") if op is not None else None
        return op is not None and (number is None or not np.any(number.as_tensor().numpy()))


def _same(one: Value, other: Value) -> bool:
    return one.shape is not None and one.shape == other.shape


def _reading(op: Compute, value: Value, instead: Value) -> Compute:
    """Returns the op with `instead` in place of `value` among its inputs."""
    if value not in op.reads:
        return op
    return _with(op, [instead if one is value else one for one in op.reads], op.makes[0], op.label)


def _with(
    op: Compute,
    inputs: Sequence[Value],
    output: Value,
    label: str | Value,
    like: ir.Node | None = None,
    op_type: str = "",
) -> Compute:
    """Returns a step in place of `op`, over other values, with the attributes and type of `like` (default `op`), or with `op_type`."""
    like = like or op.node
    node = ir.Node(like.domain, op_type or like.op_type, [], list(like.attributes.values()))
    return replace(op, node=node, inputs=tuple(inputs), outputs=(output,), label=label)
