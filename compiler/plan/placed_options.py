"""Keys of a plan that know their lines: the begin of a message about one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

from partc.runtime.options import Options
from pydantic import PrivateAttr


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
