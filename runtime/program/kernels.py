"""Refuses ops for which a device has no kernel when a program is loaded, with the path of the node and the remedy.

onnxruntime would run them on the CPU and copy their operands back and forth, without any sign in the plan or the dump.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from partc.runtime.artifact.graph.onnx_graph import op_and_path, path_of
from partc.runtime.units import first_of

from ..devices.devices import Device
from ..errors import ArtifactError
from .ort import Session, left_on_host, without_kernel

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_SHOWN = 10
_FLOATS = (1, 10, 11, 16)
"""The element types of floats: shapes are never computed with them."""


def refuse_without_kernel(
    where: str, device: Device, model: bytes, entries: Mapping[str, str], nodes: Sequence[NodeProto]
) -> None:
    """Raises ArtifactError if a session on a GPU could not be made because ops of its model have no kernel there."""
    try:
        found = without_kernel(model, device, entries)
    except Exception:
        return  # the model is refused for another reason, which the caller knows
    _refuse(where, device, found, nodes)


def refuse_moved_to_host(where: str, device: Device, session: Session, model: ModelProto) -> None:
    """Raises ArtifactError for nodes that compute floats and that a session on a GPU runs on the CPU.

    onnxruntime may run shape arithmetic, on integers, there.
    """
    on_host = left_on_host(session)
    if not on_host:
        return
    from onnx import shape_inference

    inferred = shape_inference.infer_shapes(model).graph
    kinds = {one.name: one.type.tensor_type.elem_type for one in (*inferred.value_info, *inferred.output)}
    computing = {node.name for node in model.graph.node if any(kinds.get(name) in _FLOATS for name in node.output)}
    _refuse(where, device, [(op, name) for op, name in on_host if name in computing], list(model.graph.node))


def _refuse(where: str, device: Device, found: Iterable[tuple[str, str]], nodes: Sequence[NodeProto]) -> None:
    by_name = {node.name: node for node in nodes if node.name}
    ops = {op: node for node in reversed(nodes) for op in [node.op_type]}
    lines = dict[str, str]()
    for op, name in found:
        node = by_name.get(name) or ops.get(op)
        lines[op_and_path(node) if node is not None else op] = (path_of(node) if node is not None else "") or op
    if not lines:
        return
    shown = first_of([*lines], _SHOWN)
    places = ", ".join(f'"{path.partition(", ")[0]}": cpu' for path in list(dict.fromkeys(lines.values()))[:_SHOWN])
    raise ArtifactError(
        f"{where}: onnxruntime has no kernel on {device.kind} for {shown}\n"
        f"  help: target: {{{places}}} in the plan runs it on the CPU, with copies that the dump shows"
    )
