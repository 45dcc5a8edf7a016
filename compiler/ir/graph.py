"""Helpers for graphs with bodies: the bodies of nodes, the outer values that these read, the removal of a node; keys of nodes' metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import onnx_ir as ir

OLDEST_OPSET, NEWEST_OPSET = 7, 26
"""The opsets of the standard that a model may have."""
SERVED = "partc.served"
"""Key of `ir.Node.meta`: the ranks that serve the rows of a lookup, an equal run of rows each; other ranks pull them."""
PINNED = "partc.pinned"
"""Key of `ir.Node.meta`: a node of weights alone that runs where a rule places it, and not on each of its readers' ranks."""
WRITTEN = "partc.written"
"""Key of `ir.Node.meta`: the names of the node's operands in the model, `Operands`, if a rewrite has added other operands."""
OWN_NAME = "partc.own_name"
"""Key of `ir.Node.meta`: the name that the node has in its file, or in the function that it comes from."""
COPIES_DIMS = "partc.copies_dims"
"""Key of a Reshape's meta: it copies an unmoved dim (0) instead of a number, so programs that differ in this size share one graph."""
UNBIASED = "partc.unbiased"
"""Key of a BatchNormalization's meta: it updates the running variance with the variance over n - 1, as torch's layers do."""
FROZEN_STATISTICS = "partc.frozen_statistics"
"""Key of a BatchNormalization's meta: whether its module is in evaluation mode within one in training mode, so statistics do not change."""
STOPS_GRADIENT = "partc.stops_gradient"
"""The metadata of an Identity through which no gradient flows, as of torch's `detach`; in files, too."""
OWN_BACKWARD = "partc.own_backward"
"""The metadata of an Identity after the ops of a `torch.autograd.Function`: the function's name; in files, too."""
GRADIENT_FORM = "partc.gradient"
"""The metadata of a node whose gradient in torch is not that of its op (`rewrite/gradient_forms.py`); in files, too."""
UNTRAINABLE = "partc.untrainable"
"""The metadata of a model whose training would not be its module's: a list of problems (where, fact, law, help); in files, too."""
CHANGED_BY_FORWARD = "partc.changed_by_forward"
"""The metadata of a model: the buffers and numbers, quoted, that its module's forward changes and the graph does not; in files, too."""
ADAPTER = "partc.adapter"
"""Key of `ir.Node.meta`: the module to whose product a node adds an adapter; the node does not follow the module's style. Key of the
`ir.Value.meta` of an adapter's first weight: its alpha; the product is scaled by alpha / rank.
"""
BY_EXPERT = "partc.by_expert"
"""Key of `ir.Node.meta` of the borders of sharded experts and of nodes between them: the mesh axis, and the line of the plan. Key of the
`ir.Value.meta` of values between them: a shard has as many rows as come to the rank in a step.
"""
UNKNOWN_TURNS = "partc.unknown_turns"
"""The metadata of a node whose bodies are not unrolled: the reason, and on a second line the remedy."""
OF_TURNS = "partc.of_turns"
"""The metadata of a node that takes the elements of a stack for the turns of an unrolled loop, one each: their axis."""
OF_ALL_TURNS = "partc.of_all_turns"
"""Key of `ir.Node.meta` of the last border of a state, whose inputs are what a turn makes, what it begins with, and the end of the loop
(`ops/families/control/bodies.py`): it stays as long as the loop is run.
"""
CONTEXT = "partc.context"
"""Key of `ir.Node.meta`: the `ContextMark` of a node of an attention whose tokens are sharded."""
FOLDED = "partc.folded"
"""Key of `ir.Value.meta`: the number of ranks over which dims of a value are in folded order (`rewrite/fold.py`), and these dims.
None where a dim joins tokens with others in an order of ranks (`rewrite/joined_tokens.py`).
"""
INSIDE = "partc.local"
"""The metadata of nodes inside of a local map: its name."""


class ContextMark(NamedTuple):
    """The factors of a node that stay unsharded, and the factor that a mesh axis shards, with the line of the plan.

    `first`: the axis shards the factor before others are derived, and not after them.
    """

    axis: str
    replicated: str
    factor: str
    why: str
    first: bool = False


def has_computed_target(node: ir.Node) -> bool:
    """Whether a Reshape that programs of other sizes share (`COPIES_DIMS`) computes its target from the sizes of a step."""
    maker = node.inputs[1].producer() if COPIES_DIMS in node.meta and node.inputs[1] is not None else None
    return maker is not None and maker.op_type != "Constant"


