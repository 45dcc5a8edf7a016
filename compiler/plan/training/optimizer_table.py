"""The optimizers of a plan, one row an optimizer: its options, what it keeps of a parameter, and its formula in ONNX ops.

    "lion": OptimizerKind(
        "w' = w (1 - lr weight_decay) - lr sign(beta1 m + (1-beta1) g); m' = beta2 m + (1-beta2) g",
        function="Lion", options={**_LR, **_BETAS, **_DECAY}, slots=("exp_avg",), body="..."
    )

A row is all that a new optimizer needs: the function that artifacts carry, the options that a plan may give, the schema and the slots of
checkpoints follow from it. A body is text, a line a node, element by element:

    @name             the attribute of that name as a constant (an option, `one_minus_beta1`, `lr_multiplier`)
    g                 the gradient after scaling, clipping and coupled weight decay
    name ~ value      `value`, multiplied with the scalar that gradients are scaled with, where this costs no pass over the gradient
    + line, - line    a line of a function with weight decay, of one without
    name_next         what is made of the parameter or of a slot

`1 - beta` is an attribute of its own, for float32 cannot subtract 0.999 from 1 exactly enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Number: TypeAlias = "float | tuple[float, float]"


@dataclass(frozen=True)
class Option:
    """A number, or a pair where its default is one; without a default it must be given. `below` bounds it, `positive` excludes 0."""

    default: Number | None = None
    below: float = math.inf
    positive: bool = False

    @property
    def law(self) -> str:
        """What the number must be, for people."""
        least = "above 0" if self.positive else "at least 0"
        bound = least if math.isinf(self.below) else f"{least} and below {self.below:g}"
        return f"two numbers, each {bound}," if isinstance(self.default, tuple) else f"a number {bound}"

    @property
    def form(self) -> dict[str, Any]:
        """The law as a JSON schema."""
        one: dict[str, Any] = {"type": "number", "exclusiveMinimum" if self.positive else "minimum": 0}
        one |= {} if math.isinf(self.below) else {"exclusiveMaximum": self.below}
        if isinstance(self.default, tuple):
            return {"type": "array", "items": one, "minItems": 2, "maxItems": 2, "default": list(self.default)}
        return one if self.default is None else {**one, "default": self.default}

    def number(self, value: object) -> Number | None:
        """The value as a number or a pair; None where the law does not hold."""
        if not isinstance(self.default, tuple):
            return self._number(value)
        if not isinstance(value, list | tuple) or len(value) != 2:
            return None
        first, second = map(self._number, value)
        return None if first is None or second is None else (first, second)

    def _number(self, value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return float(value) if (value > 0 if self.positive else value >= 0) and value < self.below else None


@dataclass(frozen=True)
class OptimizerKind:
    """A type of optimizer. `doc`: its formula, and whose it is. `function`: the name of the ONNX function that makes the update.

    `options`: by key of the plan what its value must be. `slots`: tensors of the parameter's shape that are kept from step to step.
    `scalars`: what the runtime feeds each step, of `lr`, `bias1` and `bias2`. `body`: the formula; empty where an update is several
    functions (LAMB). `coupled`: weight decay is added to the gradient, and the body need not speak of it.
    """

    doc: str
    function: str
    options: Mapping[str, Option]
    slots: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ("lr",)
    body: str = ""
    coupled: bool = False


MEAN = """
    weight1 ~ @one_minus_beta1
    old_mean = Mul (exp_avg, @beta1)
    new_mean = Mul (g, weight1)
    exp_avg_next = Add (old_mean, new_mean)
"""
SQUARE = """
    root_weight2 = Sqrt (@one_minus_beta2)
    weight2 ~ root_weight2
    weighted = Mul (g, weight2)
    new_square = Mul (weighted, weighted)
    old_square = Mul (exp_avg_sq, @beta2)
    exp_avg_sq_next = Add (old_square, new_square)
    root = Sqrt (exp_avg_sq_next)
"""
# m/bias1 / (sqrt(v/bias2) + eps) is sqrt(bias2)/bias1 * m / (sqrt(v) + eps*sqrt(bias2)): the corrections cost no pass.
CORRECTED = """
    root_bias = Sqrt (bias2)
    small = Mul (root_bias, @eps)
    divisor = Add (root, small)
    quotient = Div (exp_avg_next, divisor)
    correction = Div (root_bias, bias1)
"""
APPLY = """
    - parameter_next = Sub (parameter, change)
    + lost = Mul (rate, @weight_decay)
    + share = Sub (@1, lost)
    + kept = Mul (parameter, share)
    + parameter_next = Sub (kept, change)
