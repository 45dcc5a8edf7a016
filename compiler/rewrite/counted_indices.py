"""Pass: replaces look-ups whose indices count up: elements in order become a Reshape, a look-up by record number stays within its record.

Exporters write views and masks as look-ups by indices that count up. The elements of an index tensor are tracked as long as they are
`begin + sum(step[k] * i[k])` for the tensor's own coordinates `i`:

    as_strided   Gather(Reshape(x, [-1]), 8*i0 + i1)                       Reshape(x, [-1, 8])
    a mask       GatherND(mask, [i0, i3]) of (batch, 1, 1, seq)            Unsqueeze(mask, [1, 2])
    by record    GatherND(logits, [i0, last]) of (batch,)                  GatherND(logits, [last]) {batch_dims: 1}

Where the steps are those of a transposed tensor, a Transpose follows the Reshape. Every other look-up stays. A plan that neither shards nor
runs microbatches leaves the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import sympy
from partc.compiler.analysis.records import dims_of
from partc.compiler.autodiff.shapes import inverse
from partc.compiler.dims.normal import normal
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Typed
from partc.compiler.ops.node import axis_of
from partc.compiler.rewrite.opset import cuts
from partc.compiler.rewrite.rewriting import Rewriting

_LARGEST = 1 << 16
"""The most elements of a constant that is examined."""
_ZERO, _ONE = sympy.Integer(0), sympy.Integer(1)


@dataclass(frozen=True)
class Counting:
    """An integer tensor whose element at coordinates i is `begin + sum(steps[k] * i[k])`; `sizes` are its dims."""

    begin: sympy.Expr
    steps: tuple[sympy.Expr, ...]
    sizes: tuple[sympy.Expr, ...]

    @property
    def is_number(self) -> bool:
        """Whether all elements are equal."""
        return not any(self.steps)


def counted_indices(program: Typed) -> Typed:
    """Returns the program without look-ups by indices that count; `paths` and `values` are updated."""
    plan = program.plan
    in_time = plan.pipeline is not None or (plan.train is not None and plan.train.accumulate > 1)
    if not in_time and not cuts(plan, program.declared):
        return program
    work, at = _Rewritten(program), _Followed(program)
    for node in list(work.graph):
        if node in work.paths and node.domain in ("", "ai.onnx") and not node.device_configurations:
            if node.op_type == "Gather":
                work.gather(node, at)
            elif node.op_type == "GatherND" and not node.attributes.get_int("batch_dims", 0):
                work.gather_nd(node, at)
    return work.done()


class _Rewritten(Rewriting[Typed]):
    def gather(self, node: ir.Node, at: _Followed) -> None:
        """Rewrites a look-up of all elements of a vector by an index tensor that counts."""
        data, index = dims_of(node.inputs[0]), at.of(node.inputs[1])
        if data is not None and len(data) == 1 and index is not None:
            self._in_order(node, data, index, at)

    def gather_nd(self, node: ir.Node, at: _Followed) -> None:
        """Rewrites a look-up by tuples of indices: of single elements whose indices all count, or of records by their number."""
        data, given = dims_of(node.inputs[0]), node.inputs[1]
        parts = at.columns(given)
        if data is None or not parts or len(parts) > len(data):
            return
        known = [one for one in parts if one is not None]
        if len(known) == len(parts) == len(data):
            begin, steps = _ZERO, [_ZERO] * len(known[0].steps)
            for size, one in zip(data, known, strict=True):
                begin = begin * size + one.begin
                steps = [step * size + own for step, own in zip(steps, one.steps, strict=True)]
            together = Counting(at.normal(begin), tuple(map(at.normal, steps)), known[0].sizes)
            if self._in_order(node, data, together, at):
                return
        first = parts[0]
        if first is None or len(parts) < 2 or not first.sizes or first.begin != 0:
            return
        if first.steps[0] == 1 and not any(first.steps[1:]) and at.same(first.sizes[0], data[0]):
            self._by_record(node, len(parts))

    def _in_order(self, node: ir.Node, data: Sequence[sympy.Expr], index: Counting, at: _Followed) -> bool:
        """Replaces a look-up by a Reshape and a Transpose where the index visits all elements once, by strides; returns whether it does."""
        out, source = node.outputs[0], node.inputs[0]
        assert source is not None
        if index.begin != 0 or not at.same(sympy.prod(index.sizes), sympy.prod(data)) or out.shape is None:
            return False
        order = _by_strides(index, at)
        if order is None or len(out.shape) != len(order):
            return False
        turned = order != [*range(len(order))]
        regrouped = self.turned(out, f"{out.name}.regrouped", order) if turned else self.like(out, name_of(out))
        if not self._regroup(node, source, regrouped, at):
            self.values.pop(regrouped, None)
            return False
        made = regrouped
        if turned:
            made = self.like(out, name_of(out))
            self.put(node, "Transpose", [regrouped], [made], ".turned", perm=inverse(order))
        self._replace(node, made)
        return True

    def _regroup(self, node: ir.Node, source: ir.Value, target_value: ir.Value, at: _Followed) -> bool:
        """Adds a node that regroups the elements into the dims of `target_value`, in the same order; returns whether one op can."""
        here, there = dims_of(source), dims_of(target_value)
        if here is None or there is None:
            return False
        ones = [k for k, dim in enumerate(there) if dim == 1]
        others = [dim for dim in there if dim != 1]
        if len(others) == len(here) and all(at.same(a, b) for a, b in zip(here, others, strict=True)):
            if not ones:
                self.put(node, "Identity", [source], [target_value], ".regrouped")
            else:
                axes = self.constant(f"{self.paths[node]}.axes", ones)
                self.put(node, "Unsqueeze", [source, axes], [target_value], ".regrouped")
            return True
        target = [int(dim) if dim.is_Integer else -1 for dim in there]
        if target.count(-1) > 1 or 0 in target:
            return False
        self.put(
            node, "Reshape", [source, self.constant(f"{self.paths[node]}.dims", target)], [target_value], ".regrouped"
        )
        return True

    def _by_record(self, node: ir.Node, depth: int) -> None:
        """Removes the record number from the index tuples: each record is looked up by its own tuple (`batch_dims`)."""
        out, indices = node.outputs[0], node.inputs[1]
        assert indices is not None
        assert indices.shape is not None
        path, last, joined = self.paths[node], len(indices.shape) - 1, indices.producer()
        parts = [] if joined is None or joined.op_type != "Concat" else list(joined.inputs)
        if len(parts) == 2 and (dims_of(parts[0]) or [0])[-1] == 1:
            rest = parts[1]
        else:
            rest = self.like(indices, f"{path}.within", {last: depth - 1})
            bounds = {"from": 1, "to": depth, "along": last}
            begins = [self.constant(f"{path}.{name}", [number]) for name, number in bounds.items()]
            self.put(node, "Slice", [indices, *begins], [rest], ".within")
        made = self.like(out, name_of(out))
        self.put(node, "GatherND", [node.inputs[0], rest], [made], batch_dims=1)
        self._replace(node, made)

    def _replace(self, node: ir.Node, made: ir.Value) -> None:
        """Redirects the readers to the new value, and removes nodes that served only to count."""
        out = node.outputs[0]
        out.replace_all_uses_with(made, replace_graph_outputs=True)
        unread = [node]
        while unread:
            one = unread.pop()
            if any(value.uses() or value.is_graph_output() for value in one.outputs) or one not in self.paths:
                continue
            before = {value.producer(): None for value in one.inputs if value is not None}
            self.drop([one])
            unread += [producer for producer in before if producer is not None]


class _Followed:
    """The countings of integer tensors, computed on demand."""

    def __init__(self, program: Typed) -> None:
        self.known = {name: info.facts for name, info in program.symbols.items()}
        self.countings: dict[ir.Value, Counting | None] = {}

    def normal(self, expression: sympy.Expr) -> sympy.Expr:
        """Returns the normal form of an expression in an index."""
        return normal(expression, self.known)

    def same(self, a: sympy.Expr, b: sympy.Expr) -> bool:
        """Whether two sizes are equal."""
        return bool(self.normal(a - b) == 0)

    def of(self, value: ir.Value | None) -> Counting | None:
        """Returns the counting of a tensor; None where it is not known."""
        if value is None:
            return None
        if value not in self.countings:
            self.countings[value] = None
            sizes = dims_of(value)
            if sizes is not None and value.dtype in (ir.DataType.INT64, ir.DataType.INT32):
                self.countings[value] = self._of(value, tuple(sizes))
        return self.countings[value]

    def columns(self, value: ir.Value | None) -> list[Counting | None]:
        """Returns the counting of each component of index tuples; empty where the number of components is not known."""
        sizes = dims_of(value)
        if value is None or not sizes or not sizes[-1].is_Integer:
            return []
        node = value.producer()
        if node is None or node.op_type != "Concat" or axis_of(node, len(sizes), 0) != len(sizes) - 1:
            return [_column(self.of(value), k) for k in range(int(sizes[-1]))]
        countings: list[Counting | None] = []
        for part in node.inputs:
            width = (dims_of(part) or [None])[-1]
            if width is None or not width.is_Integer:
                return []
            countings += [_column(self.of(part), k) for k in range(int(width))]
        return countings

    def _of(self, value: ir.Value, sizes: tuple[sympy.Expr, ...]) -> Counting | None:
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None:
            return _constant(tensor, sizes)
        node = value.producer()
        rule = None if node is None or node.domain not in ("", "ai.onnx") else _RULES.get(node.op_type)
        return None if rule is None or node is None else rule(self, node, sizes)

    def range(self, node: ir.Node, sizes: tuple[sympy.Expr, ...]) -> Counting | None:
        begin, step = self.of(node.inputs[0]), self.of(node.inputs[2])
        return None if begin is None or step is None else Counting(begin.begin, (step.begin,), sizes)

    def added(self, node: ir.Node, sizes: tuple[sympy.Expr, ...]) -> Counting | None:
        one, other = (self.aligned(self.of(value), sizes) for value in node.inputs)
        if one is None or other is None:
            return None
        sign = -1 if node.op_type == "Sub" else 1
        steps = tuple(a + sign * b for a, b in zip(one.steps, other.steps, strict=True))
        return Counting(one.begin + sign * other.begin, steps, sizes)

    def multiplied(self, node: ir.Node, sizes: tuple[sympy.Expr, ...]) -> Counting | None:
        one, other = (self.aligned(self.of(value), sizes) for value in node.inputs)
        if one is None or other is None or not (one.is_number or other.is_number):
            return None
        a, times = (other, one.begin) if one.is_number else (one, other.begin)
        return Counting(a.begin * times, tuple(step * times for step in a.steps), sizes)

    def regrouped(self, node: ir.Node, sizes: tuple[sympy.Expr, ...]) -> Counting | None:
        """Follows a counting through Squeeze, Unsqueeze and a Reshape that only adds or removes dims of 1."""
        source = self.of(node.inputs[0])
        if source is None:
            return None
        steps = iter([(step, size) for step, size in zip(source.steps, source.sizes, strict=True) if size != 1])
        steps_kept = []
        for size in sizes:
            step, own = (_ZERO, size) if size == 1 else next(steps, (_ZERO, None))
            if own != size:
                return None
            steps_kept.append(step)
        return None if next(steps, None) is not None else Counting(source.begin, tuple(steps_kept), sizes)

    def as_before(self, node: ir.Node, sizes: tuple[sympy.Expr, ...]) -> Counting | None:
        return self.aligned(self.of(node.inputs[0]), sizes)

    def turned(self, node: ir.Node, sizes: tuple[sympy.Expr, ...]) -> Counting | None:
        source = self.of(node.inputs[0])
        order = node.attributes.get_ints("perm") or [*reversed(range(len(sizes)))]
        return None if source is None else Counting(source.begin, tuple(source.steps[k] for k in order), sizes)

    def aligned(self, counting: Counting | None, sizes: tuple[sympy.Expr, ...]) -> Counting | None:
        """Broadcasts an operand's counting to these dims; None where a size differs that is not 1."""
        if counting is None or len(counting.sizes) > len(sizes):
            return None
        ahead = len(sizes) - len(counting.sizes)
        if any(have not in (1, want) for have, want in zip(counting.sizes, sizes[ahead:], strict=True)):
            return None
        steps = tuple(_ZERO if size == 1 else step for step, size in zip(counting.steps, counting.sizes, strict=True))
        return Counting(counting.begin, (_ZERO,) * ahead + steps, sizes)


