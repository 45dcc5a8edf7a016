"""Exports a model with a stack of equal layers by its first three, and repeats the nodes of the third for the others.

torch's export takes more than a second a layer. Layers are equal where they have the same modules, settings and shapes, apart from their
own numbers, and no list or interval of the configuration tells them apart. The exported nodes are a second proof: those of the third
layer must be those of the second with names of one layer later. Without either, the whole model is exported.

    model.layers.1: MatMul(layers.0.Add_1, layers.1.q_proj.weight)      model.layers.2: MatMul(layers.1.Add_1, layers.2.q_proj.weight)
    model.layers.7: MatMul(layers.6.Add_1, layers.7.q_proj.weight)      and what read layers.2.Add_1 after the stack reads layers.31.Add_1

Where kinds of layers alternate with a period, such as five with a sliding window and one without, the same holds of periods: three are
exported, with the layers that do not fill one, and the nodes of the last period are repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.frontend.torch.torch_model import TORCH_MODEL

_LEAST = 6
"""The smallest stack of which not all layers are exported."""
_PORT = re.compile(r"(past|present)_(\d+)_")
_INTERVAL = re.compile("layer|interval|every|period|pattern|freq|step|skip|stride")
"""Parts of the names of settings that tell layers apart by their numbers."""
_OF_NO_LAYER = {
    "architectures",
    "begin_suppress_tokens",
    "eos_token_id",
    "keys_to_ignore_at_inference",
    "long_factor",
    "mrope_section",
    "short_factor",
    "suppress_tokens",
}
"""Lists of configurations that have no entries for layers."""
_PARTS = {"_buffers", "_modules", "_parameters"}


@dataclass(frozen=True)
class Stack:
    """The layers of a module: the path of their `ModuleList`, their number, and how many layers later an equal one comes."""

    path: str
    layers: int
    period: int = 1

    @property
    def exported(self) -> int:
        """The number of layers that are exported: three periods, and what does not fill a period."""
        return 3 * self.period + self.layers % self.period

    def exported_layer(self, layer: int) -> int:
        """Returns the exported layer whose nodes a layer has: itself, or one of the last period."""
        return layer if layer < self.exported else layer - self.period * -(-(layer + 1 - self.exported) // self.period)

    def layer(self, name: str | None) -> int | None:
        """Returns the layer of a node or value that is named by its module; None outside of the layers."""
        if name is None or not name.startswith(f"{self.path}."):
            return None
        number, dot, _ = name[len(self.path) + 1 :].partition(".")
        return int(number) if dot and number.isdecimal() else None

    def later(self, name: str, by: int) -> str:
        """Returns the name that a node, a value, an input or an output has `by` layers later; a name outside of the layers stays."""
        if match := _PORT.match(name):
            return f"{match[1]}_{int(match[2]) + by}_{name[match.end() :]}"
        layer = self.layer(name)
        return name if layer is None else f"{self.path}.{layer + by}{name[len(f'{self.path}.{layer}') :]}"


def stack_of(module: Any) -> Stack | None:
    """Returns the stack of layers of a model of `transformers`, with the smallest period of which layers are equal.

    None where it has none, or several, or too few layers.
    """
    import torch

    stacks = dict[str, torch.nn.ModuleList]()
    for path, one in module.named_modules():
        is_nested = any(path.startswith(f"{outer}.") for outer in stacks)
        if isinstance(one, torch.nn.ModuleList) and len(one) >= _LEAST and not is_nested:
            stacks[path] = one
    if len(stacks) != 1:
        return None
    ((path, layers),) = stacks.items()
    inside = {id(one) for one in layers.modules()}
    others = [one for one in module.modules() if id(one) not in inside]
    lists = [value for one in others for name, value in vars(one).items() if name not in _PARTS]
    settings = module.config.to_dict()
    for period in range(1, len(layers) // 2):
        stack = Stack(path, len(layers), period)
        if (
            stack.exported < stack.layers
            and all(_is_periodic_list(value, stack) for value in lists)
            and _are_periodic(settings, stack)
            and _are_equal(layers, period)
        ):
            return stack
    return None


def _is_periodic_list(value: object, stack: Stack) -> bool:
    """Whether an attribute has no entry for each layer, or those of equal layers are equal."""
    entries = [*value.values()] if isinstance(value, dict) and {*value} == {*range(stack.layers)} else value
    return not isinstance(entries, list | tuple) or len(entries) != stack.layers or _is_periodic(entries, stack.period)


def _is_periodic(values: Sequence[object], period: int) -> bool:
    return all(one == values[k % period] for k, one in enumerate(values))


def _are_periodic(settings: dict[str, Any], stack: Stack) -> bool:
    """Whether no setting of a configuration may tell equal layers apart: no list of different entries, and no other interval."""
    for name, value in settings.items():
        if isinstance(value, dict):
            is_periodic = _are_periodic(value, stack)
        elif isinstance(value, list | tuple):
            period = stack.period if len(value) == stack.layers else 1
            is_periodic = name in _OF_NO_LAYER or _is_periodic(value, period) or [*value] == [*range(stack.layers)]
        else:
            is_interval = isinstance(value, int) and 1 < value < stack.layers and _INTERVAL.search(str(name))
            is_periodic = not is_interval or stack.period % value == 0
        if not is_periodic:
            return False
    return True


def _are_equal(layers: Any, period: int) -> bool:
    """Whether layers that are whole periods apart differ in nothing but the numbers of their weights, and in numbers that count the layers.

    No layer shares a weight with another.
    """
    facts, tensors = list[dict[str, Any]](), list[int]()
    for layer in layers:
        own: dict[str, Any] = {}
        for path, one in layer.named_modules():
            own[path] = type(one)
            own |= {f"{path}:{name}": value for name, value in vars(one).items() if name not in _PARTS}
        for path, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            own[f"{path}="] = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
            tensors.append(id(tensor))
        facts.append(own)
    return len(tensors) == len(set(tensors)) and all(
        all(own.keys() == alike[0].keys() for own in alike)
        and all(_are_alike([own[key] for own in alike], period) for key in alike[0])
        for alike in (facts[k::period] for k in range(period))
    )


def _are_alike(values: Sequence[Any], period: int) -> bool:
    """Whether a setting is the same in all layers that are whole periods apart, or counts the layers."""
    if all(isinstance(one, partial) for one in values):
        values = [(one.func, one.args, one.keywords) for one in values]
    first = values[0]
    counts = isinstance(first, int) and not isinstance(first, bool)
    if counts and [*values] == [*range(first, first + period * len(values), period)]:
        return True
    plain = isinstance(first, int | float | str | list | tuple | dict | set)
    return all(one is first or (plain and type(one) is type(first) and one == first) for one in values)


@contextmanager
def shortened(module: Any, stack: Stack) -> Iterator[None]:
    """A context in which a model has its class's own forward, and only the layers of its stack that are exported."""
    import torch

    forward = {name: vars(module).pop(name) for name in ("forward",) if name in vars(module)}
    path, _, name = stack.path.rpartition(".")
    owner = module.get_submodule(path)
    whole = owner._modules[name]
    owner._modules[name] = torch.nn.ModuleList(list(whole)[: stack.exported])
    try:
        yield
    finally:
        owner._modules[name] = whole
        vars(module).update(forward)


