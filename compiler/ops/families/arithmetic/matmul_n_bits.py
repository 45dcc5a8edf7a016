"""Products with weights of a few bits each, in blocks of the contracted dim that share a scale and a zero point.

    MatMulNBits(A [*, K], B [N, blocks, bytes of a block], scales [N, blocks], zero points [N, blocks, or packed], -, bias [N]) -> [*, N]

Columns (N) are cut as of any product. Rows (K) are cut in whole blocks, where scales have blocks as a dim of their own, and in whole bytes
of zero points that are packed, two blocks of 4 bits a byte: each rank then makes a term of the sum. The attributes K and N are a rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.ops.node import dims, operand
from partc.compiler.ops.registry import CONTRIB, op
from partc.compiler.ops.rule import WHOLE, Local, Rule
from partc.compiler.ops.work import Dims

_BIAS = 5

matmul_n_bits = op(
    "MatMulNBits",
    domain=CONTRIB,
    factors="*k,nk.,nk,nk,_,n->*n",
    contracted="k",
    linear="each",
    partial=(0, 2),
    remarks="k in whole blocks, whole bytes of packed zero points, and without an order of rows; linear without bias, which is added once",
    kernel="product",
)


@matmul_n_bits.multiply_adds
def _(node: ir.Node, given: Sequence[Dims], made: Dims) -> list[Dims]:
    """Every row with every column."""
    return [(*given[0], *made[-1:])]


@matmul_n_bits.sharding
def _(node: ir.Node) -> Rule | None:
    source, weights, scales = (dims(operand(node, k)) for k in range(3))
    size, block = (node.attributes.get_int(name, 0) for name in ("K", "block_size"))
    if (
        source is None
        or weights is None
        or scales is None
        or len(weights) != 3
        or len(node.inputs) > _BIAS + 1
        or block < 1
    ):
        return None
    points, blocks = dims(operand(node, 3)), weights[1]
    apart = len(scales) == 2 and (points is None or len(points) == 2)
    units = blocks if points is None else points[1] if apart else 0
    whole = (
        size % block == 0 and isinstance(blocks, int) and isinstance(units, int) and units > 0 and blocks % units == 0
    )
    packed = operand(node, 3) is not None and operand(node, 3).dtype is ir.DataType.UINT8  # type: ignore[union-attr]
    whole = whole and (not packed or units * 8 == blocks * node.attributes.get_int("bits", 4))
    k = "k" if whole and apart and operand(node, 4) is None else WHOLE
    free = "abcdefg"[: len(source) - 1]
    rows = [f"n{k}" if apart else "n" + WHOLE * (len(one) - 1) for one in (scales, points or ())]
    bias = operand(node, _BIAS)
    operands = [f"{free}{k}", f"n{k}{WHOLE}", rows[0], rows[1], WHOLE, "n"]
    there = [None if operand(node, at) is None else one for at, one in enumerate(operands[: len(node.inputs)])]
    return Rule(
        tuple(there),
        (f"{free}n",),
        linear=None if bias is None else "",
        local=_local,
        reduce={} if k == WHOLE else {"k": "sum"},
        units={"k": int(str(units))} if k != WHOLE else {},
    )


@matmul_n_bits.gradient
def _(g: GradientBuilder, dy: str, a: str, blocks: str, scales: str, *rest: str | None) -> Sequence[str | None]:
    """dA = dY Wt, of the dequantized weight Wt [N, K], (number - 2**(bits - 1)) * scale; its blocks have no gradient."""
    bits, shape = g.attribute("bits", 4), g.shape(blocks)
    if any(rest[:2]) or bits not in (4, 8) or shape is None or not all(isinstance(dim, int) for dim in shape):
        raise NoGradient("of weights of few bits those of 4 and 8 bits without zero points and order have a gradient")
    columns, count, size = (int(str(dim)) for dim in shape)
    if bits == 4:
        low, high = (
            g.BitwiseAnd(blocks, g.constant(15, blocks)),
            g.BitShift(blocks, g.constant(4, blocks), direction="RIGHT"),
        )
        last = g.constant([3])
        blocks = g.Reshape(
            g.Concat(g.Unsqueeze(low, last), g.Unsqueeze(high, last), axis=3), g.constant([columns, count, 2 * size])
        )
    numbers = g.Sub(g.Cast(blocks, to=g.dtype(scales).value), g.constant(1 << (bits - 1), scales))
    weight = g.Mul(numbers, g.Reshape(scales, g.constant([columns, count, 1])))
    width, rows = count * size * 8 // bits, g.attribute("K")
    weight = g.Reshape(weight, g.constant([columns, width]))
    if width > rows:  # the last block is filled up
        weight = g.Slice(weight, g.constant([0]), g.constant([rows]), g.constant([1]))
    dx = g.MatMul(dy, weight)
    return [dx, *(None for _ in g.node.inputs[1:])]


def _local(local: Local) -> None:
    """The node with this rank's K and N; a bias counts on the first of the ranks that each make a term of a sum."""
    attributes = local.node.attributes
    changed: dict[str, Any] = {
        name: attributes.get_int(name, 0) // local.num_shards(letter) for name, letter in (("K", "k"), ("N", "n"))
    }
    inputs, bias = list(local.inputs), operand(local.node, _BIAS)
    if bias is not None and bias.dtype is not None and local.num_shards("k") > 1:
        keep = local.constant("keep", np.array(local.index("k") == 0, bias.dtype.numpy()))
        inputs[_BIAS] = local.emit("Mul", [inputs[_BIAS], keep], "bias")
    local.same(inputs, **changed)
