"""Ops of one tensor that work on every element by itself: any dim may be sharded.

The gradient is the cotangent times the slope, which is written with the output where that is cheaper or where the output is kept anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from partc.compiler.autodiff.builder import GradientBuilder
from partc.compiler.ops.registry import CONTRIB, Precision, Rounding, op
from partc.compiler.ops.work import Kernel

SELU_ALPHA, SELU_GAMMA = 1.6732632423543772, 1.0507009873554805

Slope = Callable[[GradientBuilder, str], str]
SLOPES: dict[str, Slope] = {
    "Abs": lambda g, x: g.Sign(x),
    "Acos": lambda g, x: g.Neg(_over_root(g, _one_minus(g, g.Mul(x, x)))),
    "Acosh": lambda g, x: _over_root(g, g.Sub(g.Mul(x, x), g.constant(1, x))),
    "Asin": lambda g, x: _over_root(g, _one_minus(g, g.Mul(x, x))),
    "Asinh": lambda g, x: _over_root(g, _one_plus(g, g.Mul(x, x))),
    "Atan": lambda g, x: g.Reciprocal(_one_plus(g, g.Mul(x, x))),
    "Atanh": lambda g, x: g.Reciprocal(_one_minus(g, g.Mul(x, x))),
    "Celu": lambda g, x: g.Exp(g.Div(g.Min(x, g.constant(0, x)), g.constant(g.attribute("alpha", 1.0), x))),
    "Cos": lambda g, x: g.Neg(g.Sin(x)),
    "Cosh": lambda g, x: g.Sinh(x),
    "Elu": lambda g, x: _right_of_zero(g, x, 1, g.Add(g.output(0), g.constant(g.attribute("alpha", 1.0), x))),
    "Erf": lambda g, x: g.Mul(g.Exp(g.Neg(g.Mul(x, x))), g.constant(2 / math.sqrt(math.pi), x)),
    "Exp": lambda g, x: g.output(0),
    "Gelu": lambda g, x: gelu_tanh(g, x) if g.attribute("approximate", "none") == "tanh" else gelu(g, x),
    "HardSigmoid": lambda g, x: g.Mul(_between(g, 0, 1), g.constant(g.attribute("alpha", 0.2), x)),
    "HardSwish": lambda g, x: hard_swish(g, x),
    "LeakyRelu": lambda g, x: _right_of_zero(g, x, 1, g.constant(g.attribute("alpha", 0.01), x)),
    "Mish": lambda g, x: mish(g, x),
    "Relu": lambda g, x: g.mask(g.Greater(g.output(0), g.constant(0, x)), x),
    "Selu": lambda g, x: _selu(g, x, g.attribute("alpha", SELU_ALPHA), g.attribute("gamma", SELU_GAMMA)),
    "Shrink": lambda g, x: g.mask(g.Greater(g.Abs(x), g.constant(g.attribute("lambd", 0.5), x)), x),
    "Sigmoid": lambda g, x: g.Mul(g.output(0), _one_minus(g, g.output(0))),
    "Sin": lambda g, x: g.Cos(x),
    "Sinh": lambda g, x: g.Cosh(x),
    "Softplus": lambda g, x: g.Sigmoid(x),
    "Softsign": lambda g, x: _square(g, _one_minus(g, g.Abs(g.output(0)))),
    "Swish": lambda g, x: swish(g, x, g.attribute("alpha", 1.0)),
    "Tan": lambda g, x: _one_plus(g, _square(g, g.output(0))),
    "Tanh": lambda g, x: _one_minus(g, _square(g, g.output(0))),
    "ThresholdedRelu": lambda g, x: g.mask(g.Greater(x, g.constant(g.attribute("alpha", 1.0), x)), x),
}
"""Maps each op to the derivative of its output by its input, element by element. An op with a slope needs no more than its line here."""
_FOLLOWING = (
    *("Abs", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Selu", "Shrink", "Sigmoid", "Softsign"),
    *("Swish", "Tanh", "ThresholdedRelu"),
)
"""The ops among these that lose nothing in 16 bits: no exponential or power leaves the range."""
_RISING = ("Elu", "Erf", "Exp", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Tanh")
"""The ops among these that make more of more."""
_EXACT = ("Abs", "Relu")
"""The ops among these that round nothing."""
_BY_BYTES = (
    "Abs",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "Neg",
    "Reciprocal",
    "Relu",
    "Shrink",
    "Sqrt",
    "ThresholdedRelu",
)
"""The ops among these that compute less than they move."""


def _by_slope(slope: Slope) -> Callable[[GradientBuilder, str, str], str]:
    return lambda g, dy, x: g.Mul(dy, slope(g, x))


for _name, _slope in SLOPES.items():
    _precision: Precision = "follow" if _name in _FOLLOWING else "high"
    _kernel: Kernel = "elementwise" if _name in _BY_BYTES else "function"
    _rounds: Rounding | None = "exact" if _name in _EXACT else None
    _rising = _name in _RISING
    _declared = op(_name, factors="*->*", precision=_precision, rounds=_rounds, rising=_rising, kernel=_kernel)
    _declared.gradient(_by_slope(_slope))
op("Gelu", domain=CONTRIB, factors="*->*", kernel="function").gradient(_by_slope(lambda g, x: gelu(g, x)))
op("QuickGelu", domain=CONTRIB, factors="*->*", kernel="function").gradient(
    _by_slope(lambda g, x: swish(g, x, g.attribute("alpha", 1.702)))
)
op("Ceil", "Floor", "Round", "Sign", factors="*->*", stops_gradient=True, precision="follow", rising=True)
op(
    "IsInf",
    "IsNaN",
    "Not",
    "BitwiseNot",
    factors="*->*",
    stops_gradient=True,
    precision="follow",
)
identity = op("Identity", factors="*->*", linear="joint", precision="follow", kernel="view")
negative = op("Neg", factors="*->*", linear="joint", precision="follow", rounds="exact")
logarithm = op("Log", factors="*->*", rounds="sums", rising=True)
reciprocal = op("Reciprocal", factors="*->*", rounds="sums")
root = op("Sqrt", factors="*->*", rounds="sums", rising=True)
bias_gelu = op("BiasGelu", domain=CONTRIB, factors="*,*->*", kernel="function")
fast_gelu = op("FastGelu", domain=CONTRIB, factors="*,*->*")


@identity.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = dY."""
    return dy


