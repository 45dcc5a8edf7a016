"""Converts a caller's inputs to values of the runtime: a rank's shard, or the global value, whose shard the runtime selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from partc.runtime.artifact.tensors.boxes import divisor, slices, unsharded_extent
from partc.runtime.artifact.tensors.dtypes import BY_NAME, by_numpy, dense
from partc.runtime.artifact.tensors.tensor import Tensor, Value

from ..artifact.format import IdsRecord, LabelRecord, Port


@dataclass(frozen=True)
class Whole:
    """The global value of an input of which a rank reads a shard: the runtime selects the shard.

    A memory-mapped array is read only within the shard.
    """

    value: object


class SameArrays(dict[str, object]):
    """Inputs that are in the same arrays in many steps of one program: a rank converts and checks them once.

    From then on it uses the converted values. Only numbers may change between two steps; the caller is responsible for them, as they are
    not checked again.
    """

    def __init__(self, inputs: Mapping[str, object]) -> None:
        super().__init__(inputs)
        self.read: dict[int, tuple[dict[str, int], dict[str, Value]]] = {}
        """Maps each rank to the sizes and values that it has read."""

    def hold(self, values: Mapping[str, Value]) -> bool:
        """Whether all `values`, which a rank has read from these inputs, share the memory of these arrays, so that none is a copy."""
        for name, value in values.items():
            given = self[name]
            array = given.value if isinstance(given, Whole) else given
            if not isinstance(value, Tensor) or not isinstance(array, np.ndarray):
                return False
            if not np.may_share_memory(array, value.data):
                return False
        return True


def shard(port: Port, rank: int, value: object) -> object:
    """Returns a rank's shard of a global input, as a copy; a `Whole` of the input where its size does not allow that."""
    box = port.box(rank)
    if box is None:
        return value
    array = np.asarray(value)
    try:
        return np.ascontiguousarray(array[slices(box, array.shape)])
    except ValueError:
        return Whole(value)


class InputReader:
    """Reads an input of a rank; an array with the type and the shape of the last one is not converted or measured again."""

    __slots__ = ("_axes", "_box", "_checks", "_dtype", "_kept", "_last", "name", "port", "rank", "sizes")

    def __init__(self, port: Port, rank: int) -> None:
        self.port, self.rank, self.name = port, rank, port.name
        self.sizes: tuple[int, ...] | None = None
        """The dims of the last global value that was a tensor."""
        self._dtype = dense(port.type)
        self._kept = self._dtype.numpy if self._dtype is not None else None
        self._last: tuple[int, ...] | None = None
        """The shape of the last array of that type, from which `sizes` were computed."""
        self._box = port.box(rank)
        self._axes = None if port.shape is None else len(port.shape)
        self._checks = port.labels is not None or bool(port.ids)

    def read_again(self, given: object, values: dict[str, Value]) -> bool:
        """Reads a value with the type and the shape of the last one, and so its sizes; returns False for any other value."""
        if type(given) is not np.ndarray or given.dtype is not self._kept or given.shape != self._last:
            return False
        assert self._dtype is not None
        value = values[self.name] = Tensor.of(given, self._dtype)
        if self._checks:
            check_numbers(self.port, value, self.rank)
        return True

    def read(self, fed: object, values: dict[str, Value]) -> None:
        """Puts this rank's shard of the input `fed` into `values`; ValueError says what is wrong with it."""
        self.forget()
        if self._box is None and type(fed) is np.ndarray and fed.dtype is self._kept and fed.ndim == self._axes:
            self.sizes = self._last = fed.shape
            self.read_again(fed, values)
            return
        value = values[self.name] = self._shard(_value(self.port, fed), fed)
        if type(fed) is np.ndarray and fed.dtype is self._kept:
            self._last = fed.shape
        check_numbers(self.port, value, self.rank)

    def forget(self) -> None:
        """Forgets the last value."""
        self.sizes = self._last = None

    def _shard(self, value: Value, fed: object) -> Value:
        """Returns this rank's shard of an input and sets `sizes` to the global dims; ValueError if these are not integers."""
        box = self._box
        if not isinstance(value, Tensor | np.ndarray):
            return value
        self.sizes = value.shape
        if box is None:
            return value
        if not isinstance(fed, Whole):
            sizes = []
            for axis, (size, cut) in enumerate(zip(value.shape, box, strict=True)):
                try:
                    sizes.append(unsharded_extent(size, cut))
                except ValueError as error:
                    raise ValueError(f"axis {axis} of this rank's shard: {error}") from None
            self.sizes = tuple(sizes)
            return value
        if any(size % divisor(self.port.boxes or [], axis) for axis, size in enumerate(value.shape)):
            return value  # which is refused by all ranks, once they know the size
        array = value.array() if isinstance(value, Tensor) else value
        part = array[slices(box, array.shape)]
        return Tensor.of(part, value.dtype) if isinstance(value, Tensor) else part


