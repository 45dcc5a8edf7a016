"""Names of losses and metrics in other frameworks: those that mean the same here, and the remedy for the others.

MSELoss, mse_loss, mean_squared_error    the loss mean_squared, the metric mse bce                                      refused: it takes
probabilities, and binary_cross_entropy takes logits
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import ClassVar, TypeVar, get_args

from partc.runtime.options import Options, Refused, shown
from partc.runtime.spellings import nearest
from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

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
"""Names of losses in other frameworks that have no meaning here, with the reason and the remedy."""
_COUNTERPARTS = {"labels": "target", "target": "labels", "logits": "prediction", "prediction": "logits"}
"""Maps each key to the key with the same role in the other types."""


class UsuallyNamed(Options):
    """A loss or a metric, whose type has usual names, too: `also`, and those that `pattern` matches."""

    type: str
    also: ClassVar[tuple[str, ...]] = ()
    pattern: ClassVar[str] = ""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        found = handler.resolve_ref_schema(schema)
        names: JsonSchemaValue = {"enum": [found["properties"]["type"]["const"], *cls.also]}
        if cls.pattern:
            names = {"anyOf": [names, {"type": "string", "pattern": cls.pattern}]}
        found["properties"]["type"] = names
        return schema

    @classmethod
    def instead_of(cls, key: str, keys: Collection[str]) -> str:
        same = _COUNTERPARTS.get(key, "")
        return f"write '{same}'" if same in keys else super().instead_of(key, keys)

    @classmethod
    def without_nulls(cls, said: Mapping[str, object]) -> dict[str, object]:
        """Returns a mapping without its known keys that are null."""
        keys = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: one for key, one in said.items() if one is not None or key not in keys}

    @classmethod
    def name_options(cls, name: str) -> dict[str, object]:
        """Returns the keys that a usual name implies: the k of `top5`."""
        return {}


Named = TypeVar("Named", bound=UsuallyNamed)


def by_type(*classes: type[Named]) -> dict[str, type[Named]]:
    """Maps the plan's name of each type to its class."""
    return {get_args(one.model_fields["type"].annotation)[0]: one for one in classes}


def known_type(kind: object, types: Mapping[str, type[UsuallyNamed]]) -> object:
    """Returns the type that a usual name means; the name itself where it means none."""
    if not isinstance(kind, str) or kind in types:
        return kind
    if found := next((name for name, one in types.items() if one.pattern and re.fullmatch(one.pattern, kind)), None):
        return found
    names = {word: name for name, one in types.items() for word in (*one.also, name)}
    return names.get(kind) or names.get(_plain(kind)) or kind


def usual_names(types: Mapping[str, type[UsuallyNamed]]) -> list[str]:
    """The usual names that mean one of the types."""
    return [word for one in types.values() for word in one.also]


def unknown_type(
    kind: object,
    types: Mapping[str, type[UsuallyNamed]],
    key: str = "",
    losses: Mapping[str, type[UsuallyNamed]] | None = None,
) -> Refused:
    """Returns the refusal of a type, with the nearest name or the reason why it has no meaning here; for metrics, pass `losses`."""
    law = f"the types are {', '.join(types)}"
    if kind is None:
        return Refused("no 'type' is given", law, key=key)
    if not isinstance(kind, str):
        return Refused(f"type: expected a name, but got {shown(kind)}", law, key=key)
    fact, plain = f"there is no type '{kind}'", _plain(kind)
    if losses is not None and plain in {*_INSTEAD, *usual_names(losses)}:
        return Refused(fact, law, "leave it out: the loss itself is reported for every step and every evaluation", key)
    if losses is None and (reason := _INSTEAD.get(plain)):
        return Refused(fact, f"{law}; {reason[0]}", reason[1], key)
    close = nearest(kind, [*types, *usual_names(types)])
    return Refused(fact, law, f"say '{known_type(close[0], types)}'" if close else "", key)


def _plain(kind: str) -> str:
    """Normalizes a name: `nn.BCEWithLogitsLoss` and `bce_with_logits_loss` become `bce_with_logits`."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind.rpartition(".")[2]).lower()
    name = name.replace("crossentropy", "cross_entropy").removesuffix("_loss")
    return "bce" if name == "binary_cross_entropy" and "crossentropy" in kind.lower() else name
