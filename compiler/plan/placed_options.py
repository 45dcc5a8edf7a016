"""Keys of a plan that know their lines, with which messages about them begin."""

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
        """Returns a copy with the places of its keys; `where` returns the place of a path, `where("train", "loss")`."""
        found = self.model_copy()
        found._place = where
        return found

    def where(self, *steps: str | int) -> str:
        """Returns the place of a key, `plan.yaml:4`; without steps, the place of the whole entry."""
        return self._place(self.KEY, *steps)


def _nowhere(*steps: str | int) -> str:
    """Returns the path itself as the place of options that are not from a file."""
    return ".".join(map(str, steps))
