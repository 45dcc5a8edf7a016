"""Writes out onnxruntime's MoE, where it is cut, trained or computes slots, as products with matrices that a router picks.

    y = MoE(x, logits, W1, b1, W2, b2) {k, activation_type}
 -> p, ids = TopK(Softmax(logits), k);  y = sum over k of p * (W2[ids] act(W1[ids] x + b1[ids]) + b2[ids])

The kernel computes a layer whole, has no gradient, and gives a token other bits alone than among others. The pass `routed` then multiplies
rows by expert. An activation of which this module has no formula leaves the node as it is.

Experts whose weights are to be blocks are written out as well, for one session of onnxruntime: there each expert multiplies all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.blocked import EXPERT_BLOCKS, ExpertBlocks
from partc.compiler.ir.value_info import Array
from partc.compiler.ops.node import dims, operand
from partc.compiler.ops.registry import CONTRIB
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.products import products

_ALONE = ("identity", "relu", "silu")
_SWIGLU, _INTERLEAVED = "swiglu", 1
_LAST = np.iinfo(np.int64).max


def write_out_mixture(node: ir.Node) -> None:
    """Replaces an MoE in its graph by plain nodes; what its output is called stays."""
    graph, weights = node.graph, [dims(operand(node, k)) for k in (2, 4)]
    if node.op_type != "MoE" or not isinstance(graph, ir.Graph) or None in weights or dims(node.inputs[0]) is None:
        return
    kind, fusion = (
        str(node.attributes.get_string("activation_type", "relu")),
        node.attributes.get_int("swiglu_fusion", 0),
    )
    is_gated = kind == _SWIGLU and fusion == _INTERLEAVED
    mixer = node.attributes.get_int("use_sparse_mixer", 0)
    if mixer or operand(node, 6) is not None or not (kind in _ALONE or is_gated):
        return
    write = _Writing(node)
    x, logits, first, first_bias, second, second_bias = (operand(node, k) for k in range(6))
    assert first is not None
    assert first.shape is not None
    experts, width, count = first.shape[0], first.shape[2], node.attributes.get_int("k", 1)
    shares = write("softmax", "Softmax", [write("logits", "Reshape", [logits, [-1, experts]])], axis=-1)
    share, chosen = write.several("choices", "TopK", [shares, [count]], 2)
    if node.attributes.get_int("normalize_routing_weights", 0):
        share = write("shares", "Div", [share, write("total", "ReduceSum", [share, [1]], keepdims=1)])
    ids = write("experts", "Reshape", [chosen, [-1]])
    each = write("each", "Expand", [write("tokens", "Reshape", [x, [-1, 1, width]]), [1, count, 1]])
    h = write.product("first", write("rows", "Reshape", [each, [-1, width, 1]]), first, first_bias, ids)
    if is_gated:
        h = write.gated(h)
    elif kind != "identity":
        h = write("relu", "Relu", [h]) if kind == "relu" else write.silu(h, 1.0)
    y = write.product("second", write("inner", "Unsqueeze", [h, [2]]), second, second_bias, ids)
    weighed = write("weighed", "Mul", [y, write("share", "Reshape", [share, [-1, 1]])])
    total = write("sum", "ReduceSum", [write("of_token", "Reshape", [weighed, [-1, count, width]]), [1]], keepdims=0)
    out = node.outputs[0]
    made = write("", "Reshape", [total, write("shape", "Shape", [x])])
    made.shape, made.type = out.shape, out.type
    ir.convenience.replace_nodes_and_values(graph, node, [node], write.nodes, [out], [made])


def with_dense_experts(model: ir.Model) -> ir.Model:
    """The model with each product by expert, whose weights are to be blocks, as quantized products of all rows with each expert's."""
    graph = model.graph
    for node, product in products(graph).items():
        blocks: ExpertBlocks | None = product.weight.meta.get(EXPERT_BLOCKS)
        if product.picked is None or blocks is None:
            continue
        (size, columns), column = product.sizes, node.inputs[0] is product.picked.nodes[-1].outputs[0]
        how = {**blocks.attributes, "K": size, "N": columns}
        build = NodeBuilder(graph, f"{node.outputs[0].name}.by_expert")
        ids = build.op("ids", "Reshape", [product.picked.ids, build.constant("flat", [-1, 1])])
        rows = build.op("rows", "Reshape", [node.inputs[column], build.constant("matrix", [-1, size])])
        made: ir.Value | None = None
        for expert, tensors in enumerate(zip(blocks.blocks.numpy(), blocks.scales.numpy(), strict=True)):
            operands = [
                _constant(graph, f"{build.path}.{expert}.{word}", one) for word, one in zip("bs", tensors, strict=True)
            ]
            (one,) = build.node(f"{expert}.product", "MatMulNBits", [rows, *operands], 1, CONTRIB, **how)
            chosen = build.op(f"{expert}.rows", "Equal", [ids, build.constant(str(expert), [expert])])
            made = one if made is None else build.op(f"{expert}.sum", "Where", [chosen, one, made])
        shape = build.constant("shape", [-1, columns, 1] if column else [-1, 1, columns])
        whole = build.op("whole", "Reshape", [made, shape])
        build.put(after=node)
        ir.convenience.replace_all_uses_with(node.outputs[0], whole, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    return model


def _constant(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    tensor = ir.tensor(np.ascontiguousarray(array), name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


class _Writing:
    """Makes nodes in the place of one; a list of numbers is a constant."""

    def __init__(self, node: ir.Node) -> None:
        self.node, self.nodes = node, list[ir.Node]()

    def __call__(self, word: str, op_type: str, inputs: Sequence[Any], **attributes: int) -> ir.Value:
        return self.several(word, op_type, inputs, 1, **attributes)[0]

    def several(self, word: str, op_type: str, inputs: Sequence[Any], count: int, **attributes: int) -> list[ir.Value]:
        """The outputs of a node, named after `word`; without one after the node that is replaced."""
        name, path = str(self.node.outputs[0].name), str(self.node.name)
        operands = [self._operand(one, f"{word}.operand{k}") for k, one in enumerate(inputs)]
        names = [name if not word else f"{name}.{word}{'' if count == 1 else k}" for k in range(count)]
        made = [ir.Value(name=one) for one in names]
        given = ir.convenience.convert_attributes(attributes)
        self.nodes.append(ir.Node("", op_type, operands, given, outputs=made, name=f"{path}.{word}" if word else path))
        self.nodes[-1].metadata_props.update(self.node.metadata_props)
        return made

    def _operand(self, value: Any, word: str) -> ir.Value | None:
        if value is None or isinstance(value, ir.Value):
            return value
        dtype = self.node.inputs[0].dtype if isinstance(value, float) and self.node.inputs[0] is not None else None
        array = np.array(value, np.int64 if dtype is None else dtype.numpy())
        attribute = ir.AttrTensor("value", ir.tensor(array))
        made = ir.Value(name=f"{self.node.outputs[0].name}.{word}")
        self.nodes.append(ir.Node("", "Constant", [], [attribute], outputs=[made], name=f"{self.node.name}.{word}"))
        return made

    def product(self, word: str, rows: ir.Value, weights: Any, bias: Any, ids: ir.Value) -> ir.Value:
        """Columns multiplied with the matrices that ids pick, and their biases."""
        made = self(word, "MatMul", [self(f"{word}.weights", "Gather", [weights, ids], axis=0), rows])
        made = self(f"{word}.rows", "Squeeze", [made, [2]])
        return (
            made if bias is None else self(f"{word}.biased", "Add", [made, self(f"{word}.bias", "Gather", [bias, ids])])
        )

    def silu(self, x: ir.Value, alpha: float) -> ir.Value:
        """x * sigmoid(alpha x)."""
        scaled = x if alpha == 1 else self("scaled", "Mul", [x, alpha])
        return self("silu", "Mul", [x, self("sigmoid", "Sigmoid", [scaled])])

    def gated(self, x: ir.Value) -> ir.Value:
        """The gated product of columns that alternate, `silu(gate) * (up + beta)`, both within the limit."""
        gate, up = (self(word, "Slice", [x, [k], [_LAST], [1], [2]]) for k, word in enumerate(("gate", "up")))
        numbers = self.node.attributes
        if limit := numbers.get_float("swiglu_limit", 0.0):
            gate = self("gate.limited", "Min", [gate, float(limit)])
            up = self("up.limited", "Clip", [up, -float(limit), float(limit)])
        if beta := numbers.get_float("activation_beta", 0.0):
            up = self("up.raised", "Add", [up, float(beta)])
        return self("gated", "Mul", [self.silu(gate, float(numbers.get_float("activation_alpha", 1.0))), up])
