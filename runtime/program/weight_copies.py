"""Rewrites the model of a session so that onnxruntime makes fewer copies of its weights while it creates the session.

onnxruntime computes nodes of weights alone once, then packs each product's weight and frees what it packed. Each copy of a large model's
weights costs seconds: most of them for pages that the system must clear. The values do not change.

    %w = Transpose(%weight);  %y = MatMul(%x, %w)   ->   %y = FusedMatMul(%x, %weight)      packed from the file's order
    %y = MatMul(%x, %weight)                        ->   %weight = Cast(%weight.narrow)     widened one by one
    %rows = Gather(%table, %ids)                    ->   %rows = Cast(Gather(%table.narrow, %ids))   the table stays mapped
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from partc.runtime.artifact.graph.onnx_graph import reads
from partc.runtime.artifact.tensors.dtypes import BY_NAME
from partc.runtime.artifact.tensors.stored_weight import is_widened, stored_type

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_MICROSOFT = "com.microsoft"


def multiply_by_transposed(model: ModelProto) -> None:
    """Replaces, in place, products with a transposed float32 matrix among the weights by products that read it as it is."""
    from onnx import helper

    graph = model.graph
    matrices = {
        tensor.name
        for tensor in graph.initializer
        if tensor.external_data and len(tensor.dims) == 2 and tensor.data_type == BY_NAME["float"].code
    }
    readers = Counter(name for node in graph.node for name in reads(node))
    readers.update(port.name for port in graph.output)
    transposes = (node for node in graph.node if _is(node, "Transpose") and node.input[0] in matrices)
    turned = {node.output[0]: node for node in transposes if _order(node) in ([1, 0], [])}
    products = [node for node in graph.node if _is(node, "MatMul") and node.input[1] in turned]
    for node in products:
        readers[node.input[1]] -= 1
        node.op_type, node.domain, node.input[1] = "FusedMatMul", _MICROSOFT, turned[node.input[1]].input[0]
        node.attribute.append(helper.make_attribute("transB", 1))
    kept = [node for node in graph.node if any(readers[name] or name not in turned for name in node.output)]
    del graph.node[:]
    graph.node.extend(kept)
    if products and all(entry.domain != _MICROSOFT for entry in model.opset_import):
        model.opset_import.add(domain=_MICROSOFT, version=1)


def read_narrow(graph: GraphProto) -> None:
    """Gives weights that their file stores in 16 bits the type of the file, in place, and widens by Casts what is read of them."""
    from onnx import helper

    codes = dict[str, int]()
    for tensor in graph.initializer:
        if is_widened(tensor) and (stored := stored_type(tensor)) is not None:
            codes[tensor.name] = tensor.data_type
            tensor.name, tensor.data_type = f"{tensor.name}.narrow", stored.code
    if not codes:
        return
    nodes: list[NodeProto] = []
    whole = dict[str, None]()
    for node in graph.node:
        nodes.append(node)
        if _is(node, "Gather") and (code := codes.get(node.input[0])):
            rows, narrow = node.output[0], f"{node.output[0]}.narrow"
            node.input[0], node.output[0] = f"{node.input[0]}.narrow", narrow
            nodes.append(helper.make_node("Cast", [narrow], [rows], f"{node.name}.widened", to=code))
        whole |= dict.fromkeys(name for name in reads(node) if name in codes)
    whole |= dict.fromkeys(port.name for port in graph.output if port.name in codes)
    casts = [helper.make_node("Cast", [f"{name}.narrow"], [name], f"{name}.widened", to=codes[name]) for name in whole]
    del graph.node[:]
    graph.node.extend([*casts, *nodes])


def _is(node: NodeProto, op_type: str) -> bool:
    return node.op_type == op_type and not node.domain


def _order(node: NodeProto) -> list[int]:
    return [number for attribute in node.attribute if attribute.name == "perm" for number in attribute.ints]
