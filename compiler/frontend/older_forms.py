"""Rewrites forms of a file that passes and later opsets do not support, without change of values: sparse weights, and the ops of opset 6.

    sparse_initializer w: 3 values of [4, 3]     ->    initializer w, [4, 3]
    Add <broadcast=1, axis=1> (x, bias)          ->    Add(x, Unsqueeze <axes=[1, 2]> (bias))        of opset 7

Opset 7 replaced opset 6's attributes for broadcasting by numpy's rule, and training modes by separate ops. An op that
opset 7 redefines is converted by the table; every other op is the same in both. onnx's converter is not used for this step: it needs
every size, has no rule for LSTM, and leaves PRelu's slope as it is, which then means another axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper
from partc.compiler.errors import Problem
from partc.runtime.artifact.graph.onnx_graph import LARGEST_MODEL, graph_bodies, node_title

OLDER = 6
"""The opset whose ops are converted to the next opset."""
_EXPORT = "export the model again, or write the tensor densely"


def has_older_forms(proto: ModelProto) -> bool:
    """Whether the model has a form that `modern` rewrites."""
    nodes = (node for graph in _graphs(proto) for node in graph.node)
    return (
        _opset(proto) == OLDER
        or any(graph.sparse_initializer for graph in _graphs(proto))
        or any(attribute.HasField("sparse_tensor") for node in nodes for attribute in node.attribute)
    )


def modern(proto: ModelProto, where: str) -> tuple[ModelProto, list[Problem]]:
    """Returns a copy of the model without these forms, and the problems that prevent it."""
    copy, problems = ModelProto(), list[Problem]()
    copy.CopyFrom(proto)
    for graph in _graphs(copy):
        for sparse in graph.sparse_initializer:
            _densify(sparse, f"the sparse weight '{sparse.values.name}'", graph.initializer.add(), where, problems)
        del graph.sparse_initializer[:]
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor"):
                    title = f"'{attribute.name}' of {node_title(node)}"
                    _densify(attribute.sparse_tensor, title, attribute.t, where, problems)
                    attribute.ClearField("sparse_tensor")
                    attribute.name, attribute.type = "value", AttributeProto.TENSOR
    if _opset(copy) == OLDER and not problems:
        _to_next_opset(copy, where, problems)
    return copy, problems


def _graphs(proto: ModelProto) -> Iterator[GraphProto]:
    waiting = [proto.graph]
    while waiting:
        graph = waiting.pop()
        yield graph
        waiting += [body for node in graph.node for body in graph_bodies(node)]


def _opset(proto: ModelProto) -> int:
    return next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)


def _densify(sparse: SparseTensorProto, title: str, dense: TensorProto, where: str, problems: list[Problem]) -> None:
    """Fills a dense tensor with the values of a sparse one: zeros, except at the sparse tensor's indices."""
    shape, fact = tuple(sparse.dims), ""
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in (sparse.values, sparse.indices)):
        problems.append(Problem(where, f"{title} is in another file", help=_EXPORT))
        return
    values, indices = numpy_helper.to_array(sparse.values).reshape(-1), numpy_helper.to_array(sparse.indices)
    if min(shape, default=0) < 0 or math.prod(shape) * values.itemsize > LARGEST_MODEL:
        fact = f"{title} has {list(shape)} elements; a model has {LARGEST_MODEL:,} bytes at most"
    elif indices.shape not in ((len(values),), (len(values), len(shape))):
        fact = f"{title} has {len(values)} values and indices of shape {list(indices.shape)}"
    else:
        columns = indices.reshape(len(values), -1)
        most = shape if indices.ndim == 2 else (math.prod(shape),)
        if len(values) and not ((columns >= 0) & (columns < np.array(most))).all():
            fact = f"{title} has an index outside of {list(shape)}"
    if fact:
        problems.append(Problem(where, fact, help=_EXPORT))
        return
    flat = np.zeros(math.prod(shape), values.dtype)
    flat[indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)] = values
    dense.CopyFrom(numpy_helper.from_array(flat.reshape(shape), sparse.values.name))
    dense.data_type = sparse.values.data_type


@dataclass
class _Conversion:
    """A graph under conversion.

    `shapes`: the known shapes of its values, with None for a dim of unknown size; `inserted`: new nodes to stand before the converted one.
    """

    shapes: Mapping[str, tuple[int | None, ...]]
    inserted: list[NodeProto] = field(default_factory=list)

    def unsqueeze(self, node: NodeProto, operand: int, axes: range) -> None:
        """Inserts an Unsqueeze that gives an operand further dims of size 1."""
        name = f"{node.output[0]}.operand"
        self.inserted.append(helper.make_node("Unsqueeze", [node.input[operand]], [name], axes=list(axes)))
        node.input[operand] = name


