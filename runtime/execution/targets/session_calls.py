"""Runs sessions as actions of a step: bound once if their operands have fixed places, else bound in each step or called with objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from partc.runtime.artifact.tensors.dtypes import BY_NAME, dense
from partc.runtime.artifact.tensors.tensor import Tensor, Value

from ...devices.device_memory import Cell, Placed, Remote, bytes_at, move, new_place
from ...devices.devices import Device
from ...program.flat_buffers import merged
from ...program.ort import Bind, Binding
from ...program.session_values import as_feed, as_tensor, bind_tensor, check_promise, from_ort
from ...program.sessions import SegmentSession
from ...program.steps import Copy
from ...program.value_table import Storage
from ...updates.updater import RowUpdater, Updater
from ..bodies import Bodies
from ..rank_program import RankProgram
from .counts import Copies

BYTE = BY_NAME["uint8"]
_FIXED = (Storage.SLOT, Storage.CONSTANT)


class SessionCalls:
    """The sessions of a program over the cells of one step plan.

    `readers`: maps each input of the step to the bindings that read it, with its type and its name in each. `bindings`: maps steps that are
    segments to their bindings. `bound`: maps each input to the place and the shape that are bound. `bodies`: the borders of bodies.
    """

    def __init__(self, program: RankProgram, cells: dict[str, Cell]) -> None:
        self.program, self.values, self.cells = program, program.values, cells
        self.bodies = Bodies(program.values, cells)
        self.readers: dict[str, list[tuple[Binding, int, str]]] = {}
        self.bindings: dict[int, Binding] = {}
        self.bound: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.rows: list[tuple[Bind, str, str]] = []
        """For each use of the rows of a cache: the function that binds them, their name in the session, and their name in the program."""

    def bind_inputs(self, inputs: Mapping[str, Value]) -> None:
        """Takes the inputs of a step, and binds those whose place or shape is another one."""
        self.cells.update(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and self.bound.get(name) != (value.pointer, value.shape):
                self.bound[name] = (value.pointer, value.shape)
                for binding, code, formal in self.readers.get(name, ()):
                    binding.bind_input(formal, "cpu", 0, code, value.shape, value.pointer)

    def bind_rows(self) -> None:
        """Binds the rows of caches again, after other slots were chosen."""
        for bind, formal, name in self.rows:
            bind_tensor(bind, formal, self.place(name))

    def _is_row(self, name: str) -> bool:
        return self.program.rows is not None and name in self.program.rows.records

    def place(self, name: str) -> Placed:
        """Returns the place of a dense value, on any target."""
        value = self.cells[name]
        assert isinstance(value, Tensor | Remote), name
        return value

    def read_input(self, name: str, binding: Binding, formal: str) -> None:
        """Notes that a session reads an input of the step, which is bound when its value is known."""
        self.readers.setdefault(name, []).append((binding, self.values.dtype(name).code, formal))

    def segment(self, index: int) -> Callable[[], object]:
        """Returns the function that runs the segment with the step number `index`."""
        runner = self.program.runners[index]
        if runner.objects or any(dense(self.values.types[name]) is None for name in runner.segment.inputs):
            return partial(self._run_objects, runner)
        binding = self.bindings[index] = runner.session.io_binding()
        inputs, outputs = runner.segment.operands, runner.segment.output_pairs
        loose = {name for _, name in (*inputs, *outputs) if self.values.storage[name] is Storage.TENSOR}
        # A GPU's session copies an operand from the host when it is bound, and not when it runs.
        anew = {name for _, name in inputs if name in loose or not self._is_fixed(name, runner)}
        for port, name in inputs:
            if name in anew:
                continue
            if self.values.storage[name] is Storage.INPUT:
                self.read_input(name, binding, port)
            else:
                bind_tensor(binding.bind_input, port, self.place(name))
                self.rows += [(binding.bind_input, port, name)] * self._is_row(name)
        for port, name in outputs:
            if name in loose:
                self._bind_loose(binding, port, name)
            else:
                bind_tensor(binding.bind_output, port, self.place(name))
                self.rows += [(binding.bind_output, port, name)] * self._is_row(name)
        if anew or loose:
            return partial(self._run_loose, runner, binding, frozenset(anew), frozenset(loose))
        return partial(runner.session.run_with_iobinding, binding)

    def updates(self, updaters: Sequence[Updater | RowUpdater]) -> Callable[[], None]:
        """Returns the function that runs the updates of a step, each of many parameters at once."""
        calls: list[Callable[[], object]] = []

        def shared(name: str, binding: Binding, formal: str, there: Device) -> None:
            if not there.is_host and name not in self.values.targets:
                calls.append(partial(self._bind_now, binding, formal, name))
            elif self.values.storage[name] is Storage.INPUT:
                self.read_input(name, binding, formal)
            else:
                bind_tensor(binding.bind_input, formal, self.place(name))

        for updater in updaters:
            # The calls that bind operands for each run are added before the runs.
            runs = updater.calls(self.place, partial(shared, there=updater.device), self.values.is_dynamic)
            calls += runs

        def update() -> None:
            for call in calls:
                call()

        return update

    def _bind_now(self, binding: Binding, formal: str, name: str) -> None:
        bind_tensor(binding.bind_input, formal, self.place(name))

    def _is_fixed(self, name: str, runner: SegmentSession) -> bool:
        """Whether an operand may be bound once: it is on the device of the session, or does not change."""
        kind = self.values.storage[name]
        constant = kind is Storage.CONSTANT and name not in self.program.state.tensors
        return runner.device.is_host or name in self.values.targets or constant

    def _bind_loose(self, binding: Binding, formal: str, name: str) -> None:
        """Binds an output of unknown shape; needed before each run, or the session would overwrite its last result."""
        target = self.values.targets.get(name)
        if target is None:
            binding.bind_output(formal)
        else:
            device = self.program.arenas.memories[target].device
            binding.bind_output(formal, device.kind, device.number)

    def _run_loose(self, runner: SegmentSession, binding: Binding, anew: frozenset[str], loose: frozenset[str]) -> None:
        """Runs a session some of whose tensors have a new place and shape in each run."""
        for one, name in runner.segment.operands:
            if name in anew:
                bind_tensor(binding.bind_input, one, self.place(name))
        for one, name in runner.segment.output_pairs:
            if name in loose:
                self._bind_loose(binding, one, name)
        runner.session.run_with_iobinding(binding)
        for name, value in zip(runner.segment.outputs, binding.get_outputs(), strict=True):
            if name in loose:
                self.cells[name] = from_ort(value, self.program.arenas.memories.get(self.values.targets.get(name, "")))

    def _run_objects(self, runner: SegmentSession) -> None:
        """Runs a session with Python objects, which are on the host."""
        feeds = {one: as_feed(self.cells[name]) for one, name in runner.segment.operands}
        names = [runner.widened.get(name, name) for name, _ in runner.segment.output_pairs]
        for name, value in zip(runner.segment.outputs, runner.session.run(names, feeds), strict=True):
            if self.values.storage[name] is Storage.OBJECT:
                self.cells[name] = value
                continue
            result = as_tensor(value, self.values.dtype(name))
            if self.values.storage[name] is Storage.TENSOR:
                self.cells[name] = result if name not in self.values.targets else self._placed(name, result)
            else:
                slot = self.place(name)
                check_promise(name, result.shape, slot.shape)
                move(result, slot)

    def _placed(self, name: str, value: Placed) -> Placed:
        """Copies a value to new memory, on the target of the value `name`."""
        memory = self.program.arenas.memories.get(self.values.targets.get(name, ""))
        place = new_place(memory, value.dtype, value.shape)
        move(value, place)
        return place

    def copies(self, run: Sequence[int]) -> Callable[[], object]:
        """Returns the function that runs and counts consecutive copies to one target; copies of adjacent values are merged."""
        count = self.program.targets.counts.copies_to(self.program.targets.of_steps[run[0]])
        steps = [step for index in run if isinstance(step := self.program.steps[index], Copy)]
        steps = [step for step in steps if step.source != step.result]  # the others came from another device
        targets = self.values.targets
        calls: list[Callable[[], object]] = []
        fixed: dict[str | None, dict[tuple[int, int, int], tuple[Placed, Placed]]] = {}
        for step in steps:
            if not all(self.values.storage[name] in _FIXED for name in (step.source, step.result)):
                calls.append(partial(self._copy, step, count))
                continue
            source, result = self.place(step.source), self.place(step.result)
            check_promise(step.result, source.shape, result.shape)
            if size := source.dtype.bytes_of(source.shape):
                fixed.setdefault(targets.get(step.source), {})[source.pointer, result.pointer, size] = source, result
        for places in fixed.values():
            firsts = {(begin, there): pair for (begin, there, _), pair in places.items()}
            for begin, there, size in merged(places):
                one, two = firsts[begin, there]
                calls.append(partial(_move, _bytes(one, size), _bytes(two, size), count))
        return _in_order(calls)

    def _copy(self, step: Copy, count: Copies) -> None:
        value = self.cells[step.source]
        if not isinstance(value, Tensor | Remote):
            self.cells[step.result] = value
            return
        if self.values.storage[step.result] is Storage.TENSOR:
            self.cells[step.result] = self._placed(step.result, value)
        else:
            slot = self.place(step.result)
            check_promise(step.result, value.shape, slot.shape)
            move(value, slot)
        count.number += 1
        count.bytes += value.dtype.bytes_of(value.shape)


def _in_order(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    if len(calls) == 1:
        return calls[0]

    def run() -> None:
        for call in calls:
            call()

    return run


def _move(source: Placed, target: Placed, count: Copies) -> None:
    move(source, target)
    count.number += 1
    count.bytes += source.dtype.bytes_of(source.shape)


def _bytes(first: Placed, size: int) -> Placed:
    """Returns `size` bytes from the first one of a value on, also beyond its end."""
    if isinstance(first, Remote):
        return Remote(BYTE, (size,), first.pointer, first.memory, first.owner)
    return Tensor(BYTE, (size,), bytes_at(first.pointer, size, first.data))
