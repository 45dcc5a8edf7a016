"""Reads attributes of the configuration of a model of `transformers`, each with a type and a default.

    attribute(BertConfig(), "is_decoder", bool, False)          False
    attribute(DistilBertConfig(), "is_decoder", bool, False)    False: the class has no such attribute
    attribute(LlavaConfig(), "max_position_embeddings", int)    that of its text model

About half of the classes lack any particular attribute, some have properties that raise, and a composite configuration has its text
model's attributes in a nested configuration. Only this module reads attributes of a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, overload

T = TypeVar("T")
U = TypeVar("U")


@overload
def attribute(config: Any, name: str, kind: type[T]) -> T | None: ...
@overload
def attribute(config: Any, name: str, kind: type[T], default: U) -> T | U: ...
def attribute(config: Any, name: str, kind: type, default: object = None) -> object:
    """Returns an attribute of a configuration, else of its text model's; the default where both lack it or have it with another type."""
    for of_text in (False, True):
        try:
            value = getattr(text_of(config) if of_text else config, name, None)
        except Exception:  # a property may raise, such as NotImplementedError where the model has no such size
            continue
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
    return default


def text_of(config: Any) -> Any:
    """Returns the configuration of the text model; the configuration itself where it has no text model, or several."""
    try:
        return config.get_text_config(decoder=True)
    except Exception:  # several text models, or a class that the user wrote
        return config


@contextmanager
def no_padding(config: Any) -> Iterator[None]:
    """A context in which a configuration names no padding token.

    A model looks for the padding token among its input tokens, and an export without weights has no token values.
    """
    name = "pad_token_id"
    parts = {id(part): vars(part) for part in (config, text_of(config))}.values()
    before = [{name: fields[name]} if name in fields else {} for fields in parts]
    for fields in parts:
        fields[name] = None  # an assignment is refused where the field is declared as a whole number
    try:
        yield
    finally:
        for fields, old in zip(parts, before, strict=True):
            del fields[name]
            fields.update(old)
