"""Reads texts of dims as sympy expressions in which a name is only assumed to be an integer.

onnx-ir's own reader assumes that every name is positive, so that sympy drops the 1 of `Max(1, n)`; but a dynamic dim may be 0. Only the
facts of a name may decide.

Max and Min of expressions without sympy's pairwise comparison, which takes seconds for 64 arguments; `normal` compares by facts.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import sympy


def largest(*args: Any) -> sympy.Expr:
    """The Max of expressions or integers."""
    return _extreme(sympy.Max, max, args)


def smallest(*args: Any) -> sympy.Expr:
    """The Min of expressions or integers."""
    return _extreme(sympy.Min, min, args)


def _extreme(of: Any, number_of: Any, args: Iterable[Any]) -> sympy.Expr:
    """Returns an extreme of `args` unevaluated: nested extremes are flattened, numbers are combined, and equal arguments are dropped."""
    parts = [part for arg in map(sympy.sympify, args) for part in (arg.args if isinstance(arg, of) else (arg,))]
    numbers = [part for part in parts if part.is_Rational]
    rest = dict.fromkeys(part for part in parts if not part.is_Rational)
    kept = [*rest, *([number_of(numbers)] if numbers else [])]
    return kept[0] if len(kept) == 1 else of(*kept, evaluate=False)


LONGEST = 10_000

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: sympy.floor(a / b),
    ast.Mod: sympy.Mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "Max": largest,
    "max": largest,
    "Min": smallest,
    "min": smallest,
    "Mod": sympy.Mod,
    "mod": sympy.Mod,
    "Abs": sympy.Abs,
    "sign": sympy.sign,
    "sqrt": sympy.sqrt,
}


@functools.lru_cache(maxsize=8192)
def read(text: str) -> sympy.Expr | None:
    """The expression of a text such as `floor(seq/2) + 1`; None where the text is not an expression."""
    if text.isidentifier():
        return symbol(text)
    if len(text) > LONGEST:
        return None
    try:
        return _expression(ast.parse(text, mode="eval").body)
    except (SyntaxError, KeyError, TypeError, ValueError, RecursionError, ZeroDivisionError):
        return None


@functools.lru_cache(maxsize=8192)
def symbol(name: str) -> sympy.Symbol:
    """The sympy symbol of the dim with this name."""
    return sympy.Symbol(name, integer=True)


@functools.lru_cache(maxsize=8192)
def names_in(expression: sympy.Expr) -> frozenset[str]:
    """The names of the dims in an expression."""
    return frozenset(str(name) for name in expression.free_symbols)


def _expression(tree: ast.expr) -> sympy.Expr:
    match tree:
        case ast.Constant(value=int() as number):
            return sympy.Integer(number)
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_expression(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_expression(left), _expression(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _FUNCTIONS[name](*(_expression(arg) for arg in args))
        case _:
            raise ValueError("no dim is written so")
