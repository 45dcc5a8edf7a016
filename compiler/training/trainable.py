"""Decides which weights of a model are trainable, where the plan does not state it.

A module says it itself: its parameters are, its buffers and those without `requires_grad` are not. A file does not, so there the law is: of
the initializers of floats, trainable are

    weights and biases of layers      what MatMul, Gemm, Conv, a normalization, PRelu or a recurrent layer reads as such
    others of more than one number    tables that are looked up, what is added or multiplied with, as a bias or positions

and the others are not: numbers by themselves (`[]`, and `[1]` but for a layer's bias), what only sets an op up, as Resize's scales and a
loss's weights of classes, and masks, which are tables of just two numbers or hold one of 1e4 or more. Constant nodes, integers, what a
branch or a loop has for itself, and what torch's exporter marks as a buffer, such as rotary frequencies, never are. The plan has the last
word: `parameters: {mask: {frozen: true}}` keeps a tensor, and `{mask: {frozen: false}}`, with its whole name, makes it trainable.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.computed import DrawnTensor, full_box, is_absent, shard_of
from partc.compiler.ir.graph import name_of
from partc.compiler.ops.registry import stops_gradient

TRAINABLE = "partc.trainable"
"""Key of `ir.Value.meta`: whether a loader knows that a weight is trainable, or that it is not."""
_TORCH_KIND, _PARAMETER = "pkg.torch.export.graph_signature.InputSpec.kind", "PARAMETER"

_PRODUCTS = ("Conv", "ConvTranspose", "Einsum", "FusedMatMul", "Gemm", "MatMul")
_LAYERS: dict[str, range] = {
    **{op_type: range(8) for op_type in _PRODUCTS},
    **{
        f"{kind}Normalization": range(1, 3)
        for kind in ("Batch", "Group", "Instance", "Layer", "RMS", "SimplifiedLayer")
    },
    "PRelu": range(1, 2),
    **{op_type: range(1, 8) for op_type in ("RNN", "GRU", "LSTM")},
}
"""Maps each op to its operands that are weights of a layer."""
_SETTINGS: dict[str, range] = {
    "BatchNormalization": range(3, 5),
    "Clip": range(1, 3),
    "DequantizeLinear": range(1, 3),
    "NegativeLogLikelihoodLoss": range(1, 3),
    "OneHot": range(1, 3),
    "Pad": range(1, 4),
    "QuantizeLinear": range(1, 3),
    "Resize": range(1, 4),
    "SoftmaxCrossEntropyLoss": range(1, 3),
    "Upsample": range(1, 2),
}
"""Maps each op to its operands through which no gradient flows."""
_LARGE, _BEGINNING = 1e4, 4096


def is_parameter(value: ir.Value) -> bool:
    """Whether the weight is a parameter of a module of onnxscript, which a model in a file does without and this does not import."""
    modules = sys.modules.get("onnxscript.nn")
    return modules is not None and isinstance(value, modules.Parameter)


def trainable_names(model: ir.Model) -> list[str]:
    """The weights that training changes: what the model's modules say is trainable; of a file, what the law above says."""
    weights = candidates(model)
    declared = declares_trainable(model)
    return [name_of(value) for value in weights if (_is_declared(value) if declared else _is_likely(value))]


def declares_trainable(model: ir.Model) -> bool:
    """Whether the model's modules say which weights are trainable."""
    weights = model.graph.initializers.values()
    return any(is_parameter(value) or TRAINABLE in value.meta for value in weights)


def candidates(model: ir.Model) -> list[ir.Value]:
    """The weights of floats that could be trained: all but running statistics."""
    statistics = set(running_statistics(model.graph))
    return [value for value in model.graph.initializers.values() if value not in statistics and _is_floating(value)]


def running_statistics(graph: ir.Graph) -> list[ir.Value]:
    """The running statistics of normalizations, as far as they are weights."""
    norms = [node for node in graph if node.op_type == "BatchNormalization"]
    read = [value for node in norms for value in node.inputs[3:5]]
    return list(dict.fromkeys(value for value in read if value is not None and value.is_initializer()))


def _is_declared(value: ir.Value) -> bool:
    known = value.meta.get(TRAINABLE)
    return bool(known) if known is not None else is_parameter(value) and bool(getattr(value, "learned", True))


def _is_likely(value: ir.Value) -> bool:
    """Whether a file's tensor is taken for a parameter."""
    shape = tuple(value.shape.numpy()) if value.shape is not None and value.shape.is_static() else ()
    uses = [(use.node, use.idx) for use in value.uses()]
    if value.metadata_props.get(_TORCH_KIND, _PARAMETER) != _PARAMETER:
        return False
    if not shape or not any(not stops_gradient(node) and k not in _SETTINGS.get(node.op_type, ()) for node, k in uses):
        return False
    if any(_is_of_layer(node, k) for node, k in uses):
        return True
    return shape != (1,) and not _is_mask(value, shape)


def _is_of_layer(node: ir.Node, k: int) -> bool:
    """Whether operand `k` is a layer's weight, or the bias that is added after one."""
    if node.op_type == "Add":
        other = node.inputs[1 - k]
        producer = other.producer() if other is not None else None
        return producer is not None and producer.op_type in _PRODUCTS
    return k in _LAYERS.get(node.op_type, ())


def _is_mask(value: ir.Value, shape: tuple[int, ...]) -> bool:
    """Whether the numbers are those of a mask; of a large tensor the beginning tells mostly, and is all that is read."""
    tensor = value.const_value
    if tensor is None or not math.prod(shape) or isinstance(tensor, DrawnTensor) or is_absent(tensor):
        return False
    rows = min(shape[0], -(-_BEGINNING // math.prod(shape[1:])))
    begin = shard_of(tensor, (slice(0, rows), *full_box(shape[1:]))).reshape(-1)[:_BEGINNING].astype(np.float64)
    if not (np.abs(begin) < _LARGE).all():
        return True
    low, high = begin.min(), begin.max()
    table = sum(size > 1 for size in shape) > 1
    if not table or low == high or not ((begin == low) | (begin == high)).all():
        return False
    numbers = tensor.numpy()
    return bool(((numbers == low) | (numbers == high)).all())


def _is_floating(value: ir.Value) -> bool:
    dtype = value.dtype or (value.const_value.dtype if value.const_value is not None else None)
    return dtype is not None and dtype.is_floating_point()
