"""The tasks of a rank file: functions of the domain `partc.task`, and the row of their calls in the main graph.

    0F3 = F0(x.3, w) {microbatch: 3}      the body F0, with the value names of microbatch 3

In a call, an input or output of the body has the name of the call's operand at the same index, and a value `v` inside the body is named
`v.3`; the tags of communication nodes are `tag + 3`. `unrolled` returns the program without functions, to which all statements about
programs apply directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from partc.runtime.artifact.format import DOMAIN, MICROBATCH, TAG, TASK, TASKS
from partc.runtime.artifact.graph.onnx_graph import graph_bodies, integer_of, reads
from partc.runtime.errors import ArtifactError

if TYPE_CHECKING:
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

_AGAIN = "  help: the file was changed; compile again"


@dataclass(frozen=True)
class Body:
    """The function of a task: its nodes without constants, and the constants by name."""

    function: FunctionProto
    nodes: tuple[NodeProto, ...]
    constants: Mapping[str, TensorProto]

    @cached_property
    def inside(self) -> frozenset[str]:
        """The values that the body makes."""
        return frozenset(name for node in self.nodes for name in node.output if name)


@dataclass(frozen=True)
class Call:
    """A call of a task in the row."""

    node: NodeProto
    body: Body
    microbatch: int

    @property
    def cell(self) -> str:
        """The task as a schedule writes it: `0F3`."""
        return self.node.name

    @cached_property
    def names(self) -> dict[str, str]:
        """Maps each name in the body to the name in this microbatch."""
        function, node = self.body.function, self.node
        inside = {name: f"{name}.{self.microbatch}" for name in self.body.inside}
        inputs = zip(function.input, node.input, strict=True)
        return {**inside, **dict(inputs), **dict(zip(function.output, node.output, strict=True))}


def is_call(node: NodeProto) -> bool:
    """Whether a node is a call of a task."""
    return node.domain == TASKS


def bodies_of(model: ModelProto) -> dict[str, Body]:
    """Maps the name of each task function in a rank file to its body."""
    bodies: dict[str, Body] = {}
    for function in model.functions:
        if function.domain != TASKS:
            continue
        constants = {node.output[0]: _value(node) for node in function.node if _is_constant(node)}
        for name, tensor in constants.items():
            tensor.name = name
        nodes = tuple(node for node in function.node if not _is_constant(node))
        bodies[function.name] = Body(function, nodes, constants)
    return bodies


def _is_constant(node: NodeProto) -> bool:
    """Whether a node is a constant that the compiler wrote into the body: one tensor, without metadata such as a path in the model."""
    return (
        node.op_type == "Constant"
        and not node.domain
        and not node.metadata_props
        and len(node.output) == 1
        and [one.name for one in node.attribute] == ["value"]
        and node.attribute[0].HasField("t")
    )


def _value(node: NodeProto) -> TensorProto:
    from onnx import TensorProto

    tensor = TensorProto()
    tensor.CopyFrom(node.attribute[0].t)
    return tensor


def calls_of(nodes: Iterator[NodeProto] | list[NodeProto], bodies: Mapping[str, Body], where: str) -> dict[int, Call]:
    """Maps the index of each call in `nodes` to its `Call`; ArtifactError, naming the file `where`, where a call has no fitting body."""
    calls: dict[int, Call] = {}
    problems = []
    for at, node in enumerate(nodes):
        if not is_call(node):
            continue
        microbatch = integer_of(node, MICROBATCH, -1)
        body = bodies.get(node.op_type)
        title = f"{where}: the task '{node.name}'"
        if body is None:
            problems.append(f"{title} is a call of '{node.op_type}', which is not a function of the file")
        elif microbatch < 0:
            problems.append(f"{title} is of no microbatch")
        elif (len(node.input), len(node.output)) != (len(body.function.input), len(body.function.output)):
            problems.append(f"{title} has other numbers of inputs and outputs than '{node.op_type}'")
        elif not all(node.input) or not all(node.output):
            problems.append(f"{title} leaves out an operand")
        else:
            calls[at] = Call(node, body, microbatch)
    if problems:
        raise ArtifactError("\n".join([*problems, _AGAIN]))
    return calls


def nodes_of(model: ModelProto, where: str = "") -> Iterator[tuple[NodeProto, int]]:
    """Yields the nodes of a program in their order, as its file has them, each with the number that its call adds to tags.

    The nodes of a body are yielded once for each call. ArtifactError where a call is not valid.
    """
    nodes = list(model.graph.node)
    calls = calls_of(nodes, bodies_of(model), where)
    for at, node in enumerate(nodes):
        if at in calls:
            yield from ((one, calls[at].microbatch) for one in calls[at].body.nodes)
        else:
            yield node, 0


def tensors_of(model: ModelProto) -> dict[str, TensorProto]:
    """Maps names to the weights and constants of a rank file, including those of bodies."""
    found = {name: tensor for body in bodies_of(model).values() for name, tensor in body.constants.items()}
    return found | {tensor.name: tensor for tensor in model.graph.initializer}


def declared(model: ModelProto, where: str = "") -> Iterator[tuple[str, ValueInfoProto]]:
    """Yields each value's name and the type that a rank file declares for it: in the main graph, and in bodies for values of every call."""
    graph = model.graph
    for value in (*graph.value_info, *graph.input, *graph.output):
        yield value.name, value
    bodies = bodies_of(model)
    if not bodies:
        return
    inside = {
        name: [(value.name, value) for value in body.function.value_info if value.name in body.inside]
        for name, body in bodies.items()
    }
    for call in calls_of(list(graph.node), bodies, where).values():
        names = call.names
        for name, value in inside[call.node.op_type]:
            yield names[name], value


