"""Layers with the arguments and weight layouts of torch's: activations, linear maps, convolutions, normalizations, pooling.

Where ONNX needs a scale or a shift that a normalization does not learn, it is a parameter named `ones` or `zeros`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import ml_dtypes
import onnx_ir as ir
from onnxscript import OpBuilder
from partc.compiler.ir.graph import STOPS_GRADIENT
from partc.compiler.nn import init as _init
from partc.compiler.nn.module import Attribute, Module
from partc.compiler.nn.parameter import Parameter


def positive(value: int, name: str) -> int:
    """`value`, or an error that names the argument."""
    return checked_int(value, name, least=1)


def checked_int(value: int, name: str, least: int) -> int:
    """`value` if it is an int of at least `least`; raises TypeError or ValueError with the argument's name."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is an int, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} is at least {least}, got {value}")
    return value


def each(value: int | Sequence[int], axes: int, name: str, least: int = 1) -> tuple[int, ...]:
    """`value` for each of so many axes: an int is repeated, a sequence must have one entry an axis."""
    sizes = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(sizes) != axes:
        raise ValueError(f"{name} has one entry for each of {axes} axes, got {len(sizes)}: {list(sizes)}")
    return tuple(checked_int(size, name, least) for size in sizes)


class _OneOp(Module):
    """A layer that is one op, with these attributes, of its input and its parameters."""

    op_type: ClassVar[str]

    def __init__(self, **attributes: Attribute) -> None:
        super().__init__()
        self.attributes = attributes

    def operands(self) -> Sequence[ir.Value | None]:
        """The operands of the op after the layer's input."""
        return ()

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = getattr(op, self.op_type)(x, *self.operands(), **self.attributes)
        return y


class ReLU(_OneOp):
    """`max(x, 0)`."""

    op_type = "Relu"


class Sigmoid(_OneOp):
    """`1 / (1 + exp(-x))`."""

    op_type = "Sigmoid"


class Tanh(_OneOp):
    """`tanh x`."""

    op_type = "Tanh"


class Identity(_OneOp):
    """`x`; it keeps a node of its own, so that it can be placed."""

    op_type = "Identity"


def stop_gradient(op: OpBuilder, x: ir.Value) -> ir.Value:
    """`x`, through which no gradient flows in a training, as torch's `x.detach()`."""
    y: ir.Value = op.Identity(x)
    node = y.producer()
    assert node is not None
    node.metadata_props[STOPS_GRADIENT] = "true"
    return y


class LeakyReLU(_OneOp):
    """`x` above 0, `negative_slope * x` below."""

    op_type = "LeakyRelu"

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__(alpha=negative_slope)


class GELU(_OneOp):
    """`x` times the probability that a standard normal variable lies below it; exact, or `approximate="tanh"`."""

    op_type = "Gelu"

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate is 'none' or 'tanh', got {approximate!r}")
        super().__init__(approximate=approximate)


class SiLU(Module):
    """`x * sigmoid(x)`, in two ops: onnxruntime has no kernel for ONNX's Swish."""

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.Mul(x, op.Sigmoid(x))
        return y


class Softmax(_OneOp):
    """`exp x` over its sum along `dim`, by default the last axis."""

    op_type = "Softmax"

    def __init__(self, dim: int = -1) -> None:
        super().__init__(axis=dim)


class LogSoftmax(Softmax):
    """The logarithm of `Softmax`, without its loss of small values."""

    op_type = "LogSoftmax"


