"""The optimizer of a plan: its types, what each keeps of a parameter, their options, and what is wrong with those that are given.

chosen = optimizer("momentum", {"lr": 0.01, "momentum": 0.9})
chosen.slots                                   # ("momentum",): one tensor of the parameter's shape
chosen.scalars                                 # ("lr",): what the runtime feeds each step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.pattern import nearest
from partc.compiler.plan.violation import shown

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
class Kind:
    """A type of optimizer: the family of its function, its slots, the scalars of a step, and its options beside `lr`."""

    family: str
    slots: tuple[str, ...]
    scalars: tuple[str, ...]
    options: Mapping[str, Option]


_LR = {"lr": Option()}
_DECAY = {"weight_decay": Option(0.0)}
_MOMENTUM = {**_LR, "momentum": Option(0.9, below=1), **_DECAY}
_BETAS = {"betas": Option((0.9, 0.999), below=1)}
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _adam(eps: float, weight_decay: float) -> dict[str, Option]:
    return {**_LR, **_BETAS, "eps": Option(eps, positive=True), "weight_decay": Option(weight_decay)}


OPTIMIZERS = {
    "sgd": Kind("Sgd", (), ("lr",), {**_LR, **_DECAY}),
    "momentum": Kind("Momentum", ("momentum",), ("lr",), _MOMENTUM),
    "nesterov": Kind("Nesterov", ("momentum",), ("lr",), _MOMENTUM),
    "adagrad": Kind(
        "Adagrad",
        ("sum",),
        ("lr",),
        {**_LR, "initial_accumulator": Option(0.0), "eps": Option(1e-10, positive=True), **_DECAY},
    ),
    "adam": Kind("Adam", _MOMENTS, ("lr", "bias1", "bias2"), _adam(1e-8, 0.0)),
    "adamw": Kind("AdamW", _MOMENTS, ("lr", "bias1", "bias2"), _adam(1e-8, 0.01)),
    "adam_weight_decay": Kind("AdamWeightDecay", _MOMENTS, ("lr",), _adam(1e-6, 0.0)),
    "lamb": Kind(
        "Lamb",
        _MOMENTS,
        ("lr", "bias1", "bias2"),
        {**_adam(1e-6, 0.0), "max_ratio": Option(10.0, positive=True)},
    ),
}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer with its numbers. `hyper`: those but `lr` and `weight_decay`, by name, `betas` as `beta1` and `beta2`."""

    type: str
    lr: float
    weight_decay: float = 0.0
    hyper: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def slots(self) -> tuple[str, ...]:
        """The tensors that are kept of each parameter, each of its shape and type."""
        return OPTIMIZERS[self.type].slots

    @property
    def scalars(self) -> tuple[str, ...]:
        """The rank-0 float32 values that a step reads; where gradients are scaled `scale` is one more."""
        return OPTIMIZERS[self.type].scalars

    @property
    def is_elementwise(self) -> bool:
        """Whether an update needs nothing of a parameter but the same elements of its gradient and slots."""
        return self.type != "lamb"

    def initial(self, slot: str) -> float:
        """What every element of a slot begins with."""
        if slot not in self.slots:
            raise KeyError(f"{self.type} has no slot '{slot}'")
        return self.hyper.get("initial_accumulator", 0.0)


def optimizer(
    type: object, options: Mapping[str, object], where: Callable[[str], str] = lambda key: "optimizer"
) -> Optimizer:
    """The optimizer of a type and its options, defaults filled in. Raises CompileError with all that is wrong, each at `where(key)`."""
    if not isinstance(type, str) or type not in OPTIMIZERS:
        near = nearest(type, OPTIMIZERS, 1) if isinstance(type, str) else []
        remedy = f"the nearest is '{near[0]}'" if near else f"choose from {', '.join(OPTIMIZERS)}"
        fact = (
            f"unknown optimizer '{type}'"
            if isinstance(type, str)
            else f"an optimizer's type is a text, but got {shown(type)}"
        )
        raise CompileError(Problem(where("type"), fact, help=remedy))
    known = OPTIMIZERS[type].options
    problems: list[Problem] = []
    numbers: dict[str, float] = {}
    for key in options:
        if key not in known:
            problems.append(Problem(where(key), f"{type}: unknown option '{key}'", help=_remedy(type, key)))
    for key, option in known.items():
        if option.default is None and key not in options:
            problems.append(Problem(where(key), f"{type}: '{key}' is missing", help=f"it is {option.law}"))
            continue
        value = options.get(key, option.default)
        match option.number(value):
            case None:
                got = value if isinstance(value, list | tuple) else shown(value)
                problems.append(Problem(where(key), f"{type}: expected {option.law} as '{key}', but got {got}"))
            case (first, second):
                numbers.update(beta1=first, beta2=second)
            case float(number):
                numbers[key] = number
    if problems:
        raise CompileError(problems)
    return Optimizer(type, numbers.pop("lr"), numbers.pop("weight_decay"), numbers)


def _remedy(type: str, key: str) -> str:
    known = OPTIMIZERS[type].options
    if key in OPTIMIZERS:
        return f"write 'type: {key}'"
    if key in ("beta1", "beta2") and "betas" in known:
        return "write 'betas: [0.9, 0.999]'"
    near = nearest(key, known, 1)
    return f"the nearest is '{near[0]}'" if near else f"the options of {type} are {', '.join(known)}"