def _to_next_opset(proto: ModelProto, where: str, problems: list[Problem]) -> None:
    inferred = onnx.shape_inference.infer_shapes(proto)
    for graph, known in zip(_graphs(proto), _graphs(inferred), strict=True):
        conversion = _Conversion(_shapes(known))
        nodes = list[NodeProto]()
        for node in graph.node:
            if node.domain in ("", "ai.onnx") and (fact := _CONVERSIONS.get(node.op_type, _same)(conversion, node)):
                help = f"export the model again, with opset {OLDER + 1} or later and in inference mode"
                problems.append(Problem(where, f"{node_title(node)} of opset {OLDER}: {fact}", help=help))
            nodes += [*conversion.inserted, node]
            conversion.inserted.clear()
        copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = OLDER + 1


def _shapes(graph: GraphProto) -> dict[str, tuple[int | None, ...]]:
    ports = [
        port for port in (*graph.value_info, *graph.input, *graph.output) if port.type.tensor_type.HasField("shape")
    ]
    sizes = {
        port.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else None for dim in port.type.tensor_type.shape.dim
        )
        for port in ports
    }
    return sizes | {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}


def _same(conversion: _Conversion, node: NodeProto) -> str:
    return ""


def _broadcast(conversion: _Conversion, node: NodeProto) -> str:
    """Aligns the dims of operand b with those of a from `axis` on; without `axis` they are its last dims, as in numpy."""
    axis, broadcast = _removed(node, "axis"), _removed(node, "broadcast")
    if not broadcast or axis is None:
        return ""
    a, b = (conversion.shapes.get(name) for name in node.input)
    if a is None or b is None:
        return f"it broadcasts '{node.input[1]}' along axis {axis}, and a rank is not known"
    behind = len(a) - axis % max(len(a), 1) - len(b)
    if behind < 0:
        return f"'{node.input[1]}' of rank {len(b)} does not fit '{node.input[0]}' of rank {len(a)} at axis {axis}"
    if behind:
        conversion.unsqueeze(node, 1, range(len(b), len(b) + behind))
    return ""


def _slope(conversion: _Conversion, node: NodeProto) -> str:
    """Broadcasts PRelu's slope: one value is for all elements, several are for the channels, which are dim 1."""
    x, slope = (conversion.shapes.get(name) for name in node.input)
    if slope is None or (len(slope) == 1 and (slope[0] is None or x is None)):
        return f"the shape of '{node.input[1]}' is not known"
    if x is not None and len(slope) == 1 and slope[0] != 1 and len(x) > 2:
        conversion.unsqueeze(node, 1, range(1, len(x) - 1))
    return ""


def _inference(conversion: _Conversion, node: NodeProto) -> str:
    return "" if _removed(node, "is_test") else "it is in training mode (is_test is 0)"


def _without(name: str) -> Callable[[_Conversion, NodeProto], str]:
    def convert(conversion: _Conversion, node: NodeProto) -> str:
        _removed(node, name)
        return ""

    return convert


def _upsample(conversion: _Conversion, node: NodeProto) -> str:
    found = {one.name: one for one in node.attribute}
    scales = [1.0, 1.0, *(found[name].f if name in found else 1.0 for name in ("height_scale", "width_scale"))]
    mode = "linear" if "mode" in found and found["mode"].s == b"bilinear" else "nearest"
    del node.attribute[:]
    node.attribute.extend([helper.make_attribute("scales", scales), helper.make_attribute("mode", mode)])
    return ""


def _removed(node: NodeProto, name: str) -> int | None:
    """Returns the value of the node's integer attribute, and removes the attribute; None where the node lacks it."""
    for at, attribute in enumerate(node.attribute):
        if attribute.name == name:
            value = int(attribute.i)
            del node.attribute[at]
            return value
    return None


_BROADCASTS = ("Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")
_CONVERSIONS: dict[str, Callable[[_Conversion, NodeProto], str]] = {
    **dict.fromkeys(_BROADCASTS, _broadcast),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _without("output_sequence")),
    "AveragePool": _same,
    "BatchNormalization": _inference,
    "Dropout": _inference,
    "Gemm": _without("broadcast"),
    "PRelu": _slope,
    "Upsample": _upsample,
}
"""Ops that opset 7 redefines; each function converts a node in place, and returns the reason where it cannot, else ""."""
