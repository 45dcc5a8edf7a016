"""Translates functions of torch to ONNX in place of its exporter, where that is wrong for extreme numbers or has no translation.

Each gives torch's value and torch's gradient, by the op table's rules, also for zeros of both signs, tiny numbers that 1 + x would
lose, numbers whose exponential overflows, ties, infinities, NaN. A branch that a Where does not choose gets a harmless operand, as its
gradient would be 0 times infinity:

    log1p(x)    Log(1 + x) + (s - ((1 + s) - 1)) / (1 + s), s = x where |x| < 1/2, else 0: what 1 + x has lost
    expm1(x)    tanh(s / 2) (exp(s) + 1) where |x| < 1/2, else exp(x) - 1
    norms       0, with the gradient 0, where all elements are 0
    max(dim)    the element at the index, which alone gets the gradient; amax shares it, by ReduceMax
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir


class _Ops:
    """onnxscript's functions of opset 18, imported at their first use: a model that is a file does not need them."""

    def __getattr__(self, name: str) -> Any:
        from onnxscript import opset18

        return getattr(opset18, name)


op: Any = _Ops()
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_LN2 = math.log(2)
_LONGEST = 4096
_COMPLEX = "aten::unsqueeze"
"""`_LONGEST`: the longest dim along which a running product is written out, in log2(size) steps.

`_COMPLEX`: the function whose translation for complex numbers is registered in the exporter's registry.
"""


def table() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Maps each function of torch to its translation, in the form of `torch.onnx.export`'s `custom_translation_table`."""
    from onnxscript.function_libs.torch_lib.registration import default_registry, torch_op

    # torch takes no translation of complex numbers from a table
    if _COMPLEX not in default_registry or not default_registry[_COMPLEX].complex:
        torch_op(_COMPLEX, trace_only=True, complex=True)(unsqueeze_complex)
    return _table()


@cache
def _table() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    import torch

    aten = torch.ops.aten
    return {
        aten._cdist_forward.default: cdist,
        aten.atan2.default: atan2,
        aten.clamp.default: clamp,
        aten.clamp.Tensor: clamp_by_tensors,
        aten.clamp_max.default: lambda x, high: clamp(x, None, high),
        aten.clamp_max.Tensor: lambda x, high: clamp_by_tensors(x, None, high),
        aten.clamp_min.default: clamp,
        aten.clamp_min.Tensor: clamp_by_tensors,
        aten.copysign.Scalar: lambda x, other: copysign(x, _like(x, other)),
        aten.copysign.Tensor: copysign,
        aten.cumprod.default: cumprod,
        aten.div.Scalar_mode: divided,
        aten.div.Tensor_mode: divided,
        aten.expm1.default: _in_float(expm1),
        aten.floor_divide.default: floor_divided,
        aten.fmax.default: fmax,
        aten.fmin.default: fmin,
        aten.hardtanh.default: hardtanh,
        aten.heaviside.default: heaviside,
        aten.hypot.default: _in_float(hypot),
        aten.kthvalue.default: kthvalue,
        aten.linalg_vector_norm.default: vector_norm,
        aten.log1p.default: _in_float(log1p),
        aten.log_sigmoid.default: _in_float(log_sigmoid),
        aten.logaddexp.default: _in_float(logaddexp),
        aten.logaddexp2.default: _in_float(logaddexp2),
        aten.logcumsumexp.default: logcumsumexp,
        aten.max.dim: lambda x, dim, keepdim=False: _at_extreme("ArgMax", x, dim, keepdim),
        aten.median.default: lambda x: median_of_all(x, False),
        aten.median.dim: lambda x, dim, keepdim=False: median(x, dim, keepdim, False),
        aten.min.dim: lambda x, dim, keepdim=False: _at_extreme("ArgMin", x, dim, keepdim),
        aten.nanmedian.default: lambda x: median_of_all(x, True),
        aten.nanmedian.dim: lambda x, dim, keepdim=False: median(x, dim, keepdim, True),
        aten.pow.Tensor_Scalar: power,
        aten.relu6.default: lambda x: hardtanh(x, 0, 6),
        aten.remainder.Scalar: remainder,
        aten.remainder.Tensor: remainder,
        aten.signbit.default: signbit,
        aten.sort.stable: sort,
        aten.std.correction: std,
        aten.std_mean.correction: std_mean,
        aten.xlogy.Tensor: xlogy,
    }


