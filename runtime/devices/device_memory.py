"""The memory of a target other than the host, and values in it.

    memory = memory_of(Device("cuda", 0))
    block = memory.block(1 << 20)             # freed when its last reference is gone
    memory.write(block.pointer, data)         # from the host
    memory.read(block.pointer, data)          # to the host

Only sessions and the calls here access this memory: a `Remote` has no array. That also holds if the target runs on the CPU, so that a
program that would read a device's memory as the host's fails there, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Bytes, Dtype
from partc.runtime.artifact.tensors.tensor import Tensor, Value, aligned

from ..artifact.format import CUDA
from ..errors import UsageError
from .devices import Device, Devices


@dataclass(frozen=True)
class Block:
    """Memory of a device: its address, and the object that owns it."""

    pointer: int
    size: int
    owner: object


class DeviceMemory(Protocol):
    """The memory of one target."""

    device: Device

    def block(self, size: int) -> Block:
        """Returns new memory, not cleared."""
        ...

    def write(self, pointer: int, data: Bytes) -> None:
        """Copies from the host; returns when the copy is done."""
        ...

    def read(self, pointer: int, data: Bytes) -> None:
        """Copies to the host; returns when the copy is done."""
        ...


@dataclass(frozen=True)
class Remote:
    """A dense value in a target's memory: type, shape and address."""

    dtype: Dtype
    shape: tuple[int, ...]
    pointer: int
    memory: DeviceMemory
    owner: object

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.dtype.bytes_of(self.shape)

    @property
    def where(self) -> tuple[str, int]:
        """Its device as onnxruntime names it."""
        return self.memory.device.kind, self.memory.device.number

    def to_host(self) -> Tensor:
        """Returns a copy in the host's memory."""
        copy = Tensor.empty(self.dtype, self.shape)
        self.memory.read(self.pointer, copy.data)
        return copy


Placed: TypeAlias = Tensor | Remote
Cell: TypeAlias = "Value | Remote"
"""A value of a step: one on the host, or one in a target's memory."""


def move(source: Placed, target: Placed) -> None:
    """Copies the bytes of a value to another one of the same size; each may be on the host or a device."""
    match source, target:
        case Tensor(), Tensor():
            np.copyto(target.data, source.data)
        case Tensor(), Remote():
            target.memory.write(target.pointer, source.data)
        case Remote(), Tensor():
            source.memory.read(source.pointer, target.data)
        case Remote(), Remote():
            target.memory.write(target.pointer, source.to_host().data)


def shapes_of(cells: Mapping[str, Cell]) -> dict[str, tuple[int, ...]]:
    """Maps names to the shapes of the cells that are tensors."""
    return {name: tuple(one.shape) for name, one in cells.items() if isinstance(one, Tensor | Remote)}


def on_host(value: Cell) -> Value:
    """Returns a value on the host: itself, or a copy of one on a device."""
    return value.to_host() if isinstance(value, Remote) else value


def new_place(memory: DeviceMemory | None, dtype: Dtype, shape: tuple[int, ...]) -> Placed:
    """Returns memory for one value, on the host if no other memory is given."""
    if memory is None:
        return Tensor.empty(dtype, shape)
    block = memory.block(dtype.bytes_of(shape))
    return Remote(dtype, shape, block.pointer, memory, block)


def part(whole: Placed, begin: int, dtype: Dtype, shape: tuple[int, ...]) -> Placed:
    """Returns the value that begins at a byte of another one's memory."""
    if isinstance(whole, Remote):
        return Remote(dtype, shape, whole.pointer + begin, whole.memory, whole.owner)
    return Tensor(dtype, shape, whole.data[begin : begin + dtype.bytes_of(shape)])


