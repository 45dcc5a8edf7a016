"""Broadcasting undone: the cotangent of an operand is summed over what the operand was repeated along."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.node import Dim, same


def unbroadcast(g: GradientBuilder, dx: str, x: str) -> str:
    """The cotangent `dx` summed over the dims along which `x` was broadcast, in the shape of `x`."""
    have, want = g.shape(dx), g.shape(x)
    if have is not None and want is not None:
        lead = len(have) - len(want)
        pairs = list(zip(have[lead:], want, strict=True)) if lead >= 0 else []
        if lead >= 0 and all(same(a, b) or _is_one(a) or isinstance(b, int) for a, b in pairs):
            spread = [lead + k for k, (a, b) in enumerate(pairs) if _is_one(b) and not same(a, b)]
            dx = g.sum(dx, spread, keepdims=True)
            if not want:
                return g.sum(dx, list(range(lead)))
            for axis in reversed(range(lead)):  # onnxruntime is far slower at two leading axes at once
                dx = g.sum(dx, [axis])
            return dx
    shape, spread_shape = g.shape_of(x), g.shape_of(dx)
    if have is None or want is None:
        ranks = g.Sub(g.Shape(spread_shape), g.Shape(shape))
        ones = g.ConstantOfShape(ranks, value=ir.tensor(np.ones(1, np.int64)))
        padded = g.Concat(ones, shape, axis=0)
    else:
        lead = len(have) - len(want)
        padded = g.Concat(g.constant(np.ones(lead, np.int64)), shape, axis=0) if lead else shape
    one = g.constant(1)
    was_spread = g.And(g.Equal(padded, one), g.Not(g.Equal(spread_shape, one)))
    axes = g.reshape(g.NonZero(was_spread), [-1])
    total = g.ReduceSum(dx, axes, keepdims=1, noop_with_empty_axes=1)
    return g.Reshape(total, shape, allowzero=1)


def _is_one(dim: Dim) -> bool:
    return isinstance(dim, int) and dim == 1