def drop_in_attention(model: ir.Model) -> None:
    """Turns on the Dropout of attention, as in torch: the exporter writes one in inference mode."""
    for node in list(model.graph):
        if node.op_type != "Dropout" or "scaled_dot_product_attention" not in node.metadata_props.get(_CLASSES, ""):
            continue
        mode = ir.node("Constant", [], {"value": ir.tensor(np.array(True))})
        mode.outputs[0].name, mode.name = f"{node.outputs[0].name}.mode", f"{node.name}_mode"
        mode.outputs[0].type, mode.outputs[0].shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([])
        model.graph.insert_before(node, mode)
        node.resize_inputs(3)
        node.replace_input_with(2, mode.outputs[0])


def attend_to_none(model: ir.Model) -> None:
    """Makes a query whose boolean mask allows no key attend to none, as torch does.

    The exporter masks with the smallest number, so the softmax of such a row gives equal weights, and the exporter's NaN test never fires.
    """
    for node in list(model.graph):
        if node.op_type != "IsNaN" or "scaled_dot_product_attention" not in node.metadata_props.get(_CLASSES, ""):
            continue
        weights = node.inputs[0]
        softmax = weights.producer() if weights is not None else None
        scores = softmax.inputs[0] if softmax is not None and softmax.op_type == "Softmax" else None
        added = scores.producer() if scores is not None else None
        mask = added.inputs[1] if added is not None and added.op_type == "Add" else None
        chosen = mask.producer() if mask is not None else None
        if chosen is None or chosen.op_type != "Where" or weights is None or mask is None:
            continue
        axes = ir.node("Constant", [], {"value": ir.tensor(np.array([-1], np.int64))})
        best = ir.node("ReduceMax", [mask, axes.outputs[0]], {"keepdims": 1})
        none = ir.node("Equal", [best.outputs[0], chosen.inputs[2]], outputs=[ir.Value(name=node.outputs[0].name)])
        for k, made in enumerate((axes, best, none)):
            made.name = f"{node.name}_{k}"
            made.metadata_props.update(node.metadata_props)
        best.outputs[0].type = mask.type
        none.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [axes, best, none], node.outputs, none.outputs
        )


