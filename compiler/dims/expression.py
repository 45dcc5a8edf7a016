"""Facts of whole dim expressions: `floor(batch/2) + 1`, `Max(seq, 8)`, `784*batch/49`.

A name with facts (d, r, min, max) is replaced by `min + d*N`, N from 0 on, and sums and products are multiplied out to a polynomial in
these N, so that common parts cancel. A subexpression that is not a polynomial becomes a new variable whose facts the arithmetic of `Facts`
computes:

    floor(p/q)   the terms of p that q divides leave it exactly; the rest is constant, or a variable
    Max, Min     arguments that another one always exceeds are dropped
    Mod(p, m)    p itself where it never reaches m, a constant where m divides all differences of p

With batch = 64N, `784*batch/49` is 1024N and `floor(batch/2) + 1` is 32N+1. Equal subexpressions give equal variables.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import TypeAlias

import onnx_ir as ir
import sympy
from partc.compiler.dims.facts import ANY, ANY_DIM, Facts, maximum, minimum
from partc.compiler.dims.polynomial import Monomial, Polynomial
from partc.compiler.dims.reading import names_in, read

LARGEST_POWER = 8
LARGEST_SUM = 256
LARGEST_PRODUCT = 1024
LARGEST_QUOTIENT = 64

Bindings: TypeAlias = tuple[tuple[str, Facts], ...]


class _Unread(Exception):
    """Raised where no rule reads an expression, or where it is too large."""


def facts_of(dim: int | ir.SymbolicDim | sympy.Expr | str, known: Mapping[str, Facts]) -> Facts:
    """Returns the facts of a dim's value, given the facts `known` of the names in it; a name not in `known` may be any dim.

    A dim is an integer for every legal binding, so `batch/2` with an odd batch does not occur. Where the expression has functions that no
    rule reads, or is unknown, the facts say so (`[-inf,inf]`, `[0,inf]`); nothing is raised. The result is cached by the expression and the
    facts of its names.
    """
    if isinstance(dim, int):
        return Facts.constant(dim)
    if isinstance(dim, sympy.Expr):
        expression = dim
    else:
        text = dim if isinstance(dim, str) else dim.value
        if text is None or text in known:
            return ANY_DIM if text is None else known[text]
        parsed = read(text)
        if parsed is None:
            return ANY_DIM
        expression = parsed
    return _facts_of(expression, tuple((name, known.get(name, ANY_DIM)) for name in sorted(names_in(expression))))


@functools.lru_cache(maxsize=8192)
def _facts_of(expression: sympy.Expr, bindings: Bindings) -> Facts:
    try:
        p = _divided(expression, dict(bindings))
        return (p * Fraction(p.denominator)).facts().exactly_divided(p.denominator)
    except (_Unread, ValueError):  # ValueError: the facts contradict each other, no binding is legal
        return ANY


def _read(expression: sympy.Basic, known: Mapping[str, Facts]) -> Polynomial:
    """The polynomial whose values are the expression's; raises _Unread where there is none."""
    if isinstance(expression, sympy.Symbol):
        return Polynomial.having(known[expression.name], expression.name)
    if isinstance(expression, sympy.Rational):
        return Polynomial.constant(Fraction(int(expression.p), int(expression.q)))
    rule = _RULES.get(type(expression).__name__)
    if rule is None:
        raise _Unread(expression)
    return rule(expression.args, known)


