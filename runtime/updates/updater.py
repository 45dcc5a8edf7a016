"""Runs one group of updates: the optimizer's function over flat memory, in place, in slices that fit into the cache.

onnxruntime makes a pass over memory for each node of an element-wise chain. In slices of half a megabyte all passes but the first find
their operands in the cache; each slice is one bound call of one session.

Builds a model from an optimizer's function, to run over flat buffers.

onnxruntime makes one pass over memory for each node in a chain of element-wise nodes, so a large buffer is updated in slices, each small
enough that all passes but the first find it in the cache.

Updates a table by rows: runs the optimizer's function in place on the rows that the gradient names.

onnxruntime writes rows into the memory of an output, after it has copied the table if input and output differ in memory. Here both are
bound to the table's own memory, so the time of a call depends only on its rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from onnx import FunctionProto, TensorProto, ValueInfoProto, helper
from partc.runtime.artifact.graph.optimizer_function import is_in_place
from partc.runtime.artifact.graph.row_function import IDS, NEXT, ROWS, adds_up
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.artifact.tensors.tensor import Tensor
from partc.runtime.artifact.training.scalars import SCALARS

from ..devices.device_memory import Placed
from ..devices.devices import Device
from ..program.kernels import refuse_without_kernel
from ..program.ort import NO_FALLBACK, Binding, Session, new_session
from ..program.session_values import bind_tensor
from ..program.sessions import Settings
from .fusion import FusedUpdate, RowUpdate

IR_VERSION = 10
_LENGTH = "n"


def flat_model(function: FunctionProto, attributes: Mapping[str, float], element: int = TensorProto.FLOAT) -> bytes:
    """Returns a model with the function's body and its attributes filled in; tensors have the length `n`, scalars rank 0 and float32.

    Inputs and outputs have the function's own names and order. `element` is the type of the tensors: float32, or float64 for a function
    that is `Double`. KeyError for a missing attribute.
    """
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [])
        if name in SCALARS
        else helper.make_tensor_value_info(name, element, [] if name == "ratio" else [_LENGTH])
        for name in function.input
    ]
    outputs = [helper.make_tensor_value_info(name, element, [_LENGTH]) for name in function.output]
    return _model(function, attributes, inputs, outputs)


def row_model(
    function: FunctionProto, attributes: Mapping[str, float], element: int, ranks: Mapping[str, int]
) -> bytes:
    """Returns the model of a function over ids and rows: each tensor has its rank from `ranks`, and any dims."""
    kinds = {IDS: TensorProto.INT64, **dict.fromkeys(SCALARS, TensorProto.FLOAT)}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, kinds.get(name, element), [None] * ranks.get(name, 0)) for name in names]
        for names in (function.input, function.output)
    )
    return _model(function, attributes, inputs, outputs)


def _model(
    function: FunctionProto,
    attributes: Mapping[str, float],
    inputs: list[ValueInfoProto],
    outputs: list[ValueInfoProto],
) -> bytes:
    graph = helper.make_graph([], function.name, inputs, outputs)
    for node in function.node:
        copy = graph.node.add()
        copy.CopyFrom(node)
        for attribute in copy.attribute:
            if attribute.ref_attr_name:
                attribute.f = attributes[attribute.ref_attr_name]
                attribute.ref_attr_name = ""
    model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=list(function.opset_import))
    return bytes(model.SerializeToString())


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


class RowUpdater:
    """A node that updates rows of a table, and its session."""

    def __init__(self, update: RowUpdate, settings: Settings, type: str, ranks: dict[str, int]) -> None:
        self.node, self.function = update.node, update.function
        attributes = {attribute.name: attribute.f for attribute in update.node.attribute}
        dtype = dense(type)
        assert dtype is not None
        assert is_in_place(update.function), update.function.name
        # Several threads of onnxruntime's ScatterND lose additions to an id that occurs several times.
        threads = 1 if adds_up(update.function) else settings.threads
        formals = dict(zip(update.function.input, update.node.input, strict=True))
        tables = {name.removesuffix(NEXT) for name in update.function.output}
        rank = ranks[formals[next(iter(tables))]]
        dims = {name: ranks[formals[name]] for name in tables} | {
            f"{name}{NEXT}": ranks[formals[name]] for name in tables
        }
        model = row_model(update.function, attributes, dtype.code, {**dims, IDS: 1, ROWS: rank})
        self.device = settings.devices.of(update.target)
        self.session = shared_session(model, threads, settings, update)

    def calls(self, place: PlaceOf, shared: BindShared, is_loose: IsLoose) -> list[Call]:
        """Returns the call that updates the table and its slots; arguments are as for `Updater.calls`."""
        binding = self.session.io_binding()
        loose: list[tuple[str, str]] = []
        for formal, name in zip(self.function.input, self.node.input, strict=True):
            if formal in SCALARS:
                shared(name, binding, formal)
            elif is_loose(name) or (not self.device.is_host and isinstance(place(name), Tensor)):
                loose.append((formal, name))
            else:
                bind_tensor(binding.bind_input, formal, place(name))
        for formal, name in zip(self.function.output, self.node.output, strict=True):
            bind_tensor(binding.bind_output, formal, place(name))
        run = partial(self.session.run_with_iobinding, binding)

        def call() -> None:
            for formal, name in loose:
                bind_tensor(binding.bind_input, formal, place(name))
            run()

        return [call if loose else run]
