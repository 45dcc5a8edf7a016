"""Replaces onnxruntime's MoE and QMoE that are sharded, trained or used for slots by products with the matrices that a router picks.

    y = MoE(x, logits, W1, b1, W2, b2) {k, activation_type}
-> p, ids = TopK(Softmax(logits), k);  y = sum over k of p * (W2[ids] act(W1[ids] x + b1[ids]) + b2[ids])

The kernel computes an unsharded layer, has no gradient, and gives a token other bits alone than among others. The pass `routed` then
multiplies rows by expert. A node whose activation this module does not know stays as it is.

Nodes whose experts' weights are to be quantized in blocks are replaced too, for one session of onnxruntime: there each expert multiplies
all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.blocked import EXPERT_BLOCKS, ExpertBlocks
from partc.compiler.ir.computed import Box, ComputedTensor, full_box
from partc.compiler.ir.graph import add_initializer
from partc.compiler.ir.value_info import Array
from partc.compiler.ops.node import operand
from partc.compiler.ops.registry import CONTRIB
from partc.compiler.rewrite.generation.node_builder import NodeBuilder
from partc.compiler.rewrite.products import products

_ALONE = ("identity", "relu", "silu")
_SWIGLU, _INTERLEAVED = "swiglu", 1
_INT8 = 4
"""The kernel's accuracy level for weights of 8 bits in blocks; it multiplies weights of 4 bits in floats."""
_FLOATS = "partc.floats"
"""Key in the `meta` of a packed weight: its floats and blocks, which all programs of a plan share."""
_LAST = np.iinfo(np.int64).max


def write_out_mixture(node: ir.Node) -> None:
    """Replaces an MoE or a QMoE in its graph by plain nodes; the output keeps its name."""
    graph, attributes = node.graph, node.attributes
    if node.op_type not in ("MoE", "QMoE") or not isinstance(graph, ir.Graph):
        return
    kind, fusion = str(attributes.get_string("activation_type", "relu")), attributes.get_int("swiglu_fusion", 0)
    is_gated, mixer = kind == _SWIGLU and fusion == _INTERLEAVED, attributes.get_int("use_sparse_mixer", 0)
    is_quantized = node.op_type == "QMoE"
    others = range(8, len(node.inputs)) if is_quantized else range(6, len(node.inputs))
    if mixer or any(operand(node, k) for k in others) or not (kind in _ALONE or is_gated):
        return
    if is_quantized and attributes.get_int("normalize_routing_weights", 0) != 1:
        return  # its kernel for CPUs does not follow this
    x, logits, first, first_bias, second, second_bias = (operand(node, k) for k in range(6))
    if is_quantized:
        first, first_bias, second, second_bias = _floats(node, 2), operand(node, 4), _floats(node, 5), operand(node, 7)
    if first is None or second is None or first.shape is None or first.dtype is None:
        return
    write = _Writing(node, first.dtype)
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


def _floats(node: ir.Node, k: int) -> ir.Value | None:
    """Returns a QMoE's weights [experts, N, K] as floats, with their blocks; None if the packed numbers or scales are not supported."""
    packed, scales = operand(node, k), operand(node, k + 1)
    bits, block = node.attributes.get_int("expert_weight_bits", 4), node.attributes.get_int("block_size", 0)
    if (
        packed is None
        or scales is None
        or packed.const_value is None
        or scales.const_value is None
        or bits not in (4, 8)
    ):
        return None
    width = packed.const_value.shape.numpy()[-1] * 8 // bits
    block = block or next((one for one in (32, 16) if width % one == 0), width)
    if width % block:
        return None
    known: dict[str, tuple[ComputedTensor, ExpertBlocks]] = packed.const_value.meta.setdefault(_FLOATS, {})
    name = f"{packed.name}.floats"
    if name not in known:
        known[name] = _unpacked(packed.const_value, scales.const_value, bits, block, name, str(node.name))
    tensor, blocks = known[name]
    assert isinstance(node.graph, ir.Graph)
    floats = add_initializer(node.graph, name, tensor)
    floats.meta[EXPERT_BLOCKS] = blocks
    return floats