def _in_float(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it computes in 32 bits where its operands have 16."""

    def wide(*operands: Any) -> Any:
        kind = operands[0].dtype
        if kind not in _HALVES:
            return function(*operands)
        return op.Cast(function(*(_float(x) for x in operands)), to=kind)

    return wide


def _float(x: Any) -> Any:
    wide = op.Cast(x, to=ir.DataType.FLOAT)
    wide.dtype, wide.shape = ir.DataType.FLOAT, x.shape
    return wide


def _like(x: Any, number: float) -> Any:
    """Returns a number as a constant in the type of `x`."""
    return op.Constant(value=ir.tensor(np.array(number, x.dtype.numpy()), dtype=x.dtype))


def _typed(x: Any, like: Any, rank: int | None = None) -> Any:
    """Gives a value that a translation made the type of `like`, and `rank` dims of unknown size, by default the shape of `like`."""
    x.dtype, x.shape = like.dtype, like.shape if rank is None else ir.Shape([None] * rank)
    return x


def _ints(*numbers: int) -> Any:
    return op.Constant(value=ir.tensor(np.array(numbers, np.int64)))


def _operands(x: Any, other: Any) -> tuple[Any, Any]:
    """Returns both operands as values of one type."""
    if isinstance(other, int | float):
        return x, _like(x, other)
    return (x, other) if x.dtype == other.dtype else (x, op.CastLike(other, x))


def _rank(x: Any) -> int:
    if x.shape is None:
        raise ValueError("the number of dims of its operand is not known")
    return len(x.shape)


def log1p(x: Any) -> Any:
    one = _like(x, 1)
    small = op.Where(op.Less(op.Abs(x), _like(x, 0.5)), x, _like(x, 0))
    wide = op.Add(small, one)
    lost = op.Div(op.Sub(small, op.Sub(wide, one)), wide)
    return op.Add(op.Log(op.Add(x, one)), lost)


def expm1(x: Any) -> Any:
    one, near = _like(x, 1), op.Less(op.Abs(x), _like(x, 0.5))
    small = op.Where(near, x, _like(x, 0))
    precise = op.Mul(op.Tanh(op.Mul(small, _like(x, 0.5))), op.Add(op.Exp(small), one))
    return op.Where(near, precise, op.Sub(op.Exp(x), one))


def _softplus(x: Any, like: Any) -> Any:
    """log(1 + exp(x)), in the type of `like`; onnxruntime has no Softplus of 64 bits."""
    if like.dtype != ir.DataType.DOUBLE:
        return op.Softplus(x)
    return op.Add(op.Max(x, _like(like, 0)), log1p(_typed(op.Exp(op.Neg(op.Abs(x))), like)))


def log_sigmoid(x: Any) -> Any:
    return op.Neg(_softplus(op.Neg(x), x))


def logaddexp(a: Any, b: Any) -> Any:
    """max(a, b) + log(1 + exp(-|a - b|)), with a - b as 0 also for equal infinities."""
    apart = op.Where(op.Equal(a, b), _like(a, 0), op.Sub(a, b))
    return op.Add(op.Max(a, b), _softplus(op.Neg(op.Abs(apart)), a))


def logaddexp2(a: Any, b: Any) -> Any:
    apart = op.Where(op.Equal(a, b), _like(a, 0), op.Sub(a, b))
    rest = _softplus(op.Mul(op.Abs(apart), _like(a, -_LN2)), a)
    return op.Add(op.Max(a, b), op.Mul(rest, _like(a, 1 / _LN2)))


def signbit(x: Any) -> Any:
    """Whether a number is negative, or the negative zero, whose reciprocal is negative."""
    zero = _like(x, 0)
    if not x.dtype.is_floating_point():
        return op.Less(x, zero)
    return op.Less(op.Where(op.Equal(x, zero), op.Reciprocal(x), x), zero)


def copysign(x: Any, sign: Any) -> Any:
    size = op.Abs(x)
    return op.Where(signbit(sign), op.Neg(size), size)


def atan2(y: Any, x: Any) -> Any:
    """The arc tangent of the smaller operand over the larger, turned by a half or a quarter: also where both are 0 or infinite."""
    (y, x), zero = _operands(y, x), _like(y, 0)
    steep = op.Greater(op.Abs(y), op.Abs(x))
    over, under = op.Where(steep, x, y), op.Where(steep, y, x)
    nothing = op.Equal(under, zero)
    slope = op.Div(over, op.Where(nothing, _like(y, 1), under))
    infinite = op.And(op.IsInf(y), op.IsInf(x))
    slope = op.Where(infinite, op.Mul(op.Sign(y), op.Sign(x)), slope)
    angle, negative = op.Atan(slope), signbit(y)
    quarter = op.Where(negative, _like(y, -math.pi / 2), _like(y, math.pi / 2))
    half = op.Where(negative, _like(y, -math.pi), _like(y, math.pi))
    return op.Where(steep, op.Sub(quarter, angle), op.Where(signbit(x), op.Add(angle, half), angle))


def hypot(a: Any, b: Any) -> Any:
    """The square root of a**2 + b**2, scaled so that the squares do not overflow."""
    larger, power = op.Max(op.Abs(a), op.Abs(b)), 2.0 ** (500 if a.dtype == ir.DataType.DOUBLE else 70)
    scale = op.Where(op.Greater(larger, _like(a, power**0.5)), _like(a, power), _like(a, 1))
    scale = op.Where(op.Less(larger, _like(a, power**-0.5)), _like(a, 1 / power), scale)
    x, y = op.Div(a, scale), op.Div(b, scale)
    length = op.Mul(op.Sqrt(op.Add(op.Mul(x, x), op.Mul(y, y))), scale)
    return op.Where(op.Or(op.IsInf(a), op.IsInf(b)), _like(a, math.inf), length)


def fmax(a: Any, b: Any) -> Any:
    """The larger operand; for a NaN and a number, the number. As in torch, the gradient goes to `a` where both are equal."""
    return op.Where(op.Or(op.GreaterOrEqual(a, b), op.IsNaN(b)), a, b)


def fmin(a: Any, b: Any) -> Any:
    return op.Where(op.Or(op.LessOrEqual(a, b), op.IsNaN(b)), a, b)


def heaviside(x: Any, at_zero: Any) -> Any:
    zero = _like(x, 0)
    return op.Where(op.Equal(x, zero), at_zero, op.Cast(op.Greater(x, zero), to=x.dtype))


def xlogy(x: Any, y: Any) -> Any:
    """x log y; 0 where x is 0 and the logarithm is not finite; NaN where y is NaN."""
    zero = _like(x, 0)
    unbounded = op.Or(op.LessOrEqual(y, zero), op.IsInf(y))
    return op.Mul(x, op.Log(op.Where(op.And(op.Equal(x, zero), unbounded), _like(x, 1), y)))


def clamp(x: Any, low: float | None = None, high: float | None = None) -> Any:
    """Clip with both bounds: onnxruntime replaces an absent bound by the largest number, to which it would clip an infinity."""
    if low is None and high is None:
        return op.Identity(x)
    if not x.dtype.is_floating_point():
        if any(isinstance(bound, float) for bound in (low, high)):
            x = _float(x)
        else:
            return op.Clip(x, *(None if bound is None else _like(x, bound) for bound in (low, high)))
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    return op.Clip(x, *(_like(x, bound) for bound in bounds))


def clamp_by_tensors(x: Any, low: Any = None, high: Any = None) -> Any:
    """Returns the bound where a number is beyond it; at the bound the gradient goes to the number alone."""
    if low is not None:
        low = op.CastLike(low, x)
        x = op.Where(op.Less(x, low), low, x)
    if high is not None:
        high = op.CastLike(high, x)
        x = op.Where(op.Greater(x, high), high, x)
    return x


def hardtanh(x: Any, low: float = -1, high: float = 1) -> Any:
    """A clamp that passes no gradient at the bounds either, as far as one op can: at 0, by Relu."""
    if low == 0 and x.dtype.is_floating_point():
        return op.Clip(op.Relu(x), _like(x, 0), _like(x, high))
    lowest, highest = _like(x, low), _like(x, high)
    return op.Where(op.LessOrEqual(x, lowest), lowest, op.Where(op.GreaterOrEqual(x, highest), highest, x))


def power(x: Any, exponent: float) -> Any:
    """A power; roots are written as Sqrt, since (-inf) to the power 0.5 is inf, but its square root is NaN."""
    if not x.dtype.is_floating_point():
        if isinstance(exponent, int):
            return op.Pow(x, _like(x, exponent))
        x = _float(x)
    if exponent == 0.5:
        return op.Sqrt(x)
    if exponent == -0.5:
        return op.Reciprocal(op.Sqrt(x))
    return op.Pow(x, _like(x, exponent))


def divided(x: Any, other: Any, rounding_mode: str | None = None) -> Any:
    """The quotient, rounded towards 0 or down; the quotient of integers is exact, without conversion to a float."""
    if isinstance(other, float) and not x.dtype.is_floating_point():
        x = _float(x)
    x, other = _operands(x, other)
    if rounding_mode == "floor":
        return floor_divided(x, other)
    quotient = op.Div(x, other)
    if rounding_mode is None or not x.dtype.is_floating_point():
        return quotient
    return op.Where(op.Less(quotient, _like(x, 0)), op.Ceil(quotient), op.Floor(quotient))


def floor_divided(x: Any, other: Any) -> Any:
    """The quotient rounded down, computed from x minus its remainder: 2.1 // 0.7 is 2, as 2.1 is less than 3 times 0.7."""
    if isinstance(other, float) and not x.dtype.is_floating_point():
        x = _float(x)
    x, other = _operands(x, other)
    zero = _like(x, 0)
    if not x.dtype.is_floating_point():
        rest = op.Mod(x, other)  # with the sign of the divisor
        return op.Div(op.Sub(x, rest), other)
    rest = op.Mod(x, other, fmod=1)
    exact = op.Div(op.Sub(x, rest), other)
    below = op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(other, zero)))
    exact = op.Where(below, op.Sub(exact, _like(x, 1)), exact)
    down = op.Floor(exact)
    nearest = op.Where(op.Greater(op.Sub(exact, down), _like(x, 0.5)), op.Add(down, _like(x, 1)), down)
    return op.Floor(op.Where(op.Equal(other, zero), op.Div(x, other), nearest))


