"""Keys that users write, in a plan or as options, as frozen models: the type and the bounds of a field are the law of its key.

    class Clip(Options):
        norm: float | None = Field(None, gt=0, description="Maximum of the global norm of all gradients.")

Validation, the JSON schema, messages and the help of commands are derived from the fields. Values that a model refuses are reported all at
once, with a `Refused` for each wrong key, also where models are nested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeAlias

from partc.runtime.spellings import nearest
from partc.runtime.units import FORMS, parse_bytes
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

_SHOWN = 80
_INNER = "refused"
"""The error type of a refusal by a nested model."""
_EXACT = 2.0**53
_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "bool_type": "true or false",
    "string_type": "a text",
    "dict_type": "a mapping, 'key: value' on each line",
    "model_type": "a mapping, 'key: value' on each line",
    "model_attributes_type": "a mapping, 'key: value' on each line",
    "list_type": "a list",
    "tuple_type": "a list",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
}


Line: TypeAlias = "tuple[tuple[int | str, ...], Refused, object]"
"""The path of a refused value, the reason, and the value."""


class Refused(ValueError):
    """A value that is not allowed: the fact, the law and the remedy; `key` is the key of a mapping that is wrong, or empty."""

    def __init__(self, fact: str, law: str = "", help: str = "", key: str = "") -> None:
        super().__init__(fact)
        self.fact, self.law, self.help, self.key = fact, law, help, key


@dataclass(frozen=True)
class Remedy:
    """The remedy for a wrong value, as metadata of its key's field: a text, or a function from the value to the text."""

    text: str | Callable[[object], str]

    def of(self, value: object) -> str:
        """The remedy for this value."""
        return self.text if isinstance(self.text, str) else self.text(value)


class Options(BaseModel):
    """A mapping with known keys. Nothing changes it; what differs is a copy."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _refused_in_words(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        wrong: list[Line] = []
        try:
            validated = handler(value)
        except ValidationError as error:
            details = error.errors(include_url=False)
            if not isinstance(value, dict):  # the surrounding model has the remedy
                raise _refused(details[0]) from None
            wrong = [_line(cls, one) for one in details]
        wrong += [((), refused, value) for refused in cls.contradictions(value)] if isinstance(value, dict) else ()
        if wrong:
            raise _again(cls.__name__, wrong)
        return validated

    @classmethod
    def contradictions(cls, said: Mapping[str, Any]) -> Iterator[Refused]:
        """Yields the contradictions between keys of a mapping, whether or not each key by itself is valid."""
        yield from ()

    @classmethod
    def instead_of(cls, key: str, keys: Collection[str]) -> str:
        """Returns the remedy for a key that is not one of the `keys`: the most similar key, else all keys."""
        near = nearest(key, keys, 1)
        return f"the nearest is '{near[0]}'" if near else f"the keys here are {', '.join(keys)}"


def of_type(value: Any, handler: Callable[[Any], Any]) -> Any:
    """Validates a mapping by its key `type`: a WrapValidator for a union that `type` discriminates."""
    try:
        return handler(value)
    except ValidationError as error:
        details = error.errors(include_url=False)
        if not details[0]["loc"]:
            raise _mistyped(details[0]) from None
        # pydantic begins a path with the type of the union
        raise _again("type", ((one["loc"][1:], _refused(one), one["input"]) for one in details)) from None


def refusals(error: ValidationError) -> Iterator[Line]:
    """Yields the path, the reason and the value of each value that a model refused; the path of a key itself ends with the key."""
    for one in error.errors(include_url=False):
        yield tuple(step for step in one["loc"] if step != "[key]"), _refused(one), one["input"]


def refusal_lines(error: ValidationError, where: str) -> str:
    """Returns the messages about all values that a model refused, one text, for an error of the runtime."""
    lines = []
    for path, refused, _ in refusals(error):
        named = ".".join(map(str, path))
        lines.append(f"{where}: {named}: {refused.fact}" if named else f"{where}: {refused.fact}")
        lines += [f"  {refused.law}"] if refused.law else []
        lines += [f"  help: {refused.help}"] if refused.help else []
    return "\n".join(lines)


def or_empty(value: object) -> object:
    """Returns the value, or an empty mapping for None."""
    return {} if value is None else value


def is_integer(value: object) -> bool:
    """Whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Describes a YAML value in YAML's terms, for messages: `the string 'a'`, `a list`, `nothing`."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return f"the string '{value}'" if len(value) <= _SHOWN else f"the string '{value[:_SHOWN]}...'"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
        case int() | float():
            return f"the number {value}"
        case _:
            return f"{value!r} of type {type(value).__name__}"


