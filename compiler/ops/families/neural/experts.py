"""The product of each row with the matrix of the expert that a router chose for it.

    ExpertMatMul(rows [m, a], weights [E, a, b], experts [m]) -> [m, b]      y[i] = rows[i] weights[experts[i]]

With `transposed` the weights are [E, b, a]. The result has the order of the rows, which is arbitrary; the local form on a rank sorts rows
by expert, and multiplies each matrix by its own rows only:

    order = stable sort of rows by expert      y[order] = [rows[order] of expert e times weights[e], for each e]

A rank with a shard of the experts writes zeros in the rows of other experts: a partial sum. Between the borders of `expert_rows.py` a rank
has the rows of its own experts only, numbered from its first expert. A row's bits are those of a product with one constant matrix, whatever
rows are multiplied with it. The gradient is derived from the nodes of the local form.

    ExpertMatMulNBits(rows [m, k], blocks [E, n, k / block, bytes], experts [m], scales [E, n, k / block]) -> [m, n]

is the same product with quantized weights, each matrix in the form of `MatMulNBits`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.ir.graph import BY_EXPERT
from partc.compiler.ops.local_shapes import as_int64, integer, integers
from partc.compiler.ops.node import dims
from partc.compiler.ops.registry import CONTRIB, op
from partc.compiler.ops.rule import OWN, Local, Rule
from partc.compiler.ops.work import Dims

EXPERT_MATMUL, EXPERT_MATMUL_N_BITS = "ExpertMatMul", "ExpertMatMulNBits"
TRANSPOSED = "transposed"

expert_matmul = op(
    EXPERT_MATMUL,
    domain=OWN,
    factors="ma,eab,m->mb",
    contracted="ae",
    linear="each",
    partial=(0, 1),
    remarks="with transposed eba; rows of other ranks' experts are zeros",
    local_gradient=True,
    precision="low",
    kernel="product",
)

expert_matmul_n_bits = op(
    EXPERT_MATMUL_N_BITS,
    domain=OWN,
    factors="mk,enk.,m,enk->mn",
    contracted="ke",
    linear="each",
    partial=(0, 3),
    remarks="k in whole blocks; rows of other ranks' experts are zeros",
    local_gradient=True,
    kernel="product",
)


@expert_matmul.sharding
def _(node: ir.Node) -> Rule:
    weights = "eba" if is_transposed(node) else "eab"
    return Rule(("ma", weights, "m"), ("mb",), reduce={"e": "sum", "a": "sum"})


@expert_matmul_n_bits.sharding
def _(node: ir.Node) -> Rule:
    blocks = (dims(node.inputs[1]) or (0, 0, 1))[2]
    units = {"k": blocks} if isinstance(blocks, int) else {}
    return Rule(("mk", "enk.", "m", "enk"), ("mn",), reduce={"e": "sum", "k": "sum"}, units=units)


@expert_matmul.shapes
@expert_matmul_n_bits.shapes
def _(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    rows, weights = node.inputs[:2]
    assert rows is not None
    if rows.shape is None or weights is None or weights.shape is None:
        return
    columns = weights.shape[1 if node.op_type == EXPERT_MATMUL_N_BITS or is_transposed(node) else 2]
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([rows.shape[0], columns]), rows.dtype)


@expert_matmul.multiply_adds
@expert_matmul_n_bits.multiply_adds
def _(node: ir.Node, given: Sequence[Dims], made: Dims) -> list[Dims]:
    """Each row is multiplied by one matrix."""
    return [(*given[0], *made[-1:])]


@expert_matmul.local
def _(local: Local) -> None:
    transposed = {"transB": 1} if is_transposed(local.node) else {}

    def product(rows: str, matrices: Sequence[str], k: int) -> str:
        return local.emit("Gemm" if transposed else "MatMul", [rows, *matrices], f"product{k}", **transposed)

    rows, weights, _ = local.inputs
    _by_expert(local, rows, [weights], 1 if transposed else 2, product)


@expert_matmul_n_bits.local
def _(local: Local) -> None:
    """Multiplies an expert's rows with the first row repeated at the end: a single row alone would get other bits than among others."""
    rows, blocks, _, scales = local.inputs
    shape, options = (
        local.local_shapes[blocks] or (),
        {name: local.node.attributes.get_int(name, 0) for name in ("bits", "block_size", "accuracy_level")},
    )
    assert isinstance(shape[2], int)
    sizes = {"K": shape[2] * options["block_size"], "N": shape[1]}
    begin, one, last = (integers(local, name, [at]) for name, at in (("begin", 0), ("single", 1), ("but_last", -1)))

    def product(rows: str, matrices: Sequence[str], k: int) -> str:
        again = local.emit("Slice", [rows, begin, one], f"again{k}")
        several = local.emit("Concat", [rows, again], f"several{k}", axis=0)
        made = local.emit("MatMulNBits", [several, *matrices], f"products{k}", domain=CONTRIB, **options, **sizes)
        return local.emit("Slice", [made, begin, last], f"product{k}")

    _by_expert(local, rows, [blocks, scales], 1, product)


