"""Rewrites nodes whose gradient in torch differs from their op's into ops with torch's gradient, in a program with a backward pass.

    y = Gather(w, ids)  {partc.gradient: padding_row 0}      a row of a table has no gradient: `padding_idx`
->  y = Where(ids == 0, stopped(Gather(w, ids)), Gather(w, ids))

    y = Clip(x, a, b)  {partc.gradient: inside}              no gradient at the bounds either: `hardtanh`, `relu6`
->  y = Where(a < x and x < b, x, stopped(Clip(x, a, b)))

    y = ReduceMax(x, [k])  {partc.gradient: first}           of equal maxima the first gets all of it: `max(dim)`, `min(dim)`
->  y = GatherElements(x, ArgMax(x))

The values stay the same. Another reader of the table, such as an output layer tied to it, and weight decay still change a padding row.

Splits that exporters write as sequences become Splits: a sequence has no gradient, and cannot be sharded.

s = SplitToSequence(x, 8), q = SequenceAt(s, 0), k = SequenceAt(s, 1), v = SequenceAt(s, 2)     torch's x.split(8, -1)
q, k, v = Split(x, [8, 8, 8])

Decomposes each maximum and minimum that has a gradient into ops that can be sharded.

    top = ReduceMax(x)   same = Equal(x, top)   count = ReduceSum(Cast(same))   y = partc.nn.Extreme(x, top, same, count)

The first and the third are reductions: each rank reduces its own shard of `x`, and collectives complete them. So equal elements share a
cotangent over all ranks as they do on one. The parts compute the same numbers as the gradient of the whole op, in about the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.shape_rules import Known
from partc.compiler.autodiff.reach import flowing
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.names import node_paths
from partc.compiler.ir.graph import GRADIENT_FORM, STOPS_GRADIENT, add_initializer, name_of, nodes_of, reads_of
from partc.compiler.ir.training import Training
from partc.compiler.ops.families.arithmetic.extreme import EXTREME
from partc.compiler.ops.families.control.local_map import SPREAD, is_collective
from partc.compiler.ops.node import constant_ints, operand
from partc.compiler.ops.rule import OWN
from partc.compiler.rewrite.train_mode import modules, ranked


def give_gradient_forms(model: ir.Model, trains: Callable[[ir.Value], bool]) -> None:
    """Rewrites each marked node of `model`, except lookups of a weight for which `trains` is false.

    Raises CompileError for a marked node in a body.
    """
    marked = [node for node in nodes_of(model.graph) if GRADIENT_FORM in node.metadata_props]
    if not marked:
        return
    paths = node_paths(model)
    problems = [
        Problem(
            paths.get(node, node.name or node.op_type),
            f"{node.op_type} in a body has a gradient of its own ({node.metadata_props[GRADIENT_FORM]})",
            "gradients of their own are for nodes outside of bodies",
            "unroll it",
        )
        for node in marked
        if node.graph is not model.graph
    ]
    if problems:
        raise CompileError(problems)
    for node, path in paths.items():
        node.name = path
    module = modules(model)
    for node in marked:
        word, _, argument = node.metadata_props.pop(GRADIENT_FORM).partition(" ")
        table = node.inputs[0]
        if table is None or (word == "padding_row" and table.is_initializer() and not trains(table)):
            continue
        _FORMS[word](_Rewriting(model, node, module(name_of(node))), argument)


@dataclass
class _Rewriting:
    """Adds nodes in the module of a node, and then replaces its output."""

    model: ir.Model
    node: ir.Node
    metadata: dict[str, str]
    nodes: list[ir.Node] = field(default_factory=list)

    def add(self, word: str, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Adds a node and returns its output; `word` is its name below the path of the replaced node."""
        name = f"{name_of(self.node)}.{word}"
        given = ir.convenience.convert_attributes(attributes)
        made = ir.Node("", op_type, inputs, given, outputs=[ir.Value(name=name)], name=name)
        made.metadata_props.update(self.metadata)
        self.nodes.append(made)
        return made.outputs[0]

    def constant(self, word: str, numbers: object, dtype: type = np.int64) -> ir.Value:
        name = f"{name_of(self.node)}.{word}"
        return add_initializer(self.model.graph, name, ir.tensor(np.array(numbers, dtype), name=name))

    def stopped(self) -> ir.Value:
        """Returns the node's output through an Identity that stops its gradient."""
        made = self.add("stopped", "Identity", self.node.outputs[0])
        self.nodes[-1].metadata_props[STOPS_GRADIENT] = "true"
        return made

    def give(self, result: ir.Value) -> None:
        """Inserts the added nodes after the node, and puts `result` in place of its output, under its name."""
        old, graph = self.node.outputs[0], self.model.graph
        result.type, result.shape = old.type, old.shape
        graph.insert_after(self.node, self.nodes)
        for use in [use for use in old.uses() if use.node not in self.nodes]:
            use.node.replace_input_with(use.idx, result)
        for k, output in enumerate(graph.outputs):
            if output is old:
                graph.outputs[k] = result
        result.name, old.name = old.name, f"{name_of(self.node)}.unmarked"


