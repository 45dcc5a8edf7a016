"""Metrics that are not means: a program computes sums, which add up over batches, microbatches and ranks; a formula makes a number of them.

    perplexity        exp(losses / labels)
    precision, recall, f1    from true positives, false positives, false negatives; or, from counts by label and prediction, the mean over
                      classes
    confusion         counts by label and prediction, and the share of those on the diagonal
    r2                1 - squares / (t^2 - (t)^2 / n), from the sums of (x - t)^2, t, t^2 and 1
    =a,b: a / b       an expression of the plan over sums that it names
    roc_auc    from the counts of labels 0 by bin of the prediction, then those of labels 1, each followed by the count of predictions
               without a bin:   sum over bins of  ones (zeros below + zeros here / 2)  /  (ones zeros)

The area under the ROC curve is the share of pairs of a 1 and a 0 in which the 1 has the higher prediction. Two predictions in one bin
count as half a pair. A formula without a value returns `Undefined`: NaN with the reason.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isqrt
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from partc.runtime.artifact.training.training_record import MetricsRecord

Counts: TypeAlias = npt.NDArray[np.float64]

ROC_AUC = "roc_auc"


class Undefined(float):
    """The value of a metric that has none: NaN, with the reason."""

    reason: str

    def __new__(cls, reason: str) -> Undefined:
        """Returns NaN with a reason."""
        made = super().__new__(cls, "nan")
        made.reason = reason
        return made


BINARY = ("true_negatives", "false_positives", "false_negatives", "true_positives")
"""Names of the counts of two classes, 0 and the positive class 1, in the row-major order of the table."""


class Confusion(float):
    """The share of labels that are predicted correctly, with `counts`: a table with a row for each label, a column for each prediction."""

    counts: tuple[tuple[int, ...], ...]

    def __new__(cls, counts: Sequence[Sequence[int]]) -> Confusion:
        """Computes the share from these counts, at least one of which is not 0."""
        table = tuple(tuple(map(int, row)) for row in counts)
        made = super().__new__(cls, sum(row[k] for k, row in enumerate(table)) / sum(map(sum, table)))
        made.counts = table
        return made

    @property
    def named(self) -> Mapping[str, int] | None:
        """Maps the names in `BINARY` to the counts of two classes; None for more classes."""
        flat = [count for row in self.counts for count in row]
        return dict(zip(BINARY, flat, strict=True)) if len(flat) == len(BINARY) else None


def confusion(counts: Counts) -> float:
    """Returns the `Confusion` of counts of a square table; Undefined where all are 0."""
    if not counts.any():
        return Undefined("none of the labels counts")
    return Confusion(np.rint(counts).astype(np.int64).reshape(isqrt(counts.size), -1).tolist())


def _is_square(size: int) -> bool:
    return size > 3 and isqrt(size) ** 2 == size


def roc_auc(counts: Counts) -> float:
    """The area under the ROC curve, from counts by bin; Undefined where one of the labels does not occur, or a prediction has no bin."""
    zeros, ones = counts.reshape(2, -1)
    total, astray = int(counts.sum()), int(zeros[-1] + ones[-1])
    if astray:
        return Undefined(f"{astray:,} of {total:,} predictions are NaN, or no probability from 0 to 1")
    pairs = float(zeros.sum()) * float(ones.sum())
    if not pairs:
        return Undefined(f"all {total:,} labels are {int(not zeros.any())}" if total else "there are no labels")
    return float(((np.cumsum(zeros) - zeros / 2) * ones).sum() / pairs)


@dataclass(frozen=True)
class Formula:
    """The function that computes a metric from its sums; `sums` describes them, and `fits` says whether there may be n of them."""

    number: Callable[[Counts], float]
    sums: str
    fits: Callable[[int], bool]


def _perplexity(sums: Counts) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(sums[0] / sums[1])) if sums[1] else Undefined("none of the labels counts")


def _of_classes(number: Callable[[Counts, Counts, Counts], Counts]) -> Formula:
    """The formula of a number computed from true positives, false positives and false negatives; its mean over the classes that occur."""

    def of(counts: Counts) -> float:
        if counts.size == 3:
            hits, alarms, misses = counts[:1], counts[1:2], counts[2:]
        else:
            square = counts.reshape(isqrt(counts.size), -1)
            hits = np.diagonal(square)
            alarms, misses = square.sum(0) - hits, square.sum(1) - hits
            there = hits + alarms + misses > 0
            hits, alarms, misses = hits[there], alarms[there], misses[there]
        return float(number(hits, alarms, misses).mean()) if hits.size else Undefined("none of the labels counts")

    return Formula(of, "3 counts, or one for each label and prediction", lambda n: n == 3 or _is_square(n))


def _share(part: Counts, whole: Counts) -> Counts:
    """Returns `part / whole`, element-wise, and 0 where `whole` is 0."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _r2(sums: Counts) -> float:
    squares, total, target, number = sums
    spread = target - total**2 / number if number else 0.0
    return float(1 - squares / spread) if spread > 0 else Undefined("all targets are equal")


