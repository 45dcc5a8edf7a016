"""Converts the sharding specs (cuts) of values to their layouts on a group: of one value alone, or of the values of a region together.

Cuts of several values are one strategy where the ops between them propagate a cut from one to the other. Dims that correspond through the
ops of a region are in one class, and a class is sharded by one set of axes: the device matrix is the classes' numbers of shards in the
order in which the cuts first name them, the replication axis last, as for a single op.

    MatMul(Relu(x), w)   x [4, 2], w [2, 1] on 8     x0: 4   x1, w0: 2   w1: 1   mesh (2, 2, 2)   x [(0, 1), (2,)]   w [(2,), ()]

A cut that contradicts an earlier one (corresponding dims in other numbers of shards, or more shards than ranks), and values that no op
connects, are laid out separately: such a value is resharded where it meets the others.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.program import Placed
from partc.compiler.ir.sharded import Group
from partc.compiler.layout.layout import Layout
from partc.compiler.plan.groups import Axes
from partc.compiler.plan.shard_spec import ShardSpec, is_named
from partc.compiler.sharding.seeding.strategy import refined, to_axes

Place = tuple[ir.Value, int]
"""A dim of a value."""


def names_of(cut: ShardSpec) -> list[tuple[str, ...]]:
    """The mesh axes that shard each dim in a cut spelled by axis names."""
    return [shard if isinstance(shard, tuple) else () for shard in cut]


def numbers_of(cut: ShardSpec) -> list[int]:
    """The number of shards of each dim in a cut spelled by numbers."""
    return [shard if isinstance(shard, int) else 1 for shard in cut]


def is_text(value: ir.Value | None) -> bool:
    """Whether a value is a tensor of strings."""
    return value is not None and value.dtype == ir.DataType.STRING


def layout_of_spec(program: Placed, cut: ShardSpec, value: ir.Value, group: Group) -> Layout:
    """Returns the layout that a cut gives a value on a group; ValueError where it has another number of dims or does not fit the group."""
    rank = len(value.shape) if value.shape is not None else len(cut)
    if len(cut) != rank:
        raise ValueError(f"the cut has {len(cut)} dims, the value has {rank}")
    axes: Axes = program.plan.axes_of(group)
    if is_named(cut):
        mesh, named = refined(axes)
        missing = [name for names in names_of(cut) for name in names if name not in named]
        if missing:
            raise ValueError(f"'{missing[0]}' is not an axis of the group's mesh")
        return Layout(mesh, tuple(tuple(axis for name in names for axis in named[name]) for names in names_of(cut)))
    numbers = numbers_of(cut)
    product = math.prod(numbers)
    if len(group) % product:
        raise ValueError(f"the cut has {product} shards, but the group has {len(group)} ranks")
    letters = [chr(ord("a") + dim) for dim in range(rank)]
    mesh, by_dim = to_axes(dict(zip(letters, numbers, strict=True)), letters, len(group))
    return Layout(mesh, tuple(by_dim[letter] for letter in letters))


class Joint:
    """The layouts of one region's values on a group: dims that correspond through the region's ops are sharded by the same axes.

    Call `add` with the cuts in their order, then `layout` for the layout of a value: None for a value that must be laid out separately.
    """

    def __init__(
        self, instances: Iterable[NodeOnGroup], choices: Mapping[NodeOnGroup, NodeSharding], group: Group
    ) -> None:
        self.size = len(group)
        self.classes, self.met = _Sets(), _Sets()
        self.matrices: dict[Hashable, _Matrix] = {}
        self.cuts: dict[ir.Value, tuple[int, ...]] = {}
        for instance in instances:
            rule, node = choices[instance].rule, instance.node
            operands = [*zip(rule.inputs, node.inputs, strict=False), *zip(rule.outputs, node.outputs, strict=False)]
            first: dict[str, Place] = {}
            values = [value for letters, value in operands if letters is not None and value is not None]
            for letters, value in operands:
                if letters is None or value is None:
                    continue
                self.met.join(values[0], value)
                for dim, letter in enumerate(letters):
                    if letter in rule.factors:
                        self.classes.join(first.setdefault(letter, (value, dim)), (value, dim))

    def add(self, value: ir.Value, cut: ShardSpec) -> None:
        """Adds the numbers of shards of one more value; ignores them where they contradict earlier ones or are spelled by axis names."""
        if is_named(cut) or value in self.cuts or (value.shape is not None and len(cut) != len(value.shape)):
            return
        shards = numbers_of(cut)
        classes = [self.classes.of((value, dim)) for dim in range(len(cut))]
        if len(set(classes)) == len(classes) and self._matrix(value).take(dict(zip(classes, shards, strict=True))):
            self.cuts[value] = tuple(shards)

    def layout(self, value: ir.Value, cut: ShardSpec) -> Layout | None:
        if is_named(cut) or self.cuts.get(value) != tuple(numbers_of(cut)):
            return None
        matrix = self._matrix(value)
        names = {key: str(at) for at, key in enumerate(matrix.shards)}
        mesh, axes = to_axes({names[key]: n for key, n in matrix.shards.items()}, list(names.values()), self.size)
        return Layout(mesh, tuple(axes[names[self.classes.of((value, dim))]] for dim in range(len(cut))))

    def _matrix(self, value: ir.Value) -> _Matrix:
        return self.matrices.setdefault(self.met.of(value), _Matrix(self.size))


@dataclass
class _Matrix:
    """The device matrix of connected values: maps each class of dims to its number of shards, in the order in which they were named."""

    size: int
    shards: dict[Hashable, int] = field(default_factory=dict)

    def take(self, wanted: Mapping[Hashable, int]) -> bool:
        """Adds classes with their numbers of shards if they agree with earlier ones and all fit the group; returns whether they do."""
        joined = {**self.shards, **wanted}
        if any(joined[key] != count for key, count in self.shards.items()) or self.size % math.prod(joined.values()):
            return False
        self.shards = joined
        return True


class _Sets:
    """Disjoint sets (union-find)."""

    def __init__(self) -> None:
        self.above: dict[Hashable, Hashable] = {}

    def of(self, member: Hashable) -> Hashable:
        """The representative of the set to which a member belongs."""
        path = []
        while (above := self.above.get(member, member)) != member:
            path.append(member)
            member = above
        self.above.update(dict.fromkeys(path, member))
        return member

    def join(self, one: Hashable, other: Hashable) -> None:
        self.above[self.of(other)] = self.of(one)


def corresponding(operands: Sequence[ir.Value | None], arguments: Sequence[ir.Value | None]) -> list[int | None]:
    """Maps each argument of a call to the operand of the node that the call became, or None; each operand is used at most once."""
    free = {k: value for k, value in enumerate(operands) if value is not None}
    places: list[int | None] = []
    for argument in arguments:
        at = next((k for k, value in free.items() if value is argument), None)
        places.append(at)
        if at is not None:
            del free[at]
    return places