def _by_expert(
    local: Local,
    rows: str,
    stacks: Sequence[str],
    columns: int,
    product: Callable[[str, Sequence[str], int], str],
) -> None:
    """Sorts the rows by expert, with unique integer keys, and writes one product for each expert.

    `stacks`: the operands of the product for all experts. `columns`: the dim of the first stack that is the result's last dim. `product`:
    writes the product of rows with the k-th expert's operands.
    """
    experts, count = as_int64(local, 2), experts_of(local.node) // local.num_shards("e")
    out, runs = local.outputs[0], count
    is_cut = local.num_shards("e") > 1 and BY_EXPERT not in local.node.meta
    zero, unit, first = integer(local, "zero", 0), integer(local, "one", 1), integers(local, "first", [0])
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
    key = local.emit("Add", [major, local.emit("Range", [zero, entries, unit], "places")], "key")
    order = f"{out}.order"
    local.give("TopK", [key, extent], f"{out}.keys", order, largest=0)
    ones = local.emit("ConstantOfShape", [extent], "ones", value=ir.tensor(np.ones(1, np.int64)))
    none = local.constant("none", np.zeros(runs, np.int64))
    lengths = local.emit("ScatterElements", [none, experts, ones], "lengths", reduction="add")
    parts = [f"{out}.rows{k}" for k in range(runs)]
    local.give("Split", [local.emit("Gather", [rows, order], "sorted"), lengths], *parts)
    for run in local.nodes[-1].outputs:  # of as many rows as a step has, which no inference tells
        run.shape = ir.Shape([None, (local.local_shapes[rows] or (None, None))[1]])
    each, matrices = integers(local, "each", [1] * count), list[list[str]]()
    for word, stack in zip(("weights", "scales"), stacks, strict=False):
        matrices.append([f"{out}.{word}{k}" for k in range(count)])
        local.give("Split", [stack, each], *matrices[-1])
        matrices[-1] = [local.emit("Squeeze", [one, first], f"{word}.of{k}") for k, one in enumerate(matrices[-1])]
    made = [product(parts[k], operands, k) for k, operands in enumerate(zip(*matrices, strict=True))]
    results = local.emit("Concat", made, "results", axis=0)
    if is_cut:
        done = local.emit("Shape", [results], "done", end=1)
        order = local.emit("Slice", [order, first, done], "done_order")
    places = local.emit("Unsqueeze", [order, integers(local, "last", [1])], "indices")
    width = (local.local_shapes[stacks[0]] or ())[columns]
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
    """The number of experts in a product's weights."""
    sizes = dims(node.inputs[1])
    assert sizes is not None
    assert isinstance(sizes[0], int)
    return sizes[0]