FORMULAS: Mapping[str, Formula] = {
    ROC_AUC: Formula(roc_auc, "2 counts for each of 2 bins or more, and 2 besides", lambda n: n >= 6 and n % 2 == 0),
    "perplexity": Formula(_perplexity, "a sum and a count", lambda n: n == 2),
    "precision": _of_classes(lambda hits, alarms, misses: _share(hits, hits + alarms)),
    "recall": _of_classes(lambda hits, alarms, misses: _share(hits, hits + misses)),
    "f1": _of_classes(lambda hits, alarms, misses: _share(2 * hits, 2 * hits + alarms + misses)),
    "confusion": Formula(confusion, "a count for each label and prediction", _is_square),
    "r2": Formula(_r2, "4 sums", lambda n: n == 4),
}
"""The formulas by name."""


def formula_of(text: str, names: Sequence[str]) -> str:
    """Returns a manifest's text of the formula that is an expression over sums of these names."""
    return f"={','.join(names)}: {text}"


@cache
def formula(text: str) -> Formula:
    """Returns the formula of a manifest's text: one of `FORMULAS`, or an expression over sums. ValueError for any other text."""
    if not text.startswith("="):
        if text not in FORMULAS:
            raise ValueError(f"the runtime knows {', '.join(FORMULAS)}")
        return FORMULAS[text]
    listed, _, body = text[1:].partition(": ")
    names = tuple(listed.split(","))
    number = expression(body, names)

    def of(sums: Counts) -> float:
        try:
            return number(dict(zip(names, map(float, sums), strict=True)))
        except (ArithmeticError, ValueError) as error:
            return Undefined(f"{body}: {error}")

    return Formula(of, f"{len(names)} sums", lambda n: n == len(names))


def expression(text: str, names: Collection[str]) -> Callable[[Mapping[str, float]], float]:
    """Compiles an expression over numbers of these names to a function of these numbers; ValueError where it contains anything else."""
    try:
        return _compiled(ast.parse(text.strip(), mode="eval").body, names)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"'{text}' is not an expression") from None


def _compiled(node: ast.expr, names: Collection[str]) -> Callable[[Mapping[str, float]], float]:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return lambda given: float(number)
        case ast.Name(id=name) if name in names:
            return lambda given: given[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            act, a, b = _BINARY[type(op)], _compiled(left, names), _compiled(right, names)
            return lambda given: act(a(given), b(given))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            one = _compiled(operand, names)
            return lambda given: -one(given)
        case ast.Call(func=ast.Name(id=name), args=[arg], keywords=[]) if name in _CALLED:
            call, one = _CALLED[name], _compiled(arg, names)
            return lambda given: call(one(given))
    raise ValueError(
        f"'{ast.unparse(node)}' is not one of {', '.join(names)}, nor a number, + - * / **, sqrt, exp or log"
    )


_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
_CALLED: Mapping[str, Callable[[float], float]] = {"sqrt": math.sqrt, "exp": math.exp, "log": math.log}


class MetricSums:
    """Accumulates the loss and the metrics over batches: the results are those of all records, however these are batched.

    A mean is weighted by its denominator, so that a batch whose denominator is 0, such as a batch without a label that counts, changes
    nothing; a mean without a denominator is weighted by the number of records. Sums are added with `adding`, else averaged over batches.
    """

    def __init__(self, record: MetricsRecord, *, adding: bool = False) -> None:
        self._formulas, self._denominators = record.formulas, record.denominators
        self._added = frozenset(record.sums) if adding else frozenset[str]()
        self._even = frozenset(record.sums) - self._added
        self._totals: dict[str, Any] = {}
        self._weights: dict[str, float] = {}

    def add(self, outputs: Mapping[str, Any], records: int = 1) -> None:
        """Adds the loss and the metrics of a batch of this many records."""
        for name, value in outputs.items():
            if name in self._denominators.values():
                continue
            array = np.asarray(value)
            if name in self._formulas:
                self._totals[name] = self._totals.get(name, 0.0) + array.astype(np.float64)
                continue
            denominator = self._denominators.get(name, "")
            if denominator in outputs:
                weight = float(np.asarray(outputs[denominator]).item())
            else:
                weight = 1.0 if name in self._added or name in self._even else float(records)
            term = array.item() * weight if weight else 0.0
            self._totals[name] = self._totals.get(name, 0.0) + term
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def take(self) -> dict[str, float]:
        """Returns the loss and the metrics of all batches since the last call."""
        found = {name: self._number(name, total) for name, total in self._totals.items()}
        self._totals, self._weights = {}, {}
        return found

    def _number(self, name: str, total: Any) -> float:
        if name in self._formulas:
            return formula(self._formulas[name]).number(total)
        if name in self._added:
            return float(total)
        weight = self._weights[name]
        return float(total / weight) if weight else Undefined("none of the labels counts")


Json: TypeAlias = float | Mapping[str, int] | Sequence[Sequence[int]] | None


def json_numbers(numbers: Mapping[str, float]) -> dict[str, Json]:
    """The numbers as files have them: None for an undefined metric, a confusion's counts by name (two classes) or its table (more)."""
    return {name: _json(value) for name, value in numbers.items()}


def _json(value: float) -> Json:
    if isinstance(value, Confusion):
        return value.named or value.counts
    return None if isinstance(value, Undefined) else float(value)
