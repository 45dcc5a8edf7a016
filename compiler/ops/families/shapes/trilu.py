"""The triangle of a matrix: a shard of it is a triangle, too, with its diagonal shifted by the begin of the shard."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.families.indexing.row_ranges import rows_of
from partc.compiler.ops.local_shapes import integer
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Local, Rule

trilu = op("Trilu", factors="*rc,_->*rc", linear="joint", partial=(0,), precision="follow", kernel="layout")


@trilu.sharding
def _(node: ir.Node) -> Rule | None:
    return rule(node, "*rc,_->*rc")


@trilu.gradient
def _(g: GradientBuilder, dy: str, x: str, k: str | None = None) -> str:
    """dX = the same triangle of dY."""
    return str(g.Trilu(dy, k, upper=g.attribute("upper", 1)))


@trilu.local
def _(local: Local) -> None:
    """Row i of a shard is row i + begin of the global matrix, so that k grows by the first row and falls by the first column."""
    if local.num_shards("r") == 1 and local.num_shards("c") == 1:
        local.same()
        return
    k = local.inputs[1] if len(local.inputs) > 1 and local.inputs[1] else integer(local, "diagonal", 0)
    rank = len(local.rule.inputs[0] or "")
    for letter, axis, move in (("r", rank - 2, "Add"), ("c", rank - 1, "Sub")):
        if local.num_shards(letter) > 1:
            k = local.emit(move, [k, rows_of(local, 0, axis, letter).offset], f"{letter}.diagonal")
    local.same([local.inputs[0], k])
