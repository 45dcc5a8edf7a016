"""Names that other frameworks have for losses and metrics: those that mean the same here, and what to write instead of the others.

MSELoss, mse_loss, mean_squared_error    the loss mean_squared, the metric mse
bce                                      refused: it takes probabilities, and binary_cross_entropy takes logits
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from partc.compiler.errors import Problem
from partc.compiler.plan.pattern import nearest
from partc.compiler.plan.violation import shown

_ALIASES = {
    **dict.fromkeys(("mse", "mean_squared_error", "mean_squared"), ("mean_squared", "mse")),
    **dict.fromkeys(("mae", "mean_absolute_error", "l1_loss", "l1"), ("l1", "mae")),
    **dict.fromkeys(
        ("cross_entropy", "sparse_softmax_cross_entropy", "softmax_cross_entropy_with_logits"),
        ("softmax_cross_entropy", ""),
    ),
    **dict.fromkeys(("bce_with_logits", "binary_cross_entropy_with_logits"), ("binary_cross_entropy", "")),
    **dict.fromkeys(("acc", "categorical_accuracy", "sparse_categorical_accuracy"), ("", "accuracy")),
    **dict.fromkeys(("top_k_accuracy",), ("", "top_k")),
    **dict.fromkeys(("roc_auc", "auroc", "binary_auroc", "roc_auc_score"), ("", "auc")),
}
"""Usual names of losses and metrics, with what they are called here: the loss, and the metric."""

_OF_LOGITS = "write softmax_cross_entropy, and give it the logits, which the model has before its softmax"
_IN_MODEL = "compute it in the model as an output of one float, and name that output: `loss: my_loss`"
_INSTEAD = {
    "nll": ("it takes logarithms of probabilities", _OF_LOGITS),
    "sparse_categorical_cross_entropy": ("it takes probabilities", _OF_LOGITS),
    "categorical_cross_entropy": ("it takes probabilities", f"{_OF_LOGITS}, with `probabilities: true` for its labels"),
    "bce": ("it takes probabilities", "write binary_cross_entropy, and give it the logits, before the sigmoid"),
    "l2": ("it is a sum, half a sum or a mean, by framework", "write mean_squared, the mean of the squares"),
    **dict.fromkeys(("huber", "smooth_l1", "kl_div", "hinge", "poisson_nll"), ("it is not among them", _IN_MODEL)),
}
"""Usual names of losses that mean nothing here, with the reason and the remedy."""
_TOP_K = re.compile(r"top_?([1-9][0-9]*)(_acc|_accuracy)?")
TOP_K = "^top_?[1-9][0-9]*(_acc|_accuracy)?$"
"""Names of the metric top_k that say its k: `top5`."""


def known_type(kind: object, types: Mapping[str, Any]) -> object:
    """The type that a usual name means; the name itself where it means none of the types."""
    if not isinstance(kind, str) or kind in types:
        return kind
    if "top_k" in types and _TOP_K.fullmatch(kind):
        return "top_k"
    meant = (_ALIASES.get(kind) or _ALIASES.get(_plain(kind)) or ()) if kind else ()
    return next((name for name in (*meant, _plain(kind)) if name in types), kind)


def k_of(kind: object) -> int | None:
    """The k that the name of a metric says: 5 of `top5`; None where it says none."""
    found = _TOP_K.fullmatch(kind) if isinstance(kind, str) else None
    return int(found[1]) if found else None


def usual_names(types: Mapping[str, Any]) -> list[str]:
    """The usual names that mean one of the types."""
    return [name for name, known in _ALIASES.items() if name not in types and set(known) & types.keys()]


def unknown_type(kind: object, types: Mapping[str, Any], where: str) -> Problem:
    """What is wrong with a type that is none, with the nearest name, or the reason why a usual name has no meaning here."""
    law = f"the types are {', '.join(types)}"
    if kind is None:
        return Problem(where, "no 'type' is given", law)
    if not isinstance(kind, str):
        return Problem(where, f"type: expected a name, but got {shown(kind)}", law)
    fact = f"there is no type '{kind}'"
    if (reason := _INSTEAD.get(_plain(kind))) and "mean_squared" in types:
        return Problem(where, fact, f"{law}; {reason[0]}", reason[1])
    if "accuracy" in types and (_plain(kind) in _INSTEAD or _ALIASES.get(_plain(kind), ("", ""))[0]):
        return Problem(
            where, fact, law, "leave it out: the loss itself is reported for every step and every evaluation"
        )
    close = nearest(kind, [*types, *usual_names(types)])
    return Problem(where, fact, law, f"say '{known_type(close[0], types)}'" if close else "")


def _plain(kind: str) -> str:
    """A name as functions have it: `nn.BCEWithLogitsLoss` and `bce_with_logits_loss` are `bce_with_logits`."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind.rpartition(".")[2]).lower()
    name = name.replace("crossentropy", "cross_entropy").removesuffix("_loss")
    return "bce" if name == "binary_cross_entropy" and "crossentropy" in kind.lower() else name
