"""Gradients of ops on every element: each op, and broadcasting in each operand."""

from __future__ import annotations

import numpy as np
from gradient_case import proof

RNG = np.random.default_rng(17)
CHOICE = RNG.random((6, 12)) < 0.5
PLAIN = (
    *("Abs", "Asinh", "Atan", "Cos", "Cosh", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu"),
    *("Mish", "Neg", "Relu", "Selu", "Shrink", "Sigmoid", "Sin", "Sinh", "Softplus", "Softsign", "Tanh"),
    *("ThresholdedRelu", "Celu", "Elu"),
)
ALPHA = ("Celu", "Elu", "HardSigmoid", "LeakyRelu", "ThresholdedRelu")
POSITIVE = ("Log", "Reciprocal", "Sqrt")

CASES = [
    *[proof(op, [(6, 12)], span=(-4, 4) if op == "HardSwish" else None) for op in PLAIN],
    *[proof(op, [(6, 12)], {"alpha": 0.7}) for op in ALPHA],
    *[proof(op, [(6, 12)], span=(0.5, 2)) for op in POSITIVE],
    *[proof(op, [(6, 12)], span=(-0.8, 0.8)) for op in ("Acos", "Asin", "Atanh", "Tan")],
    proof("Acosh", [(6, 12)], span=(1.2, 3)),
    proof("Gelu", [(6, 12)], {"approximate": "tanh"}),
    proof("Gelu", [(6, 12)], domain="com.microsoft"),
    proof("QuickGelu", [(6, 12)], {"alpha": 1.5}, domain="com.microsoft"),
    proof("BiasGelu", [(6, 12), (12,)], domain="com.microsoft"),
    proof("FastGelu", [(6, 12), (12,)], domain="com.microsoft"),
    proof("FastGelu", [(6, 12)], domain="com.microsoft"),
    *[proof(op, [(6, 12), (6, 12)], span=(0.5, 2)) for op in ("Add", "Sub", "Mul", "Div", "Pow")],
    *[proof(op, [(5, 6, 12), (6, 1)], span=(0.5, 2)) for op in ("Add", "Sub", "Mul", "Div", "Pow")],
    *[proof(op, [(12,), (5, 1, 12)], span=(0.5, 2)) for op in ("Add", "Mul", "Div", "Max", "Min")],
    proof("Mul", [(), (6, 12)]),
    proof("Mod", [(6, 12), (12,)], {"fmod": 1}, span=(0.6, 0.9)),
    proof("Mod", [(6, 12), np.float32(0.25)], {"fmod": 1}, wanted=(0,), span=(0.55, 0.7)),
    *[proof("Pow", [(6, 12)], constants={1: np.float32(number)}) for number in (0, 1)],
    proof("Pow", [(6, 12)], constants={1: np.float32(2)}),
    proof("Pow", [(6, 12)], constants={1: np.float32(3)}),
    proof("Pow", [(6, 12)], constants={1: np.int64(3)}),
    *[proof(op, [(6, 12), (12,), (6, 1)]) for op in ("Sum", "Mean", "Max", "Min")],
    *[proof(op, [(6, 12)]) for op in ("Sum", "Mean", "Max", "Min")],
    proof("Clip", [(6, 12), np.float32(-0.7), np.float32(0.9)]),
    proof("Clip", [(6, 12), None, np.float32(0.9)]),
    proof("Clip", [(6, 12), np.float32(-0.7)]),
    proof("Where", [CHOICE, (6, 12), (12,)]),
    proof("Where", [CHOICE, (), (5, 1, 12)]),
    proof("PRelu", [(6, 12), (12,)]),
    proof("Cast", [(6, 12)], {"to": 11}),
    proof("CastLike", [(6, 12), np.zeros(1)], wanted=(0,)),
]

UNPROVEN = {
    "Swish": "onnxruntime has no kernel of it; its slope is that of QuickGelu",
    "partc.nn.ExpertMatMul": "test_experts.py trains with it, cut in every way",
    "partc.nn.ExpertMatMulNBits": "the gradient of its rows is that of the products that it is written as",
    "partc.nn.FromExperts": "test_routes.py trains with it, on one rank and on several",
    "partc.nn.ToExperts": "test_routes.py trains with it, on one rank and on several",
    "partc.nn.Extreme": "test_training_extremes.py trains with it, on one rank and on several",
}