def _unpacked(
    packed: ir.TensorProtocol, scales: ir.TensorProtocol, bits: int, block: int, name: str, where: str
) -> tuple[ComputedTensor, ExpertBlocks]:
    """Unpacks weights to floats and to blocks of `MatMulNBits`; a scale of a whole row becomes the scale of each of its blocks."""
    experts, columns, row = packed.shape.numpy()
    width = row * 8 // bits
    shape = experts, columns, width // block

    def scale(box: Box) -> Array:
        rows = scales.numpy().reshape(experts, columns, -1)
        return np.ascontiguousarray(np.broadcast_to(rows, shape)[box])

    def floats(box: Box) -> Array:
        numbers = packed.numpy()
        if bits == 4:
            numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(experts, columns, width)
        centred = numbers.astype(scales.dtype.numpy()) - (1 << (bits - 1))
        return np.asarray((centred * np.repeat(scale(full_box(shape)), block, axis=-1))[box])

    sizes = *shape, block * bits // 8
    blocks = ComputedTensor(lambda box: packed.numpy().reshape(sizes)[box], packed.dtype, sizes, name)
    attributes = {"bits": bits, "block_size": block, "accuracy_level": 1 if bits == 4 else _INT8}
    own = ExpertBlocks(blocks, ComputedTensor(scale, scales.dtype, shape, name), attributes, True, where)
    return ComputedTensor(floats, scales.dtype, (experts, columns, width), name), own


def with_dense_experts(model: ir.Model) -> ir.Model:
    """Returns the model with each expert product with weights in blocks as quantized products of all rows with each expert's matrix."""
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
        total: ir.Value | None = None
        for expert, tensors in enumerate(zip(blocks.blocks.numpy(), blocks.scales.numpy(), strict=True)):
            operands = [
                _constant(graph, f"{build.path}.{expert}.{word}", one) for word, one in zip("bs", tensors, strict=True)
            ]
            (one,) = build.node(f"{expert}.product", "MatMulNBits", [rows, *operands], 1, CONTRIB, **how)
            chosen = build.op(f"{expert}.rows", "Equal", [ids, build.constant(str(expert), [expert])])
            total = one if total is None else build.op(f"{expert}.sum", "Where", [chosen, one, total])
        shape = build.constant("shape", [-1, columns, 1] if column else [-1, 1, columns])
        whole = build.op("whole", "Reshape", [total, shape])
        build.put(after=node)
        ir.convenience.replace_all_uses_with(node.outputs[0], whole, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    return model


def _constant(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    return add_initializer(graph, name, ir.tensor(np.ascontiguousarray(array), name=name))


class _Writing:
    """Makes nodes that replace a node; a list of numbers becomes a constant."""

    def __init__(self, node: ir.Node, dtype: ir.DataType) -> None:
        self.node, self.nodes, self.dtype = node, list[ir.Node](), dtype

    def __call__(self, word: str, op_type: str, inputs: Sequence[Any], **attributes: int) -> ir.Value:
        return self.several(word, op_type, inputs, 1, **attributes)[0]

    def several(self, word: str, op_type: str, inputs: Sequence[Any], count: int, **attributes: int) -> list[ir.Value]:
        """Adds a node and returns its outputs, which are named after `word`, or after the replaced node if it is empty."""
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
        array = np.array(value, self.dtype.numpy() if isinstance(value, float) else np.int64)
        attribute = ir.AttrTensor("value", ir.tensor(array))
        made = ir.Value(name=f"{self.node.outputs[0].name}.{word}")
        self.nodes.append(ir.Node("", "Constant", [], [attribute], outputs=[made], name=f"{self.node.name}.{word}"))
        return made

    def product(self, word: str, rows: ir.Value, weights: Any, bias: Any, ids: ir.Value) -> ir.Value:
        """Multiplies columns with the matrices that `ids` picks, and adds their biases."""
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
        """The gated product of alternating columns, `silu(gate) * (up + beta)`, with gate and up clipped to the limit."""
        gate, up = (self(word, "Slice", [x, [k], [_LAST], [1], [2]]) for k, word in enumerate(("gate", "up")))
        numbers = self.node.attributes
        if limit := numbers.get_float("swiglu_limit", 0.0):
            gate = self("gate.limited", "Min", [gate, float(limit)])
            up = self("up.limited", "Clip", [up, -float(limit), float(limit)])
        if beta := numbers.get_float("activation_beta", 0.0):
            up = self("up.raised", "Add", [up, float(beta)])
        return self("gated", "Mul", [self.silu(gate, float(numbers.get_float("activation_alpha", 1.0))), up])
