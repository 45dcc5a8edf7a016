"""What is known of values and of dynamic dims: types, global shapes, and what is promised of the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from partc.compiler.dims.facts import Facts

Dim = int | str
Shape = tuple[Dim, ...]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SymbolInfo:
    """A dynamic dim of the inputs: what is promised of it, and where (`plan.yaml:3`, or the input that names it).

    `parts`: of how many equal parts the facts speak of one; `whole` are then those of all of them.
    """

    facts: Facts
    where: str
    unique: bool = False
    parts: int = 1
    whole: Facts | None = None


@dataclass(frozen=True)
class ValueInfo:
    """What is known of a value: its type as onnxruntime writes it, and its global shape; None where only a run tells."""

    type: str
    shape: Shape | None
    item_bytes: int | None

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("tensor(")