def repeat(model: ir.Model, stack: Stack, inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    """Adds the other layers to the graph of a shortened model; returns False, without a change, where its layers are not equal.

    `inputs`, `outputs`: the names of the whole model's inputs and outputs, in order; `outputs` is empty where no layer has one.
    """
    graph, torch_model = model.graph, model.meta[TORCH_MODEL]
    is_whole = {stack.layer(node.name) for node in graph} >= {*range(stack.exported)}
    shared = _shared(graph, stack) if is_whole and not model.functions else None
    if shared is None:
        return False
    last, more = _nodes_of(graph, stack, _last_period(stack)), stack.layers - stack.exported
    inside = {id(value) for node in last for value in node.outputs}
    after = [
        (use.node, use.idx, value)
        for node in last
        for value in node.outputs
        for use in value.uses()
        if stack.layer(use.node.name) is None
    ]
    values = {_name(value): value for value in (*graph.inputs, *graph.initializers.values())}
    values |= {_name(value): value for node in graph for value in node.outputs}

    def read(value: ir.Value | None, by: int) -> ir.Value | None:
        """Returns what a node reads in place of `value`, `by` layers later."""
        if value is None or (id(value) in shared and id(value) not in inside):
            return value
        name = stack.later(_name(value), by)
        if name not in values:
            values[name] = _copy(value, name)
            if value.name in graph.initializers:
                values[name].const_value = value.const_value
                graph.initializers.add(values[name])
            else:
                graph.inputs.append(values[name])
        return values[name]

    place = last[-1]
    for by in range(stack.period, more + 1, stack.period):
        nodes = list[ir.Node]()
        for node in last:
            results = [_copy(value, stack.later(_name(value), by)) for value in node.outputs]
            values |= {_name(value): value for value in results}
            nodes.append(_like(node, [read(value, by) for value in node.inputs], results, stack, by))
        graph.insert_after(place, nodes)
        place = nodes[-1]
    for node, k, value in after:
        node.replace_input_with(k, values[stack.later(_name(value), more)])
    _order(graph, stack, values, inputs, outputs)

    def exported_port(port: re.Match[str]) -> str:
        return f"{port[1]}_{stack.exported_layer(int(port[2]))}_"

    specs = {one.name: one for one in torch_model.inputs}
    model.meta[TORCH_MODEL] = replace(
        torch_model,
        inputs=[replace(specs[_PORT.sub(exported_port, name)], name=name) for name in inputs],
        outputs={name: k for k, name in enumerate(outputs)} or torch_model.outputs,
        arguments=[*inputs] if torch_model.arguments else [],
    )
    return True


def _last_period(stack: Stack) -> range:
    """Returns the exported layers whose nodes are repeated."""
    return range(stack.exported - stack.period, stack.exported)


def _nodes_of(graph: ir.Graph, stack: Stack, layers: range) -> list[ir.Node]:
    return [node for node in graph if stack.layer(node.name) in layers]


def _shared(graph: ir.Graph, stack: Stack) -> set[int] | None:
    """Returns the ids of the values that the last and the previous period both read; None if these differ in more than names."""
    period = _last_period(stack)
    last = _nodes_of(graph, stack, period)
    previous = _nodes_of(graph, stack, range(period.start - stack.period, period.start))
    before = _nodes_of(graph, stack, range(period.start))
    outside = (use.node for node in before for value in node.outputs for use in value.uses())
    if len(previous) != len(last) or any(stack.layer(node.name) is None for node in outside):
        return None
    shared, moved = set[int](), set[int]()
    for node, other in zip(previous, last, strict=True):
        if not _are_one_op(node, other) or stack.later(_name(node), stack.period) != other.name:
            return None
        for value, later in zip(node.outputs, other.outputs, strict=True):
            is_port = later.is_graph_output()
            if value.is_graph_output() != is_port or (is_port and _PORT.match(_name(later)) is None):
                return None
            if _facts(value) != _facts(later) or stack.later(_name(value), stack.period) != later.name:
                return None
        for read, same in zip(node.inputs, other.inputs, strict=True):
            if read is same:
                shared.add(id(read))
            elif (
                read is None
                or same is None
                or stack.later(_name(read), stack.period) != same.name
                or not _are_like(read, same)
            ):
                return None
            else:
                moved.add(id(same))
    return None if shared & moved else shared


def _are_one_op(node: ir.Node, other: ir.Node) -> bool:
    """Whether two nodes have one op, equal attributes and as many operands."""
    of = [
        (one.op_type, one.domain, one.overload, one.version, len(one.inputs), len(one.outputs)) for one in (node, other)
    ]
    if of[0] != of[1] or node.attributes.keys() != other.attributes.keys():
        return False
    pairs = [(one, other.attributes[name]) for name, one in node.attributes.items()]
    bodies = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS, ir.AttributeType.TENSOR, ir.AttributeType.TENSORS)
    return all(one.type == same.type and one.type not in bodies and one.value == same.value for one, same in pairs)


