"""Max and Min of expressions without sympy's pairwise comparison, which takes seconds for 64 arguments; `normal` compares by facts."""

from __future__ import annotations

from collections.abc import Iterable
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