def _divided(expression: sympy.Basic, known: Mapping[str, Facts]) -> Polynomial:
    """Same as `_read` for an expression that is rounded down or is known to be an integer, so that it may divide by names."""
    try:
        return _read(expression, known)
    except _Unread:
        divides = any(power.exp.is_negative for power in expression.atoms(sympy.Pow))
        if not divides or expression.count_ops() > LARGEST_QUOTIENT:
            raise
        try:
            top, bottom = sympy.fraction(sympy.cancel(expression))
        except sympy.PolynomialError as error:
            raise _Unread(expression) from error
    numerator, denominator = _integers([_read(top, known), _read(bottom, known)])[0]
    if denominator.value == 0:
        raise _Unread(expression)
    if denominator.value is not None:
        return numerator * (1 / denominator.value)
    return Polynomial.having(numerator.facts() // denominator.facts(), f"({numerator.key})//({denominator.key})")


def _sum(args: tuple[sympy.Basic, ...], known: Mapping[str, Facts]) -> Polynomial:
    if len(args) > LARGEST_SUM:
        raise _Unread(args)
    return functools.reduce(Polynomial.__add__, (_read(arg, known) for arg in args))


def _product(args: tuple[sympy.Basic, ...], known: Mapping[str, Facts]) -> Polynomial:
    product = Polynomial.constant(1)
    for arg in args:
        factor = _read(arg, known)
        if len(product.terms) * len(factor.terms) > LARGEST_PRODUCT:
            raise _Unread(args)
        product *= factor
    return product


def _power(args: tuple[sympy.Basic, ...], known: Mapping[str, Facts]) -> Polynomial:
    base, exponent = args
    if not isinstance(exponent, sympy.Integer) or not 0 <= int(exponent) <= LARGEST_POWER:
        raise _Unread(exponent)
    return _product((base,) * int(exponent), known)


def _floor(args: tuple[sympy.Basic, ...], known: Mapping[str, Facts]) -> Polynomial:
    try:
        return floor_of(_divided(args[0], known))
    except _Unread:
        return Polynomial.having(ANY, f"floor({args[0]})")


def _ceiling(args: tuple[sympy.Basic, ...], known: Mapping[str, Facts]) -> Polynomial:
    return _floor((-args[0],), known) * Fraction(-1)


def floor_of(p: Polynomial) -> Polynomial:
    """The polynomial rounded down: exact where its congruence determines the remainder, else with a new variable."""
    q = p.denominator
    whole: dict[Monomial, Fraction] = {}
    rest: dict[Monomial, Fraction] = {}
    for monomial, coefficient in p.terms.items():
        n = int(coefficient * q)
        exact = n // q if n >= 0 or not monomial else -(-n // q)
        whole[monomial], rest[monomial] = Fraction(exact), Fraction(n - exact * q)
    outside = Polynomial({m: c for m, c in whole.items() if c})
    inside = Polynomial({m: c for m, c in rest.items() if c})
    facts = inside.facts()
    if facts.divisor % q == 0:
        return outside + (inside - Polynomial.constant(facts.remainder % q)) * Fraction(1, q)
    return outside + Polynomial.having(facts // q, f"({inside.key})//{q}")


def _largest(args: tuple[sympy.Basic, ...], known: Mapping[str, Facts]) -> Polynomial:
    return _extreme("Max", maximum, args, known)


def _smallest(args: tuple[sympy.Basic, ...], known: Mapping[str, Facts]) -> Polynomial:
    return _extreme("Min", minimum, args, known)


def _extreme(
    name: str,
    of: Callable[[Iterable[Facts]], Facts],
    args: tuple[sympy.Basic, ...],
    known: Mapping[str, Facts],
) -> Polynomial:
    values, q = _integers([_read(arg, known) for arg in args])
    sign = Fraction(1 if name == "Max" else -1)
    kept: list[Polynomial] = []
    for i, value in enumerate(values):
        others = kept + values[i + 1 :]
        if not any(((other - value) * sign).facts().low >= 0 for other in others):
            kept.append(value)
    if len(kept) == 1:
        return kept[0] * Fraction(1, q)
    key = f"{name}({', '.join(sorted(value.key for value in kept))})"
    return Polynomial.having(of(value.facts() for value in kept), key) * Fraction(1, q)


def _modulo(args: tuple[sympy.Basic, ...], known: Mapping[str, Facts]) -> Polynomial:
    (value, modulus), q = _integers([_read(arg, known) for arg in args])
    if modulus.facts().low < 0:
        raise _Unread(args)
    if value.facts().low >= 0 and (modulus - value).facts().low > 0:
        return value * Fraction(1, q)
    facts = value.facts() % modulus.facts()
    return Polynomial.having(facts, f"Mod({value.key}, {modulus.key})") * Fraction(1, q)


def _integers(values: list[Polynomial]) -> tuple[list[Polynomial], int]:
    """The polynomials times their common denominator, and that denominator."""
    q = math.lcm(*(value.denominator for value in values))
    return [value * Fraction(q) for value in values], q


_RULES: dict[str, Callable[[tuple[sympy.Basic, ...], Mapping[str, Facts]], Polynomial]] = {
    "Add": _sum,
    "Mul": _product,
    "Pow": _power,
    "floor": _floor,
    "ceiling": _ceiling,
    "Max": _largest,
    "Min": _smallest,
    "Mod": _modulo,
}
