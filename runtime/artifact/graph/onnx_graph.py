"""Functions that read the graph of a rank file: bodies of nodes, the values that a node reads, names of nodes for messages.

A body is a graph in an attribute of a node, as `If`, `Loop` and `Scan` have them. It sees the values of the graphs around it, so its
node also reads the values that the body captures from them.

A hash of a rank file that is equal for files of equal nodes, which differ in the shards of their weights alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from partc.runtime.artifact.format import DIGEST, PATH, PIECE, RECOMPUTED, TASK

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto


_SCATTERS = ("ScatterElements", "ScatterND")


LARGEST_MODEL = 1 << 31
"""The most bytes that protobuf allows for a model, external weights not counted."""


def graph_bodies(node: NodeProto) -> list[GraphProto]:
    """The bodies of a node."""
    graphs = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            graphs.append(attribute.g)
        if attribute.graphs:
            graphs += attribute.graphs
    return graphs


def reads(node: NodeProto) -> Iterator[str]:
    """The values that a node reads: its operands, and the values that its bodies capture from the graphs around them."""
    yield from filter(None, node.input)
    if not node.attribute:
        return
    for body in graph_bodies(node):
        inside = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
        inside |= {sparse.values.name for sparse in body.sparse_initializer}
        for inner in body.node:
            yield from (name for name in reads(inner) if name not in inside)
            inside.update(inner.output)
        yield from (value.name for value in body.output if value.name not in inside)


def integer_of(node: NodeProto, name: str, default: int) -> int:
    """An integer attribute of a node."""
    return next((one.i for one in node.attribute if one.name == name), default)


def text_of(node: NodeProto, name: str, default: str = "") -> str:
    """A text attribute of a node."""
    return next((one.s.decode(errors="replace") for one in node.attribute if one.name == name), default)


def metadata_of(of: NodeProto | TensorProto | ModelProto | ValueInfoProto, key: str, default: str = "") -> str:
    """Returns the value of a key in the metadata, or `default`."""
    for entry in of.metadata_props:  # a generator would take half as long again, for each node of each check
        if entry.key == key:
            value: str = entry.value
            return value
    return default


def read_for_sizes_alone(graph: GraphProto) -> set[str]:
    """The inputs of a graph that only Shape and Size read and that are not outputs of it."""
    found = {value.name for value in graph.input} - {value.name for value in graph.output}
    for node in graph.node:
        if node.op_type not in ("Shape", "Size") or node.domain not in ("", "ai.onnx"):
            found.difference_update(reads(node))
    return found


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes, each followed by those of its bodies."""
    for node in nodes:
        yield node
        for body in graph_bodies(node):
            yield from all_nodes(body.node)


def short_splits(nodes: Iterable[NodeProto]) -> Iterator[tuple[NodeProto, str]]:
    """Yields each Split, in bodies too, whose `num_outputs` is below its number of outputs, with a text; onnx ends the process there."""
    for node in all_nodes(nodes):
        if node.op_type == "Split" and not node.domain:
            number = integer_of(node, "num_outputs", len(node.output))
            if number < len(node.output):
                yield node, f"its num_outputs is {number}, and it has {len(node.output)} outputs"


def all_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """The initializers of a graph and the tensors in attributes of its nodes, those of bodies included."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _tensors_of(graph.node)


def model_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """All tensors of a model, those in its functions included."""
    yield from all_tensors(model.graph)
    for function in model.functions:
        yield from _tensors_of(function.node)


def _tensors_of(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for body in graph_bodies(node):
            yield from all_tensors(body)


def source_path(node: NodeProto) -> str:
    """The name of a node's op in the source model, empty where it has none: `blocks.0.fc1`."""
    return metadata_of(node, PATH)


def path_of(node: NodeProto) -> str:
    """The name of a node's op in the source model, and in a pipeline also its task: `blocks.0.fc1, 1B3`; empty where it has neither."""
    said = {item.key: item.value for item in node.metadata_props}
    return ", ".join(filter(None, (said.get(PATH, ""), said.get(TASK, ""))))


