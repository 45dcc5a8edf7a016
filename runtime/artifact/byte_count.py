"""Byte counts as sums of products of dims, with exact rational coefficients; they are added and compared without the symbols' sizes.

of_value("tensor(float)", ["batch/4", 16])              4*batch/4*16 = 16*batch
str(one + other)                                        16*batch + 128
largest([16*batch + 4, 8*batch, 20*seq])                Max(16*batch + 4, 20*seq)
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from partc.runtime.artifact.tensors.dtypes import BY_CODE, BY_NAME

from .dim_expression import parse

if TYPE_CHECKING:
    from onnx import TensorProto

_Factors = tuple[str, ...]
_SHOWN = 4
"""The most counts that `Max(...)` shows."""


@dataclass(frozen=True)
class ByteCount:
    """A sum of terms: maps each term's sorted factors to its coefficient. A factor is a symbol, a call, or an expression in brackets."""

    terms: Mapping[_Factors, Fraction]

    def __add__(self, other: ByteCount) -> ByteCount:
        return self._plus(other, 1)

    def __sub__(self, other: ByteCount) -> ByteCount:
        return self._plus(other, -1)

    def _plus(self, other: ByteCount, sign: int) -> ByteCount:
        found = dict(self.terms)
        for factors, number in other.terms.items():
            found[factors] = found.get(factors, Fraction()) + sign * number
        return ByteCount({factors: number for factors, number in found.items() if number})

    def is_within(self, other: ByteCount) -> bool:
        """Whether this count is at most `other` at all sizes, because no coefficient is larger than that of the same term in `other`."""
        return all(number <= other.terms.get(factors, 0) for factors, number in self.terms.items())

    def __call__(self, sizes: Mapping[str, int]) -> int:
        """Returns the bytes at these sizes of all symbols, rounded up; ValueError where a factor cannot be computed."""
        total = Fraction()
        for factors, number in self.terms.items():
            for factor in factors:
                number *= parse(factor, sizes).exact(sizes)
            total += number
        return -(-total.numerator // total.denominator)

    def __str__(self) -> str:
        ordered = sorted(self.terms.items(), key=lambda one: (not one[0], one[0]))
        return " + ".join(_product_text(factors, number) for factors, number in ordered) or "0"


ZERO = ByteCount({})


def _product_text(factors: _Factors, number: Fraction) -> str:
    above = [str(number.numerator)] if number.numerator != 1 or not factors else []
    above += [name if times == 1 else f"{name}**{times}" for name, times in Counter(factors).items()]
    return "*".join(above) + (f"/{number.denominator}" if number.denominator != 1 else "")


def of_value(type: str, shape: Sequence[int | str] | None) -> ByteCount | None:
    """The bytes of a tensor; None where its type or shape is unknown."""
    dtype = BY_NAME.get(type.removeprefix("tensor(").removesuffix(")")) if type.startswith("tensor(") else None
    if dtype is None or shape is None:
        return None
    number, factors = Fraction(dtype.bits, 8), list[str]()
    for dim in shape:
        times, more = (Fraction(dim), []) if isinstance(dim, int) else _product(dim)
        number *= times
        factors += more
    return ByteCount({tuple(sorted(factors)): number} if number else {})


def of_text(text: str) -> ByteCount:
    """Parses the sum in a text such as `28*batch + 32`."""
    total, pending = ZERO, [ast.parse(text, mode="eval").body]
    while pending:
        match pending.pop():
            case ast.BinOp(left, ast.Add(), right):
                pending += [right, left]
            case term:
                number, factors = _factors(term)
                total += ByteCount({tuple(sorted(factors)): number} if number else {})
    return total


def of_tensor(tensor: TensorProto) -> int:
    """Returns the bytes of a weight; for strings, the sum of their lengths."""
    dtype = BY_CODE.get(tensor.data_type)
    return sum(map(len, tensor.string_data)) if dtype is None else dtype.bytes_of(tuple(tensor.dims))


def _product(dim: str) -> tuple[Fraction, list[str]]:
    """Splits a dim into a coefficient and factors: `batch/4` into 1/4 and `["batch"]`."""
    if dim.isidentifier():
        return Fraction(1), [dim]
    try:
        return _factors(ast.parse(dim.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Fraction(1), [f"({dim})"]


def _factors(node: ast.expr) -> tuple[Fraction, list[str]]:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number), []
        case ast.Name(id=name):
            return Fraction(1), [name]
        case ast.BinOp(left, ast.Mult(), right):
            (first, some), (second, others) = _factors(left), _factors(right)
            return first * second, some + others
        case ast.BinOp(left, ast.Div(), ast.Constant(value=int(number))) if number:
            first, some = _factors(left)
            return first / number, some
        case ast.BinOp(ast.Name(id=name), ast.Pow(), ast.Constant(value=int(times))):
            return Fraction(1), [name] * times
        case ast.Call():
            return Fraction(1), [ast.unparse(node)]
        case _:
            return Fraction(1), [f"({ast.unparse(node)})"]


def undominated(counts: Iterable[ByteCount]) -> list[ByteCount]:
    """Returns the counts that no other count bounds at all sizes; at any sizes the maximum is one of them."""
    kept: list[ByteCount] = []
    for one in counts:
        if not any(one.is_within(other) for other in kept):
            kept = [*(other for other in kept if not other.is_within(one)), one]
    return kept


def largest_text(counts: Sequence[ByteCount]) -> str:
    """Returns the maximum of undominated counts as text: a single count as it is, several as `Max(...)`."""
    texts = sorted(str(one) for one in counts)
    if len(texts) < 2:
        return texts[0] if texts else "0"
    return f"Max({', '.join([*texts[:_SHOWN], *(['...'] if len(texts) > _SHOWN else [])])})"
