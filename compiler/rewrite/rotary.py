"""Pass: repeats the tables of a rotary embedding for each record of the batch, as onnxruntime requires.

In the standard a table of one record serves the whole batch, and exporters write it so: cosine (1, seq, half) with X (batch, heads, seq,
size). onnxruntime refuses the node where the batch is larger. A repeated table is sharded as X is.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
from partc.compiler.ir.program import Typed
from partc.compiler.ops.node import dims, operand
from partc.compiler.rewrite.rewriting import Rewriting


def repeat_tables(program: Typed) -> Typed:
    """Returns the program with an Expand before every table of one record that serves more records."""
    work = Rewriting(program)
    embeddings = [node for node in work.graph if node.op_type == "RotaryEmbedding" and node.domain in ("", "ai.onnx")]
    for node in embeddings:
        source = dims(node.inputs[0])
        if operand(node, 3) is not None or source is None or source[0] == 1 or node.device_configurations:
            continue
        for k in (1, 2):
            table = node.inputs[k]
            shape = dims(table)
            if table is not None and shape is not None and len(shape) == 3 and shape[0] == 1:
                node.replace_input_with(k, _repeated(work, node, table))
    return work.done() if embeddings else program


def _repeated(work: Rewriting[Typed], node: ir.Node, table: ir.Value) -> ir.Value:
    path, data = work.paths[node], node.inputs[0]
    assert data is not None
    name = f"{path}.{table.name}"
    records = work.vector(f"{name}.records", 1)
    work.put(node, "Shape", [data], [records], f".{table.name}.records", start=0, end=1)
    target = work.vector(f"{name}.target", 3)
    rest = work.constant(f"{name}.rest", [1, 1])
    work.put(node, "Concat", [records, rest], [target], f".{table.name}.target", axis=0)
    known = work.values[data].shape
    repeated = work.like(table, f"{name}.repeated")
    assert data.shape is not None
    assert table.shape is not None
    repeated.shape = ir.Shape([data.shape[0], *table.shape.dims[1:]])
    rest_known = work.values[table].shape
    shape = None if known is None or rest_known is None else (known[0], *rest_known[1:])
    work.values[repeated] = replace(work.values[table], shape=shape)
    work.put(node, "Expand", [table, target], [repeated], f".{table.name}.repeated")
    return repeated
