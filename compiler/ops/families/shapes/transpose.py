"""Ops that permute elements: Transpose, and the exchange of depth and space."""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.autodiff.shapes import extents, inverse, joined, like, shaped
from partc.compiler.ops.node import LETTERS, counted, rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Rule

transpose = op("Transpose", factors="ab->ba", linear="joint", precision="follow", kernel="layout")


@transpose.sharding
def _(node: ir.Node) -> Rule | None:
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    order = node.attributes.get_ints("perm") or tuple(reversed(range(rank)))
    letters = LETTERS[:rank]
    return Rule((letters,), ("".join(letters[counted(axis, rank)] for axis in order),))


@transpose.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = dY with its dims put back."""
    order = g.attribute("perm") or [*reversed(range(g.rank(x)))]
    return str(g.Transpose(dy, perm=inverse([axis % len(order) for axis in order])))


depth_to_space = op(
    "DepthToSpace",
    factors="nchw->nchw",
    linear="joint",
    remarks="channels only in mode CRD, where they are major in the input's depth",
    precision="follow",
    kernel="layout",
)


@depth_to_space.sharding
def _(node: ir.Node) -> Rule | None:
    crd = node.attributes.get_string("mode", "DCR") == "CRD"
    return rule(node, "nchw->nchw" if crd else "n.hw->n.hw")


@depth_to_space.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = SpaceToDepth(dY), whose channels are counted the other way round in mode CRD."""
    block = g.attribute("blocksize")
    packed = str(g.SpaceToDepth(dy, blocksize=block))
    if g.attribute("mode", "DCR") == "CRD":
        parted = joined(g, extents(g, packed, [0]), [block * block, -1], extents(g, packed, [2, 3]))
        packed = shaped(g, str(g.Transpose(g.Reshape(packed, parted), perm=[0, 2, 1, 3, 4])), x)
    return like(g, packed, x)


space_to_depth = op("SpaceToDepth", factors="n.hw->n.hw", linear="joint", precision="follow", kernel="layout")


@space_to_depth.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = DepthToSpace(dY)."""
    return like(g, str(g.DepthToSpace(dy, blocksize=g.attribute("blocksize"))), x)
