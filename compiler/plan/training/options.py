"""Options of training, read from a mapping: a type, and the keys that this type takes, all that is wrong in one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.pattern import nearest
from partc.compiler.plan.training.usual_names import known_type, unknown_type
from partc.compiler.plan.violation import is_integer, shown


class Check(Enum):
    """What the value of a key may be, in words."""

    NAME = "the name of a value"
    REDUCTION = "mean, sum or sum_over_ranks"
    INTEGER = "an integer"
    COUNT = "an integer of 1 or more"
    BINS = "an integer from 2 to 65536"
    SHARE = "a number from 0 to less than 1"
    NUMBERS = "a number, a list of numbers, or the name of an .npy file"
    BOOL = "true or false"

    @property
    def form(self) -> dict[str, Any]:
        """The value as a JSON schema."""
        return _FORMS[self]


_FORMS: dict[Check, dict[str, Any]] = {
    Check.NAME: {"type": "string", "minLength": 1},
    Check.REDUCTION: {"enum": ["mean", "sum", "sum_over_ranks"]},
    Check.INTEGER: {"type": "integer"},
    Check.COUNT: {"type": "integer", "minimum": 1},
    Check.BINS: {"type": "integer", "minimum": 2, "maximum": 65536},
    Check.SHARE: {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    Check.NUMBERS: {
        "anyOf": [{"type": "number"}, {"type": "string"}, {"type": "array", "items": {"type": "number"}, "minItems": 1}]
    },
    Check.BOOL: {"type": "boolean"},
}

_COUNTERPARTS = {"labels": "target", "target": "labels", "logits": "prediction", "prediction": "logits"}
"""Keys by the key that has their place in the other types."""

Contradictions = Callable[[Mapping[str, Any]], list[tuple[str, str, str]]]


def read(
    options: Mapping[str, Any],
    types: Mapping[str, Mapping[str, Check]],
    where: str,
    folder: Path | None = None,
    contradictions: Contradictions | None = None,
    required: Sequence[str] = (),
) -> dict[str, Any]:
    """The options with their type, checked by the keys of their type; a null counts as absent.

    `required`: keys that must be there where the type takes them. Raises CompileError with a problem for each key that
    is unknown, missing or of a wrong value.
    """
    kind = known_type(options.get("type"), types)
    if not isinstance(kind, str) or kind not in types:
        raise CompileError(unknown_type(kind, types, where))
    keys, given = types[kind], {key: value for key, value in options.items() if value is not None}
    found, problems = {"type": kind}, []
    for key in options:
        if key != "type" and key not in keys:
            same = _COUNTERPARTS.get(str(key), "")
            close = [same] if same in keys and same not in given else nearest(str(key), keys)
            remedy = f"say '{close[0]}'" if close else "take it out"
            problems.append(Problem(where, f"'{kind}' has no key '{key}'", f"its keys are {', '.join(keys)}", remedy))
    for key, check in keys.items():
        if key in given:
            try:
                found[key] = _checked(given[key], check, folder)
            except ValueError as error:
                problems.append(Problem(where, f"{key}: {error}"))
        elif key in required:
            problems.append(Problem(where, f"'{kind}' lacks '{key}'", help=f"say {key}: {check.value}"))
    if contradictions and not problems:
        problems += [Problem(where, *each) for each in contradictions(found)]
    if problems:
        raise CompileError(problems)
    return found


def _checked(value: Any, check: Check, folder: Path | None) -> Any:
    """The value as it is kept. Raises ValueError with what is wrong."""
    match check:
        case Check.NAME if isinstance(value, str) and value:
            return value
        case Check.REDUCTION if value in ("mean", "sum", "sum_over_ranks"):
            return value
        case Check.INTEGER if is_integer(value):
            return value
        case Check.COUNT if is_integer(value) and value >= 1:
            return value
        case Check.BINS if is_integer(value) and 2 <= value <= 65536:
            return value
        case Check.SHARE if _is_number(value) and 0 <= value < 1:
            return float(value)
        case Check.BOOL if isinstance(value, bool):
            return value
        case Check.NUMBERS:
            return _numbers(value, folder)
    raise ValueError(f"expected {check.value}, but got {shown(value)}")


def _numbers(value: Any, folder: Path | None) -> tuple[float, ...]:
    if _is_number(value):
        value = [value]
    if isinstance(value, str):
        from partc.runtime.data.npy import BROKEN, read_array, reason

        path = (folder or Path()) / value
        try:
            array = read_array(path)
        except BROKEN as error:
            raise ValueError(f"'{path}' is no .npy file: {reason(error)}") from None
        if array.ndim != 1 or array.dtype.kind not in "fiu":
            raise ValueError(f"'{path}' has {array.dtype} of shape {list(array.shape)}; expected one list of numbers")
        value = array.tolist()
    if not isinstance(value, (list, tuple)) or not value or not all(map(_is_number, value)):
        raise ValueError(f"expected {Check.NUMBERS.value}, but got {shown(value)}")
    wrong = [number for number in value if not 0 <= number < float("inf")]
    if wrong:
        raise ValueError(f"{wrong[0]} is no weight; a weight is 0 or more, and finite")
    return tuple(float(number) for number in value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
