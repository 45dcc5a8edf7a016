"""The places of a step's values for given sizes: an arena on each target, the scratch of collectives, and the cells that refer to them."""

from __future__ import annotations

from collections.abc import Mapping

from partc.runtime.artifact.tensors.dtypes import BY_NAME, Array, Bytes
from partc.runtime.artifact.tensors.tensor import Tensor, Value

from ...artifact.format import CPU
from ...devices.device_memory import Cell, Placed, Remote, on_host, part
from ...program.value_table import Storage
from ..collective_plans import AnyCollective, scratch_lifetimes, scratch_name
from ..rank_program import RankProgram
from .freed import PoisonFreed, fills_freed
from .layout import arenas

BYTE = BY_NAME["uint8"]


class StepMemory:
    """The memory of one step plan.

    `shapes`: maps each value of known shape to its current shape. `cells`: maps each value to its place, or to the value that a step has
    set. `lives`: the lifetimes by which places were assigned. `waits`: maps each step to the sends to wait for before it. `scratch`: maps
    the tag of a collective and a side ("in", "out") to memory from there on. `freed`: fills places that no value uses, if the environment
    asks for it.
    """

    def __init__(
        self, program: RankProgram, shapes: dict[str, tuple[int, ...]], works: Mapping[int, AnyCollective]
    ) -> None:
        self.program, self.shapes = program, shapes
        self.cells: dict[str, Cell] = dict(program.constants)
        self.shown: dict[str, Array] = {}
        """Maps each output that stays in place to its memory as an array."""
        own, targets = program.arenas, program.values.targets
        self.lives = program.values.lifetimes(own.aliases, shapes) + scratch_lifetimes(program.steps, works)
        self.capacity = {life.name: life.bytes for life in self.lives}
        """Maps each place to its bytes, in which values of smaller sizes fit."""
        planned = arenas(self.lives, targets, own.memories)
        self.waits: dict[int, list[int]] = {}
        for one in planned.values():
            for step, sends in one.waits.items():
                self.waits.setdefault(step, []).extend(sends)
        self.host = own.on_host(planned[CPU].bytes)
        self.offsets = {name: at for one in planned.values() for name, at in one.offsets.items()}
        self.blocks: dict[str, Placed] = {CPU: Tensor(BYTE, (self.host.size,), self.host)}
        """Maps each target to its arena."""
        for target, there in own.memories.items():
            block = own.on(target, planned[target].bytes)
            self.blocks[target] = Remote(BYTE, (block.size,), block.pointer, there, block)
        self.freed: PoisonFreed | None = None
        if fills_freed():
            places = {
                life.name: part(self.blocks[targets.get(life.name, CPU)], self.offsets[life.name], BYTE, (life.bytes,))
                for life in self.lives
            }
            self.freed = PoisonFreed(self.lives, places, [*self.blocks.values()])
        for name in shapes:
            self.lay(name)
        sides = ((tag, side) for tag in works for side in ("in", "out"))
        self.scratch: dict[tuple[int, str], Bytes] = {
            key: self.host[self.offsets[scratch_name(*key)] :] for key in sides
        }

    def lay(self, name: str) -> None:
        """Sets a value's place, for its current size."""
        values = self.program.values
        dtype = values.dtype(name)
        buffer, at = values.flat_places.get(name, (name, 0))
        place = self.program.arenas.aliases.get(buffer, buffer)
        whole = self.blocks[values.targets.get(place, CPU)]
        self.shown.pop(name, None)
        self.cells[name] = part(whole, self.offsets[place] + dtype.bytes_of((at,)), dtype, self.shapes[name])

    def tensor(self, name: str) -> Tensor:
        """Returns a value that is a tensor on the host."""
        value = self.cells[name]
        assert isinstance(value, Tensor), name
        return value

    def remote(self, name: str) -> Remote:
        """Returns a value that is on a target other than the host."""
        value = self.cells[name]
        assert isinstance(value, Remote), name
        return value

    def delivered(self, name: str, lent: bool) -> Value:
        """Returns an output for the caller; memory that the next step overwrites is copied, unless it is `lent`."""
        if (array := self.shown.get(name)) is None:
            value, kind = on_host(self.cells[name]), self.program.values.storage[name]
            if not isinstance(value, Tensor):
                return value
            array = value.array()
            if kind is Storage.TENSOR or value.dtype.bits < 8:
                return array
            if kind is Storage.SLOT and value is self.cells[name]:
                self.shown[name] = array
        return array if lent else array.copy()
