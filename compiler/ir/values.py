"""The value table: the type and shape of every value of a lowering, and the job's value for each version on its ranks.

Passes that localize, differentiate or update make values that the model does not have: a cotangent, a shard with open dims, the next
parameter. These are listed here with their types; the program and the model stay as they are.

    table.infos[h.grad]              tensor(float), (batch, 64)
    table.at[h on 0-3, [2, 1]]       %h@[2, 1]
    table.local_shape(that)          (batch/2, 64)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import onnx_ir as ir
from partc.compiler.dims.normal import normal
from partc.compiler.dims.reading import read
from partc.compiler.ir.graph import BY_EXPERT
from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.ir.value_info import Shape, ValueInfo


class ValueTable:
    """Types and global shapes of values, and the job's value of each version; each pass of the lowering has its own copy.

    Versions of one name and one local shape are one value: a value that is made on a group is also that of a smaller group within it.
    """

    def __init__(self, infos: Mapping[ir.Value, ValueInfo], names: Mapping[ShardedValue, str]) -> None:
        self._infos = dict(infos)
        self._at: dict[ShardedValue, Value] = {}
        self._versions: dict[ir.Value, list[ShardedValue]] = {}
        known: dict[tuple[str, ir.Value, Shape | None], Value] = {}
        for version, name in names.items():
            shape = self.local_shape(version) if version.value in self._infos else None
            key = name, version.value, version.layout.shards if shape is None else shape
            self.bind(version, known.setdefault(key, Value(name)))

    @property
    def infos(self) -> Mapping[ir.Value, ValueInfo]:
        """The type and global shape of every value, in the order in which values were added."""
        return self._infos

    @property
    def at(self) -> Mapping[ShardedValue, Value]:
        """The job's value of every version of a value of the model, on the ranks of its group."""
        return self._at

    def copy(self) -> ValueTable:
        """Returns an independent table with the same entries."""
        found = ValueTable(self._infos, {})
        for version, value in self._at.items():
            found.bind(version, value)
        return found

    def __getitem__(self, value: ir.Value) -> ValueInfo:
        return self._infos[value]

    def add(self, value: ir.Value, info: ValueInfo) -> ir.Value:
        """Adds a value that a pass has made, and returns it."""
        self._infos[value] = info
        return value

    def bind(self, version: ShardedValue, value: Value) -> None:
        """Sets the job's value of a version."""
        if version not in self._at:
            self._versions.setdefault(version.value, []).append(version)
        self._at[version] = value

    def versions(self, value: ir.Value) -> list[ShardedValue]:
        """Returns the known versions of a value."""
        return self._versions.get(value, [])

    def local_shape(self, version: ShardedValue) -> Shape | None:
        """Returns the shape of one shard: every dim divided by its number of shards; None if the value's shape is not known."""
        shape = self._infos[version.value].shape
        if shape is None or len(shape) != len(version.layout.cuts):
            return shape
        if version.value.meta.get(BY_EXPERT) or (BY_EXPERT in version.value.meta and version.layout.shards[0] > 1):
            return None
        return _local_shape(shape, version.layout.shards)

    def local_value(self, version: ShardedValue) -> ir.Value:
        """Returns a value with the type and the known dims of one shard: the value itself if it is replicated or has no shape."""
        value = version.value
        if value.shape is None or (version.layout.is_replicated and not value.meta.get(BY_EXPERT)):
            return value
        if BY_EXPERT in value.meta and self.local_shape(version) is None and self._infos[value].shape is not None:
            rest = _local_shape(self._infos[value].shape or (), version.layout.shards)[1:]
            made = ir.Value(name=value.name, type=value.type, shape=ir.Shape([_ROWS, *rest]))
            return self.add(made, self._infos[value])
        if self._infos[value].shape is not None:
            return value
        dims = [
            dim
            if not isinstance(dim, int) and dim.value is None
            else _shard(dim if isinstance(dim, int) else str(dim), shards)
            for dim, shards in zip(value.shape.dims, version.layout.shards, strict=True)
        ]
        return self.add(ir.Value(name=value.name, type=value.type, shape=ir.Shape(dims)), self._infos[value])


_ROWS = "_rows_of_experts"
"""The symbol, in gradients only, for a rank's number of rows between the borders of sharded experts."""


@functools.lru_cache(maxsize=4096)
def _local_shape(shape: Shape, shards: tuple[int, ...]) -> Shape:
    return tuple([_shard(dim, count) for dim, count in zip(shape, shards, strict=True)])


@functools.lru_cache(maxsize=4096)
def _shard(dim: int | str, shards: int) -> int | str:
    if shards == 1:
        return dim
    if isinstance(dim, int):
        return dim // shards
    expression = read(dim)
    return f"({dim})/{shards}" if expression is None else str(normal(expression / shards, {}))
