"""Outputs that are absent before ones that are there: a node that is cut along the batch, or runs in microbatches, keeps their places."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from equivalence import same_as_whole
from onnx import TensorProto, helper, numpy_helper
from rows import of_today

HIDDEN, WIDTH, SEQUENCE = 5, 6, 3
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
PLANS = {
    "batch": "ranks: 2\nmesh: {dp: 2}\ndataset: {x: [null, dp, null]}\n",
    "strategy": "ranks: 2\nsharding: {node: {in: [[1, 2, 1]]}}\n",
    "stream": "ranks: 2\nplacement: {node: 0, end: 1}\npipeline: {microbatches: 2}\nbatch_dims: {x: 1}\n",
    "shards of a stream": "ranks: 4\nmesh: {pp: 2, dp: 2}\ndataset: {x: [null, dp, null]}\nplacement: {node: {pp: 0}, end: {pp: 1}}\n"
    "pipeline: {microbatches: 2}\nbatch_dims: {x: 1}\n",
}


def model(op_type: str, outputs: list[str], batch: int | str) -> onnx.ModelProto:
    """A node whose last output is the model's, over (3, batch, 6)."""
    rng, rows = np.random.default_rng(4), GATES[op_type] * HIDDEN
    arrays = {"w": rng.standard_normal((1, rows, WIDTH)), "r": rng.standard_normal((1, rows, HIDDEN))}
    nodes = [
        helper.make_node(op_type, ["x", *arrays], outputs, name="node", hidden_size=HIDDEN),
        helper.make_node("Tanh", [outputs[-1]], ["z"], name="end"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [SEQUENCE, batch, WIDTH])
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "absent", [x], [z], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


NODES = [
    ("LSTM", ["", "h"]),
    ("LSTM", ["", "", "c"]),
    ("LSTM", ["y", "", "c"]),
    ("GRU", ["", "h"]),
    ("RNN", ["", "h"]),
    ("GRU", ["y", "h"]),
]


CASES = [(*node, plan, (8, "batch")[(j + k) % 2]) for j, node in enumerate(NODES) for k, plan in enumerate(PLANS)]


@pytest.mark.parametrize(("op_type", "outputs", "plan", "batch"), of_today(CASES, 8))
def test_they_stay_absent(op_type: str, outputs: list[str], plan: str, batch: int | str) -> None:
    symbols = "symbols: {batch: {divisor: 4}}\n" if isinstance(batch, str) else ""
    x = np.random.default_rng(5).standard_normal((SEQUENCE, 8, WIDTH)).astype(np.float32)
    same_as_whole(model(op_type, outputs, batch), PLANS[plan] + symbols, {"x": x}, rtol=1e-5, atol=1e-6, checked=True)
