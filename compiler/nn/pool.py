"""Pooling over `[N, C, H, W]`: `MaxPool2d`, `AvgPool2d`, `GlobalAvgPool2d`, `AdaptiveAvgPool2d`."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnxscript import OpBuilder
from partc.compiler.nn.module import Module
from partc.compiler.nn.sizes import each

Sizes = int | Sequence[int]


class _Pool2d(Module):
    def __init__(self, kernel_size: Sizes, stride: Sizes | None, padding: Sizes, ceil_mode: bool) -> None:
        super().__init__()
        self.kernel_size = each(kernel_size, 2, "kernel_size")
        self.stride = self.kernel_size if stride is None else each(stride, 2, "stride")
        self.padding = each(padding, 2, "padding", least=0)
        self.ceil_mode = ceil_mode
        if any(2 * pad > kernel for pad, kernel in zip(self.padding, self.kernel_size, strict=True)):
            raise ValueError(f"padding {list(self.padding)} is more than half of kernel_size {list(self.kernel_size)}")


class MaxPool2d(_Pool2d):
    """The largest of each window; the stride is the window's size unless given."""

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.dilation = each(dilation, 2, "dilation")

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.MaxPool(
            x,
            kernel_shape=self.kernel_size,
            strides=self.stride,
            pads=self.padding * 2,
            dilations=self.dilation,
            ceil_mode=int(self.ceil_mode),
        )
        return y


class AvgPool2d(_Pool2d):
    """The mean of each window, zeros of the padding included unless `count_include_pad` is False."""

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.count_include_pad = count_include_pad

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.AveragePool(
            x,
            kernel_shape=self.kernel_size,
            strides=self.stride,
            pads=self.padding * 2,
            ceil_mode=int(self.ceil_mode),
            count_include_pad=int(self.count_include_pad),
        )
        return y


class GlobalAvgPool2d(Module):
    """The mean over H and W, which stay as axes of size 1."""

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.GlobalAveragePool(x)
        return y


class AdaptiveAvgPool2d(GlobalAvgPool2d):
    """As torch's for an output size of 1; others raise ValueError: no ONNX op has windows that depend on the input."""

    def __init__(self, output_size: Sizes = 1) -> None:
        super().__init__()
        if each(output_size, 2, "output_size") != (1, 1):
            raise ValueError(f"output_size is 1, got {output_size}; use AvgPool2d with the window's size")
