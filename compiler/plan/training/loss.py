"""The loss of a plan: its types, their keys, and what is wrong with the options that are given.

loss({"type": "softmax_cross_entropy", "logits": "y", "labels": "label", "label_smoothing": 0.1})
loss("total")                                                # an output of the model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partc.compiler.plan.training.options import Check, read

TYPES: Mapping[str, Mapping[str, Check]] = {
    "softmax_cross_entropy": {
        "logits": Check.NAME,
        "labels": Check.NAME,
        "reduction": Check.REDUCTION,
        "axis": Check.INTEGER,
        "ignore_index": Check.INTEGER,
        "label_smoothing": Check.SHARE,
        "weights": Check.NUMBERS,
        "probabilities": Check.BOOL,
    },
    "mean_squared": {"prediction": Check.NAME, "target": Check.NAME, "reduction": Check.REDUCTION},
    "l1": {"prediction": Check.NAME, "target": Check.NAME, "reduction": Check.REDUCTION},
    "binary_cross_entropy": {
        "logits": Check.NAME,
        "labels": Check.NAME,
        "reduction": Check.REDUCTION,
        "pos_weight": Check.NUMBERS,
    },
    "output": {"output": Check.NAME},
}
"""By type the keys that it takes."""
REQUIRED = ("logits", "labels", "prediction", "target", "output")
"""The keys that must be there where a type takes them."""


@dataclass(frozen=True)
class Loss:
    """A loss: `output` of the model against the input `labels`, which is added where the model has none.

    `weights`: one number a class (`pos_weight`: what a label of 1 counts, one number or one a column). `axis`: that of the classes;
    None: the last of up to three dims, else 1. `probabilities`: labels are shares of all classes. Positions with the label `ignore_index`
    do not count: neither in the sum nor in what a mean divides by. `reduction`: a sum over ranks of their means is a mean of the means of
    the `pieces` that they have of a batch; what makes it a sum is a factor of the cotangents.
    """

    type: str
    output: str
    labels: str = "labels"
    reduction: str = "mean"
    axis: int | None = None
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    weights: tuple[float, ...] | None = None
    pos_weight: tuple[float, ...] | None = None
    probabilities: bool = False
    pieces: int = 1


def loss(options: Mapping[str, Any] | str, where: str = "train.loss", folder: Path | None = None) -> Loss:
    """The loss that options say; a text is the name of an output of the model. Files of weights are looked for in `folder`.

    Raises CompileError with all that is wrong.
    """
    if isinstance(options, str):
        return Loss("output", options)
    found = read(options, TYPES, where, folder, _contradictions, REQUIRED)
    words = {"logits": "output", "prediction": "output", "target": "labels"}
    return Loss(**{words.get(key, key): value for key, value in found.items()})


def _contradictions(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Options that exclude each other, each with a law and a remedy."""
    if found.get("probabilities") and found.get("ignore_index") is not None:
        return [
            (
                "`ignore_index` and `probabilities` are both given",
                "only a label that is a number can be ignored",
                "take one of them out; probabilities that are all zero add nothing to the sum",
            )
        ]
    return []
