"""The body of a branch or a loop while it is differentiated: first its nodes under separate names, then its gradient.

A name that is made in a body may stand nowhere around it, so whatever a body makes begins with the path of the node that it will be in.
What it reads from around keeps the name that it has there. Constants are nodes, so that a body needs nothing but what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.autodiff.engine import differentiate_nodes
from partc.compiler.autodiff.scope import Scope
from partc.compiler.ir.graph import captured_by, name_of, operand_name
from partc.compiler.ops.registry import draws
from partc.runtime.spellings import first_free

Outer = Callable[[ir.Value], ir.Value]


@dataclass
class Body:
    """The nodes of a body; `scope` knows them and what they read, `inputs` and `outputs` are the body's by their names here."""

    owner: GradientBuilder
    prefix: str
    nodes: list[ir.Node]
    inputs: list[str]
    outputs: list[str]
    scope: Scope
    leading: int = 0

    @staticmethod
    def of(
        g: GradientBuilder, graph: ir.Graph, names: Mapping[str, str], path: str, inputs: Sequence[ir.Value]
    ) -> Body:
        """A body of the node that `g` differentiates; `names` of what it reads from around, `inputs` what is known of its own.

        What it makes is called after `path`, with strokes where other values are called after it.

        An input that is a constant becomes a node. Raises NoGradient where doing the body again would not give the same.
        """
        around, own = dict[str, ir.Value](), dict[str, ir.Value]()

        def is_taken(path: str) -> bool:
            return any(name.startswith(f"{path}.") for name in g.scope.reserved)

        prefix = f"{first_free(path, is_taken)}."
        scope = Scope(reserved=frozenset(_named(prefix, name) for name in _names(graph)), known=g.scope.known)

        def outer(value: ir.Value) -> ir.Value:
            name = names.get(name_of(value), name_of(value))
            if name not in around:
                around[name] = g.scope.values.get(name, value)
                scope.know([around[name]])
            return around[name]

        nodes = []
        for value, known in zip(graph.inputs, inputs, strict=True):
            name = f"{prefix}{value.name}"
            if known.const_value is not None:
                nodes.append(_constant(name, known.const_value.numpy()))
                own[name_of(value)] = nodes[-1].outputs[0]
            else:
                own[name_of(value)] = ir.Value(name=name, type=known.type or value.type, shape=known.shape)
        scope.know(own.values())
        taken = [name_of(one) for one in own.values()]
        nodes += _copies(graph, prefix, own, outer)
        if drawn := next((one.op_type for one in _every(nodes) if draws(one)), None):
            raise NoGradient(f"{drawn} in the body of {g.node.op_type} draws other numbers when the body is done again")
        output_names = []
        for k, value in enumerate(graph.outputs):
            source = own.get(name_of(value)) or outer(value)
            out = ir.Value(name=scope.derived(f"{prefix}output{k}"), type=source.type)
            nodes.append(ir.Node("", "Identity", [source], outputs=[out], name=out.name))
            output_names.append(name_of(out))
        return Body(g, prefix, nodes, taken, output_names, scope)

    def fresh(self, name: str, like: ir.Value) -> str:
        """A further input of the body, with the type and shape of a value."""
        name = self.scope.derived(self.prefix + name)
        self.scope.know([ir.Value(name=name, type=like.type, shape=like.shape)])
        return name

    def add(self, op_type: str, operands: Sequence[str], name: str) -> str:
        """A further node of the body."""
        name = self.scope.derived(self.prefix + name)
        self.scope.add(self.scope.node(op_type, operands, [name]))
        self.nodes.append(self.scope.nodes[-1])
        return name

    def first(self, op_type: str, operands: Sequence[str], name: str) -> str:
        """A node before all others of the body, but behind those that were put first already; `name` is that of a value."""
        self.scope.add(self.scope.node(op_type, operands, [name]))
        self.nodes.insert(self.leading, self.scope.nodes[-1])
        self.leading += 1
        return name

    def gradient(self, cotangents: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
        """Adds the gradient to the nodes; by each wanted value the cotangent, which a node of the body makes."""
        around = self.owner.scope.values
        self.scope.know(around[name] for name in (*cotangents.values(), *wanted) if name in around)
        backward = differentiate_nodes(self.nodes, cotangents, wanted, scope=self.scope)
        zeros = GradientBuilder(self.scope, self.owner.node, [])
        names = {}
        for k, name in enumerate(wanted):
            names[name] = self.scope.derived(f"{self.prefix}grad{k}")
            dx = backward.gradients.get(name) or zeros.zeros(name)
            self.scope.add(self.scope.node("Identity", [dx], [names[name]]))
            self.scope.value(names[name]).shape = self.scope.value(name).shape
        constants = [_constant(name, array) for name, array in backward.constants.items()]
        self.nodes = [*constants, *backward.forward, *backward.early, *backward.nodes]
        return names

    def graph(self, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Graph:
        """A graph of the nodes that lead to `outputs`."""
        needed, kept = set(outputs), list[ir.Node]()
        for node in reversed(self.nodes):
            if any(out.name in needed for out in node.outputs):
                kept.append(node)
                needed.update(map(operand_name, (*node.inputs, *captured_by(node))))
        own, around = dict[str, ir.Value](), dict[str, ir.Value]()
        for one in inputs:
            known = self.scope.value(one)
            own[one] = ir.Value(name=one, type=known.type, shape=known.shape)
        ports = [own[one] for one in inputs]
        nodes = _linked(
            reversed(kept), self.prefix, own, lambda v: around.setdefault(name_of(v), ir.Value(name=v.name))
        )
        made = [own[out] for out in outputs]
        for value in made:  # onnxruntime wants the shapes of what a Scan stacks
            known = self.scope.value(name_of(value))
            value.type, value.shape = known.type, known.shape
        return ir.Graph(ports, made, nodes=nodes, name=f"{self.prefix}{name}", opset_imports={"": 21})


def _copies(graph: ir.Graph, prefix: str, own: dict[str, ir.Value], outer: Outer) -> list[ir.Node]:
    """Copies of a body's nodes, its tensors among them."""
    constants = []
    for name, value in graph.initializers.items():
        if value.const_value is None:
            raise NoGradient(f"the tensor '{name}' of a body has no data")
        constants.append(_constant(_named(prefix, name), value.const_value.numpy()))
        own[name] = constants[-1].outputs[0]
    return constants + _linked(graph, prefix, own, outer)


def _names(graph: ir.Graph) -> Iterable[str]:
    """All names that a body gives, those of bodies in it among them."""
    nodes = [*_every(graph)]
    inner = [
        attr.as_graph() for node in nodes for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH
    ]
    for part in (graph, *inner):
        yield from (name_of(value) for value in (*part.inputs, *part.initializers.values()))
    yield from (operand_name(value) for node in nodes for value in node.outputs)


def _linked(nodes: Iterable[ir.Node], prefix: str, own: dict[str, ir.Value], outer: Outer) -> list[ir.Node]:
    """Copies of nodes that read each other's values, or `outer` ones; what they make is put into `own` by its old name."""
    copies = []
    for node in nodes:
        inputs = [None if one is None or not one.name else own.get(one.name) or outer(one) for one in node.inputs]
        attributes = [_nested(attr, prefix, own, outer) for attr in node.attributes.values()]
        outputs = [ir.Value(name=_named(prefix, operand_name(one)), type=one.type) for one in node.outputs]
        own.update((name_of(old), new) for old, new in zip(node.outputs, outputs, strict=True) if old.name)
        name = outputs[0].name
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            attributes,
            overload=node.overload,
            outputs=outputs,
            name=name,
            metadata_props=dict(node.metadata_props),
        )
        copies.append(copy)
    return copies


def _nested(attr: ir.Attr, prefix: str, own: Mapping[str, ir.Value], outer: Outer) -> ir.Attr:
    """An attribute, of which a body is copied likewise."""
    if attr.type != ir.AttributeType.GRAPH:
        return attr
    graph, known, ports = attr.as_graph(), dict(own), list[ir.Value]()
    for value in graph.inputs:
        ports.append(ir.Value(name=_named(prefix, name_of(value)), type=value.type, shape=value.shape))
        known[name_of(value)] = ports[-1]
    nodes = _copies(graph, prefix, known, outer)
    made = [known.get(name_of(value)) or outer(value) for value in graph.outputs]
    return ir.AttrGraph(attr.name, ir.Graph(ports, made, nodes=nodes, name=graph.name, opset_imports={"": 21}))


def _named(prefix: str, name: str) -> str:
    return name if not name or name.startswith(prefix) else prefix + name


def _constant(name: str, array: np.ndarray) -> ir.Node:
    tensor = ir.Tensor(array)
    outputs = [ir.val(name, const_value=tensor)]
    return ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], outputs=outputs, name=name)


def _every(nodes: Iterable[ir.Node]) -> Iterable[ir.Node]:
    for node in nodes:
        yield node
        for attr in node.attributes.values():
            if attr.type == ir.AttributeType.GRAPH:
                yield from _every(attr.as_graph())
