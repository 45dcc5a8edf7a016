"""Dims as expressions: a safe evaluator of texts such as `floor(seq/2) + 1` over integers, with exact rational arithmetic.

It knows + - * / // % **, floor, ceiling, trunc, Max, Min, Mod, Abs and the names of symbols. A text is parsed once, by Python's own
parser, into nested closures; no part of it is executed as code.

    parse("floor(seq/2) + 1")({"seq": 7}) == 4
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TypeAlias

Number: TypeAlias = int | Fraction
Bindings: TypeAlias = Mapping[str, int]
_Term: TypeAlias = Callable[[Bindings], Number]

_LONGEST = 10_000
_WIDEST = 4096


def _divide(left: Number, right: Number) -> Number:
    return Fraction(left) / Fraction(right)


def _power(base: Number, exponent: Number) -> Number:
    if exponent != int(exponent) or exponent < 0:
        raise ValueError(f"the exponent {exponent} is not a whole number of at least 0")
    if max(Fraction(base).numerator.bit_length(), Fraction(base).denominator.bit_length()) * exponent > _WIDEST:
        raise ValueError(f"{base}**{exponent} is too large for a dim")
    return base ** int(exponent)


_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.USub: lambda one: -one, ast.UAdd: lambda one: one}
_ONE: dict[str, Callable[[Number], Number]] = {
    "floor": math.floor,
    "ceiling": math.ceil,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "Abs": lambda one: max(one, -one),
    "abs": lambda one: max(one, -one),
}
_MANY: dict[str, Callable[[list[Number]], Number]] = {"Max": max, "Min": min, "max": max, "min": min}


@dataclass(frozen=True)
class Expression:
    """A parsed dim. `names` are the symbols that it needs; a call with the sizes of these symbols returns the dim as an integer."""

    text: str
    names: frozenset[str]
    term: _Term

    def __call__(self, bindings: Bindings) -> int:
        """Returns the dim at these sizes; ValueError where it is not an integer or cannot be computed."""
        value = self.exact(bindings)
        if value != int(value):
            raise ValueError(f"'{self.text}' is {value}, not a whole number")
        return int(value)

    def exact(self, bindings: Bindings) -> Number:
        """Returns the exact value, which may be a fraction; ValueError where it cannot be computed."""
        try:
            return self.term(bindings)
        except ZeroDivisionError:
            raise ValueError(f"'{self.text}' divides by 0") from None
        except (ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"'{self.text}' cannot be computed: {error}") from None
        except KeyError as error:
            raise ValueError(f"'{self.text}' needs {error}, which is not bound") from None


def parse(dim: int | str, symbols: Collection[str] = ()) -> Expression:
    """Parses a dim; a text that equals a symbol's name is that symbol, whatever characters it has.

    ValueError where the text is not such an expression.
    """
    return _symbol(dim) if isinstance(dim, str) and dim in symbols else _parse(dim)


def symbols_in(dim: int | str, symbols: Collection[str]) -> Collection[str]:
    """The symbols in a dim; a text that is not an expression counts as a symbol that nothing binds."""
    try:
        return parse(dim, symbols).names
    except ValueError:
        return (str(dim),)


@cache
def _symbol(name: str) -> Expression:
    return Expression(name, frozenset([name]), lambda bindings: bindings[name])


@cache
def _parse(dim: int | str) -> Expression:
    if isinstance(dim, int):
        return Expression(str(dim), frozenset(), lambda _: dim)
    if len(dim) > _LONGEST:
        raise ValueError(f"a dim of {len(dim)} characters is longer than {_LONGEST}")
    names: set[str] = set()
    try:
        term = _compiled(ast.parse(dim.strip(), mode="eval").body, names)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"'{dim}' is not an expression over dims") from None
    except ValueError as error:
        raise ValueError(f"'{dim}' is not an expression over dims: {error}") from None
    return Expression(dim, frozenset(names), term)


def _compiled(node: ast.expr, names: set[str]) -> _Term:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(whole)):
            return lambda _: whole
        case ast.Constant(value=float(number)) if math.isfinite(number):
            exact = Fraction(repr(number))
            return lambda _: exact
        case ast.Name(id=name):
            names.add(name)
            return lambda bindings: bindings[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            binary, first, second = _BINARY[type(op)], _compiled(left, names), _compiled(right, names)
            return lambda bindings: binary(first(bindings), second(bindings))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            unary, inner = _UNARY[type(sign)], _compiled(operand, names)
            return lambda bindings: unary(inner(bindings))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _call(name, [_compiled(argument, names) for argument in args])
    raise ValueError(f"'{ast.unparse(node)}' is not known")


def _call(name: str, terms: list[_Term]) -> _Term:
    if name in _ONE and len(terms) == 1:
        one, first = _ONE[name], terms[0]
        return lambda bindings: one(first(bindings))
    if name in ("Mod", "mod") and len(terms) == 2:
        first, second = terms
        return lambda bindings: first(bindings) % second(bindings)
    if name in _MANY and terms:
        many = _MANY[name]
        return lambda bindings: many([term(bindings) for term in terms])
    raise ValueError(f"{name} with {len(terms)} arguments is not known")
