"""Convolutions: `Conv1d`, `Conv2d`, `ConvTranspose2d`, with torch's arguments and weight layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import onnx_ir as ir
from onnxscript import OpBuilder
from partc.compiler.nn import init as _init
from partc.compiler.nn.module import Module
from partc.compiler.nn.parameter import Parameter
from partc.compiler.nn.sizes import each, positive

Sizes = int | Sequence[int]


class _Conv(Module):
    axes: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | Literal["valid", "same"] = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        init: _init.Initializer | None = None,
        bias_init: _init.Initializer | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        _channels(in_channels, out_channels, groups)
        self.kernel_size = each(kernel_size, self.axes, "kernel_size")
        self.stride = each(stride, self.axes, "stride")
        self.dilation = each(dilation, self.axes, "dilation")
        self.groups = groups
        self.pads = self._pads(padding)
        shape = [out_channels, in_channels // groups, *self.kernel_size]
        self.weight, self.bias = _weights(shape, out_channels, bias, init, bias_init, dtype)

    def _pads(self, padding: Sizes | Literal["valid", "same"]) -> list[int]:
        if not isinstance(padding, str):
            return list(each(padding, self.axes, "padding", least=0)) * 2
        if padding == "valid":
            return [0] * (2 * self.axes)
        if padding != "same":
            raise ValueError(f"padding is a size, 'valid' or 'same', got {padding!r}")
        if any(step != 1 for step in self.stride):
            raise ValueError(f"padding='same' needs a stride of 1, got {list(self.stride)}")
        total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        return [size // 2 for size in total] + [size - size // 2 for size in total]

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.Conv(
            x,
            self.weight,
            self.bias,
            kernel_shape=self.kernel_size,
            strides=self.stride,
            pads=self.pads,
            dilations=self.dilation,
            group=self.groups,
        )
        return y


class Conv1d(_Conv):
    """Convolution of `[N, in_channels, L]`; the weight is `[out_channels, in_channels / groups, kernel]`."""

    axes = 1


class Conv2d(_Conv):
    """Convolution of `[N, in_channels, H, W]`; the weight is `[out_channels, in_channels / groups, kernel, kernel]`.

    Weight and bias start uniform within `1 / sqrt(fan_in)`, as torch's do.
    """

    axes = 2


class ConvTranspose2d(Module):
    """Transposed convolution of `[N, in_channels, H, W]`; weight `[in_channels, out_channels / groups, *kernel]`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        *,
        init: _init.Initializer | None = None,
        bias_init: _init.Initializer | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        _channels(in_channels, out_channels, groups)
        self.kernel_size = each(kernel_size, 2, "kernel_size")
        self.stride = each(stride, 2, "stride")
        self.pads = each(padding, 2, "padding", least=0) * 2
        self.output_padding = each(output_padding, 2, "output_padding", least=0)
        self.dilation = each(dilation, 2, "dilation")
        self.groups = groups
        if any(extra >= max(s, d) for extra, s, d in zip(self.output_padding, self.stride, self.dilation, strict=True)):
            raise ValueError(
                f"output_padding {list(self.output_padding)} is not smaller than stride {list(self.stride)} "
                f"or dilation {list(self.dilation)}"
            )
        shape = [in_channels, out_channels // groups, *self.kernel_size]
        self.weight, self.bias = _weights(shape, out_channels, bias, init, bias_init, dtype)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.ConvTranspose(
            x,
            self.weight,
            self.bias,
            kernel_shape=self.kernel_size,
            strides=self.stride,
            pads=self.pads,
            output_padding=self.output_padding,
            dilations=self.dilation,
            group=self.groups,
        )
        return y


def _channels(in_channels: int, out_channels: int, groups: int) -> None:
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if positive(channels, name) % positive(groups, "groups"):
            raise ValueError(f"{name} {channels} is not divisible by groups {groups}")


def _weights(
    shape: list[int],
    out_channels: int,
    bias: bool,
    init: _init.Initializer | None,
    bias_init: _init.Initializer | None,
    dtype: str,
) -> tuple[Parameter, Parameter | None]:
    default = _init.within(1.0 / math.sqrt(_init.fans(tuple(shape))[0]))
    weight = Parameter(shape, dtype, init=init or default)
    return weight, Parameter([out_channels], dtype, init=bias_init or default) if bias else None