class Dropout(Module):
    """In training, zero with probability `p` and `x / (1 - p)` otherwise; in inference `x` itself, without a node."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"p is a probability below 1, got {p}")
        self.p = p

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        if not self.training:
            return x
        y: ir.Value = op.Dropout(x, self.p, True)
        return y


class Linear(Module):
    """`x W^T + b` over the last axis of x; W is `[out_features, in_features]`.

    One Gemm where x is known to be a matrix, else MatMul and Add. Both start uniform within `1 / sqrt(in_features)`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init: _init.Initializer | None = None,
        bias_init: _init.Initializer | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.in_features = positive(in_features, "in_features")
        self.out_features = positive(out_features, "out_features")
        default = _init.within(in_features**-0.5)
        self.weight = Parameter([out_features, in_features], dtype, init=init or default)
        self.bias = Parameter([out_features], dtype, init=bias_init or default) if bias else None

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value
        if x.shape is not None and len(x.shape) == 2:
            y = op.Gemm(x, self.weight, self.bias, transB=1)
            return y
        y = op.MatMul(x, op.Transpose(self.weight, perm=[1, 0]))
        return y if self.bias is None else op.Add(y, self.bias)


class Embedding(Module):
    """Row i of the weight `[num_embeddings, embedding_dim]` for each index i; the row `padding_idx` starts as zeros."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        init: _init.Initializer | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.num_embeddings = positive(num_embeddings, "num_embeddings")
        self.embedding_dim = positive(embedding_dim, "embedding_dim")
        rows = init or _init.normal()
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx {padding_idx} is outside of the {num_embeddings} embeddings")
            rows = _init.zero_row(rows, padding_idx % num_embeddings)
        self.weight = Parameter([num_embeddings, embedding_dim], dtype, init=rows)

    def forward(self, op: OpBuilder, indices: ir.Value) -> ir.Value:
        y: ir.Value = op.Gather(self.weight, indices, axis=0)
        return y


class Flatten(Module):
    """The axes `start_dim` to `end_dim`, both included, become one; by default all but the first."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        if start_dim < 0 and end_dim >= 0:
            raise ValueError(f"start_dim {start_dim} counts from the end and end_dim {end_dim} from the beginning")
        if (start_dim < 0) == (end_dim < 0) and start_dim > end_dim:
            raise ValueError(f"start_dim {start_dim} comes after end_dim {end_dim}")
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value
        if (self.start_dim, self.end_dim) == (1, -1):
            y = op.Flatten(x, axis=1)
            return y
        if self.end_dim == -1 and self.start_dim >= 0:
            y = op.Reshape(x, [0] * self.start_dim + [-1])
            return y
        parts = [op.Shape(x, start=0, end=self.start_dim)] if self.start_dim else []
        parts.append([-1])
        if self.end_dim != -1:
            parts.append(op.Shape(x, start=self.end_dim + 1))
        y = op.Reshape(x, op.Concat(*parts, axis=0))
        return y


Sizes = int | Sequence[int]