def _value(port: Port, value: object) -> Value:
    """Converts an input to a value of the runtime; ValueError says what is wrong with it."""
    value = value.value if isinstance(value, Whole) else value
    dtype = dense(port.type)
    if dtype is None and port.type != "tensor(string)":
        return _general(value, port.type)
    rank = None if port.shape is None else len(port.shape)
    if dtype is not None and type(value) is np.ndarray and value.dtype is dtype.numpy and value.ndim == rank:
        return Tensor.of(value, dtype)
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError("is not an array: its rows differ in length") from None
    if rank is not None and array.ndim != rank:
        shape = ", ".join(map(str, port.shape or ()))
        raise ValueError(f"has {array.ndim} axes, shape {array.shape}; the model takes {rank}: [{shape}]")
    if dtype is None:
        if array.dtype.kind not in "OUST":
            raise ValueError(f"is of {array.dtype}, the model takes strings")
        return array.astype(object)
    if array.dtype.newbyteorder("=") != dtype.numpy:
        raise ValueError(
            f"is of {array.dtype}, the model takes {dtype.numpy}\n  help: convert it: .astype('{dtype.numpy}')"
        )
    return Tensor.of(array.astype(dtype.numpy, copy=False), dtype)


def _general(value: object, text: str) -> Value:
    """Converts a sequence, an optional or a map; ValueError where its element types are not those of the port's type `text`."""
    head, _, rest = text.partition("(")
    inner = rest[:-1]
    match head:
        case "optional":
            return None if value is None else _general(value, inner)
        case "seq":
            if not isinstance(value, list | tuple):
                raise ValueError(f"is a {type(value).__name__}, the model takes a list ({text})")
            return [_general(item, inner) for item in value]
        case "map":
            if not isinstance(value, Mapping):
                raise ValueError(f"is a {type(value).__name__}, the model takes a dict ({text})")
            return dict(value)
        case "tensor":
            array, dtype = np.asarray(value), BY_NAME.get(inner)
            fits = by_numpy(array.dtype) == dtype if dtype else array.dtype.kind in "OUST"
            if not fits:
                raise ValueError(f"holds an array of {array.dtype}, the model takes {text}")
            return array if dtype else array.astype(object)
    raise ValueError(f"is a {text}, which cannot be given from Python")


def check_numbers(port: Port, value: Value, rank: int) -> None:
    """Raises ValueError for the first number of a rank's shard that is not a valid label, or not a row of its table."""
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
    """Describes the position, in the whole batch, of an element of a rank's shard."""
    if not first:
        return "it"
    rest = [at + begin for at, begin in zip(first, _begins(port, shape, rank), strict=True)]
    record = rest.pop(port.batch_dim)
    return f"record {record} of the batch" + (f" at {rest}" if rest else "")


def _begins(port: Port, shape: Sequence[int], rank: int) -> list[int]:
    """Returns the offset of a rank's shard of an input along each dim."""
    box = port.box(rank)
    if box is None:
        return [0] * len(shape)
    return [size * begin // (end - begin) for size, (begin, end, _) in zip(shape, box, strict=True)]