class HostMemory:
    """The memory of a target that runs on the CPU."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def block(self, size: int) -> Block:
        data = aligned(size)
        return Block(data.ctypes.data, size, data)

    def write(self, pointer: int, data: Bytes) -> None:
        ctypes.memmove(pointer, data.ctypes.data, data.size)

    def read(self, pointer: int, data: Bytes) -> None:
        ctypes.memmove(data.ctypes.data, pointer, data.size)


def host_view(value: Remote) -> Tensor:
    """Returns a value of a target that runs on the CPU as a tensor over the same memory."""
    assert value.memory.device.is_host, value.memory.device
    return Tensor(value.dtype, value.shape, bytes_at(value.pointer, value.size, value.owner))


def bytes_at(pointer: int, size: int, owner: object) -> Bytes:
    """Returns memory of the host as an array, which keeps its owner alive."""
    memory = (ctypes.c_uint8 * size).from_address(pointer)
    memory.owner = owner  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(memory)


class CudaMemory:
    """The memory of a GPU, by onnxruntime's tensors; the host's side of a copy is ordinary, pageable memory."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def block(self, size: int) -> Block:
        value = allocate(self.device, max(size, 1))
        return Block(int(value.data_ptr()), size, value)

    def write(self, pointer: int, data: Bytes) -> None:
        if data.size:
            view(self.device, pointer, data.size).update_inplace(data)

    def read(self, pointer: int, data: Bytes) -> None:
        if data.size:
            np.copyto(data, view(self.device, pointer, data.size).numpy())


def memory_of(device: Device) -> DeviceMemory:
    """Returns the memory of a target that runs on a device."""
    return HostMemory(device) if device.is_host else CudaMemory(device)


def allocate(device: Device, size: int) -> Any:
    """Returns memory of a device as a tensor of onnxruntime; raises RuntimeError if the device does not exist."""
    import onnxruntime

    if not device.is_host:
        _load_libraries()
    return onnxruntime.OrtValue.ortvalue_from_shape_and_type([size], np.uint8, device.kind, device.number)


@functools.cache
def _load_libraries() -> None:
    """Loads CUDA's libraries if they are installed as Python packages; suppresses onnxruntime's output about it."""
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    onnxruntime.set_default_logger_severity(4)  # what fails is raised, with its text
    with contextlib.suppress(Exception):
        native.set_arena_extend_strategy(native.ArenaExtendStrategy.kSameAsRequested)
    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
            onnxruntime.preload_dlls()


def view(device: Device, pointer: int, size: int) -> Any:
    """Returns a tensor of onnxruntime over memory of a device that another object owns, by the DLPack protocol."""
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    managed = _Managed()
    shape = (ctypes.c_int64 * 1)(size)
    managed.tensor = _DLTensor(pointer, _KINDS[device.kind], device.number, 1, 1, 8, 1, shape, None, 0)
    managed.deleter = _DELETER
    key = ctypes.addressof(managed)
    _views[key] = managed, shape
    return native.OrtValue.from_dlpack(_capsule(key, b"dltensor", None), False)


_KINDS = {"cpu": 1, "cuda": 2}
"""DLPack's numbers of devices."""


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("number", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Managed._fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))
_views: dict[int, Any] = {}
"""Maps addresses to the descriptions of views that onnxruntime still uses."""


def _forget(key: int | None) -> None:
    _views.pop(key or 0, None)


_DELETER = _Deleter(_forget)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def refuse_missing(devices: Devices, used: Sequence[str], where: str) -> None:
    """Raises UsageError if a program has targets for a device that this machine lacks or onnxruntime cannot use."""
    for target in used:
        device = devices.of(target)
        if device.is_host or not (why := _missing(device)):
            continue
        raise UsageError(
            f"{where}: there is no device for the target {CUDA}: {device}: {why}\n"
            f"  help: --device cuda=cpu runs the same program on the CPU; a GPU needs onnxruntime-gpu, CUDA and cuDNN"
        )


def _missing(device: Device) -> str:
    """Returns the reason for which memory on a device cannot be allocated; empty if it can."""
    try:
        allocate(device, 1)
    except Exception as error:
        text = " ".join(str(error).split())
        return text.rpartition("GetProviderInfo_CUDA() ")[2] or type(error).__name__
    return ""