def _are_like(value: ir.Value, later: ir.Value) -> bool:
    """Whether two values of different layers have one type and shape, and equal numbers where the export knows them."""
    numbers = [value.const_value, later.const_value]
    known = [tensor is not None and not getattr(getattr(tensor, "raw", None), "is_meta", False) for tensor in numbers]
    if _facts(value) != _facts(later) or known[0] != known[1]:
        return False
    arrays = [tensor.numpy() for tensor in numbers if tensor is not None and known[0]]
    return not known[0] or np.array_equal(arrays[0], arrays[1])


def _facts(value: ir.Value) -> tuple[object, ...]:
    return str(value.shape), value.dtype, value.is_initializer()


def _name(value: ir.Value | ir.Node) -> str:
    return value.name or ""


def _copy(value: ir.Value, name: str) -> ir.Value:
    shape = None if value.shape is None else value.shape.copy()
    made = ir.Value(name=name, shape=shape, type=value.type, metadata_props=dict(value.metadata_props))
    made.meta.update(value.meta)
    return made


def _like(
    node: ir.Node, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value], stack: Stack, by: int
) -> ir.Node:
    """Returns a node with the op, attributes and metadata of `node`, `by` layers later."""
    layer = stack.layer(node.name) or 0
    own = re.compile(rf"\b{re.escape(stack.path)}\.{layer}(?!\d)")
    path = f"{stack.path}.{layer + by}"
    later = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        [*node.attributes.values()],
        overload=node.overload,
        outputs=outputs,
        version=node.version,
        name=stack.later(_name(node), by),
        metadata_props={key: own.sub(path, text) for key, text in node.metadata_props.items()},
    )
    later.meta.update(node.meta)
    return later


def _order(
    graph: ir.Graph, stack: Stack, values: dict[str, ir.Value], inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    """Puts inputs, outputs and weights in the order of the whole model."""
    for ports, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        if names:
            ports.clear()
            ports.extend(values[name] for name in names)
    names = [*graph.initializers]
    more = stack.layers - stack.exported
    places = [k for k, name in enumerate(names) if stack.layer(name) in _last_period(stack)]
    added = [stack.later(names[k], by) for by in range(stack.period, more + 1, stack.period) for k in places]
    moved = [name for name in added if name in graph.initializers]
    for name in (*moved, *(name for name in names[max(places, default=-1) + 1 :] if name not in {*moved})):
        graph.initializers[name] = graph.initializers.pop(name)
