"""Polynomials with rational coefficients over integer variables, and the facts of their values.

The congruence is read from values, not from coefficients: by Newton's forward differences every value of a polynomial of degree k is an
integer combination of its values at 0 .. k, so the gcd of `p(x) - p(0)` over a box of degree + 1 points per variable is the largest number
that divides all differences of values: `N*N + N` is even. Where the box is large, the gcd of the coefficients, which divides that number,
is used instead.

The range adds up the ranges of the terms. Variables start from 0, so that most terms have their minimum at the same point.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from partc.compiler.dims.facts import Bound, Facts, times

Monomial: TypeAlias = "tuple[tuple[Variable, int], ...]"

LARGEST_BOX = 256


@dataclass(frozen=True, order=True)
class Variable:
    """An integer from 0 to `high` (None: unbounded); if `signed`, any integer. `key` names the expression that it represents."""

    key: str
    high: int | None = None
    signed: bool = False

    def powers(self, exponent: int) -> tuple[Bound, Bound]:
        """The range of the variable to the power `exponent`."""
        low: Bound = -math.inf if self.signed and exponent % 2 else 0
        return low, math.inf if self.high is None or self.signed else self.high**exponent


@dataclass(frozen=True)
class Polynomial:
    """A sum of terms: maps each monomial, a tuple of (variable, power) in order, to its coefficient; the constant's monomial is ()."""

    terms: Mapping[Monomial, Fraction]

    @staticmethod
    def constant(value: Fraction | int) -> Polynomial:
        """The polynomial that is this number."""
        return Polynomial({(): Fraction(value)} if value else {})

    @staticmethod
    def of(variable: Variable) -> Polynomial:
        """The polynomial that is this variable."""
        return Polynomial({((variable, 1),): Fraction(1)})

    @staticmethod
    def having(facts: Facts, key: str) -> Polynomial:
        """A polynomial in one variable of this key that has exactly the values that the facts allow."""
        if facts.divisor == 0:
            return Polynomial.constant(facts.remainder)
        steps = None if facts.min is None or facts.max is None else (facts.max - facts.min) // facts.divisor
        if facts.min is not None:
            start, step = facts.min, facts.divisor
        elif facts.max is not None:
            start, step = facts.max, -facts.divisor
        else:
            start, step = facts.remainder, facts.divisor
        variable = Variable(key, steps, facts.min is None and facts.max is None)
        return Polynomial.of(variable) * Fraction(step) + Polynomial.constant(start)

    @property
    def key(self) -> str:
        """A text that is the same for equal polynomials only."""
        return " + ".join(
            "*".join([str(coefficient), *(f"{variable.key}**{power}" for variable, power in monomial)])
            for monomial, coefficient in sorted(self.terms.items())
        )

    @property
    def value(self) -> Fraction | None:
        """The polynomial's value if it is constant; None where it has variables."""
        return self.offset if not any(self.terms) else None

    @property
    def offset(self) -> Fraction:
        """The value where every variable is 0."""
        return self.terms.get((), Fraction(0))

    @property
    def denominator(self) -> int:
        """The common denominator of the coefficients."""
        return math.lcm(*(coefficient.denominator for coefficient in self.terms.values()))

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            terms[monomial] = terms.get(monomial, Fraction(0)) + coefficient
        return Polynomial({monomial: coefficient for monomial, coefficient in terms.items() if coefficient})

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + other * Fraction(-1)

    def __mul__(self, other: Polynomial | Fraction) -> Polynomial:
        if isinstance(other, Fraction):
            return Polynomial({m: c * other for m, c in self.terms.items()} if other else {})
        product: dict[Monomial, Fraction] = {}
        for (m1, c1), (m2, c2) in itertools.product(self.terms.items(), other.terms.items()):
            powers = dict(m1)
            for variable, power in m2:
                powers[variable] = powers.get(variable, 0) + power
            monomial = tuple(sorted(powers.items()))
            product[monomial] = product.get(monomial, Fraction(0)) + c1 * c2
        return Polynomial({monomial: coefficient for monomial, coefficient in product.items() if coefficient})

    def range(self) -> tuple[Bound, Bound]:
        """Bounds of the values, exact where no two terms have opposite trends; the coefficients must be integers."""
        low: Bound = 0
        high: Bound = 0
        for monomial, coefficient in self.terms.items():
            ends: tuple[Bound, Bound] = (1, 1)
            for variable, power in monomial:
                corners = [times(x, y) for x in ends for y in variable.powers(power)]
                ends = (min(corners), max(corners))
            least, most = sorted(times(end, int(coefficient)) for end in ends)
            low, high = low + least, high + most
        return low, high

    def facts(self) -> Facts:
        """The facts of the values; the coefficients must be integers."""
        low, high = self.range()
        return Facts(
            self._common_divisor(),
            int(self.offset),
            low if isinstance(low, int) else None,
            high if isinstance(high, int) else None,
        )

    def _common_divisor(self) -> int:
        degrees: dict[Variable, int] = {}
        for monomial in self.terms:
            for variable, power in monomial:
                degrees[variable] = max(degrees.get(variable, 0), power)
        if math.prod(degree + 1 for degree in degrees.values()) > LARGEST_BOX:
            return math.gcd(*(int(coefficient) for monomial, coefficient in self.terms.items() if monomial))
        divisor = 0
        for point in itertools.product(*(range(degree + 1) for degree in degrees.values())):
            at = dict(zip(degrees, point, strict=True))
            divisor = math.gcd(divisor, int(self._at(at) - self.offset))
        return divisor

    def _at(self, values: Mapping[Variable, int]) -> Fraction:
        return sum(
            (
                coefficient * math.prod(values[variable] ** power for variable, power in monomial)
                for monomial, coefficient in self.terms.items()
            ),
            Fraction(0),
        )