_Rule = Callable[[_Followed, ir.Node, tuple[sympy.Expr, ...]], Counting | None]
_RULES: Mapping[str, _Rule] = {
    "Range": _Followed.range,
    "Add": _Followed.added,
    "Sub": _Followed.added,
    "Mul": _Followed.multiplied,
    "Unsqueeze": _Followed.regrouped,
    "Squeeze": _Followed.regrouped,
    "Reshape": _Followed.regrouped,
    "Expand": _Followed.as_before,
    "Cast": _Followed.as_before,
    "Identity": _Followed.as_before,
    "Transpose": _Followed.turned,
}


def _constant(tensor: ir.TensorProtocol, sizes: tuple[sympy.Expr, ...]) -> Counting | None:
    """Returns the counting of a constant; None where its elements follow none."""
    if not tensor.size or tensor.size > _LARGEST:
        return None
    array = tensor.numpy().astype(np.int64)
    begin = array.flat[0]
    steps = [int(array.take(1, k).flat[0] - begin) if size > 1 else 0 for k, size in enumerate(array.shape)]
    made = begin + sum((step * np.indices(array.shape, sparse=True)[k] for k, step in enumerate(steps)), np.int64(0))
    if not (made == array).all():
        return None
    return Counting(sympy.Integer(int(begin)), tuple(map(sympy.Integer, steps)), sizes)


def _column(tuples: Counting | None, k: int) -> Counting | None:
    """Returns one component of tuples along the last dim."""
    if tuples is None:
        return None
    return Counting(tuples.begin + k * tuples.steps[-1], tuples.steps[:-1], tuples.sizes[:-1])


def _by_strides(index: Counting, at: _Followed) -> list[int] | None:
    """Returns the dims from the largest step to the smallest.

    Returns None unless each step is the product of the sizes of all dims with smaller steps.
    """
    left = [k for k, size in enumerate(index.sizes) if size != 1]
    order: list[int] = []
    behind = _ONE
    while left:
        dim = next((k for k in left if at.same(index.steps[k], behind)), None)
        if dim is None:
            return None
        left.remove(dim)
        order.insert(0, dim)
        behind *= index.sizes[dim]
    if order == sorted(order):
        return [*range(len(index.sizes))]
    return order + [k for k, size in enumerate(index.sizes) if size == 1]
