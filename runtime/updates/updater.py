"""Runs one group of updates: the optimizer's function over flat memory, in shards that stay in the cache, in place.

onnxruntime makes a pass over memory for every node of an element-wise chain. In shards of half a megabyte all passes but the first
find their operands in the cache; each shard is one bound call of one session.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from ..artifact.dtypes import dense
from ..artifact.optimizer_function import is_in_place
from ..artifact.tensor import Tensor
from ..program.ort import Binding, Session, new_session
from ..program.sessions import Settings
from .fusion import FusedUpdate
from .update_model import flat_model

SHARD = 1 << 17
"""Elements that are updated at once."""

TensorOf: TypeAlias = Callable[[str], Tensor]
IsLoose: TypeAlias = Callable[[str], bool]
BindShared: TypeAlias = Callable[[str, Binding, str], None]
Call: TypeAlias = Callable[[], object]

_sessions: weakref.WeakValueDictionary[tuple[bytes, int, tuple[str, ...]], Session] = weakref.WeakValueDictionary()
"""The sessions in use, which end with the last program that has them."""


def shared_session(model: bytes, threads: int, settings: Settings) -> Session:
    """The session of an update's model; the same model has one for all updates of the process."""
    key = (model, threads, tuple(settings.providers))
    session = _sessions.get(key)
    if session is None:
        spinning = {"session.intra_op.allow_spinning": "1" if settings.spinning else "0"}
        session = _sessions[key] = new_session(model, threads, settings.providers, spinning)
    return session


class Updater:
    """A group with its session."""

    def __init__(self, group: FusedUpdate, settings: Settings, type: str) -> None:
        self.group = group
        attributes = {attribute.name: attribute.f for attribute in group.node.attribute}
        dtype = dense(type)
        assert dtype is not None
        assert is_in_place(group.function), group.function.name
        self.session = shared_session(flat_model(group.function, attributes, dtype.code), settings.threads, settings)

    def calls(self, tensor: TensorOf, shared: BindShared, is_loose: IsLoose) -> list[Call]:
        """The calls that update all members, in order.

        `tensor` gives a value's memory, and `is_loose` says of which it is another one in each step; `shared` binds a number to an input.
        """
        group, found = self.group, list[Call]()
        for begin in range(0, group.elements, SHARD):
            count = min(SHARD, group.elements - begin)
            binding = self.session.io_binding()
            for formal, names, one in zip(group.function.input, group.operands, group.shared, strict=True):
                if one:
                    shared(names[0], binding, formal)
                else:
                    _bind(binding.bind_input, formal, tensor(names[0]), begin, count)
            for formal, names in zip(group.function.output, group.results, strict=True):
                _bind(binding.bind_output, formal, tensor(names[0]), begin, count)
            found.append(partial(self.session.run_with_iobinding, binding))
        return found


def _bind(bind: Callable[..., None], formal: str, first: Tensor, begin: int, count: int) -> None:
    """Binds the elements from `begin` on, counted from the first member's."""
    dtype = first.dtype
    bind(formal, "cpu", 0, dtype.code, (count,), first.pointer + dtype.bytes_of((begin,)))
