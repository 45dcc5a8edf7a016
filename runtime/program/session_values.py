"""Converts values for sessions, and the results of sessions to values."""

from __future__ import annotations

import ctypes
from typing import TypeAlias

import numpy as np
from partc.runtime.artifact.tensors.dtypes import BY_CODE, Array, Dtype
from partc.runtime.artifact.tensors.tensor import Tensor, Value

from ..devices.device_memory import Cell, DeviceMemory, Placed, Remote, on_host
from ..errors import StepError
from .ort import Bind, OrtValue, new_value

Shape: TypeAlias = tuple[int, ...]


def as_feed(cell: Cell) -> Value | OrtValue:
    """Returns a value as onnxruntime accepts it from Python; a type that numpy lacks becomes onnxruntime's own tensor, by one copy."""
    value = on_host(cell)
    if not isinstance(value, Tensor):
        return value
    if not value.dtype.wide:
        return value.array()
    made = new_value(value.shape, value.dtype.code)
    ctypes.memmove(made.data_ptr(), value.pointer, value.data.size)
    return made


def as_tensor(value: Array, dtype: Dtype) -> Tensor:
    """Converts an array that a session returned to a tensor of the type that it must have."""
    return Tensor.of(np.asarray(value).astype(dtype.numpy, copy=False), dtype)


def from_ort(value: OrtValue, memory: DeviceMemory | None = None) -> Placed:
    """Returns a tensor that shares the memory of onnxruntime's tensor, on the host or on a target, and keeps it alive."""
    dtype, shape = BY_CODE[value.element_type()], tuple(value.shape())
    if memory is not None:
        return Remote(dtype, shape, value.data_ptr(), memory, value)
    size = dtype.bytes_of(shape)
    if not size:
        return Tensor.empty(dtype, shape)
    bytes = (ctypes.c_uint8 * size).from_address(value.data_ptr())
    bytes.owner = value  # type: ignore[attr-defined]
    return Tensor(dtype, shape, np.ctypeslib.as_array(bytes))


def check_promise(name: str, found: Shape, promised: Shape) -> None:
    """Raises StepError unless a value has the promised shape, on which other ranks rely."""
    if found != promised:
        raise StepError(f"the value '{name}' was promised with shape {list(promised)} and has {list(found)}")


def bind_tensor(bind: Bind, name: str, tensor: Placed) -> None:
    """Binds a whole tensor to an input or an output of a session."""
    bind(name, *tensor.where, tensor.dtype.code, tensor.shape, tensor.pointer)
