"""Checks one rank's graph: each value is made once and before its use, ops are known, functions are valid.

A body of If, Loop or Scan sees the values of the graphs around it, as they are at its node. A value that no node makes
is distinguished from one that is made too late, since the remedies differ. A function of the model sees only its inputs, and consists of
plain ops: it neither communicates nor calls another function.

Checks the targets of a rank file: every op reads values of its own target, and every copy is read.

A value is on the target of the node that makes it, the output of a Copy on the target to which it copies. Inputs, outputs, communicated
values, sizes, and operands that kernels read on the host are on the CPU. A file without targets has no copies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto
from partc.runtime.artifact.comm.border_node import IF
from partc.runtime.artifact.comm.collectives import GROUP_OPS
from partc.runtime.artifact.format import (
    BEGIN,
    COPY,
    CPU,
    DOMAIN,
    DOMAIN_VERSION,
    END,
    KIND,
    OTHERWISE,
    RANK_CONSTANT,
    RECV,
    SEND,
    TARGET,
    TARGETS,
    StateRecord,
)
from partc.runtime.artifact.graph.bodies import is_border
from partc.runtime.artifact.graph.kernels import host_inputs
from partc.runtime.artifact.graph.onnx_graph import (
    all_nodes,
    graph_bodies,
    metadata_of,
    node_title,
    path_of,
    reads,
    short_splits,
    text_of,
)
from partc.runtime.artifact.graph.targets import copied_to, is_copy, target_of
from partc.runtime.errors import ArtifactError, Violation


def check_graph(file: str, model: ModelProto) -> list[Violation]:
    """Returns the faults of a graph: values without a producer, made too late or twice, unknown ops or domains, and invalid functions."""
    return [*_check_scope(file, model.graph, set()), *_check_ops(file, model), *_check_functions(file, model)]


def _check_scope(file: str, graph: GraphProto, outer: set[str]) -> Iterator[Violation]:
    made = {port.name for port in graph.input}
    made.update(tensor.name for tensor in graph.initializer)
    made.update(tensor.values.name for tensor in graph.sparse_initializer)
    results = [port.name for port in graph.output]
    return _check_nodes(
        file, f"graph '{graph.name}'", graph.node, made, results, outer, "is defined by no node of this rank"
    )


def _check_nodes(
    file: str,
    owner: str,
    nodes: Sequence[NodeProto],
    defined: set[str],
    results: Sequence[str],
    outer: set[str],
    lost: str,
) -> Iterator[Violation]:
    """Checks that nodes read existing values, and make each value once.

    `defined`: the values that exist before the nodes; `results`: the values that must exist after them; `outer`: the values of the graphs
    around; `lost`: the message about a value without a producer.
    """
    later: set[str] | None = None
    for node in nodes:
        missing = [name for name in node.input if name not in defined and name and name not in outer]
        if missing and later is None:
            later = {name for each in nodes for name in each.output if name}
        for name in dict.fromkeys(missing):
            fact = f"its input '{name}' {'is defined after it' if later and name in later else lost}"
            yield Violation(file, fact, node_title(node), path_of(node))
        for body in graph_bodies(node):
            yield from _check_scope(file, body, defined | outer)
        for name in filter(None, node.output):
            if name in defined:
                yield Violation(file, f"its output '{name}' is defined twice", node_title(node), path_of(node))
            defined.add(name)
    for name in results:
        if name not in defined and name not in outer:
            yield Violation(file, f"its output '{name}' {lost}", owner)


def _check_ops(file: str, model: ModelProto) -> Iterator[Violation]:
    imported = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    known = _known_ops() | {(function.domain, function.name) for function in model.functions}
    if imported.get(DOMAIN, DOMAIN_VERSION) != DOMAIN_VERSION:
        yield Violation(
            file, f"it uses version {imported[DOMAIN]} of {DOMAIN}; this partc knows version {DOMAIN_VERSION}"
        )
    everywhere = [*all_nodes(model.graph.node)]
    splits = [node for node in everywhere if node.op_type == "Split"]
    for nodes in (splits, *(function.node for function in model.functions)):
        for node, fact in short_splits(nodes):
            yield Violation(file, fact, node_title(node), path_of(node), "compile the model again")
    for node in everywhere:
        op = domain, op_type = node.domain or "ai.onnx", node.op_type
        if domain not in imported:
            yield Violation(file, f"its domain {domain} has no opset_import", node_title(node), path_of(node))
        if op not in known:
            fact = f"neither ONNX nor onnxruntime knows {domain}.{op_type}, and no function of the file is called so"
            yield Violation(file, fact, node_title(node), path_of(node))
    for node in model.graph.node:
        inner = (one for body in graph_bodies(node) for one in all_nodes(body.node) if one.domain == DOMAIN)
        if (one := next(inner, None)) is not None:
            fact = f"it has {node_title(one)} in a body, and its metadata do not say which ranks run that together"
            yield Violation(file, fact, node_title(node), path_of(node), "compile the model again")
    yield from _check_borders(file, model.graph.node)
    yield from _check_calls(file, model, everywhere)


def _check_borders(file: str, nodes: Iterable[NodeProto]) -> Iterator[Violation]:
    """Yields a violation for the first border of a body that does not fit those before it."""
    open_ = list[list[str]]()
    for node in filter(is_border, nodes):
        if node.op_type == BEGIN:
            open_.append([text_of(node, KIND)])
            continue
        due = [OTHERWISE] if open_ and open_[-1] == [IF] else [END]
        if not open_ or node.op_type not in due or text_of(node, KIND) != open_[-1][0]:
            yield Violation(file, "no body of its kind is open here", node_title(node), path_of(node))
            return
        open_[-1].append(node.op_type)
        if node.op_type == END:
            open_.pop()
    if open_:
        yield Violation(file, f"{len(open_)} bodies of {', '.join(one[0] for one in open_)} do not end")


def check_calls(file: str, model: ModelProto) -> Iterator[Violation]:
    """Yields calls of the model's functions whose inputs, outputs or attributes are not those of the function."""
    return _check_calls(file, model, all_nodes(model.graph.node))


