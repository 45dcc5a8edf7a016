"""The scalar inputs of an optimizer's functions at each step, computed from the optimizer's own numbers and the rate of the step.

scalars(("lr", "bias1", "bias2"), 12, {"lr": rate(12), "beta1": 0.9, "beta2": 0.999})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import numpy as np

SCALARS: Mapping[str, Callable[[int, Mapping[str, float]], float]] = {
    "lr": lambda step, hyper: hyper["lr"],
    "scale": lambda step, hyper: hyper.get("scale", 1.0),
    "bias1": lambda step, hyper: 1 - hyper["beta1"] ** (step + 1),
    "bias2": lambda step, hyper: 1 - hyper["beta2"] ** (step + 1),
    "forget": lambda step, hyper: (step + 1) ** hyper["beta2_decay"],
    "bound": lambda step, hyper: (step + 1) ** -0.5,
}
"""Maps the name of each scalar input of an optimizer's functions to its computation; `hyper` has the optimizer's numbers and `lr`, the rate
of the step.
"""
NUMBERS = frozenset((*SCALARS, "ratio"))
"""The inputs of an optimizer's functions that are single numbers."""
_SHARED = ("lr", "scale")


class OptimizerRecord(BaseModel):
    """An optimizer with its numbers by name; `lr`: the rate before the schedule, which `others`, those of some parameters, follow."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, allow_inf_nan=False)

    type: str
    lr: float = Field(0.0, ge=0)
    hyper: dict[str, float] = {}
    others: dict[str, OptimizerRecord] = {}

    @property
    def types(self) -> str:
        """The types of this optimizer and of the others, as text: `adam, adagrad`."""
        return ", ".join(dict.fromkeys([self.type, *(one.type for one in self.others.values())]))

    @property
    def numbers(self) -> dict[str, float]:
        """Maps names to all numbers; those of `others` have their optimizer's name before them: `adam.beta1`."""
        others = {f"{of}.{name}": value for of, own in self.others.items() for name, value in own.hyper.items()}
        return {"lr": self.lr, **self.hyper, **others}


def scalar_name(optimizer: str, scalar: str) -> str:
    """The name of an input for an optimizer's scalar: `adam.bias1`; no prefix for `lr`, `scale`, and the training's own optimizer ("")."""
    return f"{optimizer}.{scalar}" if optimizer and scalar not in _SHARED else scalar


def scalars(names: Sequence[str], step: int, hyper: Mapping[str, float]) -> dict[str, np.float32]:
    """The scalars of a step, counted from 0: computed in float64, then rounded to float32.

    `hyper` has the numbers of an OptimizerRecord, with the step's `lr`.
    """
    import numpy as np

    numbers = {}
    for name in names:
        optimizer, dot, scalar = name.rpartition(".")
        prefix = optimizer + dot
        own = {key.removeprefix(prefix): number for key, number in hyper.items() if key.startswith(prefix)}
        numbers[name] = np.float32(SCALARS[scalar](step, own))
    return numbers
