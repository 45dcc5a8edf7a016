"""Resize: images and channels are free; a resized dim is replicated, except where an integer scale repeats pixels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.autodiff.shapes import extents, inverse, joined, moved, once
from partc.compiler.ops.families.shapes.concat import but_axes
from partc.compiler.ops.local_shapes import as_int64, divided, integers, shards_of
from partc.compiler.ops.node import Dim, constant_ints, counted, dims, operand, opset_of, rank_of, same
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Local, Rule

_REMARKS = "resized dims are replicated, but where an integer scale repeats pixels"

resize = op("Resize", factors="nc_,_,_,_->nc_", linear="joint", partial=(0,), remarks=_REMARKS, rounds="sums")
upsample = op("Upsample", factors="nc_,_->nc_", linear="joint", partial=(0,), remarks=_REMARKS, rounds="sums")


@resize.sharding
@upsample.sharding
def _(node: ir.Node) -> Rule | None:
    source, target = dims(node.inputs[0]), dims(node.outputs[0])
    if source is None or target is None or len(source) != len(target):
        return None
    if node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return None
    axes = [counted(axis, len(source)) for axis in node.attributes.get_ints("axes") or range(len(source))]
    scales = _scales(node)
    by_sizes = operand(node, 3) is not None
    if scales is None and not by_sizes:
        return None
    if by_sizes and node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        resized = set(axes)
    elif scales is not None:
        resized = {axis for axis, scale in zip(axes, scales, strict=True) if scale != 1}
    else:
        resized = {axis for axis in axes if not same(source[axis], target[axis])}
    if _repeats(node):
        resized -= {
            axis
            for k, axis in enumerate(axes)
            if _is_integer(source[axis], target[axis], scales[k] if scales else None)
        }
    letters = but_axes(len(source), tuple(resized))
    return Rule(
        (letters, *(None if v is None else WHOLE * (rank_of(v) or 0) for v in node.inputs[1:])),
        (letters,),
        local=_local_sizes if by_sizes else None,
    )


@resize.gradient
def _(
    g: GradientBuilder, dy: str, x: str, roi: str | None = None, scales: str | None = None, sizes: str | None = None
) -> str:
    """dX = dY times, along every resized dim, the matrix that resizes it, which is what the op makes of the unit matrix."""
    if g.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise NoGradient("Resize of regions has no gradient")
    if sizes and g.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise NoGradient("Resize that keeps the aspect ratio has no gradient")
    rank = g.rank(x)
    before, after = (g.shape(one) or () for one in (x, dy))
    by = g.known(scales) if scales and not sizes else None
    times = [1] * rank
    left = []
    for k, axis in enumerate(counted(one, rank) for one in g.attribute("axes") or range(rank)):
        scale = None if by is None else float(by[k])
        if _repeats(g.node) and _is_integer(before[axis], after[axis], scale):
            first, last = before[axis], after[axis]
            if scale is not None:
                times[axis] = int(scale)
            elif isinstance(first, int) and isinstance(last, int):
                times[axis] = last // first
        elif scale != 1 and (scale or not same(before[axis], after[axis])):
            left.append((k, axis))
    for k, axis in left:
        factor = None
        if scales and not sizes:
            factor = g.constant(by[[k]]) if by is not None else str(g.Gather(scales, g.constant([k])))
        matrix = _resizing(g, dy, x, axis, factor)
        dims = list(g.shape(dy) or ())
        dims[axis] = before[axis]
        if axis == rank - 2:
            dy = str(g.MatMul(matrix, dy))
        else:
            order = [*range(axis), *range(axis + 1, rank), axis]
            dy = moved(g, str(g.MatMul(moved(g, dy, order), g.mT(matrix))), inverse(order))
        g.scope.value(dy).shape = ir.Shape(dims)
    return once(g, dy, x, times, major=False)


def _resizing(g: GradientBuilder, dy: str, x: str, axis: int, scale: str | None) -> str:
    """The matrix (extent of `x`, extent of `dy`) of one axis, by its scale or else by the extents."""
    kept = {"antialias", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "mode", "nearest_mode"}
    attributes = {name: g.attribute(name) for name in sorted(kept & set(g.node.attributes))}
    extent = extents(g, x, [axis])
    dtype = ir.DataType.DOUBLE if g.dtype(x) == ir.DataType.DOUBLE else ir.DataType.FLOAT
    square = g.ConstantOfShape(joined(g, extent, extent), value=ir.tensor(np.zeros(1, dtype.numpy())))
    units = g.unsqueeze(g.EyeLike(square), 0, 2)
    if scale:
        factors = g.Concat(g.constant(np.ones(3), scale), scale, axis=0)
        made = g.Resize(units, "", factors, **attributes)
    else:
        made = g.Resize(units, "", "", joined(g, [1], extent, [1], extents(g, dy, [axis])), **attributes)
    matrix = g.Squeeze(made, g.constant([0, 2]))
    rows, columns = (g.shape(one) or () for one in (x, dy))
    g.scope.value(matrix).shape = ir.Shape([rows[axis], columns[axis]])
    return str(matrix) if g.dtype(x) == dtype else str(g.Cast(matrix, to=g.dtype(x)))


def _scales(node: ir.Node) -> tuple[float, ...] | None:
    """The scales where they are given and known."""
    given = node.attributes.get_floats("scales")
    if given is not None:
        return tuple(given)
    value = operand(node, 1 if node.op_type == "Upsample" or opset_of(node) < 11 else 2)
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    numbers = () if tensor is None else tuple(float(scale) for scale in tensor.numpy().ravel())
    return numbers or None


def _repeats(node: ir.Node) -> bool:
    """Whether growth by an integer factor only repeats pixels, so that no pixel depends on elements beyond its shard."""
    if node.attributes.get_string("mode", "nearest") != "nearest":
        return False
    if node.op_type == "Upsample" or opset_of(node) < 11:
        return True
    rounding = node.attributes.get_string("nearest_mode", "round_prefer_floor")
    place = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    centred = place in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel")
    return rounding == "floor" if place == "asymmetric" else centred and rounding.startswith("round")


def _is_integer(before: Dim, after: Dim, scale: float | None) -> bool:
    if scale is not None:
        return scale >= 1 and scale.is_integer()
    return isinstance(before, int) and isinstance(after, int) and before > 0 and after % before == 0


def _local_sizes(local: Local) -> None:
    """Sizes of sharded dims are divided."""
    letters = local.rule.outputs[0] or ""
    shards = shards_of(local, letters)
    axes = local.node.attributes.get_ints("axes") or range(len(letters))
    shards = tuple(shards[counted(axis, len(letters))] for axis in axes)
    if set(shards) == {1}:
        local.same()
        return
    given = constant_ints(local.node, 3)
    if given is not None:
        sizes = integers(local, "sizes", [size // count for size, count in zip(given, shards, strict=True)])
    else:
        sizes = divided(local, as_int64(local, 3), shards)
    local.same([*local.inputs[:3], sizes])
