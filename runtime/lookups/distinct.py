"""The ids of a lookup, each once, and sums of rows by id.

A batch names popular rows many times: of 16,384 ids with skewed counts a fifth are distinct. Ids are sorted with their places behind them
in one 64-bit number, which is faster than sorting ids and asking for the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper
from partc.runtime.artifact.tensors.dtypes import BY_CODE, Array

from ..devices.devices import HOST
from ..program.ort import Session, new_session

Ids: TypeAlias = npt.NDArray[np.int64]
_BITS = 31
_SUMMED = ("float", "double", "int32", "int64")
"""Element types that onnxruntime adds up."""


@dataclass(frozen=True)
class Distinct:
    """Ids, ascending, each once; `inverse` has the place in `ids` of each of those that were given."""

    ids: Ids
    inverse: npt.NDArray[np.integer]


def distinct(given: Ids) -> Distinct:
    """Ids of 0 and above, each once."""
    count = given.size
    if count == 0:
        return Distinct(given, given)
    if count >> _BITS or int(given.max()) >> _BITS:
        ids, inverse = np.unique(given, return_inverse=True)
        return Distinct(ids, inverse)
    keys = (given << _BITS) | np.arange(count)
    keys.sort()
    ordered = keys >> _BITS
    first = np.empty(count, np.bool_)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    inverse = np.empty(count, np.int64)
    inverse[keys & ((1 << _BITS) - 1)] = np.cumsum(first) - 1
    return Distinct(ordered[first], inverse)


def counted_from_front(ids: Array, rows: int) -> tuple[Ids, int]:
    """The ids of a table of so many rows with those below 0 counted from its end, flat; the index of the first that is not a row, or -1."""
    flat: Ids = ids.reshape(-1).astype(np.int64)
    if not flat.size:
        return flat, -1
    lowest, highest = int(flat.min()), int(flat.max())
    if lowest < -rows or highest >= rows:
        return flat, int(np.flatnonzero((flat < -rows) | (flat >= rows))[0])
    if lowest < 0:
        flat[flat < 0] += rows
    return flat, -1


class RowSums:
    """Adds rows of one element type up, in their order: each id's sum is the same, whatever else is there."""

    def __init__(self, code: int) -> None:
        self.dtype = BY_CODE[code]
        self._session: Session | None = None

    @np.errstate(over="ignore", invalid="ignore")
    def __call__(self, rows: Array, inverse: npt.NDArray[np.integer], count: int) -> Array:
        """`count` sums: the k-th is that of the rows at which `inverse` is k."""
        total = np.zeros((count, rows.shape[1]), rows.dtype)
        if count == inverse.size:
            total[inverse] = rows
        elif self.dtype.name in _SUMMED:
            self._session = self._session or _session(self.dtype.code)
            places = inverse.astype(np.int64).reshape(-1, 1)
            total = self._session.run(["y"], {"zeros": total, "places": places, "rows": rows})[0]
        else:
            wide = total.astype(np.float32) if rows.dtype.itemsize < 4 and rows.dtype.kind not in "iub" else total
            np.add.at(wide, inverse, rows.astype(wide.dtype))
            total = wide.astype(rows.dtype)
        return total


def _session(code: int) -> Session:
    node = helper.make_node("ScatterND", ["zeros", "places", "rows"], ["y"], reduction="add")
    zeros, rows, total = (
        helper.make_tensor_value_info(name, code, shape)
        for name, shape in (("zeros", ["u", "d"]), ("rows", ["n", "d"]), ("y", ["u", "d"]))
    )
    places = helper.make_tensor_value_info("places", TensorProto.INT64, ["n", 1])
    graph = helper.make_graph([node], "sums", [zeros, places, rows], [total])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    # One thread: rows are then added in their order.
    return new_session(model.SerializeToString(), 1, HOST, {})
