"""The base class of collective and lookup nodes, by which the ranks of a group's list communicate."""

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
        """The value by which reports name the node: its output, or its input where it has no output."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """The names of the node's inputs on this rank."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """The names of the node's outputs on this rank."""

    @property
    @abstractmethod
    def typed(self) -> str | None:
        """The input whose type the output also has; None where the rank has no such input."""

    @property
    @abstractmethod
    def law(self) -> tuple[object, ...]:
        """The attributes that must be equal on all ranks of a list; `LAW` names them in messages."""

    @abstractmethod
    def renamed(self, names: Mapping[str, str], tag: int, path: str) -> Self:
        """Returns this call with its values renamed by `names`, and with this tag and path."""
