"""Inputs of a model that a number of ranks read, and what their shards are together; sources of records that have their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from partc.runtime.artifact.format import Port
from partc.runtime.artifact.tensors.boxes import merge


def port(
    name: str, type: str, shape: list[int | str] | None, ranks: int = 1, cut: dict[int, int] | None = None
) -> Port:
    """A port that `ranks` ranks read, each a piece where dims are cut into so many parts, the last dim fastest."""
    if cut is None:
        return Port(name=name, type=f"tensor({type})", shape=shape, ranks=list(range(ranks)))
    boxes = []
    for rank in range(ranks):
        box, at = [], rank
        for dim in reversed(range(len(shape or []))):
            parts = cut.get(dim, 1)
            box.append([at % parts, at % parts + 1, parts])
            at //= parts
        boxes.append(box[::-1])
    return Port(name=name, type=f"tensor({type})", shape=shape, ranks=list(range(ranks)), boxes=boxes)


def whole(port: Port, pieces: list[np.ndarray]) -> np.ndarray:
    return merge(port.boxes, pieces) if port.boxes else pieces[0]


def sharded(ranks: int) -> list[Port]:
    """The inputs `x` of four numbers and `label`, whose records are dealt evenly to the ranks."""
    return [port("x", "float", ["n", 4], ranks, {0: ranks}), port("label", "int64", ["n"], ranks, {0: ranks})]


def joined(ports: Sequence[Port], ranks: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The global batch of which ranks have read these shards."""
    return {one.name: whole(one, [ranks[rank][one.name] for rank in one.ranks]) for one in ports}
