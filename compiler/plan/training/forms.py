"""JSON schemas of losses, metrics, optimizers and schedules, made of the tables by which these are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from partc.compiler.plan.target import KINDS
from partc.compiler.plan.training import loss, metric
from partc.compiler.plan.training.optimizer_table import OPTIMIZERS
from partc.compiler.plan.training.usual_names import TOP_K, known_type, usual_names
from partc.runtime.artifact.lr_schedule import SCHEDULES

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
NULL: Json = {"type": "null"}


class Key(Protocol):
    """What the value of a key must be."""

    @property
    def form(self) -> Mapping[str, Any]:
        """The law as a JSON schema."""
        ...


def loss_form() -> Json:
    """A loss: one of the types with its keys, or the name of an output."""
    return {"anyOf": [TEXT, *_types(loss.TYPES, lambda key, law: key in loss.REQUIRED)]}


def metrics_form() -> Json:
    """Metrics: a name, names, or names with options; without a type they are the metric of their name."""
    keys = {key: law for one in metric.TYPES.values() for key, law in one.items()}
    untyped = _mapping({key: dict(law.form) for key, law in keys.items()})
    named = {
        "type": "object",
        "additionalProperties": {"anyOf": [*_types(metric.TYPES, lambda key, law: False), untyped, NULL]},
    }
    return {"anyOf": [TEXT, {"type": "array", "items": TEXT}, named, NULL]}


def optimizer_form() -> Json:
    """An optimizer: one of the types with its options, whether ranks share its state, and on which device it is."""
    kinds = {name: kind.options for name, kind in OPTIMIZERS.items()}
    more: dict[str, Json] = {
        "shard": {"anyOf": [TEXT, {"type": "boolean"}, NULL]},
        "target": {"anyOf": [{"enum": list(KINDS)}, NULL]},
    }
    return {"anyOf": _types(kinds, _without_default, more)}


def own_optimizer_form() -> Json:
    """The optimizer of some parameters: a type, or one with its options."""
    kinds = {name: kind.options for name, kind in OPTIMIZERS.items()}
    return {"anyOf": [{"enum": [*kinds]}, *_types(kinds, lambda key, law: key != "lr" and law.default is None), NULL]}


def schedule_form() -> Json:
    """A schedule: one of the types with its options."""
    return {"anyOf": [*_types(SCHEDULES, _without_default), NULL]}


def _without_default(key: str, law: Any) -> bool:
    return law.default is None


def _types(
    types: Mapping[str, Mapping[str, Key]],
    required: Callable[[str, Any], bool],
    more: Mapping[str, Json] | None = None,
) -> list[Json]:
    """By type a mapping of its keys; a type has its usual names, too."""
    usual: dict[object, list[str]] = {}
    for name in usual_names(types):
        usual.setdefault(known_type(name, types), []).append(name)
    found = []
    for kind, laws in types.items():
        keys = {key: dict(law.form) for key, law in laws.items()}
        needed = [key for key, law in laws.items() if required(key, law)]
        names: Json = {"enum": [kind, *usual.get(kind, ())]}
        if kind == "top_k":
            names = {"anyOf": [names, {"type": "string", "pattern": TOP_K}]}
        found.append(_mapping({"type": names, **keys, **(more or {})}, ["type", *needed]))
    return found


def _mapping(properties: Mapping[str, Json], required: Collection[str] = ()) -> Json:
    return {"type": "object", "properties": dict(properties), "required": list(required), "additionalProperties": False}