def _again(title: str, lines: Iterable[Line]) -> ValidationError:
    return ValidationError.from_exception_data(
        title,
        [
            InitErrorDetails(type=PydanticCustomError(_INNER, "{error}", {"error": refused}), loc=path, input=value)
            for path, refused, value in lines
        ],
    )


def _line(model: type[Options], error: ErrorDetails) -> Line:
    """The refusal of one value, with the remedy of its field."""
    path, kind, value = error["loc"], error["type"], error["input"]
    key = str(path[0]) if len(path) == 1 else ""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    if key and kind == "extra_forbidden":
        return (), Refused(f"unknown key '{key}'", help=model.instead_of(key, fields), key=key), value
    refused = Refused(f"'{key}' is missing") if key and kind == "missing" else _refused(error)
    if key in fields and kind != _INNER and not refused.help and not refused.key:
        remedies = [found.of(value) for found in fields[key].metadata if isinstance(found, Remedy)]
        if kind == "missing" and not remedies and fields[key].description:
            remedies = [f"{key}: {fields[key].description}"]
        refused = Refused(refused.fact, refused.law, "".join(remedies), refused.key)
    return () if key and kind == "missing" else path, refused, value


def _mistyped(error: ErrorDetails) -> Refused:
    """Returns the reason why a value matches no type of a union."""
    value = error["input"]
    if error["type"] == "union_tag_not_found":
        return Refused("'type' is missing")
    if error["type"] != "union_tag_invalid":
        return _refused(error)
    kind, types = value["type"], [tag.strip(" '") for tag in error["ctx"]["expected_tags"].split(",")]
    if not isinstance(kind, str):
        return Refused(f"expected a name, but got {shown(kind)}", key="type")
    near = nearest(kind, types, 1)
    remedy = f"the nearest is '{near[0]}'" if near else ""
    return Refused(f"there is no type '{kind}'", f"the types are {', '.join(types)}", remedy, "type")


def _refused(details: ErrorDetails) -> Refused:
    """Returns the reason why a value is refused, translated from pydantic's error."""
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    if isinstance(error := context.get("error"), Refused):
        return error
    if kind == "greater_than_equal":
        return Refused(f"expected at least {_number(context['ge'])}, but got {value}")
    if kind == "less_than_equal":
        return Refused(f"expected at most {_number(context['le'])}, but got {value}")
    if kind in ("greater_than", "less_than"):
        bound = f"above {_number(context['gt'])}" if "gt" in context else f"below {_number(context['lt'])}"
        return Refused(f"expected a number {bound}, but got {value}")
    if kind == "literal_error":
        return Refused(f"expected {context['expected']}, but got {shown(value)}")
    if kind == "missing":
        return Refused("an item of the list is missing")
    if kind == "string_too_short":
        return Refused("expected a text, but got an empty one")
    if kind in _EXPECTED:
        return Refused(f"expected {_EXPECTED[kind]}, but got {shown(value)}")
    return Refused(details["msg"])


def _number(bound: float) -> str:
    return str(int(bound)) if isinstance(bound, float) and bound.is_integer() and abs(bound) < _EXACT else f"{bound}"


def _bytes(value: object) -> int | None:
    law = f"a size is {FORMS}"
    if value is None:
        return None
    if isinstance(value, int) and is_integer(value):
        if value < 0:
            raise Refused(f"the size {value} is negative", law)
        return value
    found = parse_bytes(value) if isinstance(value, str) else None
    if found is None:
        raise Refused(f"expected a size in bytes, but got {shown(value)}", law)
    return found


ByteText: TypeAlias = Annotated[str, Field(pattern=r"^\d+(\.\d+)?\s*([KMGT]i?)?B$")]
ByteCount: TypeAlias = Annotated[
    int | None, PlainValidator(_bytes, json_schema_input_type=Annotated[int, Field(ge=0)] | ByteText | None)
]
"""A size in bytes, as keys have it: a number, or a text such as 4GB; None if not set."""
