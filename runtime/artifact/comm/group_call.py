"""The base of collective and lookup nodes, by which the ranks of a list communicate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True)
class GroupCall(ABC):
    """One node: a `CollectiveCall` or a `LookupCall`."""

    LAW: ClassVar[str]
    op: str
    group: str
    tag: int
    path: str

    @property
    @abstractmethod
    def value(self) -> str:
        """The value that reports name: what comes out, or what goes in where nothing does."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """The values that the rank gives."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """The values that the rank gets."""

    @property
    @abstractmethod
    def typed(self) -> str | None:
        """The value that goes in whose type is that of what comes out."""

    @property
    @abstractmethod
    def law(self) -> tuple[object, ...]:
        """What the nodes of all ranks of a list say alike, in the words of `LAW`."""

    @abstractmethod
    def renamed(self, names: Mapping[str, str], tag: int, path: str) -> Self:
        """The same of other values."""
