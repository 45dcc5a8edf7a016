"""A metric of a plan: its types, their keys, and what is wrong with the options that are given.

metric("top5", {"type": "top_k", "k": 5})
metric("accuracy", {})                                       # its name is its type
metric("auc", {"logits": "y", "labels": "clicked", "bins": 500})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partc.compiler.plan.training.options import Check, read
from partc.compiler.plan.training.usual_names import k_of
from partc.runtime.artifact.metric_formula import ROC_AUC

_CLASSES = {
    "logits": Check.NAME,
    "labels": Check.NAME,
    "axis": Check.INTEGER,
    "ignore_index": Check.INTEGER,
    "probabilities": Check.BOOL,
}
_NUMBERS = {"prediction": Check.NAME, "target": Check.NAME}
TYPES: Mapping[str, Mapping[str, Check]] = {
    "accuracy": _CLASSES,
    "top_k": {**_CLASSES, "k": Check.COUNT},
    "mse": _NUMBERS,
    "mae": _NUMBERS,
    "auc": {"logits": Check.NAME, "prediction": Check.NAME, "labels": Check.NAME, "bins": Check.BINS},
    "output": {"output": Check.NAME},
}
"""By type the keys that it takes."""


@dataclass(frozen=True)
class Metric:
    """A metric: `output` of the model against the input `labels`; None is as in the loss. The other fields are as in a loss.

    `of_logits`: whether the `output` of an auc are logits, and not probabilities; `bins`: into how many its predictions are counted.
    """

    type: str
    output: str | None = None
    labels: str | None = None
    axis: int | None = None
    ignore_index: int | None = None
    probabilities: bool | None = None
    k: int = 5
    of_logits: bool | None = None
    bins: int = 2000

    @property
    def formula(self) -> str:
        """What makes the metric of the sums that its output are; none where the output is the metric."""
        return ROC_AUC if self.type == "auc" else ""


def metric(name: str, options: Mapping[str, Any], where: str = "train.metrics") -> Metric:
    """The metric that options say; without a type it is that of its name. A type that is none is the name of an output of the model.

    Raises CompileError with all that is wrong.
    """
    said = {"type": name, **options}
    if said["type"] not in TYPES and len(said) == 1 and isinstance(said["type"], str):
        return Metric("output", said["type"])
    if said.get("k") is None and (k := k_of(said["type"])) is not None:
        said["k"] = k
    found = read(said, TYPES, where, contradictions=_contradictions)
    words = {"logits": "output", "prediction": "output", "target": "labels"}
    of_logits = None if not found.keys() & {"logits", "prediction"} else "logits" in found
    return Metric(**{words.get(key, key): value for key, value in found.items()}, of_logits=of_logits)


def _contradictions(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    if not {"logits", "prediction"} <= found.keys():
        return []
    law = "logits are any numbers, a prediction of auc is a probability from 0 to 1"
    return [("`logits` and `prediction` are both given", law, "take one of them out")]
