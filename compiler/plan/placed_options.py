"""Keys of a plan that know their places: what a message about one of them begins with; and sizes in bytes as values of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Self, TypeAlias

from partc.runtime.options import Options, Refused, is_integer, shown
from partc.runtime.units import FORMS, parse_bytes
from pydantic import Field, PlainValidator, PrivateAttr


class PlacedOptions(Options):
    """What a plan has under the key `KEY`."""

    KEY: ClassVar[str]
    _place: Callable[..., str] = PrivateAttr(default_factory=lambda: _nowhere)

    def placed(self, where: Callable[..., str]) -> Self:
        """The same with the places of its keys; `where` gives that of a path, `where("train", "loss")`."""
        found = self.model_copy()
        found._place = where
        return found

    def where(self, *steps: str | int) -> str:
        """The place of a key, `plan.yaml:4`; without one that of all."""
        return self._place(self.KEY, *steps)


def _nowhere(*steps: str | int) -> str:
    """The path itself, of what no file has."""
    return ".".join(map(str, steps))


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
"""A size as users write it: `64MB`, `512KiB`, or a number of bytes."""
