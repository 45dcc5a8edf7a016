"""Casts around ops that have no 16-bit kernel on CPUs, so that they compute in float32.

    %h = MatMul(%x, %w)     ->     %h.unrounded = MatMul(%x.read, %w.read);  %h = Cast(%h.unrounded)

The compiler writes such Casts for nodes that may run on a CPU. A node that the plan places on a GPU computes in 16 bits there; where a
job runs that target on the CPU, the Casts are added when its sessions are created. They are also added for a session of the user's
model or of a part of it, since onnxruntime does not load its bfloat16 nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from partc.runtime.artifact.format import CUDA
from partc.runtime.artifact.graph.kernels import BOTH_HALVES, FLOAT16_KERNELS
from partc.runtime.artifact.graph.onnx_graph import text_of
from partc.runtime.artifact.graph.targets import target_of
from partc.runtime.spellings import first_free

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

FLOAT, FLOAT16, BFLOAT16 = 1, 10, 16
"""Element types, as ONNX numbers them."""
HALVES = (FLOAT16, BFLOAT16)
_KERNELS: Mapping[int, frozenset[str]] = {BFLOAT16: BOTH_HALVES, FLOAT16: FLOAT16_KERNELS}


def has_kernel(op_type: str, reduction: str, kind: int) -> bool:
    """Whether onnxruntime's CPU provider has a kernel of an op, with this `reduction` attribute, for the 16-bit element type `kind`."""
    return op_type in _KERNELS[kind] and reduction == "none"


def compute_in_float32(model: ModelProto, bfloat16: bool = False) -> bool:
    """Adds Casts, in place, around the nodes of target cuda that have no 16-bit kernel on CPUs; returns whether it added any.

    With `bfloat16`, bfloat16 nodes of all targets get Casts; for float16 onnxruntime itself adds them.
    """
    from onnx import helper, shape_inference

    graph = model.graph
    if not any(target_of(node) == CUDA for node in graph.node) and not (bfloat16 and _has_bfloat16(graph)):
        return False
    inferred = shape_inference.infer_shapes(model).graph
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    kinds = {one.name: one.type.tensor_type.elem_type for one in values}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    names = {*kinds, *(name for node in graph.node for name in node.output)}
    read: dict[str, str] = {}
    written: list[NodeProto] = []
    for node in graph.node:
        cast = HALVES if target_of(node) == CUDA else (BFLOAT16,) if bfloat16 else ()
        halves = {name for name in (*node.input, *node.output) if kinds.get(name) in cast}
        plain = not node.domain and not any(attribute.HasField("g") for attribute in node.attribute)
        reduction = text_of(node, "reduction", "none")
        lacking = any(not has_kernel(node.op_type, reduction, kinds[name]) for name in halves)
        if not plain or not lacking:
            written.append(node)
            continue
        for k, name in enumerate(node.input):
            if name in halves:
                if name not in read:
                    read[name] = _new(f"{name}.read", names)
                    written.append(helper.make_node("Cast", [name], [read[name]], to=FLOAT))
                node.input[k] = read[name]
        after = []
        for k, name in enumerate(node.output):
            if name in halves:
                node.output[k] = _new(f"{name}.unrounded", names)
                after.append(helper.make_node("Cast", [node.output[k]], [name], to=kinds[name]))
        written += [node, *after]
    nodes = [type(node).FromString(node.SerializeToString()) for node in written]
    changed = len(nodes) > len(graph.node)
    del graph.node[:]
    graph.node.extend(nodes)
    return changed


def _has_bfloat16(graph: GraphProto) -> bool:
    """Whether a value of a graph may be bfloat16: an input, a constant, or the result of a Cast."""
    return (
        any(port.type.tensor_type.elem_type == BFLOAT16 for port in graph.input)
        or any(tensor.data_type == BFLOAT16 for tensor in graph.initializer)
        or any(BFLOAT16 in (one.i, one.t.data_type) for node in graph.node for one in node.attribute)
    )


def _new(name: str, names: set[str]) -> str:
    found = first_free(name, names.__contains__)
    names.add(found)
    return found
