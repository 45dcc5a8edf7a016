"""Passes over large tensors that the gradients of single nodes cannot save, since each sees its own node only.

    e = Expand(v), y = Mul(e, x)              y = Mul(v, x)                    x is as large as e: the op broadcasts by itself
    s = Scatter(zeros, i, u), y = Add(a, s)   y = Scatter(a, i, u)             both add, and no zeros are made
    s = Scatter(zeros, i, u), y = Sum(a, b, s)   s = Sum(a, b), y = Scatter(s, i, u)
    y = Sum(a, b, c)                          t = Add(a, b), y = Add(t, c)
    t = Gemm(a, b), y = Transpose(t)          y = Gemm(b, a), both operands the other way round

The gradient of a cross entropy is so the exponentials times a number a position, less that number at each label; that of a table
which is looked up and multiplied with is the product's, with the rows that were looked up added in. The last is the gradient of a weight
that a model keeps transposed, as those of PyTorch are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnx_ir as ir

Dims = Callable[[str], Sequence[object] | None]

_BROADCASTING = ("Add", "Sub", "Mul", "Div", "Sum")
_ADDING = ("ScatterElements", "ScatterND")


def simplify(nodes: Sequence[ir.Node | None], kept: Collection[str], dims: Dims) -> dict[int, tuple[ir.Node, ...]]:
    """By index the nodes that stand in the place of one, none where it falls away.

    `nodes` in order, None for steps that are no nodes; what those read, and what is read afterwards, is in `kept`. `dims` are those of
    a value by its name, None where one of them is not known: equal ones say equal sizes. Names stay, so what is known of them holds.
    """
    return _Lean(nodes, kept, dims).run()


class _Lean:
    def __init__(self, nodes: Sequence[ir.Node | None], kept: Collection[str], dims: Dims) -> None:
        self.dims = dims
        self.now: list[tuple[ir.Node, ...]] = [() if node is None else (node,) for node in nodes]
        self.changed: dict[int, tuple[ir.Node, ...]] = {}
        self.made: dict[str, int] = {}
        self.reads = Counter(dict.fromkeys(kept, 1))
        self.readers: dict[str, set[int]] = {}
        for index, (node,) in ((index, here) for index, here in enumerate(self.now) if here):
            self._count(index, (node,))
            for body in (one.as_graph() for one in node.attributes.values() if one.type == ir.AttributeType.GRAPH):
                for inner in ir.traversal.RecursiveGraphIterator(body):
                    self.reads.update(_read(inner))

    def run(self) -> dict[int, tuple[ir.Node, ...]]:
        for index in self._all("Add", "Sum"):
            self._scatter_into(index)
        for index in self._all("Transpose"):
            self._product_transposed(index)
        for index in self._all("Expand"):
            self._spread_by_itself(index)
        for index in range(len(self.now)):
            self._in_pairs(index)
        return self.changed

    def _all(self, *op_types: str) -> list[int]:
        return [k for k, here in enumerate(self.now) if len(here) == 1 and _is(here[0], *op_types)]

    def _scatter_into(self, index: int) -> None:
        (node,) = self.now[index]
        total, terms = _made(node), _read(node)
        for name in terms:
            scatter = self._producer(name, *_ADDING)
            if scatter is None or self.reads[name] != 1 or len(terms) < 2:
                continue
            zeros, *rest = _read(scatter)
            others = [one for one in terms if one != name]
            same = all(self._same(one, total) for one in (name, *others))
            if not same or scatter.attributes.get_string("reduction", "none") != "add" or not self._is_zeros(zeros):
                continue
            into = others[0] if len(others) == 1 else name
            added = _with(scatter, [into, *rest], total, node.name)
            summed = _with(node, others, name, name, "Add" if len(others) == 2 else "Sum")
            before = self.made[name]
            self._place(index, (added,) if into != name else (summed, added))
            self._place(before, ())
            return

    def _product_transposed(self, index: int) -> None:
        (node,) = self.now[index]
        (name,) = _read(node)
        product = self._producer(name, "Gemm")
        if product is None or self.reads[name] != 1 or len(_read(product)) != 2:
            return
        if [*node.attributes.get_ints("perm", [1, 0])] != [1, 0]:
            return
        first, second = (product.attributes.get_int(side, 0) for side in ("transA", "transB"))
        before = self.made[name]
        swapped = _with(product, _read(product)[::-1], _made(node), node.name)
        swapped.attributes["transA"] = ir.AttrInt64("transA", 1 - second)
        swapped.attributes["transB"] = ir.AttrInt64("transB", 1 - first)
        self._place(index, (swapped,))
        self._place(before, ())

    def _spread_by_itself(self, index: int) -> None:
        (node,) = self.now[index]
        name, source = _made(node), _read(node)[0]
        readers = self.readers.get(name, set())
        inner = [one for at in readers for one in self.now[at] if name in _read(one)]
        if self.reads[name] != sum(_read(one).count(name) for one in inner):
            return
        if not inner or not all(self._broadcasts(one, name) for one in inner):
            return
        for at in sorted(readers):
            self._place(at, tuple(_reading(one, name, source) for one in self.now[at]))

    def _in_pairs(self, index: int) -> None:
        """A Sum of several as Adds, the large ones first: onnxruntime takes less time for these."""
        if not any(_is(node, "Sum") and len(_read(node)) > 2 for node in self.now[index]):
            return
        found: list[ir.Node] = []
        for node in self.now[index]:
            if not _is(node, "Sum") or len(_read(node)) < 3:
                found.append(node)
                continue
            made = _made(node)
            terms = sorted(_read(node), key=lambda one: not self._same(one, made))
            total = terms[0]
            for at, term in enumerate(terms[1:], 2):
                name = made if at == len(terms) else f"{made}.of{at}"
                found.append(_with(node, [total, term], name, name, "Add"))
                total = name
        self._place(index, tuple(found))

    def _broadcasts(self, node: ir.Node, name: str) -> bool:
        """Whether the node makes the same of what `name` was expanded from: another operand is as large."""
        others = [one for one in _read(node) if self._producer(one, "Expand") is None]
        return _is(node, *_BROADCASTING) and any(self._same(one, name) for one in others)

    def _place(self, index: int, nodes: tuple[ir.Node, ...]) -> None:
        """Puts nodes in the place of others; what only those read and makes zeros, copies or shapes, falls away."""
        before = self.now[index]
        self._count(index, before, -1)
        self.now[index] = self.changed[index] = nodes
        self._count(index, nodes)
        for name in dict.fromkeys(one for node in before for one in _read(node)):
            source = self.made.get(name)
            if not self.reads[name] and source is not None and source != index:
                here = self.now[source]
                if len(here) == 1 and _is(here[0], "ConstantOfShape", "Shape", "Expand"):
                    self._place(source, ())

    def _count(self, index: int, nodes: Sequence[ir.Node], by: int = 1) -> None:
        for node in nodes:
            for name in _read(node):
                self.reads[name] += by
                at = self.readers.setdefault(name, set())
                at.add(index) if by > 0 else at.discard(index)
            for value in node.outputs:
                if by > 0:
                    self.made[value.name or ""] = index
                elif self.made.get(value.name or "") == index:
                    del self.made[value.name or ""]

    def _producer(self, name: str, *op_types: str) -> ir.Node | None:
        """The node that makes a value, if it is of one of these ops."""
        here = self.now[self.made[name]] if name in self.made else ()
        return here[0] if len(here) == 1 and _is(here[0], *op_types) else None

    def _is_zeros(self, name: str) -> bool:
        node = self._producer(name, "ConstantOfShape")
        value = node.attributes.get("value") if node is not None else None
        return node is not None and (value is None or not np.any(value.as_tensor().numpy()))

    def _same(self, one: str, other: str) -> bool:
        first = self.dims(one)
        return first is not None and first == self.dims(other)


def _is(node: ir.Node, *op_types: str) -> bool:
    return node.op_type in op_types and node.domain in ("", "ai.onnx")


def _reading(node: ir.Node, name: str, instead: str) -> ir.Node:
    """The node, reading another value in the place of one."""
    if name not in _read(node):
        return node
    return _with(node, [instead if one == name else one for one in _read(node)], _made(node), node.name)


def _read(node: ir.Node) -> list[str]:
    return [value.name for value in node.inputs if value is not None and value.name]


def _made(node: ir.Node) -> str:
    return node.outputs[0].name or ""


def _with(node: ir.Node, inputs: Sequence[str], output: str, name: str | None, op_type: str = "") -> ir.Node:
    """A node with other names for what it reads and makes."""
    copy = ir.Node(
        node.domain,
        op_type or node.op_type,
        [ir.Value(name=one) for one in inputs],
        list(node.attributes.values()),
        outputs=[ir.Value(name=output)],
        name=name,
    )
    copy.metadata_props.update(node.metadata_props)
    return copy
