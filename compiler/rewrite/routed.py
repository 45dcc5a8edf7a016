"""Pass: products with gathered expert matrices become `ExpertMatMul`: products of rows with their experts' matrices.

Exporters gather a matrix for each entry, which is a token with one of its choices, and multiply it with that entry's row. The copies of the
matrices take most of the time of such a layer:

    P = GatherND(W [experts, b, a], ids [m, 1])   y [m, b, 1] = MatMul(P [m, b, a], x [m, a, 1])
->  y [m, b] = ExpertMatMul(x [m, a], W, ids [m])

The form is recognized by its dataflow: from the indices of a TopK or an ArgMax over as many elements as there are experts, to the first dim
of a constant of three dims; so each index is the number of an expert. The product keeps its path. Rows keep the order of their entries, so
the nodes between two products and after them do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.blocked import EXPERT_BLOCKS, ExpertBlocks
from partc.compiler.ir.graph import add_initializer, name_of
from partc.compiler.ir.program import Typed
from partc.compiler.ir.value_info import ValueInfo
from partc.compiler.ops.families.neural.experts import EXPERT_MATMUL, EXPERT_MATMUL_N_BITS, TRANSPOSED
from partc.compiler.ops.node import axes_of, axis_of, dims, same
from partc.compiler.ops.registry import CONTRIB
from partc.compiler.ops.rule import OWN
from partc.compiler.rewrite.products import Picked, picked
from partc.compiler.rewrite.rewriting import Rewriting
from partc.runtime.units import first_of

_MOVES = frozenset(("Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"))
"""Ops whose results are elements of their first input."""
_DIMS = 3
"""The number of dims of experts' weights: the expert, and the two of its matrix."""


def routed(program: Typed) -> Typed:
    """Returns the program with each such product replaced, and a warning that names matrices that are still copied.

    Raises CompileError if such matrices are to be quantized: only `ExpertMatMul` has a quantized form.
    """
    work = _Routing(program)
    for node in [node for node in work.graph if _is(node, "MatMul")]:
        work.route(node)
    if problems := [*work.unquantized()]:
        raise CompileError(problems)
    copied = [
        work.paths[node]
        for node in work.graph
        if node.op_type in ("Gather", "GatherND") and work.picked(node.outputs[0])
    ]
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

    def picked(self, value: ir.Value | None) -> Picked | None:
        """The gathered matrices that a value is; None if it is not a router's choice among the matrices of a constant."""
        choice = picked(value)
        shape, extents = (dims(choice.weights), dims(choice.ids)) if choice else (None, None)
        if choice is None or shape is None or extents is None or choice.weights not in self.constants:
            return None
        is_index = _is(choice.nodes[0], "GatherND")
        if len(shape) != _DIMS or len(extents) != 1 + is_index or (is_index and extents[1] != 1):
            return None
        return choice if isinstance(shape[0], int) and _are_choices(choice.ids, shape[0]) else None

    def unquantized(self) -> Iterator[Problem]:
        """Yields a problem for each weight that the plan quantizes and that a node still reads as floats."""
        for value in self.graph.initializers.values():
            blocks: ExpertBlocks | None = value.meta.get(EXPERT_BLOCKS)
            if blocks is not None and (use := next(iter(value.uses()), None)) is not None:
                fact = f"'{self.paths[use.node]}' picks matrices of '{value.name}', which cannot be quantized"
                law = "the product of one row with each matrix that a router picks has a quantized form"
                yield Problem(
                    blocks.where, fact, law, f"leave out '{value.name}': null behind a pattern keeps its weights"
                )

    def route(self, node: ir.Node) -> None:
        """Replaces a MatMul of rows with gathered matrices by a product by expert, if it is one."""
        for side in (0, 1):
            found, rows = self.picked(node.inputs[side]), node.inputs[1 - side]
            shape, axis = dims(rows), _DIMS - 1 - side
            if found is None or rows is None or shape is None or len(shape) != _DIMS or shape[axis] != 1:
                continue
            if same(shape[0], (dims(node.inputs[side]) or shape)[0]):
                self._put(node, found, rows, axis, (side == 0) != found.swapped)
                self.changed = True
                return

    def _put(self, node: ir.Node, matrices: Picked, rows: ir.Value, axis: int, transposed: bool) -> None:
        """Writes the product that replaces `node`; `axis`: the dim of 1 in the rows and in the product."""
        out, experts = node.outputs[0], matrices.ids
        old = [*matrices.nodes, *filter(None, map(_producer, (rows, experts))), node]
        if len(dims(experts) or ()) > 1:
            experts = self._without(node, experts, 1, ".experts")
        product = self._but(out, axis, f"{name_of(out)}.product")
        rows, weights = self._without(node, rows, axis, ".rows"), matrices.weights
        blocks: ExpertBlocks | None = weights.meta.get(EXPERT_BLOCKS)
        if blocks is None:
            how = [ir.AttrInt64(TRANSPOSED, 1)] if transposed else []
            self.put(node, EXPERT_MATMUL, [rows, weights, experts], [product], attributes=how, domain=OWN)
        else:
            packed, scales = (self._stack(weights, word) for word in ("blocks", "scales"))
            how = ir.convenience.convert_attributes(blocks.attributes)
            operands = [rows, packed, experts, scales]
            self.put(node, EXPERT_MATMUL_N_BITS, operands, [product], attributes=how, domain=OWN)
            self.before.model.opset_imports.setdefault(CONTRIB, 1)
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
        if blocks is not None and not weights.uses():
            del self.graph.initializers[name_of(weights)], self.values[weights]

    def _stack(self, weights: ir.Value, word: str) -> ir.Value:
        """The blocks or the scales of experts' weights, which all products with these weights share."""
        blocks: ExpertBlocks = weights.meta[EXPERT_BLOCKS]
        name = f"{weights.name}.{blocks.attributes['bits']}bits.{word}"
        if name not in self.graph.initializers:
            tensor = blocks.blocks if word == "blocks" else blocks.scales
            value, shape = add_initializer(self.graph, name, tensor), tuple(tensor.shape.numpy())
            self.values[value] = ValueInfo(type_text(value.type), shape, tensor.dtype.bitwidth // 8)
        return self.graph.initializers[name]

    def _without(self, node: ir.Node, value: ir.Value, axis: int, suffix: str) -> ir.Value:
        """A value without its dim of 1: the input of the Unsqueeze that added the dim, else the result of a new Squeeze before `node`."""
        made = _producer(value)
        if made is not None and _is(made, "Unsqueeze") and axes_of(made, len(dims(value) or ())) == (axis,):
            assert made.inputs[0] is not None
            return made.inputs[0]
        narrow = self._but(value, axis, self.free(f"{node.outputs[0].name}{suffix}"))
        axes = self.constant(self.free(f"{narrow.name}.axes"), [axis])
        self.put(node, "Squeeze", [value, axes], [narrow], suffix)
        return narrow

    def _but(self, value: ir.Value, axis: int, name: str) -> ir.Value:
        """A new value with the type and shape of `value`, without a dim."""
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
    """Whether ids are indices into as many elements as there are experts."""
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
