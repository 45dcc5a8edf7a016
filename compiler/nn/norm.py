"""Normalizations: `LayerNorm`, `RMSNorm`, `GroupNorm`, `InstanceNorm2d`, `BatchNorm2d`, with torch's arguments.

Where ONNX wants a scale or a shift that the layer does not learn, ones and zeros of the right size stand in its place,
as parameters named `ones` and `zeros`.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import onnx_ir as ir
from onnxscript import OpBuilder
from partc.compiler.nn import init as _init
from partc.compiler.nn.module import Module
from partc.compiler.nn.parameter import Parameter
from partc.compiler.nn.sizes import positive


class LayerNorm(Module):
    """Mean 0 and variance 1 over the last axes, which have the sizes `normalized_shape`; then scale and shift."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        shape = _trailing(normalized_shape)
        self.axis, self.eps, self.affine = -len(shape), eps, elementwise_affine
        _add_scale(self, shape, elementwise_affine, dtype)
        self.bias = Parameter(shape, dtype, init=_init.zeros()) if elementwise_affine and bias else None

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.LayerNormalization(x, _scale(self), self.bias, axis=self.axis, epsilon=self.eps)
        return y


class RMSNorm(Module):
    """Root mean square 1 over the last axes, which have the sizes `normalized_shape`; then a scale.

    Without `eps` the dtype's own epsilon is added to the mean square, as in torch.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        shape = _trailing(normalized_shape)
        self.axis, self.affine = -len(shape), elementwise_affine
        self.eps = float(ml_dtypes.finfo(dtype).eps) if eps is None else eps  # type: ignore[no-untyped-call]
        _add_scale(self, shape, elementwise_affine, dtype)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.RMSNormalization(x, _scale(self), axis=self.axis, epsilon=self.eps)
        return y


class GroupNorm(Module):
    """Mean 0 and variance 1 over each of `num_groups` groups of channels; then scale and shift per channel."""

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, *, dtype: str = "float32"
    ) -> None:
        super().__init__()
        if positive(num_channels, "num_channels") % positive(num_groups, "num_groups"):
            raise ValueError(f"num_channels {num_channels} is not divisible by num_groups {num_groups}")
        self.num_groups, self.eps, self.affine = num_groups, eps, affine
        _add_scale(self, [num_channels], affine, dtype)
        _add_shift(self, [num_channels], affine, dtype)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.GroupNormalization(x, _scale(self), _shift(self), num_groups=self.num_groups, epsilon=self.eps)
        return y


class InstanceNorm2d(Module):
    """Mean 0 and variance 1 over H and W of each channel of each sample; scale and shift only with `affine`."""

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = False, *, dtype: str = "float32") -> None:
        super().__init__()
        positive(num_features, "num_features")
        self.eps, self.affine = eps, affine
        _add_scale(self, [num_features], affine, dtype)
        _add_shift(self, [num_features], affine, dtype)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y: ir.Value = op.InstanceNormalization(x, _scale(self), _shift(self), epsilon=self.eps)
        return y


class BatchNorm2d(Module):
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
        super().__init__()
        positive(num_features, "num_features")
        self.eps, self.momentum, self.affine = eps, momentum, affine
        _add_scale(self, [num_features], affine, dtype)
        _add_shift(self, [num_features], affine, dtype)
        self.running_mean = Parameter([num_features], dtype, init=_init.zeros(), learned=False)
        self.running_var = Parameter([num_features], dtype, init=_init.ones(), learned=False)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        state = (_scale(self), _shift(self), self.running_mean, self.running_var)
        y: ir.Value
        if not self.training:
            y = op.BatchNormalization(x, *state, epsilon=self.eps, momentum=1.0 - self.momentum)
            return y
        y, _, _ = op.BatchNormalization(
            x, *state, epsilon=self.eps, momentum=1.0 - self.momentum, training_mode=1, _outputs=3
        )
        return y


_Affine = LayerNorm | RMSNorm | GroupNorm | InstanceNorm2d | BatchNorm2d


def _trailing(normalized_shape: int | Sequence[int]) -> list[int]:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if not shape:
        raise ValueError("normalized_shape names at least one axis, got none")
    return [positive(size, "normalized_shape") for size in shape]


def _add_scale(layer: _Affine, shape: Sequence[int], affine: bool, dtype: str) -> None:
    setattr(layer, "weight" if affine else "ones", Parameter(shape, dtype, init=_init.ones(), learned=affine))


def _add_shift(layer: _Affine, shape: Sequence[int], affine: bool, dtype: str) -> None:
    setattr(layer, "bias" if affine else "zeros", Parameter(shape, dtype, init=_init.zeros(), learned=affine))


def _scale(layer: _Affine) -> ir.Value:
    scale: ir.Value = getattr(layer, "weight" if layer.affine else "ones")
    return scale


def _shift(layer: _Affine) -> ir.Value:
    shift: ir.Value = getattr(layer, "bias" if layer.affine else "zeros")
    return shift
