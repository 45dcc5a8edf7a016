"""The targets of a rank file: which kind of device runs each node, and the copies of values from one to another.

    y = MatMul(x, w)                    metadata partc.target: cuda
    z = partc.comm.Copy <to = cpu> (y)

A node of a file without targets has none, and its program runs on one device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ArtifactError
from .format import COPY, CPU, DOMAIN, TARGET, TARGETS, TO
from .onnx_graph import node_title

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def target_of(node: NodeProto) -> str:
    """The target that runs a node; empty where the file names none."""
    return next((item.value for item in node.metadata_props if item.key == TARGET), "")


def target_made_on(node: NodeProto) -> str:
    """The target on which what a node of a file with targets makes lies; communication leaves it on the CPU."""
    if is_copy(node):
        return next((one.s.decode(errors="replace") for one in node.attribute if one.name == TO), CPU)
    return target_of(node) or CPU


def is_copy(node: NodeProto) -> bool:
    """Whether a node copies a value from one of the rank's targets to another."""
    return node.domain == DOMAIN and node.op_type == COPY


def as_identity(node: NodeProto) -> NodeProto:
    """A Copy as the op that it is where there is one target; any other node as it is."""
    from onnx import NodeProto

    return (
        NodeProto(op_type="Identity", name=node.name, input=node.input, output=node.output) if is_copy(node) else node
    )


def forget_copies(model: ModelProto) -> None:
    """Makes each Copy the Identity that it is for other ranks, to whom a value is the same on all targets."""
    for node in model.graph.node:
        if is_copy(node):
            node.CopyFrom(as_identity(node))


def copied_to(node: NodeProto, where: str) -> str:
    """The target to which a Copy leads; ArtifactError, naming the file `where`, if it is no sound one."""
    to = next((one.s.decode(errors="replace") for one in node.attribute if one.name == TO), "")
    problem = ""
    if (len(node.input), len(node.output)) != (1, 1) or not (node.input[0] and node.output[0]):
        problem = f"it has {len(node.input)} inputs and {len(node.output)} outputs, and takes and makes one"
    elif to not in TARGETS:
        problem = f"it leads to '{to}'; a target is one of {', '.join(TARGETS)}"
    if problem:
        raise ArtifactError(f"{where}: {node_title(node)}: {problem}\n  help: the file was changed; compile again")
    return to


def refuse_unknown_target(node: NodeProto, where: str) -> None:
    """ArtifactError for a node of the file `where` whose target is none."""
    if (target := target_of(node)) and target not in TARGETS:
        raise ArtifactError(
            f"{where}: {node_title(node)}: its target is '{target}'; a target is one of {', '.join(TARGETS)}\n"
            "  help: the file was changed; compile again"
        )
