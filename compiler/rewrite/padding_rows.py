"""Lookups of a table with a padding row, torch's `padding_idx`: in training that row has no gradient.

    y = Gather(w, ids) {partc.padding_row: 0}
->  row = Gather(w, ids)        stopped = Identity(row) {partc.stops_gradient}        y = Where(ids == 0, stopped, row)

The numbers are the same, and only a program with a backward pass is changed. The row is changed by another reader of the table, as an
output layer that is tied to it, and by weight decay, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.names import node_paths
from partc.compiler.ir.graph import PADDING_ROW, STOPS_GRADIENT, name_of, nodes_of
from partc.compiler.rewrite.train_mode import modules


def stop_padding_rows(model: ir.Model, trains: Callable[[ir.Value], bool]) -> None:
    """Changes each marked lookup of `model`, but of a table that `trains` says is not trained. Raises CompileError for one in a body."""
    marked = [node for node in nodes_of(model.graph) if PADDING_ROW in node.metadata_props]
    if not marked:
        return
    paths = node_paths(model)
    if inside := [node for node in marked if node.graph is not model.graph]:
        fact, law = (
            "looks up a table with a padding row in a body",
            "a gradient is kept from rows of lookups outside of bodies",
        )
        raise CompileError(
            [
                Problem(paths.get(node, node.name or ""), fact, law, "leave padding_idx out, or unroll it")
                for node in inside
            ]
        )
    for node, path in paths.items():
        node.name = path
    module = modules(model)
    for node in marked:
        table, ids = node.inputs[:2]
        assert table is not None
        assert ids is not None
        if table.is_initializer() and not trains(table):
            continue
        path, row, known = name_of(node), node.outputs[0], dict(node.metadata_props)
        rank = None if row.shape is None or ids.shape is None else len(row.shape) - len(ids.shape)
        made: list[ir.Node] = []

        def add(word: str, op_type: str, *inputs: ir.Value, path: str = path, made: list[ir.Node] = made) -> ir.Value:
            name = f"{path}.{word}"
            made.append(ir.Node("", op_type, inputs, outputs=[ir.Value(name=name)], name=name))
            made[-1].metadata_props.update(module(path))
            return made[-1].outputs[0]

        def constant(word: str, numbers: object, dtype: type, path: str = path) -> ir.Value:
            tensor = ir.tensor(np.array(numbers, dtype), name=f"{path}.{word}")
            value = ir.Value(
                name=tensor.name,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(tensor.shape.numpy()),
                const_value=tensor,
            )
            model.graph.register_initializer(value)
            return value

        kind = (ids.dtype or ir.DataType.INT64).numpy().type
        is_padding = add("is_padding", "Equal", ids, constant("padding", int(known[PADDING_ROW]), kind))
        behind = add(
            "each",
            "Unsqueeze",
            is_padding,
            constant("each.axes", [-1] if rank is None else range(-rank, 0), np.int64),
        )
        stopped = add("stopped", "Identity", row)
        made[-1].metadata_props[STOPS_GRADIENT] = "true"
        whole = add("Where", "Where", behind, stopped, row)
        whole.type, whole.shape, stopped.type, stopped.shape = row.type, row.shape, row.type, row.shape
        model.graph.insert_after(node, made)
        first, last = stopped.producer(), whole.producer()
        for use in [use for use in row.uses() if use.node not in (first, last)]:
            use.node.replace_input_with(use.idx, whole)
        for k, output in enumerate(model.graph.outputs):
            if output is row:
                model.graph.outputs[k] = whole
        whole.name, row.name = row.name, f"{path}.row"
