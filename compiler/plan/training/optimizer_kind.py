"""A row of the table of optimizers: options and their laws, the slots of a parameter, and forms of a formula.

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
from functools import cache
from typing import Annotated, Any, TypeAlias

from pydantic import Field

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
    def definition(self) -> tuple[Any, Any]:
        """Returns the field definition for a pydantic model: its type and its constraints."""
        if isinstance(self.default, bool):
            return bool, self.default
        least: Any = {"le": 0} if self.negative else {"gt": 0} if self.positive else {"ge": 0}
        one = Annotated[float, Field(**least, lt=None if math.isinf(self.below) else self.below)]
        if isinstance(self.default, tuple):
            return tuple[one, one], Field(self.default, strict=False)
        return one, ... if self.default is None else self.default


@dataclass(frozen=True)
class Switch:
    """An option that changes the formula unless its value is `off`; the function's name then has `suffix`."""

    suffix: str
    off: float = 0.0


class ByRows(Enum):
    """The ways in which an optimizer treats a gradient that lists rows of a table."""

    NEVER = "never"
    """It takes no such gradient: other rows change, too."""
    ALIKE = "alike"
    """Equivalent to a dense gradient, if there is no decay: other rows stay as they are."""
    LAZY = "lazy"
    """An update of its own: other rows stay as they are, whereas a dense gradient would change them."""


@dataclass(frozen=True)
class Form:
    """A type of optimizer with its switches on or off: the name of its function, its slots, and its formula."""

    function: str
    slots: tuple[str, ...]
    body: str


@dataclass(frozen=True, eq=False)
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

    def form(self, numbers: Mapping[str, float]) -> Form:
        """Returns the form that these numbers select."""
        return _form(self, frozenset(key for key, switch in self.switches.items() if numbers[key] != switch.off))

    @property
    def forms(self) -> tuple[Form, ...]:
        """All forms."""
        keys = [*self.switches]
        return tuple(_form(self, frozenset(on)) for n in range(len(keys) + 1) for on in itertools.combinations(keys, n))

    @property
    def is_scheduled(self) -> bool:
        """Whether its rate is that of the step."""
        return "lr" in self.scalars


_CONDITION = re.compile(r"(!?)(\w+)\? ")


@cache
def _form(kind: OptimizerKind, on: frozenset[str]) -> Form:
    """The form with these switches on."""

    def holds(line: str) -> bool:
        found = _CONDITION.match(line)
        return found is None or (found[2] in on) != bool(found[1])

    def bare(line: str) -> str:
        return _CONDITION.sub("", line)

    lines = [line.strip() for line in kind.body.splitlines()]
    suffix = "".join(switch.suffix for key, switch in kind.switches.items() if key in on)
    slots = tuple(bare(slot) for slot in kind.slots if holds(slot))
    return Form(kind.function + suffix, slots, "\n".join(bare(line) for line in lines if holds(line)))
