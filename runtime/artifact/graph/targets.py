"""The targets of a rank file: the kind of device that runs each node, and the copies of values between targets.

    y = MatMul(x, w)                    metadata partc.target: cuda
    z = partc.comm.Copy <to = cpu> (y)

In a file without targets no node has one, and the program runs on one device.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from partc.runtime.artifact.format import COPY, CPU, DOMAIN, TARGET, TARGETS, TO
from partc.runtime.artifact.graph.onnx_graph import metadata_of, node_title, text_of
from partc.runtime.artifact.tasks.calls import rename_values
from partc.runtime.errors import ArtifactError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def target_of(node: NodeProto) -> str:
    """The target that runs a node; empty where the file names none."""
    return metadata_of(node, TARGET)


def output_target(node: NodeProto) -> str:
    """The target in whose memory a node's outputs are, in a file with targets; communication leaves them on the CPU."""
    if is_copy(node):
        return text_of(node, TO, CPU)
    return target_of(node) or CPU


def is_copy(node: NodeProto) -> bool:
    """Whether a node copies a value from one of the rank's targets to another."""
    return node.domain == DOMAIN and node.op_type == COPY


def as_identity(node: NodeProto) -> NodeProto:
    """Returns a Copy as an Identity, which it is where there is one target; any other node unchanged."""
    from onnx import NodeProto

    return (
        NodeProto(op_type="Identity", name=node.name, input=node.input, output=node.output) if is_copy(node) else node
    )


def forget_copies(model: ModelProto, lasting: Collection[str]) -> None:
    """Removes the Copies from a program of plain nodes: each value gets one name, the shortest of its names on all targets.

    So a value has the same name in the files of all ranks, whatever targets they have. `lasting` are the names of values that replace kept
    tensors: they stay, and an Identity makes such a value's other name. So do those of results of communication, which the manifest has.
    """
    graph = model.graph
    alike: dict[str, list[str]] = {}
    for node in graph.node:
        if is_copy(node):
            alike.setdefault(node.input[0], [node.input[0]]).append(node.output[0])
    if not alike:
        return
    names: dict[str, str] = {}
    listed = {name for node in graph.node if node.domain == DOMAIN and not is_copy(node) for name in node.output}
    for source, some in alike.items():
        short = source if source in listed else min(some, key=lambda name: (name not in lasting, len(name)))
        if source not in lasting:
            names |= {name: short for name in some if name != short and name not in lasting}
    kept = [
        as_identity(node)
        for node in graph.node
        if not is_copy(node) or names.get(node.input[0], node.input[0]) != names.get(node.output[0], node.output[0])
    ]
    for node in kept:
        rename_values(node, names)
    nodes, typed = [*kept], [value for value in graph.value_info if value.name not in names]
    declared = {value.name for value in (*typed, *graph.input, *graph.output)}
    for value in graph.value_info:
        if names.get(value.name, value.name) not in declared:
            value.name = names[value.name]
            declared.add(value.name)
            typed.append(value)
    copied = [type(node).FromString(node.SerializeToString()) for node in nodes]
    types = [type(value).FromString(value.SerializeToString()) for value in typed]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(copied)
    graph.value_info.extend(types)


def copied_to(node: NodeProto, where: str) -> str:
    """Returns the target to which a Copy copies; ArtifactError, naming the file `where`, if the node is not valid."""
    to = text_of(node, TO)
    problem = ""
    if (len(node.input), len(node.output)) != (1, 1) or not (node.input[0] and node.output[0]):
        problem = f"it has {len(node.input)} inputs and {len(node.output)} outputs, and takes and makes one"
    elif to not in TARGETS:
        problem = f"it leads to '{to}'; a target is one of {', '.join(TARGETS)}"
    if problem:
        raise ArtifactError(f"{where}: {node_title(node)}: {problem}\n  help: the file was changed; compile again")
    return to
