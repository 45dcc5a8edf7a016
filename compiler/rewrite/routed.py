"""Pass: products with matrices that a router picks become products of rows with their experts' matrices.

Exporters pick a matrix for each entry, a token and one of its choices, and multiply it with that entry's row alone. The matrices are copied
for each entry, which is most of the time of such a layer:

    P = GatherND(W [experts, b, a], ids [m, 1])   y [m, b, 1] = MatMul(P [m, b, a], x [m, a, 1])
->  y [m, b] = ExpertMatMul(x [m, a], W, ids [m])

A form is known by its data flow, from indices of a TopK or an ArgMax over as many elements as there are experts to the first dim of a
constant of three dims; so each index names an expert. The product keeps its path. Rows stay in the order of their entries, so all that is
computed between two products, and after them, stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Typed
from partc.compiler.ops.families.neural.experts import EXPERT_MATMUL, TRANSPOSED
from partc.compiler.ops.node import axes_of, axis_of, counted, dims, same
from partc.compiler.ops.rule import OWN
from partc.compiler.rewrite.rewriting import Rewriting
from partc.runtime.units import first_of

_MOVES = frozenset(("Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"))
"""Ops whose results are elements of their first input."""
_DIMS = 3
"""The dims of experts' weights: an expert, and those of its matrix."""


@dataclass(frozen=True)
class _Picked:
    """Matrices of `weights`, one for each of `ids`; `swapped`: with rows as columns. `nodes`: what makes them, in order."""

    weights: ir.Value
    ids: ir.Value
    swapped: bool
    nodes: tuple[ir.Node, ...]


def routed(program: Typed) -> Typed:
    """The program with each such product replaced; a warning names matrices that are still copied."""
    work = _Routing(program)
    for node in [node for node in work.graph if _is(node, "MatMul")]:
        work.replace(node)
    copied = [work.paths[node] for node in work.graph if node.op_type in ("Gather", "GatherND") and work.picked(node)]
    if copied:
        fact = f"{first_of(copied)}: the matrices of experts are copied for each token; only products of a row with each are not"
        return work.done(warnings=(*program.warnings, fact))
    return work.done() if work.changed else program


class _Routing(Rewriting[Typed]):
    def __init__(self, program: Typed) -> None:
        super().__init__(program)
        self.changed = False
        self.constants = set(self.graph.initializers.values())
        for node in self.graph:
            if self.constants.issuperset(program.reads[node]):
                self.constants.update(node.outputs)

    def picked(self, node: ir.Node | None) -> _Picked | None:
        """The matrices that a node makes; None where a router does not pick them."""
        if node is None:
            return None
        if _is(node, "Transpose"):
            found, rank = self.picked(_producer(node.inputs[0])), len(dims(node.outputs[0]) or ())
            order = [counted(axis, rank) for axis in node.attributes.get_ints("perm") or reversed(range(rank))]
            if found is None or order != [*range(rank - 2), rank - 1, rank - 2]:
                return None
            return replace(found, swapped=not found.swapped, nodes=(*found.nodes, node))
        by_rows = _is(node, "Gather") and node.attributes.get_int("axis", 0) == 0
        if not by_rows and not (_is(node, "GatherND") and node.attributes.get_int("batch_dims", 0) == 0):
            return None
        weights, ids = node.inputs
        shape, extents = dims(weights), dims(ids)
        if weights is None or ids is None or shape is None or extents is None or weights not in self.constants:
            return None
        if len(shape) != _DIMS or not isinstance(shape[0], int) or not (by_rows or extents[-1:] == (1,)):
            return None
        return _Picked(weights, ids, False, (node,)) if _are_choices(ids, shape[0]) else None

    def replace(self, node: ir.Node) -> None:
        """Puts the product of rows with their experts' matrices in the place of a node that is one."""
        for side in (0, 1):
            picked, rows = self.picked(_producer(node.inputs[side])), node.inputs[1 - side]
            shape, axis = dims(rows), _DIMS - 1 - side
            if picked is None or rows is None or shape is None or len(shape) != _DIMS or shape[axis] != 1:
                continue
            if same(shape[0], (dims(node.inputs[side]) or shape)[0]):
                self._put(node, picked, rows, axis, (side == 0) != picked.swapped)
                self.changed = True
                return

    def _put(self, node: ir.Node, picked: _Picked, rows: ir.Value, axis: int, transposed: bool) -> None:
        """Puts it in the place of a product; `axis`: the dim of 1 of the rows, and of the product."""
        out, experts = node.outputs[0], picked.ids
        old = [*picked.nodes, *filter(None, map(_producer, (rows, experts))), node]
        if len(dims(experts) or ()) > 1:
            experts = self._without(node, experts, 1, ".experts")
        product = self._but(out, axis, f"{name_of(out)}.product")
        operands = [self._without(node, rows, axis, ".rows"), picked.weights, experts]
        self.put(
            node,
            EXPERT_MATMUL,
            operands,
            [product],
            domain=OWN,
            attributes=[ir.AttrInt64(TRANSPOSED, 1)] if transposed else [],
        )
        for reader in [use.node for use in out.uses() if _is(use.node, "Squeeze") and not out.is_graph_output()]:
            if axes_of(reader, _DIMS) == (axis,):
                self.take_place(product, reader.outputs[0], reader)
                old.append(reader)
        if out.uses() or out.is_graph_output():
            whole = self.like(out, name_of(out))
            self.put(
                node, "Unsqueeze", [product, self.constant(self.free(f"{out.name}.axes"), [axis])], [whole], ".row"
            )
            self.take_place(whole, out, node)
        self.drop(old)

    def _without(self, node: ir.Node, value: ir.Value, axis: int, suffix: str) -> ir.Value:
        """A value without a dim of 1: what an Unsqueeze has given the dim, or a Squeeze of it in front of `node`."""
        made = _producer(value)
        if made is not None and _is(made, "Unsqueeze") and axes_of(made, len(dims(value) or ())) == (axis,):
            assert made.inputs[0] is not None
            return made.inputs[0]
        narrow = self._but(value, axis, self.free(f"{node.outputs[0].name}{suffix}"))
        axes = self.constant(self.free(f"{narrow.name}.axes"), [axis])
        self.put(node, "Squeeze", [value, axes], [narrow], suffix)
        return narrow

    def _but(self, value: ir.Value, axis: int, name: str) -> ir.Value:
        """A new value as `value` is, without a dim."""
        info = self.values[value]
        kept = [dim for k, dim in enumerate(dims(value) or ()) if k != axis]
        made = ir.Value(name=name, type=value.type, shape=ir.Shape(kept))
        shape = None if info.shape is None else tuple(dim for k, dim in enumerate(info.shape) if k != axis)
        self.values[made] = replace(info, shape=shape)
        return made


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain in ("", "ai.onnx")


def _are_choices(ids: ir.Value, experts: int) -> bool:
    """Whether ids are places among as many elements as there are experts."""
    node = ids.producer()
    if node is None or node.domain not in ("", "ai.onnx"):
        return False
    source = node.inputs[0]
    if node.op_type in _MOVES and source is not None:
        return _are_choices(source, experts)
    shape = dims(source)
    if shape is None or not (node.op_type == "ArgMax" or (node.op_type == "TopK" and ids is node.outputs[1])):
        return False
    return shape[axis_of(node, len(shape), 0 if node.op_type == "ArgMax" else -1)] == experts
