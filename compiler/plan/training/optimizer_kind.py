"""What a row of the table of optimizers says: options and their laws, what is kept of a parameter, and forms of a formula.

chosen = OPTIMIZERS["rmsprop"].form({"centered": 1.0, "momentum": 0.0, ...})
chosen.function, chosen.slots                  # "RmsPropCentered", ("square_avg", "grad_avg")
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

Number: TypeAlias = "float | tuple[float, float]"


@dataclass(frozen=True)
class Option:
    """A number, or a pair or a truth value where its default is one; without a default it must be given.

    `below` bounds it, `positive` excludes 0; one that is `negative` is at most 0.
    """

    default: Number | None = None
    below: float = math.inf
    positive: bool = False
    negative: bool = False

    @property
    def law(self) -> str:
        """What the number must be, for people."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.negative:
            return "a number at most 0"
        least = "above 0" if self.positive else "at least 0"
        bound = least if math.isinf(self.below) else f"{least} and below {self.below:g}"
        return f"two numbers, each {bound}," if isinstance(self.default, tuple) else f"a number {bound}"

    @property
    def form(self) -> dict[str, Any]:
        """The law as a JSON schema."""
        if isinstance(self.default, bool):
            return {"type": "boolean", "default": self.default}
        least = "maximum" if self.negative else "exclusiveMinimum" if self.positive else "minimum"
        one: dict[str, Any] = {"type": "number", least: 0}
        one |= {} if math.isinf(self.below) else {"exclusiveMaximum": self.below}
        if isinstance(self.default, tuple):
            return {"type": "array", "items": one, "minItems": 2, "maxItems": 2, "default": list(self.default)}
        return one if self.default is None else {**one, "default": self.default}

    def number(self, value: object) -> Number | None:
        """The value as a number or a pair; None where the law does not hold."""
        if isinstance(self.default, bool):
            return float(value) if isinstance(value, bool) else None
        if not isinstance(self.default, tuple):
            return self._number(value)
        if not isinstance(value, list | tuple) or len(value) != 2:
            return None
        first, second = map(self._number, value)
        return None if first is None or second is None else (first, second)

    def _number(self, value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        if self.negative:
            return float(value) if value <= 0 else None
        return float(value) if (value > 0 if self.positive else value >= 0) and value < self.below else None


@dataclass(frozen=True)
class Switch:
    """An option that changes the formula itself, unless it has the value `off`: the function's name has `suffix` then."""

    suffix: str
    off: float = 0.0


class ByRows(Enum):
    """What a gradient that names rows of a table is for an optimizer."""

    NEVER = "never"
    """No gradient: other rows change, too."""
    ALIKE = "alike"
    """The same as the dense one, if no decay is at work: other rows stay as they are."""
    LAZY = "lazy"
    """Its own law: other rows stay as they are, which by a dense gradient they would not."""


@dataclass(frozen=True)
class Form:
    """A type of optimizer with its switches on or off: the name of its function, its slots, and its formula."""

    function: str
    slots: tuple[str, ...]
    body: str


@dataclass(frozen=True)
class OptimizerKind:
    """A type of optimizer. `doc`: its formula, and whose it is. `function`: the name of the ONNX function that makes the update.

    `options`: by key of the plan what its value must be. `slots`: tensors of the parameter's shape that are kept from step to step, of
    which `initial` names the options that they begin with, 0 where it names none.
    `scalars`: what the runtime feeds each step, of `lr`, `bias1` and `bias2`. `body`: the formula; empty where an update is several
    functions (LAMB). `coupled`: weight decay is added to the gradient, and the body need not speak of it. Without `lr` among the scalars
    the rate is the attribute `rate`: no schedule moves it.

    `by_rows`: what a gradient by rows is for it, which names the rows of a table that a step looks up. `rows`: its body over ids and rows,
    which adds at `places`; without it rows are taken out, updated by `body`, and put back.
    """

    doc: str
    function: str
    options: Mapping[str, Option]
    slots: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ("lr",)
    body: str = ""
    coupled: bool = False
    rows: str = ""
    by_rows: ByRows = ByRows.NEVER
    matrix_slots: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    """Slots in place of `slots` for parameters of two dims or more, by name; they have one element along these dims, or with None along
    all but the first."""
    initial: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, Switch] = field(default_factory=dict)
    _made: dict[frozenset[str], Form] = field(default_factory=dict, init=False, compare=False, repr=False)

    def form(self, numbers: Mapping[str, float]) -> Form:
        """The form that these numbers make."""
        return self._form(frozenset(key for key, switch in self.switches.items() if numbers[key] != switch.off))

    @property
    def forms(self) -> tuple[Form, ...]:
        """All forms."""
        keys = [*self.switches]
        return tuple(self._form(frozenset(on)) for n in range(len(keys) + 1) for on in itertools.combinations(keys, n))

    def _form(self, on: frozenset[str]) -> Form:
        if on not in self._made:
            self._made[on] = self._new_form(on)
        return self._made[on]

    def _new_form(self, on: frozenset[str]) -> Form:
        def holds(line: str) -> bool:
            found = _CONDITION.match(line)
            return found is None or (found[2] in on) != bool(found[1])

        def bare(line: str) -> str:
            return _CONDITION.sub("", line)

        lines = [line.strip() for line in self.body.splitlines()]
        suffix = "".join(switch.suffix for key, switch in self.switches.items() if key in on)
        slots = tuple(bare(slot) for slot in self.slots if holds(slot))
        return Form(self.function + suffix, slots, "\n".join(bare(line) for line in lines if holds(line)))

    @property
    def is_scheduled(self) -> bool:
        """Whether its rate is that of the step."""
        return "lr" in self.scalars


_CONDITION = re.compile(r"(!?)(\w+)\? ")
