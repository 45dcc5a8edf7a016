"""Decomposes each maximum and minimum that has a gradient into ops that can be sharded.

    top = ReduceMax(x)   same = Equal(x, top)   count = ReduceSum(Cast(same))   y = partc.nn.Extreme(x, top, same, count)

The first and the third are reductions: each rank reduces its own shard of `x`, and collectives complete them. So equal elements share a
cotangent over all ranks as they do on one. The parts compute the same numbers as the gradient of the whole op, in about the same time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.shape_rules import Known
from partc.compiler.autodiff.reach import flowing
from partc.compiler.frontend.names import node_paths
from partc.compiler.ir.graph import name_of, reads_of
from partc.compiler.ir.training import Training
from partc.compiler.ops.families.arithmetic.extreme import EXTREME
from partc.compiler.ops.families.control.local_map import SPREAD, is_collective
from partc.compiler.ops.node import constant_ints, operand
from partc.compiler.ops.rule import OWN
from partc.compiler.rewrite.train_mode import modules, ranked

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
        tensor = ir.tensor(np.array(axes, np.int64), name=f"{name}.axes")
        kind, shape = ir.TensorType(tensor.dtype), ir.Shape([len(axes)])
        over = ir.Value(name=tensor.name, type=kind, shape=shape, const_value=tensor)
        graph.register_initializer(over)
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
