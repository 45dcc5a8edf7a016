"""Ops on images and regions: images and channels are free; pixels are replicated, except in ops that compute each pixel alone."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.autodiff.shapes import shaped
from partc.compiler.ops.families.images.conv_backward import columns_of
from partc.compiler.ops.families.images.windows import windows_of
from partc.compiler.ops.local_shapes import as_int64, divided, integers
from partc.compiler.ops.node import LETTERS, constant_ints, operand, rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Local, Rule

grid_sample = op("GridSample", factors="nc_,nhw.->nchw", linear="each", partial=(0,), rounds="sums")


@grid_sample.sharding
def _(node: ir.Node) -> Rule | None:
    grid = rank_of(operand(node, 1))
    if grid is None or grid < 3:
        return None
    made = [letter for letter in LETTERS if letter not in "nc"][: grid - 2]
    return rule(node, f"nc_,n{''.join(made)}.->nc{''.join(made)}")


roi_align = op(
    "RoiAlign",
    factors=".c..,r.,r->rc..",
    linear="each",
    partial=(0,),
    remarks="linear only where regions are averaged",
    rounds="sums",
)


@roi_align.sharding
def _(node: ir.Node) -> Rule | None:
    average = node.attributes.get_string("mode", "avg") == "avg"
    return rule(node, ".c..,r.,r->rc..", linear=None if average else "")


affine_grid = op("AffineGrid", factors="n..,.->n_", linear="joint", partial=(0,))


@affine_grid.sharding
def _(node: ir.Node) -> Rule | None:
    made = rank_of(node.outputs[0])
    if made is None:
        return None
    return Rule(("n..", WHOLE), ("n" + WHOLE * (made - 1),))


@affine_grid.local
def _(local: Local) -> None:
    """The size of the batch is divided."""
    shards = local.num_shards("n")
    if shards == 1:
        local.same()
        return
    given = constant_ints(local.node, 1)
    if given is not None:
        size = integers(local, "size", [given[0] // shards, *given[1:]])
    else:
        length = rank_of(local.node.outputs[0]) or 4
        size = divided(local, as_int64(local, 1), [shards, *[1] * (length - 1)])
    local.same([local.inputs[0], size])


col2im = op("Col2Im", factors="nc.,_,_->nc_", linear="joint", partial=(0,), precision="follow")


@col2im.sharding
def _(node: ir.Node) -> Rule | None:
    made = rank_of(node.outputs[0])
    if made is None:
        return None
    return Rule(("nc.", WHOLE, WHOLE), ("nc" + WHOLE * (made - 2),))


@col2im.gradient
def _(g: GradientBuilder, dy: str, x: str, image: str, block: str) -> str:
    """dX = what every place of every window sees of dY."""
    kernel = g.known(block)
    if kernel is None:
        raise NoGradient("Col2Im with windows whose size is known only at run time")
    windows = windows_of(g, dy, dy, tuple(int(size) for size in kernel))
    return shaped(g, columns_of(g, dy, windows), x)


op("NonMaxSuppression", why="how many boxes it selects is known only at run time", stops_gradient=True)


op("ImageDecoder", why="one image at a time", stops_gradient=True)