def remainder(x: Any, other: Any) -> Any:
    """The remainder, with the sign of the divisor."""
    if isinstance(other, float) and not x.dtype.is_floating_point():
        x = _float(x)
    x, other = _operands(x, other)
    if not x.dtype.is_floating_point():
        return op.Mod(x, other)
    rest, zero = op.Mod(x, other, fmod=1), _like(x, 0)
    turned = op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(other, zero)))
    return op.Where(turned, op.Add(rest, other), rest)


def _reduced(x: Any, dim: Sequence[int] | int | None) -> tuple[Any, Any]:
    """Returns the operand of a reduction and its axes: all axes where `dim` names none."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return x, _ints(*range(_rank(x)))
    return x, _ints(*([dim] if isinstance(dim, int) else dim))


def vector_norm(x: Any, ord: float = 2.0, dim: Any = None, keepdim: bool = False, dtype: int = -1) -> Any:
    """The norm along dims; its gradient is 0 where all elements are 0."""
    x = x if dtype in (-1, None) else op.Cast(x, to=dtype)
    x, axes = _reduced(x, dim)
    keep = int(keepdim)
    zero = _like(x, 0)
    if ord == 2:
        return op.ReduceL2(x, axes, keepdims=keep)
    if ord == 1:
        return op.ReduceL1(x, axes, keepdims=keep)
    if ord == 0:
        return op.ReduceSum(op.Cast(op.Not(op.Equal(x, zero)), to=x.dtype), axes, keepdims=keep)
    size = op.Abs(x)
    if math.isinf(ord):
        return (op.ReduceMax if ord > 0 else op.ReduceMin)(size, axes, keepdims=keep)
    one, nothing = _like(x, 1), op.Equal(size, zero)
    raised = op.Pow(op.Where(nothing, one, size), _like(x, ord))
    raised = op.Where(nothing, _like(x, 0 if ord > 0 else math.inf), raised)
    total = op.ReduceSum(raised, axes, keepdims=keep)
    none = op.Or(op.Equal(total, zero), op.IsInf(total)) if ord < 0 else op.Equal(total, zero)
    root = op.Pow(op.Where(none, one, total), _like(x, 1 / ord))
    return op.Where(none, zero, root)


def unsqueeze_complex(self: Any, dim: int) -> Any:
    """Inserts a dim of 1 into complex numbers, which the exporter stores with real and imaginary parts as a last dim of 2."""
    return op.Unsqueeze(self, [dim if dim >= 0 else dim - 1])


def cdist(a: Any, b: Any, p: float, compute_mode: int | None = None) -> Any:
    """The norm of the difference of each row of `a` and each row of `b`."""
    difference = op.Sub(op.Unsqueeze(a, _ints(-2)), op.Unsqueeze(b, _ints(-3)))
    return vector_norm(_typed(difference, a, _rank(a) + 1), p, -1)


def std(x: Any, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> Any:
    """The standard deviation along dims; its gradient is 0 where the deviation is 0."""
    return std_mean(x, dim, correction, keepdim)[0]


def std_mean(x: Any, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    x, axes = _reduced(x, dim)
    centered = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    total = op.ReduceSum(op.Mul(centered, centered), axes, keepdims=int(keepdim))
    count = op.ReduceProd(op.Gather(op.Shape(x), axes), keepdims=0)
    zero = _like(x, 0)
    freedom = op.Max(op.Sub(op.CastLike(count, x), _like(x, 1 if correction is None else correction)), zero)
    variance = op.Div(total, freedom)
    none = op.Equal(variance, zero)
    deviation = op.Where(none, zero, op.Sqrt(op.Where(none, _like(x, 1), variance)))
    return deviation, op.ReduceMean(x, axes, keepdims=int(keepdim))


def _at_extreme(op_type: str, x: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    if _rank(x) == 0:
        return op.Identity(x), op.Constant(value_int=0)
    index = getattr(op, op_type)(x, axis=dim, keepdims=1)
    value = op.GatherElements(x, index, axis=dim)
    if keepdim:
        return value, index
    return op.Squeeze(value, _ints(dim)), op.Squeeze(index, _ints(dim))


def sort(x: Any, stable: bool | None = False, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """Sorts by a TopK of all elements: of equal elements the first comes first."""
    if _rank(x) == 0:
        return op.Identity(x), op.Constant(value_int=0)
    size = op.Reshape(op.Gather(op.Shape(x), dim, axis=0), _ints(-1))
    values, indices = op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)
    return values, indices


def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    return _last(op.TopK(x, _ints(k), axis=dim, largest=0, sorted=1), _ints(k - 1), dim, keepdim)


def median(x: Any, dim: int, keepdim: bool, ignores_nan: bool) -> tuple[Any, Any]:
    """The lower of the two middle elements along a dim; NaN where any element is NaN, unless NaN are ignored."""
    bad = op.IsNaN(x)
    count = _count(op.Not(bad) if ignores_nan else None, x, dim)
    middle = op.Div(op.Max(op.Sub(count, _ints(1)), _ints(0)), _ints(2))
    ordered = op.Where(bad, _like(x, math.inf), x)
    size = op.Reshape(op.Gather(op.Shape(x), dim, axis=0), _ints(-1))
    ranks = op.TopK(ordered, size, axis=dim, largest=0, sorted=1)
    at = op.GatherElements(ranks[1], op.Expand(middle, op.Shape(op.ReduceSum(ranks[1], _ints(dim)))), axis=dim)
    if not ignores_nan:
        numbers = op.Cast(bad, to=ir.DataType.INT64)
        first = op.ArgMax(numbers, axis=dim, keepdims=1)
        at = op.Where(op.Greater(op.ReduceMax(numbers, _ints(dim)), _ints(0)), first, at)
    value = op.GatherElements(x, at, axis=dim)
    if keepdim:
        return value, at
    return op.Squeeze(value, _ints(dim)), op.Squeeze(at, _ints(dim))


def _count(counted: Any, x: Any, dim: int) -> Any:
    """Returns the number of counted elements along a dim: for each row, or the dim's size where `counted` is None."""
    if counted is None:
        return op.Reshape(op.Gather(op.Shape(x), dim, axis=0), _ints(*[1] * _rank(x)))
    return op.ReduceSum(op.Cast(counted, to=ir.DataType.INT64), _ints(dim), keepdims=1)


