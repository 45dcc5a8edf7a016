"""Determines the names of the fields of a record or a batch in any of its forms.

    {"x": ..., "label": ...}    a mapping names its fields itself; `fields: {label: target}` reads the input 'label' from its 'target'
    (image, digit)              a tuple or a list: in the order of `fields: [x, label]`, else of the model's inputs
    image                       any other value is one field

`Unfit` describes a value that does not fit, without its location, which the caller knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from ...errors import PartcError
from ...spellings import nearest

FieldNames: TypeAlias = tuple[str, ...] | Mapping[str, str]


class Unfit(PartcError):
    """A value from the user's code does not match the request."""


def quoted(names: Collection[str]) -> str:
    """Returns names as messages list them."""
    return ", ".join(f"'{name}'" for name in names) or "none"


@dataclass(frozen=True)
class Naming:
    """The `fields` of a spec, and the names of the model's inputs; `inputs` is empty if there is a transform."""

    fields: FieldNames = field(default=())
    inputs: tuple[str, ...] = ()

    def of(self, item: object, what: str = "a record") -> Mapping[str, object]:
        """Maps names to the fields of a record or a batch, without copies; `Unfit` where the names cannot be determined."""
        if isinstance(item, tuple) and hasattr(item, "_asdict"):
            item = item._asdict()
        if isinstance(item, Mapping):
            return self._of_mapping(cast("Mapping[object, object]", item), what)
        if item is None:
            raise Unfit(f"{what} is None")
        values: Sequence[object] = item if isinstance(item, tuple | list) else (item,)
        if isinstance(self.fields, Mapping):
            raise Unfit(
                f"{what} is a {type(item).__name__}, whose values have no keys\n"
                "  help: write their names in their order, such as fields: [x, label]"
            )
        names = self.fields or self.inputs
        if not names:
            raise Unfit(
                f"{what} is a {type(item).__name__} of {len(values)} values without names, and the data has a transform\n"
                "  help: write the names in their order, such as fields: [x, label]"
            )
        if len(values) != len(names):
            whose = "`fields` names" if self.fields else "the model has the inputs"
            raise Unfit(
                f"{what} has {len(values)} values, and {whose} {quoted(names)}\n"
                f"  help: give {len(names)}, or name all of them in their order: fields: [x, label, unused]"
            )
        return dict(zip(names, values, strict=True))

    def _of_mapping(self, item: Mapping[object, object], what: str) -> Mapping[str, object]:
        values = {str(name): value for name, value in item.items()}
        if not self.fields:
            return values
        if not isinstance(self.fields, Mapping):
            raise Unfit(
                f"{what} is a mapping, which names its fields itself: {quoted(values)}\n"
                "  help: write fields: {input: key}, or leave `fields` out"
            )
        for name, key in self.fields.items():
            if key not in values:
                near = nearest(key, values, 1)
                help = f"\n  help: write fields: {{{name}: {near[0]}}}" if near else ""
                raise Unfit(f"{what} has no '{key}', from which `fields` takes '{name}'; it has {quoted(values)}{help}")
        own = {name: values[key] for name, key in self.fields.items()}
        return {**{name: value for name, value in values.items() if name not in own}, **own}
