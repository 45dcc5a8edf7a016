"""Learning rates by step.

A schedule gives the rate of a step, counted from 0. `base` is the optimizer's rate, `last` is `minimum`, 0 by default:

    constant                            base
    step        every, factor           base * factor^(step // every)
    multistep   at, factor              base * factor^(number of steps in `at` that are reached)
    linear      steps, minimum          last + (base - last) * left
    polynomial  steps, power, minimum   last + (base - last) * left^power
    cosine      steps, minimum          last + (base - last) * (1 + cos(pi * (1 - left))) / 2
    python      function                the number that `file.py:function` returns for the step

All types count the steps of the training, including those of a warmup: with `warmup: w`, which is 0 by default, `left` goes from 1 at
step w to 0 at step `steps`, and stays there. In the first w steps the schedule's rate is multiplied by (step + 1)/w; with
`from_zero: true` by step/w, as in Hugging Face's schedules, whose first step changes nothing. With `after_warmup: true` the schedule
counts from the warmup's end instead, so that it ends w steps later, and the warmup leads to the rate of its step 0.

    rate = rate_of(Cosine(type="cosine", steps=1000, warmup=10), 0.1)
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, Self, TypeAlias

from partc.runtime.errors import UsageError
from partc.runtime.options import Options, Refused, of_type, shown
from partc.runtime.user_code import run_file, user_code
from pydantic import AfterValidator, Field, WithJsonSchema, WrapValidator, model_validator

Rate: TypeAlias = Callable[[int], float]
Run: TypeAlias = Callable[[Path], ModuleType]


def _rising(steps: tuple[int, ...]) -> tuple[int, ...]:
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise Refused("expected a rising list of steps", help="write each step once, the first one first: [30, 60]")
    return steps


def _reference(text: str) -> str:
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise Refused(f"expected a text 'file.py:function', but got {shown(text)}")
    return text


_Count: TypeAlias = Annotated[int, Field(ge=1)]
_Positive: TypeAlias = Annotated[float, Field(gt=0)]


class _Warmed(Options):
    """A schedule by its type."""

    type: str
    warmup: int = Field(0, ge=0)
    after_warmup: bool = False
    from_zero: bool = False

    def at_step(self, step: int, base: float, begin: int) -> float:
        """The rate of a step, without the warmup; a decaying schedule decays from the step `begin` on."""
        return base


class Constant(_Warmed):
    type: Literal["constant"]


class Steps(_Warmed):
    type: Literal["step"]
    every: _Count = Field(description="The number of steps with one rate.")
    factor: _Positive = Field(description="What the rate is multiplied with.")

    def at_step(self, step: int, base: float, begin: int) -> float:
        return base * self.factor ** (step // self.every)


class Multistep(_Warmed):
    type: Literal["multistep"]
    at: Annotated[tuple[_Count, ...], Field(min_length=1, strict=False), AfterValidator(_rising)] = Field(
        description="The steps at which the rate changes."
    )
    factor: _Positive = Field(description="What the rate is multiplied with.")

    def at_step(self, step: int, base: float, begin: int) -> float:
        return base * self.factor ** bisect.bisect_right(self.at, step)


class _Decaying(_Warmed):
    """A schedule that goes from the optimizer's rate to `minimum`."""

    steps: _Count = Field(description="The step at which `minimum` is reached.")
    minimum: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _has_steps_left(self) -> Self:
        if self.warmup >= self.steps and not self.after_warmup:
            fact = f"'steps' {self.steps} include 'warmup' {self.warmup}, and none are left after it"
            raise Refused(fact, help="raise 'steps', or say 'after_warmup: true'")
        return self

    def at_step(self, step: int, base: float, begin: int) -> float:
        left = 1 - min(max(step - begin, 0) / (self.steps - begin), 1.0)
        return self.minimum + (base - self.minimum) * self.share(left)

    def share(self, left: float) -> float:
        """The share of the way from `minimum` up to the optimizer's rate that remains, where the share `left` of the steps remains."""
        return left


class Linear(_Decaying):
    type: Literal["linear"]


class Polynomial(_Decaying):
    type: Literal["polynomial"]
    power: _Positive = 1.0

    def share(self, left: float) -> float:
        return float(left**self.power)


class Cosine(_Decaying):
    type: Literal["cosine"]

    def share(self, left: float) -> float:
        return (1 - math.cos(math.pi * left)) / 2


class Python(_Warmed):
    type: Literal["python"]
    function: Annotated[str, AfterValidator(_reference), WithJsonSchema({"type": "string", "pattern": r"\.py:\w+$"})]


Schedule: TypeAlias = Annotated[
    Constant | Steps | Multistep | Linear | Polynomial | Cosine | Python,
    Field(discriminator="type"),
    WrapValidator(of_type),
]
"""The schedule of a plan."""


def above_base(schedule: Schedule, base: float) -> Refused | None:
    """Why a schedule does not fit an optimizer of the rate `base`; None where it does."""
    if not isinstance(schedule, _Decaying) or schedule.minimum <= base:
        return None
    return Refused(f"'minimum' {schedule.minimum:g} is above the optimizer's rate {base:g}", key="minimum")


def rate_of(
    schedule: Schedule | None, base: float, where: str = "schedule", folder: Path = Path(), run: Run = run_file
) -> Rate:
    """Returns the function from a step to a schedule's rate; without a schedule the rate is constant.

    A Python file is looked for in `folder`, is executed by `run` once, in this call, and must return the same numbers on every rank. Raises
    UsageError at `where` for a schedule that does not fit. The returned function raises UsageError where the user's function returns no
    valid rate, and UserCodeError where that function fails.
    """
    schedule = schedule or Constant(type="constant")
    if wrong := above_base(schedule, base):
        raise UsageError(f"{where}: {wrong.fact}")
    begin = 0 if schedule.after_warmup else schedule.warmup
    if isinstance(schedule, Python):
        rate = _python(schedule.function, where, folder, run)
    else:
        rate = partial(schedule.at_step, base=base, begin=begin)
    first = 0 if schedule.from_zero else 1
    if not schedule.warmup:
        return rate
    if schedule.after_warmup:
        return lambda step: (
            rate(0) * (step + first) / schedule.warmup if step < schedule.warmup else rate(step - schedule.warmup)
        )
    return lambda step: rate(step) * min(1.0, (step + first) / schedule.warmup)


def _python(reference: str, where: str, folder: Path, run: Run) -> Rate:
    """Returns the function that `file.py:function` names, with each result checked; UserCodeError names the user's line that fails."""
    file, _, name = reference.rpartition(":")
    path = folder / file
    if not path.is_file():
        raise UsageError(f"{where}: there is no file {file}\n  help: it is looked for in {folder}")
    function = getattr(run(path), name, None)
    if not callable(function):
        raise UsageError(f"{where}: {file} has no function '{name}'\n  help: def {name}(step: int) -> float")

    def rate(step: int) -> float:
        with user_code(str(path), f"asking `{name}` for the rate of step {step}"):
            result = function(step)
        try:
            number = float(result)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise UsageError(f"{where}: {reference}({step}) gave {result!r}\n  a rate is a number, at least 0")
        return number

    return rate
