"""First values of parameters by the plan: a distribution and a seed, from which each rank draws its own shard.

    parameters: {"table.weight": {initial: {normal: 0.01, seed: 7}}}

They are those that `nn.init` gives a parameter of this name under this seed; what the model has as the parameter's numbers is not read.
"""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

from partc.runtime.artifact.format import Law
from partc.runtime.options import Options, Refused, shown
from pydantic import Field, PlainValidator, model_validator

_DRAWS = ("normal", "truncated_normal", "uniform", "constant")
_HELP = "write {normal: 0.01, seed: 7}"


def _bounds(value: object) -> tuple[float, float] | None:
    """The least and the largest value of a uniform distribution."""
    law = "a uniform distribution is within a number of zero, or from a number to another"
    help = "write {uniform: 0.1}, or {uniform: [-0.1, 0.1]}"
    if value is None:
        return None
    if isinstance(value, list) and len(value) != 2:
        raise Refused(f"a list of {len(value)}", law, help)
    low, high = (_finite(one, law, help) for one in (value if isinstance(value, list) else (value, value)))
    if not isinstance(value, list):
        if low < 0:
            raise Refused(f"{value} is below zero", law, help)
        low = -low
    if low > high:
        raise Refused(f"{low:g} is above {high:g}", law, help)
    return low, high


def _finite(value: object, law: str, help: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"expected a finite number, but got {shown(value)}", law, help)
    return float(value)


_BoundsForm: TypeAlias = Annotated[
    tuple[float, float] | None,
    PlainValidator(
        _bounds, json_schema_input_type=float | Annotated[list[float], Field(min_length=2, max_length=2)] | None
    ),
]


class InitialRules(Options):
    """First values, drawn from a seed and the parameter's name: one distribution, and what belongs to it."""

    normal: float | None = Field(None, ge=0, description="Normal distribution of this standard deviation.")
    truncated_normal: float | None = Field(
        None, ge=0, description="As normal, cut off at two standard deviations from the mean."
    )
    uniform: _BoundsForm = Field(
        None, description="Evenly within this bound of zero, or from the first to the second number."
    )
    constant: float | None = Field(None, description="This number everywhere.")
    mean: float = Field(0.0, description="Mean of a normal distribution.")
    seed: int = Field(0, ge=0, description="Seed; parameters of other names have other numbers.")

    @model_validator(mode="after")
    def _one_distribution(self) -> InitialRules:
        given = [name for name in _DRAWS if getattr(self, name) is not None]
        if len(given) != 1:
            fact = f"'{given[0]}' and '{given[1]}' are two distributions" if given else "it names no distribution"
            raise Refused(fact, f"first values have one of {', '.join(_DRAWS)}", _HELP)
        if self.mean and given[0] not in ("normal", "truncated_normal"):
            raise Refused(f"'mean' belongs to a normal distribution, and this is '{given[0]}'", help=_HELP, key="mean")
        return self

    def law(self, name: str) -> Law:
        """The law of the parameter of this name."""
        stream = f"{self.seed}/{name}"
        if self.constant is not None:
            return Law(draw="constant", offset=self.constant)
        if self.uniform is not None:
            low, high = self.uniform
            return Law(draw="uniform", stream=stream, offset=low, factor=high - low)
        if self.normal is not None:
            return Law(draw="normal", stream=stream, offset=self.mean, factor=self.normal)
        assert self.truncated_normal is not None
        return Law(draw="truncated_normal", stream=stream, offset=self.mean, factor=self.truncated_normal)