def is_recomputed(node: NodeProto) -> bool:
    """Whether a forward node is repeated in the backward pass."""
    return RECOMPUTED in [item.key for item in node.metadata_props]


def addends(node: NodeProto) -> list[str]:
    """Returns the operands over which a node may write its result: it adds to them, and reads no element that it has already written."""
    if node.domain or len(node.output) != 1:
        return []
    if node.op_type == "Gemm":
        beta = next((one.f for one in node.attribute if one.name == "beta"), 1.0)
        return list(node.input[2:]) if beta == 1 and node.input[2:] and node.input[2] not in node.input[:2] else []
    if node.op_type == "Add":
        return [name for name in node.input if list(node.input).count(name) == 1]
    return list(node.input[:1]) if node.op_type in _SCATTERS and text_of(node, "reduction") == "add" else []


def moved_statistics(node: NodeProto) -> Sequence[str]:
    """Returns the names of the new running statistics of a BatchNormalization in training mode.

    onnxruntime writes them over the old statistics, which are kept tensors, unless the new ones are outputs of the session.
    """
    trains = node.op_type == "BatchNormalization" and integer_of(node, "training_mode", 0)
    return [name for name in node.output[1:3] if name] if trains else []


def op_and_path(node: NodeProto) -> str:
    """Names a node by its op type and its name in the source model: `MatMul (blocks.0.fc1)`."""
    path = path_of(node) or node.name
    return f"{node.op_type} ({path})" if path else node.op_type


def node_title(node: NodeProto) -> str:
    """Names a node as the rank file does: `MatMul 'fc1_node'`; a node without a name by its first output or input."""
    name = node.name or next(iter([*node.output, *node.input]), "")
    return f"{node.op_type} '{name}'"


def not_text(model: ModelProto) -> str:
    """Returns the repr of the first name or text of a model that is not UTF-8, which protobuf returns as bytes; '' where all are UTF-8."""
    texts: list[object] = []
    _add_texts(texts, model.graph)
    for function in model.functions:
        texts += (function.name, function.domain, *function.input, *function.output, *function.attribute)
        _add_node_texts(texts, function.node)
    texts += (entry.domain for entry in model.opset_import)
    for prop in model.metadata_props:
        texts += (prop.key, prop.value)
    if set(map(type, texts)) <= {str}:
        return ""
    return next(repr(text) for text in texts if not isinstance(text, str))


def _add_texts(texts: list[object], graph: GraphProto) -> None:
    texts.append(graph.name)
    for tensor in graph.initializer:
        texts.append(tensor.name)
        for entry in (*tensor.external_data, *tensor.metadata_props):
            texts += (entry.key, entry.value)
    for port in (*graph.input, *graph.output, *graph.value_info):
        texts.append(port.name)
        for dim in port.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                texts.append(dim.dim_param)
    _add_node_texts(texts, graph.node)


def _add_node_texts(texts: list[object], nodes: Iterable[NodeProto]) -> None:
    for node in nodes:
        texts += (node.name, node.op_type, node.domain, *node.input, *node.output)
        for prop in node.metadata_props:
            texts += (prop.key, prop.value)
        for attribute in node.attribute:
            texts += (attribute.name, attribute.ref_attr_name)
            for body in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _add_texts(texts, body)


def structure_of(model: ModelProto) -> bytes:
    """Returns a hash of a file without the places and numbers of its weights' shards, and without the names of its ranks."""
    from onnx import ModelProto

    light = ModelProto()
    light.CopyFrom(model)
    light.ClearField("metadata_props")
    for tensor in light.graph.initializer:
        if any(entry.key == PIECE for entry in tensor.metadata_props):
            tensor.ClearField("external_data")
            tensor.ClearField("raw_data")
            for entry in tensor.metadata_props:
                entry.value = "" if entry.key in (PIECE, DIGEST) else entry.value
    return hashlib.sha256(light.SerializeToString(deterministic=True)).digest()
