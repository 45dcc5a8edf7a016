"""Shape rules of pooling, transposed convolution and resizing, as onnxruntime computes them.

Windows are taken to fit into a dynamic dim that they slide over. Of a fixed size that is smaller, onnxruntime rounds towards 0.

pool, rounded up      Min(ceil((n + pads - k)/s) + 1, ceil((n + pad before)/s)): no window begins in the padding behind
transposed, SAME      Min(s*n, s*(n - 1) + k + output padding): padding is never below 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.normal import as_dim, normal
from partc.compiler.dims.reading import read, smallest

Known = Mapping[str, Facts]


def pool(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """The number of windows along each dim; a pool whose attributes have two readings gets other attributes (`round_down`)."""
    rule(ctx, node)
    data = node.inputs[0]
    if data is None or data.shape is None or node.outputs[0].shape is None:
        return
    windows = _Windows(node, node.attributes["kernel_shape"].as_ints())
    dims = list(data.shape.dims)
    if ctx.opset < 22 and node.attributes.get_int("ceil_mode", 0):
        windows.round_down(dims[2:])
    for k in range(len(dims) - 2):
        size = windows.pooled(k, dims[k + 2], node, ctx.opset)
        dims[k + 2] = ctx.new_symbolic_dim() if size is None else as_dim(normal(size, known))
    for out in node.outputs:
        out.shape = ir.Shape(dims)


def conv_transpose(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """With automatic padding the output is as large as the stride says only where the kernel reaches that far."""
    rule(ctx, node)
    data, weight, out = node.inputs[0], node.inputs[1], node.outputs[0]
    windows = _Windows(node, node.attributes.get_ints("kernel_shape"))
    if out.shape is None or data is None or weight is None or not windows.same or "output_shape" in node.attributes:
        return
    assert data.shape is not None
    assert weight.shape is not None
    dims = list(out.shape.dims)
    for k in range(len(dims) - 2):
        size, kernel = _read(data.shape[k + 2]), _read((windows.kernel or weight.shape.dims[2:])[k])
        if size is None or kernel is None:
            dims[k + 2] = ctx.new_symbolic_dim()
            continue
        stride, room = windows.strides(k), windows.reach(k, kernel) + windows.ints("output_padding", k, 0)
        dims[k + 2] = as_dim(normal(smallest(stride * size, stride * (size - 1) + room), known))
    out.shape = ir.Shape(dims)


def resize(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """Scales are applied in float32, so of a dynamic dim only those that float32 holds exactly are followed."""
    rule(ctx, node)
    data, out = node.inputs[0], node.outputs[0]
    if data is None or data.shape is None or out.shape is None:
        return
    axes = node.attributes.get_ints("axes") or range(len(data.shape))
    places = [axis % len(data.shape) for axis in axes]
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    scales = _scales(node)
    dims = list(out.shape.dims)
    cropped = node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    if scales is None and policy == "stretch":
        return
    for k, place in enumerate(places):
        scaled = None if scales is None or len(scales) != len(places) or cropped else scales[k]
        size = None if scaled is None else _scaled(data.shape[place], scaled, known)
        dims[place] = ctx.new_symbolic_dim() if size is None else size
    out.shape = ir.Shape(dims)


def _scales(node: ir.Node) -> list[np.float32] | None:
    """The scales of a Resize or Upsample; None where sizes are given instead, or the scales are not known."""
    if "scales" in node.attributes:
        return [np.float32(one) for one in node.attributes["scales"].as_floats()]
    place = 1 if node.op_type == "Upsample" or len(node.inputs) == 2 else 2
    value = node.inputs[place] if place < len(node.inputs) else None
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None or not tensor.size else list(tensor.numpy().astype(np.float32).ravel())


def _scaled(dim: int | ir.SymbolicDim, scale: np.float32, known: Known) -> int | ir.SymbolicDim | None:
    if isinstance(dim, int):
        return int(np.float32(dim) * scale)
    above, below = scale.as_integer_ratio()
    size = _read(dim)
    return None if size is None or below > 64 else as_dim(normal(sympy.floor(size * above / below), known))


def _read(dim: int | ir.SymbolicDim) -> Any:
    return sympy.Integer(dim) if isinstance(dim, int) else read(str(dim.value))


class _Windows:
    """The attributes of a node's windows."""

    def __init__(self, node: ir.Node, kernel: Any) -> None:
        self.node = node
        self.kernel = None if kernel is None else list(kernel)
        self.automatic = node.attributes.get_string("auto_pad", "NOTSET")
        self.same = self.automatic in ("SAME_UPPER", "SAME_LOWER")

    def ints(self, name: str, k: int, default: int) -> int:
        given = self.node.attributes.get_ints(name)
        return default if given is None else given[k]

    def strides(self, k: int) -> int:
        return self.ints("strides", k, 1)

    def reach(self, k: int, kernel: Any) -> Any:
        """The number of positions that a dilated kernel covers."""
        return (kernel - 1) * self.ints("dilations", k, 1) + 1

    def pads(self, k: int) -> tuple[int, int]:
        """The padding of a pool before and after dim `k`."""
        if self.automatic == "VALID" or self.kernel is None:
            return 0, 0
        return self.ints("pads", k, 0), self.ints("pads", k + len(self.kernel), 0)

    def round_down(self, sizes: Sequence[int | ir.SymbolicDim]) -> None:
        """Removes `ceil_mode` from a pool below opset 22 if the last window along some dim would begin in the padding.

        Shape inference below opset 22 counts such a window and no kernel computes it: the kernel's result is that of rounding down.
        A dim that is rounded up is padded as far as its last window reaches, but not for an average that counts the padding.

            MaxPool {kernel_shape: [2], strides: [3], ceil_mode: 1} of 18    ->    {kernel_shape: [2], strides: [3]}: 6 windows, not 7
        """
        assert self.kernel is not None
        ends, is_outside = list[int](), False
        for k, size in enumerate(sizes):
            if not isinstance(size, int) or self.same:
                return
            (before, after), stride, reach = self.pads(k), self.strides(k), self.reach(k, self.kernel[k])
            if size + before + after < reach:
                return
            most, inside = -((reach - size - before - after) // stride) + 1, -(-(size + before) // stride)
            is_outside |= inside < most
            ends.append(max(after, (min(most, inside) - 1) * stride + reach - size - before))
        begins, padding = zip(*map(self.pads, range(len(ends))), strict=True)
        attributes, is_padded = self.node.attributes, tuple(ends) != padding
        counted = attributes.get_int("count_include_pad", 0) or any(
            e >= k for e, k in zip(ends, self.kernel, strict=True)
        )
        if not is_outside or (is_padded and counted):
            return
        if is_padded:
            attributes["pads"] = ir.AttrInt64s("pads", [*begins, *ends])
            attributes.pop("auto_pad", None)
            self.automatic = "NOTSET"
        del attributes["ceil_mode"]

    def pooled(self, k: int, dim: int | ir.SymbolicDim, node: ir.Node, opset: int) -> Any:
        """The number of windows along dim `k`; None where onnxruntime's own inference and its kernels disagree."""
        size, stride = _read(dim), self.strides(k)
        if size is None or (self.same and self.ints("dilations", k, 1) > 1):
            return None
        if self.same:
            return sympy.ceiling(size / sympy.Integer(stride))
        assert self.kernel is not None
        before, behind = self.pads(k)
        steps = (size + before + behind - self.reach(k, self.kernel[k])) / sympy.Integer(stride)
        if not node.attributes.get_int("ceil_mode", 0):
            return (sympy.Integer(int(steps)) if steps.is_Rational else sympy.floor(steps)) + 1
        most, inside = sympy.ceiling(steps) + 1, sympy.ceiling((size + before) / sympy.Integer(stride))
        if opset < 22 and most.is_Integer and inside < most:
            return None
        return smallest(most, inside)
