"""Restores the weights of a file that `torch.onnx.export` wrote as torch's modules have them: their names, their shapes, one for each name.

The exporter folds the transpose of a linear layer's weight, which is then `val_152` with its dims exchanged, and merges weights that are
equal at the export. Metadata of the file tell the origin: for a node the call in torch with its operands, for a constant the values that
it was folded from, for a weight its name in torch's program.

    val_152 (64, 32), folded from q_proj.weight, read by linear(x, p_q_proj_weight)    ->    q_proj.weight (32, 64), transposed
    norm1.weight, read by layer_norm(y, p_norm2_weight)                                ->    norm2.weight, with the same numbers

Other constants of the exporter are named by their first use: `layers.0.Reshape.shape`. A file without these metadata stays as it is.
"""

from __future__ import annotations

import ast
import re

import numpy as np
import onnx_ir as ir
from partc.compiler.frontend.names import TORCH_SCOPES, free_name, module_of, name_by_use
from partc.compiler.frontend.torch.autograd_effects import mark_gradients, write_problems_into
from partc.compiler.ir.graph import OWN_NAME, add_initializer, nodes_of
from partc.runtime.errors import breaks_lines

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_CALL = "pkg.torch.onnx.fx_node"
_PLACEHOLDER = "pkg.torch.onnx.original_node_name"
FOLDED = "pkg.onnxscript.optimizer.folded_from"
_LINEAR = re.compile(r"aten\.linear\.default\]\(args = \(%\w+, %(\w+)")
_OPERAND = re.compile(r"%([pb]_\w+)")
_TRANSPOSE = re.compile(r"(permute|t|transpose|numpy_t|mT)(_\d+)?")
_COUNTED = re.compile(r"val_\d+")
_KINDS = {"p": "PARAMETER", "b": "BUFFER"}


def restored(model: ir.Model) -> ir.Model:
    """Gives the weights of a torch export the names and shapes that they have in their modules, and returns `model`."""
    graph = model.graph
    if not any(TORCH_SCOPES in node.metadata_props for node in graph):
        return model
    write_problems_into(model, mark_gradients(model))
    taken = {value.name or "" for value in graph.inputs}
    taken |= {value.name or "" for node in nodes_of(graph) for value in node.outputs}
    for value in list(graph.initializers.values()):
        if KIND in value.metadata_props:
            _restore_merged(graph, value, taken)
    for value in list(graph.initializers.values()):
        if FOLDED in value.metadata_props:
            _unfold(graph, value, taken)
    outputs = set(graph.outputs)
    restored_values = [
        value
        for value in graph.initializers.values()
        if KIND not in value.metadata_props
        and (FOLDED in value.metadata_props or _COUNTED.fullmatch(value.name or "") is not None)
        and value not in outputs
    ]
    for value in restored_values:
        if isinstance(value.const_value, ir.serde.TensorProtoTensor):  # it shares its name with the caller's proto
            value.const_value = ir.serde.deserialize_tensor(ir.serde.serialize_tensor(value.const_value))
    name_by_use(model, restored_values)
    return model


def _restore_merged(graph: ir.Graph, value: ir.Value, taken: set[str]) -> None:
    """Separates equal weights that the exporter merged: each reader gets the tensor that torch's call names."""
    own = value.metadata_props.get(_PLACEHOLDER, "")
    for use in list(value.uses()):
        operands = _operands(use.node)
        if use.node.graph is not graph or not own or not operands or own in operands:
            continue
        others = {one.metadata_props.get(_PLACEHOLDER) for one in use.node.inputs if one is not None}
        last = _last(value.name or "")
        names = [name for one in operands if one not in others and (name := _dotted(one, use.node)) is not None]
        fitting = [name for name in names if _last(name) == last]
        if len(fitting) != 1 or fitting[0] in taken:
            continue
        other = graph.initializers.get(fitting[0])
        if other is None:
            other = _initializer(graph, fitting[0], value.const_value, value.metadata_props[KIND])
        elif not _equal(other.const_value, value.const_value):
            continue
        use.node.replace_input_with(use.idx, other)
    _drop_unread(graph, value)


