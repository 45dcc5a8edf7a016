"""Metrics that are no mean: a program gives sums, batches, microbatches and ranks add up, and a formula makes one number of them.

    roc_auc    of the counts of labels 0 by bin of the prediction, then those of labels 1, each with one more for predictions without
               a bin:   sum over bins of  ones (zeros below + zeros here / 2)  /  (ones zeros)

The area under the ROC curve is the share of pairs of a 1 and a 0 in which the 1 has the higher prediction. Two in one bin count as half a
pair. Where a formula has no value it gives NaN with the reason, `Undefined`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = npt.NDArray[np.float64]

ROC_AUC = "roc_auc"


class Undefined(float):
    """A metric that has no value: NaN, and why."""

    reason: str

    def __new__(cls, reason: str) -> Undefined:
        """NaN for a reason."""
        made = super().__new__(cls, "nan")
        made.reason = reason
        return made


def roc_auc(counts: Counts) -> float:
    """The area under the ROC curve, of counts by bin; Undefined where a label, or a prediction's place, is missing."""
    zeros, ones = counts.reshape(2, -1)
    total, astray = int(counts.sum()), int(zeros[-1] + ones[-1])
    if astray:
        return Undefined(f"{astray:,} of {total:,} predictions are NaN, or no probability from 0 to 1")
    pairs = float(zeros.sum()) * float(ones.sum())
    if not pairs:
        return Undefined(f"all {total:,} labels are {int(not zeros.any())}" if total else "there are no labels")
    return float(((np.cumsum(zeros) - zeros / 2) * ones).sum() / pairs)


FORMULAS: Mapping[str, Callable[[Counts], float]] = {ROC_AUC: roc_auc}
"""By name what makes a metric of its sums."""


class Totals:
    """The outputs of several batches put together: the sums of metrics that have a formula, weighed means of all others."""

    def __init__(self, formulas: Mapping[str, str]) -> None:
        self._formulas = formulas
        self._sums: dict[str, Any] = {}
        self._weight = 0

    def add(self, outputs: Mapping[str, Any], weight: int = 1) -> None:
        """Adds those of a batch."""
        self._weight += weight
        for name, value in outputs.items():
            array = np.asarray(value)
            term = array.astype(np.float64) if name in self._formulas else array.item() * weight
            self._sums[name] = self._sums.get(name, 0.0) + term

    def take(self) -> dict[str, float]:
        """The numbers of all batches since the last time."""
        found = {
            name: FORMULAS[self._formulas[name]](total) if name in self._formulas else total / max(self._weight, 1)
            for name, total in self._sums.items()
        }
        self._sums, self._weight = {}, 0
        return found


def told(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """The numbers as files have them: None where a metric is undefined."""
    return {name: None if isinstance(value, Undefined) else float(value) for name, value in numbers.items()}
