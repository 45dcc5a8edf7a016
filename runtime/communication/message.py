"""Encoding of values whose size in bytes the receiver cannot foresee: unknown shapes, strings, sequences, optionals and maps.

Such a value is sent as two messages with the same tag: a header of fixed size, then the payload, whose kind and size are in the header. A
tensor's payload is its bytes, without a copy. Every other value is packed into one self-describing block; all its counts are little-endian
64-bit integers:

    tensor    1, element type, rank, dims..., bytes
    strings   2, rank, dims..., length of each in bytes, UTF-8 of all
    sequence  3, count, items...
    none      4
    map       5, keys, values    (as strings or tensors)

A value whose size both sides know is sent without a header.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from partc.runtime.artifact.tensors.dtypes import BY_CODE, Bytes, by_numpy
from partc.runtime.artifact.tensors.tensor import Tensor, Value

_TENSOR, _STRINGS, _SEQUENCE, _NONE, _MAP = 1, 2, 3, 4, 5
_PACKED = 0
_DIMS = 12
HEADER = 8 * (4 + _DIMS)


def encode(value: Value) -> tuple[Bytes, Bytes]:
    """Header and payload of a value; the payload of a tensor shares its memory."""
    if isinstance(value, Tensor) and len(value.shape) <= _DIMS:
        dims = value.shape + (0,) * (_DIMS - len(value.shape))
        return _header(_TENSOR, value.data.size, value.dtype.code, len(value.shape), dims), value.data
    block = bytearray()
    _pack(value, block)
    return _header(_PACKED, len(block), 0, 0, (0,) * _DIMS), np.frombuffer(block, np.uint8)


def payload_size(header: Bytes) -> int:
    """Returns the bytes of the payload that follows this header."""
    return int(header.view(np.int64)[1])


def decode(header: Bytes, payload: Bytes) -> Value:
    """The value; a tensor shares the payload's memory."""
    kind, _, code, rank, *dims = header.view(np.int64).tolist()
    if kind == _TENSOR:
        return Tensor(BY_CODE[code], tuple(dims[:rank]), payload)
    return _Reader(payload).value()


def _header(kind: int, size: int, code: int, rank: int, dims: tuple[int, ...]) -> Bytes:
    return np.array([kind, size, code, rank, *dims], np.int64).view(np.uint8)


def _pack(value: Value, block: bytearray) -> None:
    match value:
        case None:
            block += _ints(_NONE)
        case Tensor():
            block += _ints(_TENSOR, value.dtype.code, len(value.shape), *value.shape, value.data.size)
            block += value.data.tobytes()
        case list():
            block += _ints(_SEQUENCE, len(value))
            for item in value:
                _pack(item, block)
        case dict():
            block += _ints(_MAP)
            _pack(np.array(list(value), object if any(isinstance(key, str) for key in value) else np.int64), block)
            _pack(list(value.values()), block)
        case int() | float() | str():
            _pack(np.array(value, object if isinstance(value, str) else None), block)
        case _ if value.dtype.kind in "OSUT":
            texts = [text if isinstance(text, bytes) else str(text).encode() for text in value.reshape(-1).tolist()]
            block += _ints(_STRINGS, value.ndim, *value.shape, *map(len, texts))
            block += b"".join(texts)
        case _:
            dtype = by_numpy(value.dtype)
            if dtype is None:
                raise ValueError(f"a value of numpy type {value.dtype} cannot be sent")
            _pack(Tensor.of(value, dtype), block)


def _ints(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


class _Reader:
    """Reads values from a packed block, from its begin to its end."""

    def __init__(self, payload: Bytes) -> None:
        self.payload = payload
        self.at = 0

    def value(self) -> Value:
        (kind,) = self.ints(1)
        match kind:
            case 1:
                (code, rank) = self.ints(2)
                shape = tuple(self.ints(rank))
                (size,) = self.ints(1)
                # A copy, because the place in the block may not be aligned.
                return Tensor(BY_CODE[code], shape, self.take(size).copy()).array()
            case 2:
                (rank,) = self.ints(1)
                shape = tuple(self.ints(rank))
                texts = [self.take(size).tobytes().decode() for size in self.ints(int(np.prod(shape)))]
                array = np.empty(len(texts), object)
                array[:] = texts
                return array.reshape(shape)
            case 3:
                (count,) = self.ints(1)
                return [self.value() for _ in range(count)]
            case 4:
                return None
            case 5:
                keys, values = self.value(), self.value()
                if not isinstance(keys, np.ndarray) or not isinstance(values, list):
                    raise ValueError("a message holds a map without keys and values")
                return dict(zip(keys.tolist(), map(_scalar, values), strict=True))
        raise ValueError(f"a message holds a value of kind {kind}, which this partc does not know")

    def ints(self, count: int) -> Sequence[int]:
        return struct.unpack(f"<{count}q", self.take(8 * count).tobytes())

    def take(self, size: int) -> Bytes:
        self.at += size
        if self.at > self.payload.size:
            raise ValueError(f"a message of {self.payload.size} bytes ends too early")
        return self.payload[self.at - size : self.at]


def _scalar(value: Value) -> Value:
    """Returns an array without dims, a map's value, as a Python number or text, as onnxruntime gives them; any other value as it is."""
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