def _padding_row(at: _Rewriting, row: str) -> None:
    ids, rows = at.node.inputs[1], at.node.outputs[0]
    assert ids is not None
    known = rows.shape is not None and ids.shape is not None
    behind = len(rows.shape or ()) - len(ids.shape or ()) if known else 1
    kind = (ids.dtype or ir.DataType.INT64).numpy().type
    is_padding = at.add("is_padding", "Equal", ids, at.constant("padding", int(row), kind))
    each = at.add("each", "Unsqueeze", is_padding, at.constant("each.axes", range(-behind, 0)))
    at.give(at.add("Where", "Where", each, at.stopped(), rows))


def _inside(at: _Rewriting, _: str) -> None:
    x, low, high = at.node.inputs[:3]
    inside = at.add("inside", "And", at.add("above", "Greater", x, low), at.add("below", "Less", x, high))
    at.give(at.add("Where", "Where", inside, x, at.stopped()))


def _first(at: _Rewriting, axis: str) -> None:
    x, arg = at.node.inputs[0], at.node.op_type.replace("Reduce", "Arg")
    index = at.add("index", arg, x, axis=int(axis), keepdims=1)
    found = at.add("GatherElements", "GatherElements", x, index, axis=int(axis))
    if not at.node.attributes.get_int("keepdims", 1):
        found = at.add("Squeeze", "Squeeze", found, at.constant("squeezed", [int(axis)]))
    at.give(found)
    at.model.graph.remove(at.node, safe=True)


_FORMS: dict[str, Callable[[_Rewriting, str], None]] = {
    "padding_row": _padding_row,
    "inside": _inside,
    "first": _first,
}


def split_sequences(model: ir.Model) -> None:
    """Replaces each SplitToSequence of `model` by a Split, where its lengths and all positions that are read are known."""
    for node in list(model.graph):
        if node.op_type == "SplitToSequence" and node.domain in ("", "ai.onnx"):
            _split(model.graph, node)


def _split(graph: ir.Graph, node: ir.Node) -> None:
    readers = list(dict.fromkeys(use.node for use in node.outputs[0].uses()))
    lengths = _lengths(node)
    if lengths is None or node.outputs[0].is_graph_output():
        return
    places = [one.inputs[1] for one in readers if one.op_type == "SequenceAt" and one.graph is graph]
    tensors = [ir.convenience.get_const_tensor(value) for value in places if value is not None]
    positions = [int(tensor.numpy().reshape(())) for tensor in tensors if tensor is not None]
    at = [k for k in positions if -len(lengths) <= k < len(lengths)]
    if len(at) != len(readers):
        return
    sizes = ir.node("Constant", [], {"value": ir.tensor(np.array(lengths, np.int64))}, name=f"{node.name}.sizes")
    sizes.outputs[0].name = f"{node.outputs[0].name}.sizes"
    axis = node.attributes.get_int("axis", 0)
    split = ir.node(
        "Split", [node.inputs[0], sizes.outputs[0]], {"axis": axis}, num_outputs=len(lengths), name=node.name
    )
    for one in (sizes, split):
        one.metadata_props.update(node.metadata_props)
    for k, value in enumerate(split.outputs):
        value.name = f"{node.outputs[0].name}.{k}"
        value.type = node.inputs[0].type if node.inputs[0] is not None else None
    graph.insert_before(node, [sizes, split])
    for k, reader in zip(at, readers, strict=True):
        old, new = reader.outputs[0], split.outputs[k]
        if old.is_graph_output():
            reader.op_type, reader.domain = "Identity", ""
            reader.resize_inputs(1)
            reader.replace_input_with(0, new)
            continue
        old.replace_all_uses_with(new)
        graph.remove(reader, safe=True)
    graph.remove(node, safe=True)


def _lengths(node: ir.Node) -> list[int] | None:
    """Returns the lengths into which the node splits; None where they are known only at run time, or the parts lose their axis."""
    x, given = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        return None
    tensor = ir.convenience.get_const_tensor(given)
    if tensor is None:
        return None
    sizes = tensor.numpy()
    if sizes.ndim:
        return [int(size) for size in sizes]
    axis = node.attributes.get_int("axis", 0)
    dim = x.shape[axis] if x is not None and x.shape is not None else None
    if not isinstance(dim, int):
        return None
    size = int(sizes)
    return [min(size, dim - begin) for begin in range(0, dim, size)]


_REDUCTIONS = ("ReduceMax", "ReduceMin")
_POOL = "GlobalMaxPool"


def in_parts(model: ir.Model, training: Training, known: Known) -> None:
    """Decomposes every extreme with a gradient and known axes into its parts; `known`: the promised facts about dims."""
    _decompose_collectives(model, training, known)
    flows = flowing(reads_of(model.graph), training)
    nodes = [
        node
        for node in model.graph
        if node in flows and (node.op_type in (*_REDUCTIONS, _POOL) and node.domain in ("", "ai.onnx"))
    ]
    shaped = ranked(model, nodes, known)
    nodes = [node for node in nodes if shaped[node].shape is not None and _axes(node, shaped[node]) != ()]
    if not nodes:
        return
    whole = {node: (_axes(node, shaped[node]), shaped[node].dtype) for node in nodes}  # an extreme may read another one
    for node, path in node_paths(model).items():
        node.name = path
    module = modules(model)
    for node in nodes:
        _decompose(node, *whole[node], module(name_of(node)))