def unrolled(
    model: ModelProto,
    where: str = "",
    once: bool = False,
    limit: int | None = None,
    is_inlined: Callable[[NodeProto], bool] | None = None,
) -> ModelProto:
    """Returns the program with the nodes of tasks inlined in place of their calls; the model itself where it has no tasks.

    With `limit` each body is inlined only for so many calls, and the outputs of later calls are replaced by those of the last of these;
    `once` inlines the first call alone, which is enough where only types are needed. `is_inlined`: which nodes of bodies are.
    ArtifactError where a call is not valid.
    """
    from onnx import ModelProto

    limit = 1 if once else limit
    bodies = bodies_of(model)
    if not bodies and not any(map(is_call, model.graph.node)):
        return model
    nodes = list(model.graph.node)
    calls = calls_of(nodes, bodies, where)
    flat = ModelProto()
    flat.CopyFrom(model)
    graph = flat.graph
    del graph.node[:]
    del flat.functions[:]
    flat.functions.extend(one for one in model.functions if one.domain != TASKS)
    imports = [entry for entry in model.opset_import if entry.domain != TASKS]
    del flat.opset_import[:]
    flat.opset_import.extend(imports)
    known = {tensor.name for tensor in graph.initializer}
    instead: dict[str, str] = {}
    inlined: dict[str, list[Call]] = {}
    for at, node in enumerate(nodes):
        call = calls.get(at)
        if call is None:
            copy = graph.node.add()
            copy.CopyFrom(node)
            if instead:
                rename_values(copy, instead)
            continue
        before = inlined.setdefault(node.op_type, [])
        if len(before) == limit:
            last = before[-1].node.output
            instead |= {name: instead.get(old, old) for name, old in zip(node.output, last, strict=True)}
            continue
        before.append(call)
        _inline(graph, call, known, instead, is_inlined)
    if limit is not None:
        seen: set[str] = set()
        kept = [value for value in graph.output if value.name not in instead]
        del graph.output[:]
        graph.output.extend(kept)
        for value in list(graph.value_info):
            if value.name in seen:
                graph.value_info.remove(value)
            seen.add(value.name)
    return flat


def _inline(
    graph: GraphProto,
    call: Call,
    known: set[str],
    instead: Mapping[str, str],
    is_inlined: Callable[[NodeProto], bool] | None,
) -> None:
    """Adds the nodes, types and constants of a call to the graph."""
    names, body = dict(call.names), call.body
    nodes = body.nodes if is_inlined is None else [node for node in body.nodes if is_inlined(node)]
    typed = {*body.function.output, *(name for node in nodes for name in (*node.input, *node.output))}
    if instead:
        names |= {name: instead.get(other, other) for name, other in names.items() if name not in body.inside}
    for name, tensor in body.constants.items():
        if name not in known:
            known.add(name)
            graph.initializer.add().CopyFrom(tensor)
    for node in nodes:
        copy = graph.node.add()
        copy.CopyFrom(node)
        copy.name = f"{node.name}.{call.microbatch}"
        rename_values(copy, names)
        copy.metadata_props.add(key=TASK, value=call.cell)
        if node.domain == DOMAIN:
            for attribute in copy.attribute:
                if attribute.name == TAG:
                    attribute.i += call.microbatch
    for value in body.function.value_info:
        if value.name in body.inside and (is_inlined is None or value.name in typed):
            copied = graph.value_info.add()
            copied.CopyFrom(value)
            copied.name = names[value.name]


def rename_values(node: NodeProto, names: Mapping[str, str]) -> None:
    """Renames the values that a node reads or makes, and those that its bodies read."""
    for k, name in enumerate(node.input):
        if name in names:
            node.input[k] = names[name]
    for k, name in enumerate(node.output):
        if name in names:
            node.output[k] = names[name]
    for body in graph_bodies(node):
        rename_captured(body, names)


def rename_captured(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Renames the values that a body reads from the graphs around it."""
    own = {value.name for value in graph.input} | {name for node in graph.node for name in node.output}
    own |= {tensor.name for tensor in graph.initializer}
    outer = {old: new for old, new in names.items() if old not in own}
    for node in graph.node:
        if not outer.keys().isdisjoint(reads(node)):
            for k, name in enumerate(node.input):
                node.input[k] = outer.get(name, name)
            for body in graph_bodies(node):
                rename_captured(body, outer)
    for value in graph.output:
        value.name = outer.get(value.name, value.name)