class _Conv(_OneOp):
    op_type = "Conv"
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
        _channels(in_channels, out_channels, groups)
        kernel, strides = each(kernel_size, self.axes, "kernel_size"), each(stride, self.axes, "stride")
        dilations = each(dilation, self.axes, "dilation")
        pads = self._pads(padding, kernel, strides, dilations)
        super().__init__(kernel_shape=kernel, strides=strides, pads=pads, dilations=dilations, group=groups)
        shape = [out_channels, in_channels // groups, *kernel]
        self.weight, self.bias = _weights(shape, out_channels, bias, init, bias_init, dtype)

    def _pads(
        self,
        padding: Sizes | Literal["valid", "same"],
        kernel: Sequence[int],
        strides: Sequence[int],
        dilations: Sequence[int],
    ) -> list[int]:
        if not isinstance(padding, str):
            return list(each(padding, self.axes, "padding", least=0)) * 2
        if padding == "valid":
            return [0] * (2 * self.axes)
        if padding != "same":
            raise ValueError(f"padding is a size, 'valid' or 'same', got {padding!r}")
        if any(step != 1 for step in strides):
            raise ValueError(f"padding='same' needs a stride of 1, got {list(strides)}")
        total = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        return [size // 2 for size in total] + [size - size // 2 for size in total]

    def operands(self) -> Sequence[ir.Value | None]:
        return self.weight, self.bias


class Conv1d(_Conv):
    """Convolution of `[N, in_channels, L]`; the weight is `[out_channels, in_channels / groups, kernel]`."""

    axes = 1


class Conv2d(_Conv):
    """Convolution of `[N, in_channels, H, W]`; the weight is `[out_channels, in_channels / groups, kernel, kernel]`.

    Weight and bias start uniform within `1 / sqrt(fan_in)`, as torch's do.
    """

    axes = 2


class ConvTranspose2d(_OneOp):
    """Transposed convolution of `[N, in_channels, H, W]`; weight `[in_channels, out_channels / groups, *kernel]`."""

    op_type = "ConvTranspose"

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
        _channels(in_channels, out_channels, groups)
        kernel, strides, dilations = (
            each(sizes, 2, name)
            for sizes, name in ((kernel_size, "kernel_size"), (stride, "stride"), (dilation, "dilation"))
        )
        pads = each(padding, 2, "padding", least=0) * 2
        rest = each(output_padding, 2, "output_padding", least=0)
        if any(extra >= max(s, d) for extra, s, d in zip(rest, strides, dilations, strict=True)):
            raise ValueError(
                f"output_padding {list(rest)} is not smaller than stride {list(strides)} or dilation {list(dilations)}"
            )
        sizes = {"kernel_shape": kernel, "strides": strides, "pads": pads, "output_padding": rest}
        super().__init__(**sizes, dilations=dilations, group=groups)
        shape = [in_channels, out_channels // groups, *kernel]
        self.weight, self.bias = _weights(shape, out_channels, bias, init, bias_init, dtype)

    def operands(self) -> Sequence[ir.Value | None]:
        return self.weight, self.bias


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


class _Norm(_OneOp):
    """A normalization whose op needs a scale, and perhaps a shift: `ones` and `zeros` where it does not learn them."""

    def _add(self, parameter: str, constant: str, shape: Sequence[int], affine: bool, dtype: str) -> None:
        start = _init.ones() if constant == "ones" else _init.zeros()
        setattr(self, parameter if affine else constant, Parameter(shape, dtype, init=start, learned=affine))

    def add_scale(self, shape: Sequence[int], affine: bool, dtype: str) -> None:
        """Adds the scale."""
        self._add("weight", "ones", shape, affine, dtype)

    def add_shift(self, shape: Sequence[int], affine: bool, dtype: str) -> None:
        """Adds the shift."""
        self._add("bias", "zeros", shape, affine, dtype)

    def operands(self) -> Sequence[ir.Value | None]:
        return [getattr(self, name) for name in ("weight", "ones", "bias", "zeros") if hasattr(self, name)]


class LayerNorm(_Norm):
    """Mean 0 and variance 1 over the last axes, which have the sizes `normalized_shape`; then scale and shift."""

    op_type = "LayerNormalization"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        dtype: str = "float32",
    ) -> None:
        shape = _trailing(normalized_shape)
        super().__init__(axis=-len(shape), epsilon=eps)
        self.add_scale(shape, elementwise_affine, dtype)
        self.bias = Parameter(shape, dtype, init=_init.zeros()) if elementwise_affine and bias else None


class RMSNorm(_Norm):
    """Root mean square 1 over the last axes, which have the sizes `normalized_shape`; then a scale.

    Without `eps` the dtype's own epsilon is added to the mean square, as in torch.
    """

    op_type = "RMSNormalization"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        dtype: str = "float32",
    ) -> None:
        shape = _trailing(normalized_shape)
        least = float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
        super().__init__(axis=-len(shape), epsilon=least if eps is None else eps)
        self.add_scale(shape, elementwise_affine, dtype)


class GroupNorm(_Norm):
    """Mean 0 and variance 1 over each of `num_groups` groups of channels; then scale and shift per channel."""

    op_type = "GroupNormalization"

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, *, dtype: str = "float32"
    ) -> None:
        if positive(num_channels, "num_channels") % positive(num_groups, "num_groups"):
            raise ValueError(f"num_channels {num_channels} is not divisible by num_groups {num_groups}")
        super().__init__(num_groups=num_groups, epsilon=eps)
        self.add_scale([num_channels], affine, dtype)
        self.add_shift([num_channels], affine, dtype)


