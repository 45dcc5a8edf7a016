"""Look-ups in a table whose rows are quantized in blocks.

    GatherBlockQuantized(data [V, K * bits / 8], indices [*], scales [V, K / block], zero points) -> [*, K]

Rows (V) are cut as those of `Gather`: each rank looks up with the others' rows masked out. Columns (K) are cut in whole blocks.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ops.families.indexing.gather import ROW
from partc.compiler.ops.families.indexing.row_ranges import look_up, masked, rows_of, spread
from partc.compiler.ops.local_shapes import as_int64
from partc.compiler.ops.node import LETTERS, dims, operand, rank_of
from partc.compiler.ops.registry import CONTRIB, op
from partc.compiler.ops.rule import WHOLE, Local, Rule

_COLUMNS = "k"

gather_block_quantized = op(
    "GatherBlockQuantized",
    domain=CONTRIB,
    factors="vk,i,vk->ik",
    contracted="v",
    linear="each",
    partial=(2,),
    remarks="of bytes in rows of two dims, rows of other ranks are masked, columns in whole blocks; others are replicated",
    precision="follow",
    kernel="lookup",
    rounds="once",
)


@gather_block_quantized.sharding
def _(node: ir.Node) -> Rule | None:
    data, scales, count = dims(node.inputs[0]), dims(operand(node, 2)), rank_of(node.inputs[1])
    attributes = node.attributes
    if data is None or scales is None or count is None or len(data) != 2 or operand(node, 3) is not None:
        return None
    if attributes.get_int("gather_axis", 0) != 0 or attributes.get_int("quantize_axis", 1) not in (1, -1):
        return None
    if node.inputs[0] is None or node.inputs[0].dtype is not ir.DataType.UINT8:
        return None
    blocks, bytes_ = scales[1], data[1]
    whole = (
        isinstance(blocks, int)
        and isinstance(bytes_, int)
        and bytes_ * 8 == blocks * attributes.get_int("bits", 4) * attributes.get_int("block_size", 128)
    )
    columns = _COLUMNS if whole else WHOLE
    indices = "".join([letter for letter in LETTERS if letter not in (ROW, _COLUMNS)][:count])
    is_table = isinstance(data[0], int) and data[0] > 0
    return Rule(
        (ROW + columns, indices, ROW + columns),
        (indices + columns,),
        reduce={ROW: "sum"},
        units={_COLUMNS: blocks} if isinstance(blocks, int) and whole else {},
        looked_up=ROW if is_table else "",
    )


@gather_block_quantized.local
def _(local: Local) -> None:
    if local.num_shards(ROW) == 1:
        local.same()
        return
    indices = local.rule.inputs[1] or ""
    lookup = look_up(local, as_int64(local, 1), rows_of(local, 0, 0, ROW), ROW)
    rows = f"{local.outputs[0]}.found"
    local.same([local.inputs[0], lookup.safe, local.inputs[2]], [rows])
    scales = operand(local.node, 2)
    assert scales is not None
    assert scales.dtype is not None
    masked(local, rows, spread(local, lookup.present, len(indices), 1), scales.dtype, local.outputs[0])
