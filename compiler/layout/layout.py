"""The layout of a value on a group of ranks: the mesh axes that shard each dim, and those over which it is a partial result.

A mesh is the group's ranks as a grid: sizes of its axes, row-major, last axis fastest; rank k of the group has the coordinates of k. Along
one axis a value is sharded (`Shard(dim)`), replicated (`Replicate`), or partial (`Partial`). Several axes may shard one dim; the first one
listed is the major one. With mesh (2, 4):

    Layout((2, 4), ((0,), (1,)))          rows sharded in 2 over axis 0, columns in 4 over axis 1
    Layout((2, 4), ((0, 1), ()))          rows sharded in 8
    Layout((2, 4), ((), ()), ((1, "sum"),))   full shape on each rank, to be summed over axis 1, replicated over axis 0
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Mesh: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[tuple[int, int], ...]
"""Per dim, the begin and end of a shard."""


@dataclass(frozen=True)
class Shard:
    """Sharded along `dim`."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Replicated: the same on every rank along the axis."""


@dataclass(frozen=True)
class Partial:
    """Every rank along the axis holds a partial value; the value is their sum, maximum or minimum."""

    reduce: str = "sum"


Placement: TypeAlias = Shard | Replicate | Partial


@dataclass(frozen=True)
class Layout:
    """For each dim of the value the axes that shard it, major first; and the axes with a pending reduction, ascending."""

    mesh: Mesh
    cuts: tuple[tuple[int, ...], ...]
    partial: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        used = [axis for axes in self.cuts for axis in axes] + [axis for axis, _ in self.partial]
        if len(used) != len(set(used)) or not all(0 <= axis < len(self.mesh) for axis in used):
            raise ValueError(f"every mesh axis of {self.mesh} is used at most once: {self}")

    @staticmethod
    def replicated(mesh: Mesh, rank: int) -> Layout:
        """A value of `rank` dims that every rank of the group holds in full: replicated."""
        return Layout(mesh, ((),) * rank)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.cuts)

    def placement(self, axis: int) -> Placement:
        """The placement of the value along one axis of the mesh."""
        for dim, axes in enumerate(self.cuts):
            if axis in axes:
                return Shard(dim)
        return next((Partial(reduce) for other, reduce in self.partial if other == axis), Replicate())

    @functools.cached_property
    def shards(self) -> tuple[int, ...]:
        """The number of shards of each dim."""
        return tuple([math.prod([self.mesh[axis] for axis in axes]) for axes in self.cuts])

    def num_shards(self, dim: int) -> int:
        """The number of shards of a dim."""
        return self.shards[dim]

    def coordinates(self, index: int) -> tuple[int, ...]:
        """The mesh coordinates of the group's `index`-th rank."""
        return _coordinates(self.mesh, index)

    def shard(self, index: int) -> tuple[int, ...]:
        """For each dim, the index of the shard that the group's `index`-th rank holds."""
        at = self.coordinates(index)
        numbers = []
        for axes in self.cuts:
            number = 0
            for axis in axes:
                number = number * self.mesh[axis] + at[axis]
            numbers.append(number)
        return tuple(numbers)

    @functools.cached_property
    def holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Maps each shard to those of the group's ranks that hold it, as ascending indices."""
        found: dict[tuple[int, ...], list[int]] = {}
        numbers = [shards_along(self.mesh, axes) for axes in self.cuts]
        for index, shard in enumerate(zip(*numbers, strict=True) if numbers else [()] * self.size):
            found.setdefault(shard, []).append(index)
        return {shard: tuple(indices) for shard, indices in found.items()}

    def box(self, index: int, shape: Sequence[int]) -> Box:
        """For each dim, the begin and end of the group's `index`-th rank's shard of a value of `shape`; the shards must be equal."""
        bounds = []
        for dim, (size, number, shards) in enumerate(zip(shape, self.shard(index), self.shards, strict=True)):
            length, rest = divmod(size, shards)
            if rest:
                raise ValueError(f"dim {dim} of {size} does not divide into {shards} equal shards")
            bounds.append((number * length, (number + 1) * length))
        return tuple(bounds)

    def groups(self, axes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The group's ranks (as indices) in sets that differ only along `axes`; each set in the order of `axes`, first axis major."""
        return _groups(self.mesh, tuple(axes))

    def __str__(self) -> str:
        """The layout as a plan writes it: `[2, 1]`, with `sum over 4` where it is partial."""
        text = f"[{', '.join(map(str, self.shards))}]"
        return text + "".join(f" {reduce} over {self.mesh[axis]}" for axis, reduce in self.partial)


@functools.lru_cache(maxsize=65536)
def _coordinates(mesh: Mesh, index: int) -> tuple[int, ...]:
    found = []
    for size in reversed(mesh):
        index, coordinate = divmod(index, size)
        found.append(coordinate)
    return tuple(reversed(found))


@functools.lru_cache(maxsize=4096)
def shards_along(mesh: Mesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    """For each rank of the group, in order, the shard of a dim that it has when these axes shard the dim."""
    found = [0] * math.prod(mesh)
    for axis in axes:
        stride, size = math.prod(mesh[axis + 1 :]), mesh[axis]
        row = [at for at in range(size) for _ in range(stride)] * (len(found) // (stride * size))
        found = [number * size + at for number, at in zip(found, row, strict=True)]
    return tuple(found)


@functools.lru_cache(maxsize=256)
def layout_of(mesh: Mesh, cuts: tuple[tuple[int, ...], ...], partial: tuple[tuple[int, str], ...] = ()) -> Layout:
    """Returns the layout of these fields; equal fields return the same object, which is not checked again."""
    return Layout(mesh, cuts, partial)


@functools.lru_cache(maxsize=4096)
def _groups(mesh: Mesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    rest = tuple([axis for axis in range(len(mesh)) if axis not in axes])
    sets: dict[int, list[tuple[int, int]]] = {}
    for index, (other, own) in enumerate(zip(shards_along(mesh, rest), shards_along(mesh, axes), strict=True)):
        sets.setdefault(other, []).append((own, index))
    return tuple([tuple([index for _, index in sorted(members)]) for members in sets.values()])


def primes(number: int) -> tuple[int, ...]:
    """The prime factors of a number, ascending: the axes into which a mesh axis of that size is subdivided."""
    return tuple(_primes(number))


def _primes(number: int) -> Iterator[int]:
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1
