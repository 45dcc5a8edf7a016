"""`Symbol`: the constraints of a dynamic dimension.

The dimension is `divisor*N + remainder` with `N >= 1`, at least `min`, at most `max` (0: no maximum). So `divisor=8`
allows 8, 16, 24, ... and `divisor=8, remainder=1` allows 9, 17, 25, ... but not 1.

    Symbol(divisor=8, max=512)    # 8, 16, ..., 512
    Symbol(min=3, unique=True)    # 3, 4, 5, ...; every use of this symbol has one and the same size
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass

from partc.compiler.dims.facts import Facts

LARGEST = 1 << 40
"""The largest legal dim: it keeps results over several dims within 64 bits for every size that a machine can hold."""


@dataclass(frozen=True)
class Symbol:
    """A dynamic dimension; with `unique` all uses have the same size, without it they only share the constraints.

    Raises TypeError where a number is not an int (a bool is not) or `unique` is not a bool, ValueError where it allows no size.
    """

    max: int = 0
    min: int = 1
    divisor: int = 1
    remainder: int = 0
    unique: bool = False

    def __post_init__(self) -> None:
        for name in ("max", "min", "divisor", "remainder"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"For 'Symbol', the argument '{name}' must be int, but got {type(value)}")
            if value > LARGEST:
                raise ValueError(f"For 'Symbol', the '{name}' value should be at most {LARGEST}, but got {value}")
        if not isinstance(self.unique, bool):
            raise TypeError(f"For 'Symbol', the argument 'unique' must be bool, but got {type(self.unique)}")
        for name in ("min", "divisor"):
            if getattr(self, name) <= 0:
                raise ValueError(f"For 'Symbol', the '{name}' value should be positive, but got {getattr(self, name)}")
        if not 0 <= self.remainder < self.divisor:
            raise ValueError(
                f"For 'Symbol', the 'remainder' value should be in the range '[0, {self.divisor})', "
                f"but got {self.remainder}"
            )
        if self.max < 0:
            raise ValueError(f"For 'Symbol', the 'max' value should be 0 (no maximum) or positive, but got {self.max}")
        if 0 < self.max < self.smallest:
            raise ValueError(
                f"For 'Symbol', the 'max' value should be 0 (no maximum) or at least {self.smallest}, the smallest "
                f"size that min={self.min}, divisor={self.divisor} and remainder={self.remainder} allow, "
                f"but got {self.max}"
            )

    @property
    def smallest(self) -> int:
        """The smallest legal size: `max(min, divisor + remainder)`, rounded up to `divisor*N + remainder`."""
        least = max(self.min, self.divisor + self.remainder)
        return least + (self.remainder - least) % self.divisor

    def facts(self) -> Facts:
        """The facts of the legal sizes; `max` is rounded down to a legal one."""
        return Facts(self.divisor, self.remainder, self.smallest, self.max or None)


def identifier(text: str) -> str:
    """Converts a text to a name that an expression can hold: `2nd dim` -> `dim_2nd_dim`."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "dim"
    return f"dim_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name