def _check_calls(file: str, model: ModelProto, nodes: Iterable[NodeProto]) -> Iterator[Violation]:
    functions = {(function.domain, function.name): function for function in model.functions}
    for node in nodes if functions else ():
        if (key := (node.domain, node.op_type)) in functions:
            for fact in _wrong_call(node, functions[key]):
                yield Violation(file, fact, node_title(node), path_of(node), "compile the model again")


def _wrong_call(node: NodeProto, function: FunctionProto) -> Iterator[str]:
    """Yields the reasons why a node is not a valid call of a function."""
    for kind, there, formal in (("input", node.input, function.input), ("output", node.output, function.output)):
        if len(there) != len(formal):
            yield f"it has {len(there)} {kind}s, and {function.domain}.{function.name} has {len(formal)}"
    given = {attribute.name for attribute in node.attribute}
    optional = {attribute.name for attribute in function.attribute_proto}
    for name in sorted({*function.attribute} - given):
        yield f"its attribute '{name}' is missing"
    for name in sorted(given - {*function.attribute} - optional):
        yield f"its attribute '{name}' is not an attribute of {function.domain}.{function.name}"


def _check_functions(file: str, model: ModelProto) -> Iterator[Violation]:
    """Checks that each function is defined once, and that its body is valid by itself."""
    seen = set()
    plain = _known_ops() if model.functions else set()
    for function in model.functions:
        owner = f"function '{function.domain}.{function.name}'"
        if owner in seen:
            yield Violation(file, "it is there twice", owner)
        seen.add(owner)
        made, results = {*function.input}, list(function.output)
        for found in _check_nodes(
            file, owner, function.node, made, results, set(), "is defined by no node of the function"
        ):
            yield found if found.node == owner else replace(found, node=f"{owner}: {found.node}")
        imported = {entry.domain or "ai.onnx" for entry in function.opset_import}
        for node in all_nodes(function.node):
            domain, title = node.domain or "ai.onnx", f"{owner}: {node_title(node)}"
            if domain == DOMAIN:
                fact = "it communicates, and a function runs on one rank as if it were one op"
                yield Violation(file, fact, title, help="compile the model again")
            elif (domain, node.op_type) not in plain:
                yield Violation(file, f"neither ONNX nor onnxruntime knows {domain}.{node.op_type}", title)
            elif domain not in imported:
                yield Violation(file, f"its domain {domain} has no opset_import in the function", title)


def _known_ops() -> set[tuple[str, str]]:
    return _schemas() | {(DOMAIN, op) for op in (SEND, RECV, RANK_CONSTANT, COPY, *GROUP_OPS)}


@functools.cache
def _schemas() -> set[tuple[str, str]]:
    from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime

    schemas = [*onnx.defs.get_all_schemas(), *onnxruntime.get_all_operator_schema()]
    return {(schema.domain or "ai.onnx", schema.name) for schema in schemas}


_AGAIN = "compile the model again"
_SIZES = ("Shape", "Size")


def check_targets(file: str, model: ModelProto, kept: Sequence[StateRecord]) -> Iterator[Violation]:
    """Yields nodes without a known target, operands on another target, copies that nothing reads, and copies to the value's own target.

    `kept`: the state that the ranks of the file keep.
    """
    graph = model.graph
    lying = {port.name: metadata_of(port, TARGET) or CPU for port in graph.input}
    if {*lying.values()} <= {CPU} and not any(map(target_of, graph.node)):
        for node in graph.node:
            if is_copy(node):
                yield Violation(file, "no node of the file has a target", node_title(node), path_of(node), _AGAIN)
        return
    makers = {name: node for node in graph.node for name in node.output if name}
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
    """The target in whose memory a node's outputs are."""
    if is_copy(node):
        try:
            return copied_to(node, file)
        except ArtifactError:
            return CPU
    if node.domain == DOMAIN or (node.op_type in _SIZES and not node.domain):
        return CPU
    return target_of(node) or CPU
