"""Updates a table by rows: runs the optimizer's function in place on the rows that the gradient names.

onnxruntime writes rows into the memory of an output, after it has copied the table if input and output differ in memory. Here both are
bound to the table's own memory, so the time of a call depends only on its rows.
"""

from __future__ import annotations

from functools import partial

from partc.runtime.artifact.graph.optimizer_function import is_in_place
from partc.runtime.artifact.graph.row_function import IDS, NEXT, ROWS, adds_up
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.artifact.tensors.tensor import Tensor
from partc.runtime.artifact.training.scalars import SCALARS

from ..program.session_values import bind_tensor
from ..program.sessions import Settings
from .fusion import RowUpdate
from .update_model import row_model
from .updater import BindShared, Call, IsLoose, PlaceOf, shared_session


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