def median_of_all(x: Any, ignores_nan: bool) -> Any:
    """The median of all elements, as the largest element that is at most the median, so that equal elements share the gradient."""
    flat = _typed(op.Reshape(x, _ints(-1)), x, 1)
    found = median(flat, 0, True, ignores_nan)[0]
    lowest = _like(x, -math.inf)
    largest = op.ReduceMax(op.Where(op.LessOrEqual(flat, found), flat, lowest), _ints(0), keepdims=0)
    return op.Where(op.Squeeze(op.IsNaN(found), _ints(0)), _like(x, math.nan), largest)


def _last(ranks: Any, at: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    values, indices = (op.Gather(part, at, axis=dim) for part in ranks)
    if keepdim:
        return values, indices
    return op.Squeeze(values, _ints(dim)), op.Squeeze(indices, _ints(dim))


def cumprod(x: Any, dim: int, dtype: int = -1) -> Any:
    x = x if dtype in (-1, None) else op.Cast(x, to=dtype)
    return _scanned(x, dim, 1, lambda a, b: op.Mul(a, b), "cumprod")


def logcumsumexp(x: Any, dim: int) -> Any:
    return _scanned(x, dim, -math.inf, logaddexp, "logcumsumexp")


def _scanned(x: Any, dim: int, neutral: float, combine: Callable[[Any, Any], Any], name: str) -> Any:
    """A running reduction in log2(size) steps: each element is combined with the one 1, 2, 4 ... places before it."""
    if _rank(x) == 0:
        return op.Identity(x)
    axis = dim % _rank(x)
    size = x.shape[axis]
    if not isinstance(size, int) or size > _LONGEST:
        raise ValueError(
            f"torch.{name} has a translation along a dim of fixed size, at most {_LONGEST}; this is {size}"
        )
    pads = [0] * (2 * _rank(x))
    step = 1
    while step < size:
        pads[axis] = step
        shifted = op.Pad(op.Slice(x, _ints(0), _ints(size - step), _ints(axis)), _ints(*pads), _like(x, neutral))
        x = _typed(combine(x, _typed(shifted, x)), x)
        step *= 2
    return x
