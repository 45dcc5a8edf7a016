"""Checks the numbers of an input: labels are classes, ids are rows of tables. Others are refused, with their record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from partc.runtime.artifact.tensors.tensor import Tensor, Value

from ..artifact.format import IdsRecord, LabelRecord, Port


def check_numbers(port: Port, value: Value, rank: int) -> None:
    """ValueError for the first number of a rank's shard that is not a label, or not a row of the table that it is looked up in."""
    if (port.labels is None and not port.ids) or not isinstance(value, Tensor):
        return
    array: Any = value.array()
    if not array.size:
        return
    if port.labels is not None:
        _check_labels(port, port.labels, array, rank)
    if not port.ids:
        return
    low, high = int(array.min()), int(array.max())
    for one in port.ids:
        if low < -one.rows or high >= one.rows:
            _check_ids(port, one, array, rank)


def _check_ids(port: Port, law: IdsRecord, array: Any, rank: int) -> None:
    shape = array.shape
    places, begin = law.places, _begins(port, shape, rank)[law.axis] if shape else 0
    if places:
        places = [place - begin for place in places if begin <= place < begin + shape[law.axis]]
        array = np.take(array, places, law.axis)
    wrong = (array < -law.rows) | (array >= law.rows)
    if not wrong.any():
        return
    first = [int(one) for one in np.argwhere(wrong)[0]]
    found = array[tuple(first)]
    if places:
        first[law.axis] = places[first[law.axis]]
    raise ValueError(
        f"{_place(port, shape, first, rank)} has the id {found}\n"
        f"  the table '{law.table}' has {law.rows} rows: ids are {-law.rows} to {law.rows - 1}\n"
        "  help: look at the data, or give the table more rows"
    )


def _check_labels(port: Port, law: LabelRecord, labels: Any, rank: int) -> None:
    if labels.min() >= 0 and (not law.classes or labels.max() < law.classes) and labels.dtype.kind != "f":
        return
    right = (labels >= 0) & (labels < law.classes) if law.classes else labels >= 0
    if labels.dtype.kind == "f":
        right &= labels == np.floor(labels)
    wrong = ~right & ~np.isin(labels, law.ignored)
    if not wrong.any():
        return
    first = [int(one) for one in np.argwhere(wrong)[0]]
    to = "or" if law.classes == 2 else "to"
    classes = f"labels are 0 {to} {law.classes - 1}" if law.classes else "labels are 0 or more"
    ignored = f", or {', '.join(map(str, law.ignored))}, which does not count" if law.ignored else ""
    remedy = "give the loss an `ignore_index`, the label that does not count"
    if law.metric:
        remedy = f"take the metric '{law.metric}' out, which is of no others"
    raise ValueError(
        f"{_place(port, labels.shape, first, rank)} has the label {labels[tuple(first)]}\n  {classes}{ignored}\n"
        f"  help: correct the data, or {remedy}"
    )


def _place(port: Port, shape: Sequence[int], first: Sequence[int], rank: int) -> str:
    """The position in the batch of an element of a rank's shard."""
    if not first:
        return "it"
    rest = [at + begin for at, begin in zip(first, _begins(port, shape, rank), strict=True)]
    record = rest.pop(port.batch_dim)
    return f"record {record} of the batch" + (f" at {rest}" if rest else "")


def _begins(port: Port, shape: Sequence[int], rank: int) -> list[int]:
    """The begin of a rank's shard of an input along each dim."""
    box = port.box(rank)
    if box is None:
        return [0] * len(shape)
    return [size * begin // (end - begin) for size, (begin, end, _) in zip(shape, box, strict=True)]