class InstanceNorm2d(_Norm):
    """Mean 0 and variance 1 over H and W of each channel of each sample; scale and shift only with `affine`."""

    op_type = "InstanceNormalization"

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = False, *, dtype: str = "float32") -> None:
        super().__init__(epsilon=eps)
        self.add_scale([positive(num_features, "num_features")], affine, dtype)
        self.add_shift([num_features], affine, dtype)


class BatchNorm2d(_Norm):
    """Mean 0 and variance 1 of each channel; then scale and shift.

    In inference, mean and variance are `running_mean` and `running_var`. In training they are the batch's own, and the
    op's second and third outputs are the running ones moved by `momentum` towards these (ONNX counts momentum from the
    other end, and moves to the variance over n where torch takes n - 1).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        *,
        dtype: str = "float32",
    ) -> None:
        super().__init__(epsilon=eps, momentum=1.0 - momentum)
        self.add_scale([positive(num_features, "num_features")], affine, dtype)
        self.add_shift([num_features], affine, dtype)
        self.running_mean = Parameter([num_features], dtype, init=_init.zeros(), learned=False)
        self.running_var = Parameter([num_features], dtype, init=_init.ones(), learned=False)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        state = *self.operands(), self.running_mean, self.running_var
        y: ir.Value
        if not self.training:
            y = op.BatchNormalization(x, *state, **self.attributes)
            return y
        y, _, _ = op.BatchNormalization(x, *state, **self.attributes, training_mode=1, _outputs=3)
        return y


def _trailing(normalized_shape: int | Sequence[int]) -> list[int]:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if not shape:
        raise ValueError("normalized_shape names at least one axis, got none")
    return [positive(size, "normalized_shape") for size in shape]


class _Pool2d(_OneOp):
    def __init__(self, kernel_size: Sizes, stride: Sizes | None, padding: Sizes, **more: Attribute) -> None:
        kernel, pads = each(kernel_size, 2, "kernel_size"), each(padding, 2, "padding", least=0)
        if any(2 * pad > size for pad, size in zip(pads, kernel, strict=True)):
            raise ValueError(f"padding {list(pads)} is more than half of kernel_size {list(kernel)}")
        strides = kernel if stride is None else each(stride, 2, "stride")
        super().__init__(kernel_shape=kernel, strides=strides, pads=pads * 2, **more)


class MaxPool2d(_Pool2d):
    """The largest of each window; the stride is the window's size unless given."""

    op_type = "MaxPool"

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> None:
        dilations = each(dilation, 2, "dilation")
        super().__init__(kernel_size, stride, padding, dilations=dilations, ceil_mode=int(ceil_mode))


class AvgPool2d(_Pool2d):
    """The mean of each window, zeros of the padding included unless `count_include_pad` is False."""

    op_type = "AveragePool"

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        padded = int(count_include_pad)
        super().__init__(kernel_size, stride, padding, ceil_mode=int(ceil_mode), count_include_pad=padded)


class GlobalAvgPool2d(_OneOp):
    """The mean over H and W, which stay as axes of size 1."""

    op_type = "GlobalAveragePool"


class AdaptiveAvgPool2d(GlobalAvgPool2d):
    """As torch's for an output size of 1; others raise ValueError: no ONNX op has windows that depend on the input."""

    def __init__(self, output_size: Sizes = 1) -> None:
        super().__init__()
        if each(output_size, 2, "output_size") != (1, 1):
            raise ValueError(f"output_size is 1, got {output_size}; use AvgPool2d with the window's size")