def _decompose_collectives(model: ir.Model, training: Training, known: Known) -> None:
    """Decomposes an all_reduce of a local map by max or min: each rank has one element, and every rank reads the result."""
    flows = flowing(reads_of(model.graph), training)
    nodes = [
        node
        for node in model.graph
        if node in flows and is_collective(node) and node.attributes.get_string("reduce", "sum") != "sum"
    ]
    shaped = ranked(model, nodes, known)
    for node in nodes:
        x, old = node.inputs[0], node.outputs[0]
        assert x is not None
        name, path = name_of(old), node.name or name_of(old)
        y = ir.Value(name=name, type=old.type, shape=old.shape)
        ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
        old.name, old.shape = f"{name}.top", None
        same, ones, count, whole = (ir.Value(name=f"{name}.{word}") for word in ("same", "ones", "count", "whole"))
        axis, size = node.attributes.get_string("axis", ""), node.attributes.get_int("size", 1)
        along: dict[str, int | str] = {"axis": axis, "size": size}
        dtype = (shaped[node].dtype or ir.DataType.FLOAT).value
        plain_nodes = [
            _node("", "Equal", [x, old], {}, same),
            _node("", "Cast", [same], {"to": dtype}, ones),
            _node(OWN, "AllReduce", [ones], {**along, "reduce": "sum"}, count),
            _node(OWN, EXTREME, [x, old, same, count], {}, whole),
            _node(OWN, SPREAD, [whole], along, y),
        ]
        for one, word in zip(plain_nodes, ("same", "ones", "count", "whole", "spread"), strict=True):
            one.name = f"{path}.{word}"
            one.metadata_props.update(node.metadata_props)
        model.graph.insert_after(node, plain_nodes)


def _node(
    domain: str, op_type: str, inputs: list[ir.Value], attributes: Mapping[str, int | str], made: ir.Value
) -> ir.Node:
    given = ir.convenience.convert_attributes(dict(attributes))
    return ir.Node(domain, op_type, inputs, given, outputs=[made], version=1 if domain else None)


def _axes(node: ir.Node, x: ir.Value) -> tuple[int, ...]:
    """Returns the axes of the reduction; () where there are none, or they are known only at run time."""
    assert x.shape is not None
    rank = len(x.shape)
    if node.op_type == _POOL:
        return tuple(range(2, rank))
    axes = constant_ints(node, 1) if operand(node, 1) is not None else ()
    if axes is None or (not axes and bool(node.attributes.get_int("noop_with_empty_axes", 0))):
        return ()
    return tuple(sorted(axis % rank for axis in axes)) if axes else tuple(range(rank))


def _decompose(
    node: ir.Node, axes: tuple[int, ...], kind_of_x: ir.DataType | None, metadata: Mapping[str, str]
) -> None:
    """Decomposes an extreme; its node stays as the first part, and the other parts belong to the module of its path."""
    graph, x, old = node.graph, node.inputs[0], node.outputs[0]
    assert isinstance(graph, ir.Graph)
    assert x is not None
    keeps = node.op_type == _POOL or bool(node.attributes.get_int("keepdims", 1))
    path, name = name_of(node), name_of(old)
    over = node.inputs[1] if len(node.inputs) > 1 and constant_ints(node, 1) else None
    if over is None:
        over = add_initializer(graph, f"{name}.axes", ir.tensor(np.array(axes, np.int64), name=f"{name}.axes"))
    y = ir.Value(name=name, type=old.type, shape=old.shape)
    ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
    old.name, old.shape = f"{name}.top", None
    if node.op_type != _POOL:
        node.resize_inputs(2)
        node.replace_input_with(1, over)
        node.attributes["keepdims"] = ir.AttrInt64("keepdims", 1)
    nodes: list[ir.Node] = []

    def add(op_type: str, inputs: list[ir.Value], word: str, made: ir.Value, **attributes: int | list[int]) -> ir.Value:
        given, domain = ir.convenience.convert_attributes(attributes), OWN if op_type == EXTREME else ""
        version = 1 if domain else None
        nodes.append(ir.Node(domain, op_type, inputs, given, outputs=[made], name=f"{path}.{word}", version=version))
        nodes[-1].metadata_props.update({**node.metadata_props, **metadata})
        return made

    same = add("Equal", [x, old], "same", ir.Value(name=f"{name}.same"))
    dtype = (kind_of_x or ir.DataType.FLOAT).value
    ones = add("Cast", [same], "ones", ir.Value(name=f"{name}.ones"), to=dtype)
    count = add("ReduceSum", [ones, over], "count", ir.Value(name=f"{name}.count"), keepdims=1)
    whole = y if keeps else ir.Value(name=f"{name}.kept")
    add(EXTREME, [x, old, same, count], "whole", whole, axes=list(axes))
    if not keeps:
        add("Squeeze", [whole, over], "squeezed", y)
    graph.insert_after(node, nodes)
