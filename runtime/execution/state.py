"""The state of a rank, in memory: parameters, their optimizer slots, running statistics, a decoder's caches.

Tensors that one update processes together are adjacent in memory. A training program and the evaluation of the same model share one state,
and so do the two programs of a decoder, whose steps use the rows of some slots of each cache (`rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.tensors.boxes import region
from partc.runtime.artifact.tensors.dtypes import Array, Dtype, dense
from partc.runtime.artifact.tensors.law import fill
from partc.runtime.artifact.tensors.stored_weight import numbers
from partc.runtime.artifact.tensors.tensor import Tensor

from ..artifact.format import CACHE, CUDA, Law, StateRecord
from ..devices.device_memory import DeviceMemory, Placed, Remote, move, new_place, part
from ..errors import ArtifactError
from ..program.flat_buffers import FlatBuffer

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class State:
    """A rank's tensors by their names in its program, and their records."""

    rank: int
    tensors: Mapping[str, Placed]
    records: Sequence[StateRecord]

    def arrays(self) -> list[tuple[StateRecord, Array]]:
        """Returns every tensor of the state with its record: its memory, or a copy of it on the host where it is on another target."""
        return [(record, self._array(record)) for record in self.records]

    def fill(self, write: Callable[[StateRecord, Array], None], names: Collection[str]) -> None:
        """Calls `write` for each tensor whose global name is in `names`; the values that it writes are used from the next step on."""
        for record in self.records:
            if record.tensor not in names:
                continue
            array, tensor = self._array(record), self.tensors[record.value]
            write(record, array)
            if isinstance(tensor, Remote):
                move(Tensor.of(array, tensor.dtype), tensor)

    def rows(self, record: StateRecord, first: int, count: int) -> Placed:
        """Returns `count` of this rank's slots of a cache, from slot `first` on, as a cache with that number of slots; without a copy."""
        whole = self.tensors[record.value]
        at = first * whole.dtype.bytes_of((1, *whole.shape[1:]))
        return part(whole, at, whole.dtype, (count, *whole.shape[1:]))

    @property
    def targets(self) -> dict[str, str]:
        """Maps the name of each tensor that is not on the host to its target."""
        return {name: CUDA for name, tensor in self.tensors.items() if isinstance(tensor, Remote)}

    def _array(self, record: StateRecord) -> Array:
        tensor = self.tensors[record.value]
        return (tensor.to_host() if isinstance(tensor, Remote) else tensor).array()


def make_state(
    records: Iterable[StateRecord],
    rank: int,
    laid: Sequence[FlatBuffer],
    model: ModelProto,
    artifact: Artifact,
    memories: Mapping[str, DeviceMemory],
    groups: int = 1,
) -> State:
    """Returns the state before the first step: weights from the artifact, the rest with the initial values of the records.

    `memories`: maps each tensor that is not on the host to its device memory. `groups`: the number of groups of slots in a cache, whose
    record describes one group.
    """
    mine = [record for record in records if rank in record.ranks]
    tensors: dict[str, Placed] = {}
    by_name = {record.value: record for record in mine}
    for buffer in laid:
        dtype = dense(buffer.type)
        if dtype is None:
            raise ArtifactError(f"'{buffer.members[0]}' is a {buffer.type}, which no optimizer updates")
        memory = _zeros(memories.get(buffer.members[0]), dtype, (buffer.size,))
        for name, at in buffer.places.items():
            tensors[name] = part(memory, dtype.bytes_of((at,)), dtype, by_name[name].local_shape(rank))
    for record in mine:
        if record.value not in tensors:
            dtype = dense(record.type)
            if dtype is None:
                raise ArtifactError(f"'{record.value}' is a {record.type}, which cannot be kept from step to step")
            shape = record.local_shape(rank)
            shape = (groups * shape[0], *shape[1:]) if record.kind == CACHE else shape
            tensors[record.value] = _zeros(memories.get(record.value), dtype, shape)
    state = State(rank, tensors, mine)
    _fill(state, model, artifact)
    return state


def _zeros(memory: DeviceMemory | None, dtype: Dtype, shape: tuple[int, ...]) -> Placed:
    """Returns memory for a tensor; on the host it is zero, and a cache uses pages only for the tokens that it has."""
    return Tensor.zeros(dtype, shape) if memory is None else new_place(memory, dtype, shape)


def check_same(state: State, records: Iterable[StateRecord], where: str) -> None:
    """Raises ArtifactError unless the records are of the same tensors, types, shapes and boxes as the state of the main program.

    A program may use the state of another one only then; of a cache it may have fewer slots.
    """
    known = {record.value: record for record in state.records}
    problems = [
        f"{where}: '{record.value}' is not kept as {record.shape}, {record.type} by the main program"
        for record in records
        if (other := known.get(record.value)) is None
        or (other.tensor, other.type) != (record.tensor, record.type)
        or not (other.shape == record.shape or _is_row(record, other, state.rank))
        or other.box(state.rank) != record.box(state.rank)
    ]
    if problems:
        raise ArtifactError("\n".join([*problems, "  help: compile again"]))


def _is_row(record: StateRecord, whole: StateRecord, rank: int) -> bool:
    """Whether a record is of some of a rank's slots of a cache, and `whole` is of all of them."""
    of_cache = record.kind == whole.kind == CACHE and record.shape[1:] == whole.shape[1:]
    return of_cache and 1 <= record.local_shape(rank)[0] <= whole.local_shape(rank)[0]


def fill_first(record: StateRecord, rank: int, array: Array) -> None:
    """Writes the initial values of a rank's shard of a tensor that has no weight in the rank file."""
    if isinstance(record.initial, Law):
        fill(record.initial, array, tuple(record.shape), region(record.shard(rank), record.shape))
    else:
        array.fill(record.initial)


def _fill(state: State, model: ModelProto, artifact: Artifact) -> None:
    weights = {tensor.name: tensor for tensor in model.graph.initializer}

    def write(record: StateRecord, array: Array) -> None:
        if record.value in weights:
            np.copyto(array, numbers(weights[record.value], artifact.folder, artifact.manifest))
        elif record.initial != 0 or isinstance(state.tensors[record.value], Remote):
            fill_first(record, state.rank, array)

    state.fill(write, {record.tensor for record in state.records})
