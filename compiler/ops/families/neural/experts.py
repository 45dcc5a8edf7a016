"""The product of rows with the matrix of each row's expert, as a router chooses it.

    ExpertMatMul(rows [m, a], weights [E, a, b], experts [m]) -> [m, b]      y[i] = rows[i] weights[experts[i]]

With `transposed` the weights are [E, b, a]. Rows are in any order, and so is the result: only the form on a rank sorts them by expert, and
multiplies each matrix by its rows alone:

    order = stable sort of rows by expert      y[order] = [rows[order] of expert e times weights[e], for each e]

A rank that has some of the experts leaves zeros in the rows of the others: its term of the sum. The bits of a row are those of a product
with one constant matrix, whichever rows come with it. The gradient is that of the nodes on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.ops.local_shapes import integer, integers
from partc.compiler.ops.node import dims
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import OWN, Local, Rule
from partc.compiler.ops.work import Dims

EXPERT_MATMUL = "ExpertMatMul"
TRANSPOSED = "transposed"

expert_matmul = op(
    EXPERT_MATMUL,
    domain=OWN,
    factors="ma,eab,m->mb",
    contracted="ae",
    linear="each",
    partial=(0, 1),
    remarks="with transposed eba; rows of other ranks' experts are zeros",
    precision="low",
    kernel="product",
)


@expert_matmul.sharding
def _(node: ir.Node) -> Rule:
    weights = "eba" if is_transposed(node) else "eab"
    return Rule(("ma", weights, "m"), ("mb",), reduce={"e": "sum", "a": "sum"})


@expert_matmul.shapes
def _(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    rows, weights = node.inputs[:2]
    assert rows is not None
    if rows.shape is None or weights is None or weights.shape is None:
        return
    columns = weights.shape[1 if is_transposed(node) else 2]
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([rows.shape[0], columns]), rows.dtype)


@expert_matmul.multiply_adds
def _(node: ir.Node, given: Sequence[Dims], made: Dims) -> list[Dims]:
    """Every row with the matrix of its expert."""
    return [(*given[0], *made[-1:])]


@expert_matmul.local
def _(local: Local) -> None:
    """Sorts rows by integer keys, of which no two are equal, and writes back one product for each expert."""
    rows, weights, experts = local.inputs
    count = experts_of(local.node) // local.num_shards("e")
    out, runs, is_cut = local.outputs[0], count, local.num_shards("e") > 1
    zero, one, first = integer(local, "zero", 0), integer(local, "one", 1), integers(local, "first", [0])
    if is_cut:  # the rows of other ranks' experts come last
        runs += 1
        offset, end = (integer(local, name, n) for name, n in (("offset", local.index("e") * count), ("end", count)))
        relative = local.emit("Sub", [experts, offset], "relative")
        begun = local.emit("GreaterOrEqual", [relative, zero], "begun")
        present = local.emit("And", [begun, local.emit("Less", [relative, end], "below")], "present")
        experts = local.emit("Where", [present, relative, end], "expert")
    extent = local.emit("Shape", [experts], "extent")
    entries = local.emit("Squeeze", [extent], "entries")
    major = local.emit("Mul", [experts, entries], "major")
    key = local.emit("Add", [major, local.emit("Range", [zero, entries, one], "places")], "key")
    order = f"{out}.order"
    local.give("TopK", [key, extent], f"{out}.keys", order, largest=0)
    ones = local.emit("ConstantOfShape", [extent], "ones", value=ir.tensor(np.ones(1, np.int64)))
    none = local.constant("none", np.zeros(runs, np.int64))
    lengths = local.emit("ScatterElements", [none, experts, ones], "lengths", reduction="add")
    parts, matrices = ([f"{out}.{name}{k}" for k in range(runs)] for name in ("rows", "weights"))
    local.give("Split", [local.emit("Gather", [rows, order], "sorted"), lengths], *parts)
    for run in local.nodes[-1].outputs:  # of as many rows as a step has, which no inference tells
        run.shape = ir.Shape([None, (local.local_shapes[rows] or (None, None))[1]])
    local.give("Split", [weights, integers(local, "each", [1] * count)], *matrices[:count])
    made = []
    for k, (part, matrix) in enumerate(zip(parts, matrices[:count], strict=False)):
        operands = [part, local.emit("Squeeze", [matrix, first], f"weight{k}")]
        transposed = {"transB": 1} if is_transposed(local.node) else {}
        made.append(local.emit("Gemm" if transposed else "MatMul", operands, f"product{k}", **transposed))
    results = local.emit("Concat", made, "results", axis=0)
    if is_cut:
        done = local.emit("Shape", [results], "done", end=1)
        order = local.emit("Slice", [order, first, done], "done_order")
    places = local.emit("Unsqueeze", [order, integers(local, "last", [1])], "indices")
    width = (local.local_shapes[weights] or ())[1 if is_transposed(local.node) else 2]
    assert isinstance(width, int)
    shape = local.emit("Concat", [extent, integers(local, "width", [width])], "shape", axis=0)
    assert local.node.inputs[0] is not None
    dtype = local.node.inputs[0].dtype or ir.DataType.FLOAT
    zeros = local.emit("ConstantOfShape", [shape], "zeros", value=ir.tensor(np.zeros(1, dtype.numpy())))
    local.give("ScatterND", [zeros, places, results], out)


def is_transposed(node: ir.Node) -> bool:
    """Whether the weights of a product are [E, b, a]."""
    return bool(node.attributes.get_int(TRANSPOSED, 0))


def experts_of(node: ir.Node) -> int:
    """The number of experts that a product has the weights of."""
    sizes = dims(node.inputs[1])
    assert sizes is not None
    assert isinstance(sizes[0], int)
    return sizes[0]