def name_of(named: ir.Value | ir.Node) -> str:
    """Returns the name of a value or a node, for files, messages and matching with users' patterns.

    The loader has named all of the model's own (`frontend/names.py`), and passes name the ones they make; raises ValueError if one is
    unnamed.
    """
    name = named.name
    if not name:
        raise ValueError(f"no pass has given a name to {named!r}")
    return name


def operand_name(value: ir.Value | None) -> str:
    """Returns the name of an operand or result, '' if it is absent: an absent output is a value with an empty name."""
    if value is None:
        return ""
    name = value.name
    return name_of(value) if name is None else name


class Operands(NamedTuple):
    """The names of a node's inputs and outputs, '' for one that is absent."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def operands_of(node: ir.Node) -> Operands:
    """The names of a node's operands."""
    return Operands(tuple(map(operand_name, node.inputs)), tuple(map(operand_name, node.outputs)))


Reads = dict[ir.Node, tuple[ir.Value, ...]]


def is_inside(node: ir.Node) -> bool:
    """Whether a node belongs to a local map, borders and collectives included."""
    return INSIDE in node.metadata_props


def graphs_of(graph: ir.Graph) -> Iterator[ir.Graph]:
    """The graph and all bodies inside of it."""
    yield graph
    for node in graph:
        for body in bodies(node):
            yield from graphs_of(body)


def nodes_of(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """Yields the nodes, each followed by the nodes of its bodies."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from nodes_of(body)


def bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs among a node's attributes: branches of If, the body of Loop, Scan and SequenceMap."""
    graphs: list[ir.Graph] = []
    if not node.attributes.data:  # the mapping itself: this is asked of every node after every pass
        return graphs
    for attr in node.attributes.data.values():
        if attr.type == ir.AttributeType.GRAPH:
            graphs.append(attr.as_graph())
        elif attr.type == ir.AttributeType.GRAPHS:
            graphs.extend(attr.as_graphs())
    return graphs


def reads_of(graph: ir.Graph) -> Reads:
    """Maps each node of a graph, in order, to the distinct values that it reads, including those captured by its bodies."""
    found: Reads = {}
    for node in graph:
        found[node] = tuple(dict.fromkeys(read_by(node)))
    return found


def read_by(node: ir.Node) -> list[ir.Value]:
    """Returns the values that a node reads, by itself or in its bodies; a value that is read twice occurs twice."""
    own = [value for value in node.inputs if value is not None]
    return own + captured_by(node) if node.attributes.data else own


def captured_by(node: ir.Node) -> list[ir.Value]:
    """Values that the bodies of a node read from outside of them, in order of their first use in each."""
    return [value for body in bodies(node) for value in captured(body)]


def captured(body: ir.Graph) -> list[ir.Value]:
    """Values that a body reads from outside of itself, in order of their first use."""
    inside: set[ir.Value] = {*body.inputs, *body.initializers.values()}
    outside: list[ir.Value] = []
    for node in body:
        outside += [value for value in read_by(node) if value not in inside]
        inside.update(node.outputs)
    return outside + [value for value in body.outputs if value not in inside]


def add_initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Adds a tensor to a graph as its initializer of this name."""
    value = ir.val(name, const_value=tensor)
    graph.register_initializer(value)
    return value


def take_out(graph: ir.Graph, node: ir.Node) -> None:
    """Removes a node whose outputs have no reader, and the uses in its bodies."""
    graph.remove(node, safe=True)
    _forget_reads(node)


def drop_unread(graph: ir.Graph, used: Iterable[ir.Value] = ()) -> None:
    """Removes nodes that neither outputs nor `used` need, then inputs without a reader."""
    kept = {*graph.outputs, *used}

    def is_read(node: ir.Node) -> bool:
        return any(out in kept or out.uses() for out in node.outputs)

    for node in reversed(list(graph)):
        ended = node.inputs[-1] if OF_ALL_TURNS in node.meta else None
        if not is_read(node) and not (ended is not None and any(is_read(use.node) for use in ended.uses())):
            take_out(graph, node)
    for value in [value for value in graph.inputs if not value.uses() and value not in kept]:
        graph.inputs.remove(value)


def _forget_reads(node: ir.Node) -> None:
    for body in bodies(node):
        for inner in body:
            inner.resize_inputs(0)
            _forget_reads(inner)
