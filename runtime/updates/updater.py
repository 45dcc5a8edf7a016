"""Runs one group of updates: the optimizer's function over flat memory, in place, in slices that fit into the cache.

onnxruntime makes a pass over memory for each node of an element-wise chain. In slices of half a megabyte all passes but the first find
their operands in the cache; each slice is one bound call of one session.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from partc.runtime.artifact.graph.optimizer_function import is_in_place
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.artifact.tensors.tensor import Tensor

from ..devices.device_memory import Placed
from ..devices.devices import Device
from ..program.kernels import refuse_without_kernel
from ..program.ort import NO_FALLBACK, Binding, Session, new_session
from ..program.sessions import Settings
from .fusion import FusedUpdate, RowUpdate
from .update_model import flat_model

SHARD = 1 << 17
"""Elements of a slice, which one call updates."""

PlaceOf: TypeAlias = Callable[[str], Placed]
IsLoose: TypeAlias = Callable[[str], bool]
BindShared: TypeAlias = Callable[[str, Binding, str], None]
Call: TypeAlias = Callable[[], object]

_sessions: weakref.WeakValueDictionary[tuple[bytes, int, Device], Session] = weakref.WeakValueDictionary()
"""The sessions in use; each is removed when the last program that uses it is gone."""


def shared_session(model: bytes, threads: int, settings: Settings, update: FusedUpdate | RowUpdate) -> Session:
    """Returns the session of an update's model; all updates of the process with the same model, threads and device share it."""
    device = settings.devices.of(update.target)
    key = (model, threads, device)
    session = _sessions.get(key)
    if session is None:
        entries = {"session.intra_op.allow_spinning": "1" if settings.spinning else "0"}
        entries |= {} if device.is_host else {NO_FALLBACK: "1"}
        try:
            session = _sessions[key] = new_session(model, threads, device, entries)
        except Exception:
            if not device.is_host:
                function = update.function
                refuse_without_kernel(f"the update {function.name}", device, model, entries, list(function.node))
            raise
    return session


class Updater:
    """A group of updates with its session on a device."""

    def __init__(self, group: FusedUpdate, settings: Settings, type: str) -> None:
        self.group = group
        attributes = {attribute.name: attribute.f for attribute in group.node.attribute}
        dtype = dense(type)
        assert dtype is not None
        assert is_in_place(group.function), group.function.name
        model = flat_model(group.function, attributes, dtype.code)
        self.device = settings.devices.of(group.target)
        self.session = shared_session(model, settings.threads, settings, group)

    def calls(self, place: PlaceOf, shared: BindShared, is_loose: IsLoose) -> list[Call]:
        """Returns the calls that update all members, in order.

        `place` returns a value's memory, `is_loose` whether that memory changes from step to step; `shared` binds a scalar to an input. On
        a GPU there is one slice, since there is no cache into which it must fit; operands on the host are copied to the GPU when they are
        bound.
        """
        group, calls = self.group, list[Call]()
        shard = SHARD if self.device.is_host else max(group.elements, 1)
        for begin in range(0, group.elements, shard):
            count = min(shard, group.elements - begin)
            binding = self.session.io_binding()
            for formal, names, one in zip(group.function.input, group.operands, group.shared, strict=True):
                if one:
                    shared(names[0], binding, formal)
                    continue
                first = place(names[0])
                _bind(binding.bind_input, formal, first, begin, count)
                if not self.device.is_host and isinstance(first, Tensor):
                    calls.append(partial(_bind, binding.bind_input, formal, first, begin, count))
            for formal, names in zip(group.function.output, group.outputs, strict=True):
                _bind(binding.bind_output, formal, place(names[0]), begin, count)
            calls.append(partial(self.session.run_with_iobinding, binding))
        return calls


def _bind(bind: Callable[..., None], formal: str, first: Placed, begin: int, count: int) -> None:
    """Binds `count` elements from `begin` on, counted from the beginning of the first member."""
    dtype = first.dtype
    bind(formal, *first.where, dtype.code, (count,), first.pointer + dtype.bytes_of((begin,)))
