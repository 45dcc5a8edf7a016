"""Kinds of nodes: what is inferred of a node is true of all nodes of its kind, in any layer, microbatch or rank.

So a program is checked without the nodes whose kinds were checked before: their results become inputs of the declared types.

    h.0 [4, 8] = MatMul(x.0 [4, 6], w [6, 8])       the same kind as h.1 [4, 8] = MatMul(x.1 [4, 6], v [6, 8])
"""

from __future__ import annotations

from collections.abc import Hashable

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto
from partc.runtime.artifact.graph.onnx_graph import graph_bodies, reads
from partc.runtime.artifact.graph.rank_constants import is_rank_constant

_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def without_known(file: str, model: ModelProto, known: dict[Hashable, int]) -> ModelProto:
    """Returns the program without nodes whose kinds are in `known`, to which it adds the kinds of the others."""
    new = _new_nodes(file, model, known)
    return model if len(new) == len(model.graph.node) else _with_nodes(model, new)


def _new_nodes(file: str, model: ModelProto, known: dict[Hashable, int]) -> set[int]:
    """Returns the indices of nodes whose kind is not in `known`, and of nodes that make a value without a declared type; adds their kinds.

    `known` has one number for equal types, for equal constants, and for nodes of one kind. A node's kind is its op and attributes, with the
    kinds of its operands and results, and with its function and the opsets of its file. Integers are also distinguished by the node that
    makes them, since they may be a shape.
    """
    opsets = b"".join(sorted(one.SerializeToString(deterministic=True) for one in model.opset_import))
    functions = {(one.domain, one.name): one.SerializeToString(deterministic=True) for one in model.functions}
    ports = declared_ports(model)
    kinds: dict[str, Hashable] = {}
    integers = set[str]()
    for name, port in ports.items():
        kinds[name] = known.setdefault(port.type.SerializeToString(deterministic=True), len(known))
        if port.type.tensor_type.elem_type in _INTEGERS:
            integers.add(name)
    kinds |= {tensor.name: known.setdefault(_content(tensor), len(known)) for tensor in model.graph.initializer}
    new = set[int]()
    for at, node in enumerate(model.graph.node):
        attributes, outputs = [one.SerializeToString() for one in node.attribute], [*node.output]
        own = file if is_rank_constant(node) else functions.get((node.domain, node.op_type), opsets)
        read = (*node.input, *reads(node)) if attributes and graph_bodies(node) else node.input
        operands = [kinds.get(name, name) for name in read]
        results = [kinds.get(name, -1) if name else None for name in outputs]
        key = (own, node.domain, node.op_type, node.overload, *attributes, None, *operands, None, *results)
        count = len(known)
        number = known.setdefault(key, count)
        if number >= count or -1 in results:
            new.add(at)
        for place, name in enumerate(outputs):
            if name in integers or not _is_known(ports.get(name)):
                kinds[name] = known.setdefault((number, place), len(known))
    return new


def _with_nodes(model: ModelProto, wanted: set[int]) -> ModelProto:
    """Returns the program of the nodes at these indices, and of the nodes that make the integers, and values of unknown shape, for them.

    Integers and values of unknown shape do not become inputs; other values that a removed node makes become inputs if they are read.
    """
    ports = declared_ports(model)
    kept: list[NodeProto] = []
    needed = set[str]()
    for at, node in reversed([*enumerate(model.graph.node)]):
        if at in wanted or not needed.isdisjoint(node.output):
            kept.append(node)
            for name in reads(node):
                port = ports.get(name)
                if port is None or port.type.tensor_type.elem_type in _INTEGERS or not _is_known(port):
                    needed.add(name)
    kept.reverse()
    made_names = {name for node in kept for name in node.output}
    read = {name for node in kept for name in reads(node)}
    weights = [tensor for tensor in model.graph.initializer if tensor.name in read]
    inputs = [port for port in model.graph.input if port.name in read]
    available = made_names | {port.name for port in inputs} | {tensor.name for tensor in weights}
    rest = ModelProto()
    rest.CopyFrom(model)
    for field in ("node", "input", "output", "initializer", "value_info"):
        rest.graph.ClearField(field)
    rest.graph.node.extend(kept)
    rest.graph.initializer.extend(weights)
    rest.graph.input.extend([*inputs, *(ports[name] for name in sorted(read - available) if name in ports)])
    rest.graph.output.extend(port for port in model.graph.output if port.name in made_names)
    rest.graph.value_info.extend(port for port in model.graph.value_info if port.name in made_names)
    return rest


def _is_known(port: ValueInfoProto | None) -> bool:
    """Whether the declared type of a value has a shape without unknown dims."""
    if port is None or not port.type.tensor_type.HasField("shape"):
        return False
    return all(dim.HasField("dim_value") or dim.dim_param for dim in port.type.tensor_type.shape.dim)


def _content(tensor: TensorProto) -> Hashable:
    """A key for a weight: its type and shape, and its numbers if the program itself has them."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return tensor.data_type, tuple(tensor.dims)
    copy = TensorProto()
    copy.CopyFrom(tensor)
    for field in ("name", "doc_string", "metadata_props"):
        copy.ClearField(field)
    data: bytes = copy.SerializeToString()
    return data


def declared_ports(model: ModelProto) -> dict[str, ValueInfoProto]:
    """Maps each value that a file declares to its declaration."""
    return {port.name: port for port in (*model.graph.value_info, *model.graph.input, *model.graph.output)}
