"""Metrics that are no mean: a program gives sums, batches, microbatches and ranks add up, and a formula makes one number of them.

    roc_auc    of the counts of labels 0 by bin of the prediction, then those of labels 1, each with one more for predictions without
               a bin:   sum over bins of  ones (zeros below + zeros here / 2)  /  (ones zeros)

The area under the ROC curve is the share of pairs of a 1 and a 0 in which the 1 has the higher prediction. Two in one bin count as half a
pair. Where a formula has no value it gives NaN with the reason, `Undefined`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
    """The loss and the metrics of several batches: those of all their records, however these are batched.

    `formulas`, `denominators` and `sums` are as in the manifest's `training`. A mean is weighed by its denominator, so that a batch whose
    denominator is 0, such as one without a label that counts, changes nothing; without one, by the records. Sums are added where that is
    `adding`, else their mean over batches is taken.
    """

    def __init__(
        self,
        formulas: Mapping[str, str],
        denominators: Mapping[str, str],
        sums: Collection[str] = (),
        *,
        adding: bool = False,
    ) -> None:
        self._formulas, self._denominators = formulas, denominators
        self._added = frozenset(sums) if adding else frozenset[str]()
        self._even = frozenset(sums) - self._added
        self._totals: dict[str, Any] = {}
        self._weights: dict[str, float] = {}

    def add(self, outputs: Mapping[str, Any], records: int = 1) -> None:
        """Adds those of a batch of so many records."""
        for name, value in outputs.items():
            if name in self._denominators.values():
                continue
            array = np.asarray(value)
            if name in self._formulas:
                self._totals[name] = self._totals.get(name, 0.0) + array.astype(np.float64)
                continue
            weight = self._weight(name, outputs, records)
            term = array.item() * weight if weight else 0.0
            self._totals[name] = self._totals.get(name, 0.0) + term
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def _weight(self, name: str, outputs: Mapping[str, Any], records: int) -> float:
        denominator = self._denominators.get(name, "")
        if denominator in outputs:
            return float(np.asarray(outputs[denominator]).item())
        return 1.0 if name in self._added or name in self._even else float(records)

    def take(self) -> dict[str, float]:
        """The numbers of all batches since the last time."""
        found = {name: self._number(name, total) for name, total in self._totals.items()}
        self._totals, self._weights = {}, {}
        return found

    def _number(self, name: str, total: Any) -> float:
        if name in self._formulas:
            return FORMULAS[self._formulas[name]](total)
        if name in self._added:
            return float(total)
        weight = self._weights[name]
        return float(total / weight) if weight else Undefined("none of the labels counts")


def told(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """The numbers as files have them: None where a metric is undefined."""
    return {name: None if isinstance(value, Undefined) else float(value) for name, value in numbers.items()}
