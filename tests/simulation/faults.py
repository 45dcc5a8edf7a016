"""What may go wrong in a run, and what a rank has got of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from partc.runtime import Program, Trainer

NONE, DIES, SLEEPS, RAISES, REFUSED, DISK, NONFINITE, EXITS = (
    "none",
    "dies",
    "sleeps",
    "raises",
    "is refused",
    "cannot write",
    "is given nan",
    "exits",
)
KINDS = (*[NONE] * 6, *[DIES] * 2, *[SLEEPS] * 2, *[RAISES] * 3, EXITS, *[REFUSED] * 2)
DIMS, MISSING, LABEL = "dims", "missing", "label"
WORDS = "planted here"


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which rank, at which of the things that it does."""

    kind: str
    rank: int = 0
    at: int = 0
    way: str = ""

    def __str__(self) -> str:
        return "nothing goes wrong" if self.kind == NONE else f"rank {self.rank} {self.kind} at its action {self.at}"


@dataclass
class Results:
    """What a rank has got: the outputs of each step, the texts of those that were refused, and of those that were given up."""

    outputs: list[Mapping[str, Any]]
    refused: list[str]
    given_up: dict[int, str]


def spoiled(end: Program | Trainer, given: Mapping[str, Any], way: str) -> dict[str, Any]:
    """Inputs that no step takes: an input of other dims, none, or a last record whose label is no class."""
    if way == LABEL:
        port = next(port for port in end.inputs if port.labels)
        labels = given[port.name].copy()
        labels[-1] = 99
        return {**given, port.name: labels}
    name = end.inputs[0].name
    if way == DIMS:
        return {**given, name: np.zeros((1, 1, 1, 1, 1), np.int8)}
    return {key: value for key, value in given.items() if key != name}


def without_numbers(end: Program | Trainer, given: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of which one holds a NaN."""
    name = next(port.name for port in end.inputs if port.type == "tensor(float)")
    array = np.array(given[name])
    array.reshape(-1)[-1] = np.nan
    return {**given, name: array}