def _unfold(graph: ir.Graph, value: ir.Value, taken: set[str]) -> None:
    """Replaces a transposed weight of the file by the module's weight and a Transpose."""
    sources = _sources(value)
    tensor = value.const_value
    if tensor is None or len(sources) != 1 or len(tensor.shape) != 2 or not tensor.dtype.is_floating_point():
        return
    transposes: dict[str, ir.Node] = {}
    for use in list(value.uses()):
        name = _transposed_name(value, use.node, use.idx, sources[0])
        if name is None or name in taken or use.node.graph is not graph:
            continue
        if name not in transposes:
            weight = graph.initializers.get(name)
            if weight is None:
                kind = _KINDS["b" if f"b_{_plain(name)}" in _operands(use.node) else "p"]
                weight = _initializer(graph, name, _transposed(tensor), kind)
            elif not _equal(weight.const_value, _transposed(tensor)):
                continue
            node = ir.Node("", "Transpose", [weight], [ir.AttrInt64s("perm", [1, 0])])
            node.metadata_props.update(use.node.metadata_props)
            node.meta[OWN_NAME] = ""
            node.outputs[0].name = free_name(f"{name}.transposed", taken)
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.insert_before(use.node, node)
            transposes[name] = node
        use.node.replace_input_with(use.idx, transposes[name].outputs[0])
    _drop_unread(graph, value)


def _transposed_name(value: ir.Value, node: ir.Node, operand: int, source: str) -> str | None:
    """Returns the weight whose transpose a reader takes as `value`, which one op made from `source`; None where that op is not known."""
    linear = _LINEAR.search(node.metadata_props.get(_CALL, ""))
    if node.op_type == "MatMul" and operand == 1 and linear is not None:
        if linear[1][2:] == _plain(source):
            return source
        own = _dotted(linear[1], node)
        return own if own is not None and _last(own) == _last(source) else None
    return source if _TRANSPOSE.fullmatch(value.name or "") else None


def _operands(node: ir.Node) -> list[str]:
    """Returns the parameters and buffers that torch's call of a node reads, by their names in torch's program."""
    _, _, arguments = node.metadata_props.get(_CALL, "").partition("](args = ")
    return _OPERAND.findall(arguments)


def _dotted(operand: str, node: ir.Node) -> str | None:
    """Maps a tensor of the node's own module to its name: `p_layers_0_norm_weight` in `layers.0.norm` is `layers.0.norm.weight`."""
    scope = module_of(node)
    begin = f"{_plain(scope)}_" if scope else ""
    return f"{scope}.{operand[2:].removeprefix(begin)}" if begin and operand[2:].startswith(begin) else None


def _sources(value: ir.Value) -> list[str]:
    """Returns all values that a constant was folded from: the operands of its ops, in order."""
    try:
        names = [str(name) for name in ast.literal_eval(value.metadata_props[FOLDED])]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return []
    return names if all(name and not breaks_lines(name) for name in names) else []


def _plain(name: str) -> str:
    """Returns a tensor's name as it follows `p_` or `b_` in torch's program."""
    return re.sub(r"[^a-zA-Z0-9]", "_", name).lower()


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol | None, kind: str) -> ir.Value:
    assert tensor is not None
    value = add_initializer(graph, name, tensor)
    value.metadata_props[KIND] = kind
    return value


def _transposed(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Returns the transposed tensor; it is read only when it is used."""
    return ir.LazyTensor(
        lambda: ir.Tensor(tensor.numpy().T, dtype=tensor.dtype),
        dtype=tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()[::-1]),
        cache=False,
    )


def _equal(one: ir.TensorProtocol | None, other: ir.TensorProtocol | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one is other or np.array_equal(one.numpy(), other.numpy())


def _drop_unread(graph: ir.Graph, value: ir.Value) -> None:
    if not value.uses() and value not in graph.outputs and value.name is not None:
        del graph.initializers[value.name]
