"""`Facts`: the known properties of an integer, a congruence and a range, with the arithmetic that carries it through dims.

The law: a value v has facts (divisor, remainder, min, max) when `v == remainder (mod divisor)` and `min <= v <= max`; None means unbounded.
Congruence modulo 0 is equality, so a constant c is divisor 0, remainder c, and no formula needs a case for it:

    v + w    (gcd(d1, d2), r1 + r2)                        max, min    (gcd(d1, d2, r1 - r2), r1)
    v * w    (gcd(d1*d2, d1*r2, d2*r1), r1*r2)             v mod w     (gcd(d1, d2, r2), r1)
    v // k   (d1/k, r1//k) where k divides d1, else (1, 0)

Every result holds for all pairs of values of the operands for which the operation is defined. An operation does not see that its operands
have parts in common: `facts_of` (`expression.py`), which reads whole expressions, does.

Facts are kept in one form: the bounds are values that the congruence allows, the remainder is in 0 .. divisor - 1, and a range of one value
is a constant. The text of a dump is `[64,512]|64N`, `[9,inf]|8N+1`, `[0,inf]`, and `784` for a constant; in it N is any integer that the
range allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

Bound: TypeAlias = int | float  # a float only as an infinity


@dataclass(frozen=True)
class Facts:
    """The integers `divisor*N + remainder` within [min, max]; None means unbounded. ValueError where no integer is allowed."""

    divisor: int = 1
    remainder: int = 0
    min: int | None = 0
    max: int | None = None

    def __post_init__(self) -> None:
        d, r, low, high = self.divisor, self.remainder, self.min, self.max
        if d < 0:
            raise ValueError(f"the divisor of facts is not negative, but got {d}")
        if d:
            r %= d
            low = None if low is None else low + (r - low) % d
            high = None if high is None else high - (high - r) % d
        elif (low is None or low <= r) and (high is None or r <= high):
            low = high = r
        else:
            raise ValueError(f"no integer is {r} and within {_range(low, high)}")
        if low is not None and high is not None and low > high:
            raise ValueError(f"no integer {_steps(d, r)} is within {_range(self.min, self.max)}")
        if low is not None and low == high:
            d, r = 0, low
        for name, value in (("divisor", d), ("remainder", r), ("min", low), ("max", high)):
            object.__setattr__(self, name, value)

    @staticmethod
    def constant(value: int) -> Facts:
        """The facts of one known integer."""
        return Facts(0, value, value, value)

    @property
    def value(self) -> int | None:
        """The integer itself where the facts allow only one, else None."""
        return None if self.divisor else self.remainder

    @property
    def low(self) -> Bound:
        """The minimum, or minus infinity."""
        return -math.inf if self.min is None else self.min

    @property
    def high(self) -> Bound:
        """The maximum, or infinity."""
        return math.inf if self.max is None else self.max

    def contains(self, value: int) -> bool:
        """Whether the facts allow `value`."""
        congruent = (value - self.remainder) % self.divisor == 0 if self.divisor else value == self.remainder
        return congruent and self.low <= value <= self.high

    def divisible_by(self, k: int) -> bool:
        """Whether every allowed value is a multiple of `k`; k > 0."""
        return self.divisor % k == 0 and self.remainder % k == 0

    def real_divisor(self) -> int:
        """The largest integer known to divide every value: `gcd(divisor, remainder)`, `|c|` for a constant c."""
        return math.gcd(self.divisor, self.remainder)

    def __str__(self) -> str:
        if self.divisor == 0:
            return str(self.remainder)
        steps = "" if self.divisor == 1 else f"|{_steps(self.divisor, self.remainder)}"
        return f"{_range(self.min, self.max)}{steps}"

    def __neg__(self) -> Facts:
        return _facts(self.divisor, -self.remainder, -self.high, -self.low)

    def __add__(self, other: Facts | int) -> Facts:
        b = _as_facts(other)
        return _facts(
            math.gcd(self.divisor, b.divisor), self.remainder + b.remainder, self.low + b.low, self.high + b.high
        )

    def __sub__(self, other: Facts | int) -> Facts:
        return self + -_as_facts(other)

    def __mul__(self, other: Facts | int) -> Facts:
        b = _as_facts(other)
        d = math.gcd(self.divisor * b.divisor, self.divisor * b.remainder, b.divisor * self.remainder)
        corners = [times(x, y) for x in (self.low, self.high) for y in (b.low, b.high)]
        return _facts(d, self.remainder * b.remainder, min(corners), max(corners))

    def __floordiv__(self, other: Facts | int) -> Facts:
        """The quotient rounded down; ANY where the divisor may have either sign."""
        b = _not_zero(_as_facts(other))
        if b.high < 0:
            return -self // -b
        if b.low <= 0:
            return ANY
        corners = [_quotient(x, y) for x in (self.low, self.high) for y in (b.low, b.high)]
        k = b.value
        steps = (self.divisor // k, self.remainder // k) if k and self.divisor % k == 0 else (1, 0)
        return _facts(*steps, min(corners), max(corners))

    def __mod__(self, other: Facts | int) -> Facts:
        """The remainder in 0 .. other - 1; ANY where the modulus may be negative."""
        b = _not_zero(_as_facts(other))
        if b.low <= 0:
            return ANY
        quotient = (self // b).value
        if quotient is not None:
            return meet(self - b * quotient, Facts(max=None if b.max is None else b.max - 1))
        high = min(b.high - 1, self.high if self.low >= 0 else math.inf)
        return _facts(math.gcd(self.divisor, b.divisor, b.remainder), self.remainder, 0, high)

    def exactly_divided(self, k: int) -> Facts:
        """The quotient by a `k` > 0 that is known to divide the value; ValueError where it divides no allowed value."""
        v = meet(self, Facts(k, 0, None))
        return _facts(v.divisor // k, v.remainder // k, _quotient(v.low, k), _quotient(v.high, k))


ANY = Facts(1, 0, None, None)
"""Facts of an integer of which nothing else is known."""

ANY_DIM = Facts()
"""Facts of a dim of which nothing else is known: an integer from 0 on."""


def maximum(values: Iterable[Facts]) -> Facts:
    """The facts of the maximum of some values, given the facts of each."""
    some = list(values)
    d, r = _either(some)
    return _facts(d, r, max(v.low for v in some), max(v.high for v in some))


def minimum(values: Iterable[Facts]) -> Facts:
    """The facts of the minimum of some values, given the facts of each."""
    some = list(values)
    d, r = _either(some)
    return _facts(d, r, min(v.low for v in some), min(v.high for v in some))


def meet(a: Facts, b: Facts) -> Facts:
    """The facts of a value that satisfies both `a` and `b`; ValueError where no integer does."""
    low, high = max(a.low, b.low), min(a.high, b.high)
    if a.divisor == 0 or b.divisor == 0:
        one, other = (a, b) if a.divisor == 0 else (b, a)
        if not other.contains(one.remainder):
            raise ValueError(f"no integer is both {a} and {b}")
        return one
    g = math.gcd(a.divisor, b.divisor)
    if (b.remainder - a.remainder) % g:
        raise ValueError(f"no integer is both {a} and {b}")
    # Chinese remainders: a.remainder + a.divisor*t with a.divisor*t == b.remainder - a.remainder (mod b.divisor)
    step = b.divisor // g
    t = (b.remainder - a.remainder) // g * pow(a.divisor // g, -1, step) % step
    return _facts(a.divisor * step, a.remainder + a.divisor * t, low, high)


def times(x: Bound, y: Bound) -> Bound:
    """The product of two bounds, where 0 times an infinity is 0: the bound of values that are all 0."""
    if x == 0 or y == 0:
        return 0
    if isinstance(x, int) and isinstance(y, int):
        return x * y
    return math.inf if (x > 0) == (y > 0) else -math.inf


def _quotient(x: Bound, y: Bound) -> Bound:
    if isinstance(x, int):
        return x // y if isinstance(y, int) else (-1 if x < 0 else 0)
    return x if isinstance(y, int) else (-1 if x < 0 else 0)


def _either(values: list[Facts]) -> tuple[int, int]:
    first = values[0]
    return math.gcd(*(v.divisor for v in values), *(v.remainder - first.remainder for v in values)), first.remainder


def _facts(divisor: int, remainder: int, low: Bound, high: Bound) -> Facts:
    return Facts(divisor, remainder, low if isinstance(low, int) else None, high if isinstance(high, int) else None)


def _as_facts(value: Facts | int) -> Facts:
    return Facts.constant(value) if isinstance(value, int) else value


def _not_zero(b: Facts) -> Facts:
    return Facts(b.divisor, b.remainder, 1, b.max) if b.low == 0 and b.high > 0 else b


def _range(low: int | None, high: int | None) -> str:
    return f"[{'-inf' if low is None else low},{'inf' if high is None else high}]"


def _steps(divisor: int, remainder: int) -> str:
    return f"{divisor}N" + (f"+{remainder}" if remainder else "")