"""
RATE = "rate = Mul (lr, @lr_multiplier)\n"
_ADAM = f"{RATE}{MEAN}{SQUARE}{CORRECTED}step = Mul (rate, correction)\nchange = Mul (quotient, step)\n"

_LR = {"lr": Option()}
_DECAY = {"weight_decay": Option(0.0)}
_MOMENTUM = {**_LR, "momentum": Option(0.9, below=1), **_DECAY}
_BETAS = {"betas": Option((0.9, 0.999), below=1)}
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _adam(eps: float, weight_decay: float) -> dict[str, Option]:
    return {**_LR, **_BETAS, "eps": Option(eps, positive=True), "weight_decay": Option(weight_decay)}


OPTIMIZERS = {
    "sgd": OptimizerKind(
        "w' = w - lr (g + weight_decay w), as torch.optim.SGD",
        function="Sgd",
        options={**_LR, **_DECAY},
        body=f"""{RATE}
        step ~ rate
        change = Mul (g, step)
        {APPLY}""",
    ),
    "momentum": OptimizerKind(
        "m' = momentum m + g; w' = w - lr m', as torch.optim.SGD with momentum, without dampening",
        function="Momentum",
        options=_MOMENTUM,
        slots=("momentum",),
        body=f"""{RATE}
        old = Mul (momentum, @momentum)
        momentum_next = Add (old, g)
        change = Mul (momentum_next, rate)
        parameter_next = Sub (parameter, change)
        """,
        coupled=True,
    ),
    "nesterov": OptimizerKind(
        "m' = momentum m + g; w' = w - lr (g + momentum m'), as torch.optim.SGD with nesterov",
        function="Nesterov",
        options=_MOMENTUM,
        slots=("momentum",),
        body=f"""{RATE}
        old = Mul (momentum, @momentum)
        momentum_next = Add (old, g)
        ahead = Mul (momentum_next, @momentum)
        direction = Add (ahead, g)
        change = Mul (direction, rate)
        parameter_next = Sub (parameter, change)
        """,
        coupled=True,
    ),
    "adagrad": OptimizerKind(
        "s' = s + g g; w' = w - lr g / (sqrt(s') + eps), as torch.optim.Adagrad",
        function="Adagrad",
        options={**_LR, "initial_accumulator": Option(0.0), "eps": Option(1e-10, positive=True), **_DECAY},
        slots=("sum",),
        body=f"""{RATE}
        square = Mul (g, g)
        sum_next = Add (sum, square)
        root = Sqrt (sum_next)
        divisor = Add (root, @eps)
        quotient = Div (g, divisor)
        change = Mul (quotient, rate)
        parameter_next = Sub (parameter, change)
        """,
        coupled=True,
    ),
    "adam": OptimizerKind(
        "m' = beta1 m + (1-beta1) g; v' = beta2 v + (1-beta2) g g; w' = w - lr m'/bias1 / (sqrt(v'/bias2) + eps), as torch.optim.Adam",
        function="Adam",
        options=_adam(1e-8, 0.0),
        slots=_MOMENTS,
        scalars=("lr", "bias1", "bias2"),
        body=f"{_ADAM}parameter_next = Sub (parameter, change)",
        coupled=True,
    ),
    "adamw": OptimizerKind(
        "Adam with w (1 - lr weight_decay) in place of w, as torch.optim.AdamW",
        function="AdamW",
        options=_adam(1e-8, 0.01),
        slots=_MOMENTS,
        scalars=("lr", "bias1", "bias2"),
        body=f"{_ADAM}{APPLY}",
    ),
    "adam_weight_decay": OptimizerKind(
        "AdamW without bias correction: w' = w - lr (m' / (sqrt(v') + eps) + weight_decay w), as MindSpore's nn.AdamWeightDecay",
        function="AdamWeightDecay",
        options=_adam(1e-6, 0.0),
        slots=_MOMENTS,
        body=f"""{RATE}{MEAN}{SQUARE}
        divisor = Add (root, @eps)
        quotient = Div (exp_avg_next, divisor)
        change = Mul (quotient, rate)
        {APPLY}""",
    ),
    "lamb": OptimizerKind(
        "the direction of AdamW, scaled by the norm of the parameter over that of the direction, as LAMB (You et al. 2020)",
        function="Lamb",
        options={**_adam(1e-6, 0.0), "max_ratio": Option(10.0, positive=True)},
        slots=_MOMENTS,
        scalars=("lr", "bias1", "bias2"),
    ),
}
"""By the name in a plan."""
