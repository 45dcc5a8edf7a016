"""A GPU of stubs, for tests on machines without one: its memory is a block of the host's, its sessions run on the CPU.

What the runtime must keep to on a GPU is kept to here: an operand of the host is copied when it is bound and not when the session runs, the
memory of the device has no array, and an address is of the device that is named with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from partc.runtime.artifact.tensors.dtypes import BY_CODE, Bytes
from partc.runtime.devices.device_memory import Block, DeviceMemory, HostMemory, memory_of
from partc.runtime.devices.devices import HOST, Device
from partc.runtime.execution import rank_program
from partc.runtime.program import ort, sessions
from partc.runtime.updates import updater


class StubMemory(HostMemory):
    """DeviceMemory that knows its own addresses; `blocks` are those of all stubs."""

    blocks: list[Block] = []  # noqa: RUF012

    def block(self, size: int) -> Block:
        self.blocks.append(super().block(size))
        return self.blocks[-1]

    def write(self, pointer: int, data: Bytes) -> None:
        assert lies_there(pointer, data.size)
        super().write(pointer, data)

    def read(self, pointer: int, data: Bytes) -> None:
        assert lies_there(pointer, data.size)
        super().read(pointer, data)


def lies_there(pointer: int, size: int) -> bool:
    """Whether an address is one of the stub's device."""
    return any(one.pointer <= pointer and pointer + size <= one.pointer + one.size for one in StubMemory.blocks)


class StubBinding:
    """A binding of a session on the device."""

    def __init__(self, real: Any) -> None:
        self.real, self.copies = real, dict[str, Bytes]()
        self.made_there: dict[str, bool] = {}

    def bind_input(self, name: str, kind: str, number: int, code: int, shape: tuple[int, ...], pointer: int) -> None:
        size = BY_CODE[code].bytes_of(shape)
        if kind == "cpu":
            assert not size or not lies_there(pointer, size), f"{name} lies on the device"
            data = self.copies[name] = np.empty(size, np.uint8)
            ctypes.memmove(data.ctypes.data, pointer, size)
            pointer = data.ctypes.data
        else:
            assert not size or lies_there(pointer, size), f"{name} does not lie on {kind}:{number}"
        self.real.bind_input(name, "cpu", 0, code, shape, pointer)

    def bind_output(self, name: str, kind: str = "cpu", number: int = 0, *place: Any) -> None:
        if place:
            size = BY_CODE[place[0]].bytes_of(place[1])
            assert not size or lies_there(place[2], size) == (kind != "cpu"), name
        self.made_there[name] = kind != "cpu" and not place
        self.real.bind_output(name, "cpu", 0, *place)

    def get_outputs(self) -> Any:
        found = self.real.get_outputs()
        for one, there in zip(found, self.made_there.values(), strict=True):
            if there:
                StubMemory.blocks.append(Block(one.data_ptr(), max(1, one.tensor_size_in_bytes()), one))
        return found


class StubSession:
    """A session on the device."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def io_binding(self) -> StubBinding:
        return StubBinding(self.real.io_binding())

    def run_with_iobinding(self, binding: StubBinding) -> None:
        self.real.run_with_iobinding(binding.real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.fixture
def stub_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """The device `cuda` is a stub; what comes back lists the devices of its sessions as they are made."""
    made: list[Device] = []

    def new_session(model: bytes, threads: int, device: Device, entries: Any, *rest: Any) -> Any:
        left = {name: value for name, value in entries.items() if name != ort.NO_FALLBACK}
        session = ort.new_session(model, threads, HOST, left, *rest)
        if device.is_host:
            return session
        made.append(device)
        return StubSession(session)

    def memory(device: Device) -> DeviceMemory:
        return memory_of(device) if device.is_host else StubMemory(device)

    def none_missing(devices: Any, used: Sequence[str], where: str) -> None:
        pass

    StubMemory.blocks = []
    monkeypatch.setattr(sessions, "new_session", new_session)
    monkeypatch.setattr(updater, "new_session", new_session)
    monkeypatch.setattr(sessions, "refuse_moved_to_host", lambda *_: None)
    monkeypatch.setattr(rank_program, "memory_of", memory)
    monkeypatch.setattr(rank_program, "refuse_missing", none_missing)
    return made
