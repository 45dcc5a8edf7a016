"""Splits that exporters write as sequences, written as what they are: a sequence has no gradient, and nothing of it can be sharded.

s = SplitToSequence(x, 8), q = SequenceAt(s, 0), k = SequenceAt(s, 1), v = SequenceAt(s, 2)     torch's x.split(8, -1)
q, k, v = Split(x, [8, 8, 8])
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def split_sequences(model: ir.Model) -> None:
    """Changes `model`: each SplitToSequence into known lengths whose parts are all taken by known positions becomes a Split."""
    for node in list(model.graph):
        if node.op_type == "SplitToSequence" and node.domain in ("", "ai.onnx"):
            _split(model.graph, node)


def _split(graph: ir.Graph, node: ir.Node) -> None:
    readers = list(dict.fromkeys(use.node for use in node.outputs[0].uses()))
    lengths = _lengths(node)
    if lengths is None or node.outputs[0].is_graph_output():
        return
    places = [one.inputs[1] for one in readers if one.op_type == "SequenceAt" and one.graph is graph]
    tensors = [ir.convenience.get_const_tensor(value) for value in places if value is not None]
    positions = [int(tensor.numpy().reshape(())) for tensor in tensors if tensor is not None]
    at = [k for k in positions if -len(lengths) <= k < len(lengths)]
    if len(at) != len(readers):
        return
    sizes = ir.node("Constant", [], {"value": ir.tensor(np.array(lengths, np.int64))}, name=f"{node.name}.sizes")
    sizes.outputs[0].name = f"{node.outputs[0].name}.sizes"
    axis = node.attributes.get_int("axis", 0)
    split = ir.node(
        "Split", [node.inputs[0], sizes.outputs[0]], {"axis": axis}, num_outputs=len(lengths), name=node.name
    )
    for one in (sizes, split):
        one.metadata_props.update(node.metadata_props)
    for k, value in enumerate(split.outputs):
        value.name = f"{node.outputs[0].name}.{k}"
        value.type = node.inputs[0].type if node.inputs[0] is not None else None
    graph.insert_before(node, [sizes, split])
    for k, reader in zip(at, readers, strict=True):
        old, new = reader.outputs[0], split.outputs[k]
        if old.is_graph_output():
            reader.op_type, reader.domain = "Identity", ""
            reader.resize_inputs(1)
            reader.replace_input_with(0, new)
            continue
        old.replace_all_uses_with(new)
        graph.remove(reader, safe=True)
    graph.remove(node, safe=True)


def _lengths(node: ir.Node) -> list[int] | None:
    """Into which lengths the node splits; None where only a run tells, or where the parts lose their axis."""
    x, given = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        return None
    tensor = ir.convenience.get_const_tensor(given)
    if tensor is None:
        return None
    sizes = tensor.numpy()
    if sizes.ndim:
        return [int(size) for size in sizes]
    axis = node.attributes.get_int("axis", 0)
    dim = x.shape[axis] if x is not None and x.shape is not None else None
    if not isinstance(dim, int):
        return None
    size = int(sizes)
    return [min(size, dim - begin) for begin in range(0, dim, size)]
