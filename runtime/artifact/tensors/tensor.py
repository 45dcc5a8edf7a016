"""A dense value in memory: element type, shape and the packed bytes, whoever owns them.

All code that moves values (sessions, messages, outputs) works on the same bytes: nothing is copied on the way from a caller's array to a
session, from a session to a message, or from a message to a session.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array, Bytes, Dtype

ALIGNMENT = 64
Value: TypeAlias = "Tensor | Array | list[Value] | dict[int | str, Value] | int | float | str | None"
"""A value of a step: a dense tensor, an array of strings, a sequence, a map, or None for an empty optional."""


_FIELD = object.__basicsize__
"""The offset in a numpy array object of the pointer to its elements, by numpy's C API: directly after the head that every object has."""


def _reader_of_addresses() -> Callable[[np.ndarray[Any, Any]], int]:
    """Returns a function that reads the address of an array's elements.

    It reads the array object's field where the probes confirm its offset, which is 7 times as fast as `ctypes.data`.
    """
    read = ctypes.c_size_t.from_address
    probes: list[np.ndarray[Any, Any]] = [
        np.empty(8, np.uint8),
        np.empty((4, 4), np.float32)[1:],
        np.empty((), np.int64),
    ]
    if sys.implementation.name == "cpython" and all(read(id(one) + _FIELD).value == one.ctypes.data for one in probes):
        return lambda array: read(id(array) + _FIELD).value
    return lambda array: array.ctypes.data


address = _reader_of_addresses()


class Tensor:
    """Bytes with a type and a shape. `data` is one-dimensional and contiguous; it keeps its owner alive."""

    __slots__ = ("data", "dtype", "pointer", "shape")
    where = ("cpu", 0)
    """The device, by its name in onnxruntime."""

    def __init__(self, dtype: Dtype, shape: tuple[int, ...], data: Bytes) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data
        self.pointer: int = address(data)

    @staticmethod
    def empty(dtype: Dtype, shape: tuple[int, ...]) -> Tensor:
        """New memory, not cleared."""
        return Tensor(dtype, shape, aligned(dtype.bytes_of(shape)))

    @staticmethod
    def zeros(dtype: Dtype, shape: tuple[int, ...]) -> Tensor:
        """New memory of zeros; the system allocates a page of a large tensor when the page is first written."""
        return Tensor(dtype, shape, aligned(dtype.bytes_of(shape), np.zeros))

    @staticmethod
    def of(array: Array, dtype: Dtype) -> Tensor:
        """The bytes of an array of `dtype`, shared where it is contiguous and aligned, else copied once."""
        if dtype.bits < 8:
            return Tensor(dtype, array.shape, _packed(array, dtype.bits))
        flags = array.flags
        ready = array if flags.c_contiguous and flags.aligned else np.require(array, requirements=("C", "A"))
        return Tensor(dtype, array.shape, ready.reshape(-1).view(np.uint8))

    def array(self) -> Array:
        """The value as users see it: a view of the same bytes, or the unpacked elements where they are narrower than a byte."""
        if self.dtype.bits < 8:
            return _unpacked(self.data, self.shape, self.dtype)
        return self.data.view(self.dtype.numpy).reshape(self.shape)


def aligned(size: int, new: Callable[[int, type[np.uint8]], Bytes] = np.empty) -> Bytes:
    """`size` bytes of new memory that begin at a multiple of `ALIGNMENT`."""
    raw = new(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def _packed(array: Array, bits: int) -> Bytes:
    per = 8 // bits
    codes = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & ((1 << bits) - 1)
    rows = np.pad(codes, (0, -codes.size % per)).reshape(-1, per)
    packed: Bytes = np.bitwise_or.reduce(rows << (bits * np.arange(per, dtype=np.uint8)), axis=1)
    return packed


def _unpacked(data: Bytes, shape: tuple[int, ...], dtype: Dtype) -> Array:
    per = 8 // dtype.bits
    codes = (data[:, None] >> (dtype.bits * np.arange(per, dtype=np.uint8))) & ((1 << dtype.bits) - 1)
    count = int(np.prod(shape))
    values = codes.reshape(-1)[:count]
    if dtype.name.startswith("int"):
        half = 1 << (dtype.bits - 1)
        return ((values.astype(np.int8) ^ half) - half).astype(dtype.numpy).reshape(shape)
    if dtype.name.startswith("uint"):
        return values.astype(dtype.numpy).reshape(shape)
    return values.view(dtype.numpy).reshape(shape)
