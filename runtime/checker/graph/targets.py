"""Checks the targets of a rank file: every op reads values of its own target, and every copy is read.

A value lies on the target of the node that makes it, what a Copy makes on that to which it leads; on the CPU lie inputs, outputs, all that
is communicated, sizes, and operands that kernels read on the host. A file without targets has no copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from onnx import ModelProto, NodeProto
from partc.runtime.artifact.format import CPU, DOMAIN, RANK_CONSTANT, TARGET, TARGETS, StateRecord
from partc.runtime.artifact.graph.kernels import host_inputs
from partc.runtime.artifact.graph.onnx_graph import metadata_of, node_title, path_of, reads
from partc.runtime.artifact.graph.targets import copied_to, is_copy, target_of
from partc.runtime.errors import ArtifactError, Violation

_AGAIN = "compile the model again"
_SIZES = ("Shape", "Size")


def check_targets(file: str, model: ModelProto, kept: Sequence[StateRecord]) -> Iterator[Violation]:
    """Nodes without a target or with an unknown one, operands that lie elsewhere, copies that nothing reads or that lead nowhere.

    `kept`: the tensors of the state that the ranks of the file keep.
    """
    graph = model.graph
    if not any(map(target_of, graph.node)):
        for node in graph.node:
            if is_copy(node):
                yield Violation(file, "no node of the file has a target", node_title(node), path_of(node), _AGAIN)
        return
    makers = {name: node for node in graph.node for name in node.output if name}
    lying = {port.name: metadata_of(port, TARGET) or CPU for port in graph.input}
    lying |= {
        record.value: _target_of_outputs(file, makers[record.next])
        for record in kept
        if record.value in lying and record.next in makers
    }
    read = {name for node in graph.node for name in reads(node)} | {port.name for port in graph.output}
    for node in graph.node:
        for fact in _faults(file, node, lying, read):
            yield Violation(file, fact, node_title(node), path_of(node), _AGAIN)
        if not (node.domain == DOMAIN and node.op_type == RANK_CONSTANT):
            lying |= dict.fromkeys(filter(None, node.output), _target_of_outputs(file, node))
    following = {one.next: lying.get(one.value, CPU) for one in kept if one.next}
    for port in graph.output:
        wanted = following.get(port.name, CPU)
        if lying.get(port.name, wanted) != wanted:
            fact = f"its output '{port.name}' lies on {lying[port.name]}, and is wanted on {wanted}"
            yield Violation(file, fact, f"graph '{graph.name}'", help=_AGAIN)


def _faults(file: str, node: NodeProto, lying: Mapping[str, str], read: set[str]) -> Iterator[str]:
    if is_copy(node):
        try:
            to = copied_to(node, file)
        except ArtifactError as error:
            yield str(error).splitlines()[0].removeprefix(f"{file}: {node_title(node)}: ")
            return
        if lying.get(node.input[0], to) == to:
            yield f"it copies '{node.input[0]}' to {to}, where it lies"
        if node.output[0] not in read:
            yield f"nothing reads '{node.output[0]}'"
        return
    if node.domain == DOMAIN:
        wrong = [name for name in node.input if name and lying.get(name, CPU) != CPU]
        yield from (f"it takes '{name}', which lies on {lying[name]}" for name in wrong)
        return
    target = target_of(node)
    if target not in TARGETS:
        yield f"its target is '{target}'" if target else "it has no target"
        return
    if node.op_type in _SIZES and not node.domain:
        return
    host = host_inputs(node.domain, node.op_type)
    operands = [(name, CPU if k in host else target) for k, name in enumerate(node.input) if name]
    inner = [(name, target) for name in list(reads(node))[len(operands) :]]
    for name, wanted in dict.fromkeys((*operands, *inner)):
        if lying.get(name, wanted) != wanted:
            yield f"it reads '{name}' on {wanted}, and that lies on {lying[name]}"


def _target_of_outputs(file: str, node: NodeProto) -> str:
    """The target on which a node's outputs lie."""
    if is_copy(node):
        try:
            return copied_to(node, file)
        except ArtifactError:
            return CPU
    if node.domain == DOMAIN or (node.op_type in _SIZES and not node.domain):
        return CPU
    return target_of(node) or CPU
