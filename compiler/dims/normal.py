"""The normal form of a dim: equal dims get the same text, as far as the facts of the names show, and a constant dim becomes a number.

Sums and products are multiplied out; functions are resolved with the facts of the names in them:

    floor(p/q)   the terms of p that q divides leave it; it vanishes where the congruence of the rest determines the remainder
    ceiling      floor((p + q - 1)/q), and so is -floor(-p/q)
    Max, Min     arguments that another one always exceeds are dropped
    Mod(p, m)    p where it never reaches m; else p - m*floor(p/m) where that floor vanishes

With seq <= 512 and batch = 2N, `Min(512, seq)` is `seq`, `floor(batch/2) + 1` is `batch/2 + 1`, and `4*seq/seq` is 4.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import sympy
from partc.compiler.dims.expression import Bindings, facts_of
from partc.compiler.dims.facts import ANY, Facts
from partc.compiler.dims.reading import largest, names_in, read, smallest, symbol

LARGEST = 256


def normal_dim(dim: int | ir.SymbolicDim, known: Mapping[str, Facts]) -> int | ir.SymbolicDim:
    """The dim in normal form; unchanged where it is unknown, or where its text is not an expression."""
    if isinstance(dim, int) or dim.value is None:
        return dim
    if dim.value.isidentifier():
        return _named(dim.value)
    expression = read(dim.value)
    return dim if expression is None else as_dim(normal(expression, known))


@functools.lru_cache(maxsize=8192)
def as_dim(expression: sympy.Expr) -> int | ir.SymbolicDim:
    """An expression as a dim."""
    return int(expression) if isinstance(expression, sympy.Integer) else ir.SymbolicDim(expression)


def normal(expression: sympy.Expr, known: Mapping[str, Facts]) -> sympy.Expr:
    """The expression in normal form; a name not in `known` may have any value, including negative ones."""
    return _normal_of(expression, tuple((name, known.get(name, ANY)) for name in sorted(names_in(expression))))


@functools.lru_cache(maxsize=8192)
def _named(name: str) -> ir.SymbolicDim:
    return ir.SymbolicDim(symbol(name))


@functools.lru_cache(maxsize=8192)
def _normal_of(expression: sympy.Expr, bindings: Bindings) -> sympy.Expr:
    if expression.count_ops() > LARGEST:
        return expression
    return _simplified(expression, dict(bindings))


def _simplified(expression: Any, known: Mapping[str, Facts]) -> sympy.Expr:
    if not expression.args:
        return expression
    args = [_simplified(arg, known) for arg in expression.args]
    rule = _RULES.get(type(expression).__name__)
    if rule is None:
        return sympy.expand(expression.func(*args))
    found = rule(args, known)
    constant = facts_of(found, known).value if found.args else None
    return found if constant is None else sympy.Integer(constant)


def _floor(args: list[sympy.Expr], known: Mapping[str, Facts]) -> sympy.Expr:
    value = _cancelled(args[0])
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(value)]
    if not all(isinstance(number, sympy.Rational) and is_integral(rest, known) for number, rest in terms):
        return sympy.floor(value)
    q = math.lcm(*(int(number.q) for number, _ in terms))
    outside, inside = sympy.Integer(0), sympy.Integer(0)
    for number, rest in terms:
        n = int(number * q)
        exact = n // q if n >= 0 or rest == 1 else -(-n // q)
        outside, inside = outside + exact * rest, inside + (n - exact * q) * rest
    facts = facts_of(inside, known)
    if facts.divisor % q == 0:
        return sympy.expand(outside + (inside - facts.remainder % q) / q)
    parts = [term.as_coeff_Mul() for term in inside.as_ordered_terms()]
    if next((int(number) for number, rest in parts if rest != 1), 0) < 0:
        return sympy.expand(outside - _floor([sympy.expand((q - 1 - inside) / q)], known))
    return outside + sympy.floor(sympy.expand(inside / q))


def _ceiling(args: list[sympy.Expr], known: Mapping[str, Facts]) -> sympy.Expr:
    return sympy.expand(-_floor([sympy.expand(-args[0])], known))


def _cancelled(value: sympy.Expr) -> sympy.Expr:
    """The expression with the common factors of its quotients cancelled."""
    if not any(power.exp.is_negative for power in value.atoms(sympy.Pow)):
        return value
    try:
        return sympy.expand(sympy.cancel(value))
    except sympy.PolynomialError:
        return value


def quotient(value: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
    """The quotient `value / by`, which must be exact, in cancelled form."""
    return _cancelled(value / by)


def is_integral(expression: Any, known: Mapping[str, Facts]) -> bool:
    """Whether all values of an expression are integers, judging by its form and the facts of its names."""
    match type(expression).__name__:
        case "Symbol" | "Integer" | "One" | "Zero" | "NegativeOne" | "floor" | "ceiling":
            return True
        case "Pow":
            base, exponent = expression.args
            return isinstance(exponent, sympy.Integer) and exponent > 0 and is_integral(base, known)
        case "Max" | "Min" | "Mod":
            return all(is_integral(arg, known) for arg in expression.args)
        case "Add" | "Mul":
            terms = [term.as_coeff_Mul(rational=True) for term in sympy.Add.make_args(expression)]
            if not all(is_integral(factor, known) for _, rest in terms for factor in sympy.Mul.make_args(rest)):
                return False
            q = math.lcm(*(int(number.q) for number, _ in terms))
            return q == 1 or facts_of(sympy.expand(expression * q), known).divisible_by(q)
        case _:
            return False


def _largest(args: list[sympy.Expr], known: Mapping[str, Facts]) -> sympy.Expr:
    return _extreme(largest, 1, args, known)


def _smallest(args: list[sympy.Expr], known: Mapping[str, Facts]) -> sympy.Expr:
    return _extreme(smallest, -1, args, known)


def _extreme(of: Callable[..., Any], sign: int, args: list[sympy.Expr], known: Mapping[str, Facts]) -> sympy.Expr:
    kept: list[sympy.Expr] = []
    for i, value in enumerate(args):
        others = kept + args[i + 1 :]
        if not any(_low(sympy.expand((other - value) * sign), known) >= 0 for other in others):
            kept.append(value)
    return of(*kept)


def _modulo(args: list[sympy.Expr], known: Mapping[str, Facts]) -> sympy.Expr:
    value, modulus = args
    if _low(value, known) >= 0 and _low(sympy.expand(modulus - value), known) > 0:
        return value
    if isinstance(modulus, sympy.Integer) and modulus > 0:
        times = _floor([sympy.expand(value / modulus)], known)
        if not times.has(sympy.floor):
            return sympy.expand(value - modulus * times)
    return sympy.Mod(value, modulus)


def _absolute(args: list[sympy.Expr], known: Mapping[str, Facts]) -> sympy.Expr:
    return args[0] if _low(args[0], known) >= 0 else sympy.Abs(args[0])


def _low(expression: sympy.Expr, known: Mapping[str, Facts]) -> float:
    return facts_of(expression, known).low


_RULES: dict[str, Callable[[list[sympy.Expr], Mapping[str, Facts]], sympy.Expr]] = {
    "floor": _floor,
    "ceiling": _ceiling,
    "Max": _largest,
    "Min": _smallest,
    "Mod": _modulo,
    "Abs": _absolute,
}