@negative.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = -dY."""
    return g.Neg(dy)


@logarithm.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = dY / X."""
    return g.Div(dy, x)


@reciprocal.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = -dY Y Y."""
    return g.Neg(g.Mul(dy, _square(g, g.output(0))))


@root.gradient
def _(g: GradientBuilder, dy: str, x: str) -> str:
    """dX = dY / 2 Y."""
    return g.Div(g.Mul(dy, g.constant(0.5, x)), g.output(0))


@bias_gelu.gradient
def _(g: GradientBuilder, dy: str, x: str, bias: str) -> tuple[str, str]:
    """dX = dB = dY gelu'(X + B)."""
    dx = g.Mul(dy, gelu(g, g.Add(x, bias)))
    return dx, dx


@fast_gelu.gradient
def _(g: GradientBuilder, dy: str, x: str, bias: str | None = None) -> tuple[str, str]:
    """dX = dB = dY gelu'(X + B), the form with tanh."""
    dx = g.Mul(dy, gelu_tanh(g, g.Add(x, bias) if bias else x))
    return dx, dx


def gelu(g: GradientBuilder, x: str) -> str:
    """The slope of x F(x), F the normal distribution: F(x) + x exp(-x x / 2) / sqrt(2 pi)."""
    erf = g.Erf(g.Mul(x, g.constant(math.sqrt(0.5), x)))
    below = g.Mul(_one_plus(g, erf), g.constant(0.5, x))
    density = g.Exp(g.Mul(g.Mul(x, x), g.constant(-0.5, x)))
    return g.Add(below, g.Mul(x, g.Mul(density, g.constant(1 / math.sqrt(2 * math.pi), x))))


def gelu_tanh(g: GradientBuilder, x: str) -> str:
    """The slope of x (1 + t) / 2, t = tanh(u), u = sqrt(2 / pi) (x + 0.044715 x^3): (1 + t + x u' (1 - t t)) / 2."""
    outer, inner, square = math.sqrt(2 / math.pi), 0.044715, g.Mul(x, x)
    cubic = g.Add(g.Mul(square, g.constant(outer * inner, x)), g.constant(outer, x))
    tanh = g.Tanh(g.Mul(x, cubic))
    bend = g.Add(g.Mul(square, g.constant(3 * outer * inner, x)), g.constant(outer, x))
    rest = g.Mul(g.Mul(x, bend), _one_minus(g, g.Mul(tanh, tanh)))
    return g.Mul(g.Add(_one_plus(g, tanh), rest), g.constant(0.5, x))


def swish(g: GradientBuilder, x: str, alpha: float) -> str:
    """The slope of x s, s = sigmoid(a x): s + a x s (1 - s)."""
    scaled = x if alpha == 1.0 else g.Mul(x, g.constant(alpha, x))
    sigmoid = g.Sigmoid(scaled)
    return g.Mul(sigmoid, _one_plus(g, g.Mul(scaled, _one_minus(g, sigmoid))))


def hard_swish(g: GradientBuilder, x: str) -> str:
    """The slope of x min(max(x / 6 + 1 / 2, 0), 1): 0 below -3, 1 above 3, x / 3 + 1 / 2 between."""
    three = g.constant(3, x)
    between = g.Add(g.Div(x, three), g.constant(0.5, x))
    return g.Where(g.Less(g.Abs(x), three), between, g.mask(g.Greater(x, g.constant(0, x)), x))


def mish(g: GradientBuilder, x: str) -> str:
    """The slope of x t, t = tanh(softplus(x)): t + x (1 - t t) sigmoid(x)."""
    tanh = g.Tanh(g.Softplus(x))
    return g.Add(tanh, g.Mul(g.Mul(x, g.Sigmoid(x)), _one_minus(g, g.Mul(tanh, tanh))))


def _selu(g: GradientBuilder, x: str, alpha: float, gamma: float) -> str:
    return _right_of_zero(g, x, gamma, g.Add(g.output(0), g.constant(alpha * gamma, x)))


def _right_of_zero(g: GradientBuilder, x: str, right: float, left: str) -> str:
    return g.Where(g.Greater(x, g.constant(0, x)), g.constant(right, x), left)


def _between(g: GradientBuilder, low: float, high: float) -> str:
    y = g.output(0)
    inside = g.And(g.Greater(y, g.constant(low, y)), g.Less(y, g.constant(high, y)))
    return g.mask(inside, y)


def _one_plus(g: GradientBuilder, x: str) -> str:
    return g.Add(x, g.constant(1, x))


def _one_minus(g: GradientBuilder, x: str) -> str:
    return g.Sub(g.constant(1, x), x)


def _square(g: GradientBuilder, x: str) -> str:
    return g.Mul(x, x)


def _over_root(g: GradientBuilder, x: str) -> str:
    return g.Reciprocal(g.Sqrt(x))
