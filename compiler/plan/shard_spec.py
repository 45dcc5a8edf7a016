"""The sharding of a value as a plan spells it: per dim the number of shards, or the axes of the mesh that shard it.

Two spellings. By integers, `[2, 4]`: the number of shards of every dim, 1 for a dim that is not sharded. By axes, `[dp, tp]`, `[[dp, tp],
null]`: the mesh axes that shard a dim, major first, and null (or 1) for a dim that is not sharded. A rule has one spelling throughout; only
1 and null are in both:

    (2, 4)                     from [2, 4]
    (("dp", "tp"), ())         from [[dp, tp], null]
    ((), ())                   from [null, 1]
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

from partc.runtime.options import Refused, is_integer, shown

DimSpec: TypeAlias = int | tuple[str, ...]
ShardSpec: TypeAlias = tuple[DimSpec, ...]
"""Per dim the number of shards, or the axes that shard it, major first, () for none: one spelling in all dims."""

_LAW = "a dim is cut into a number of shards, along a mesh axis, or along a list of them, major first; null: not at all"


def dim_spec(value: object, axes: Collection[str] | None = None) -> DimSpec | None:
    """Converts one dim's entry to a `DimSpec`; None for null. Raises Refused, also for an axis that is not in `axes`, if any are given."""
    if value is None:
        return None
    if is_integer(value):
        assert isinstance(value, int)
        if value < 1:
            raise Refused(f"expected at least 1 shard, but got {value}", help="write 1 for an unsharded dim")
        return value
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        raise Refused(f"expected a number of shards or a mesh axis, but got {shown(value)}", _LAW)
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        fact = f"a list within a cut is of mesh axes, but has {shown(wrong[0])}"
        raise Refused(fact, _LAW, "write the product of the numbers" if is_integer(wrong[0]) else "")
    if axes is not None and (unknown := [name for name in names if name not in axes]):
        there = f"the mesh has the axes {', '.join(axes)}" if axes else "there is no mesh"
        one = ", ".join(f"'{name}'" for name in unknown)
        raise Refused(
            f"{one} {'is not an axis' if len(unknown) == 1 else 'are not axes'} of the mesh",
            there,
            "" if axes else "declare 'mesh: {dp: 2, tp: 4}', or write numbers of shards",
        )
    return tuple(names)


def one_spelling(specs: Sequence[Sequence[DimSpec | None] | None]) -> list[ShardSpec | None]:
    """Returns the specs of one rule, None for those to derive. Raises Refused where spellings mix, or an axis is used twice."""
    dims = [dim for spec in specs if spec is not None for dim in spec]
    counts = [dim for dim in dims if isinstance(dim, int) and dim > 1]
    if counts:
        _nothing_of_axes_beside(counts[0], dims)
    for spec in specs:
        names = [name for dim in spec or () if isinstance(dim, tuple) for name in dim]
        if twice := [name for name in names if names.count(name) > 1]:
            raise Refused(f"the axis '{twice[0]}' cuts twice", "a mesh axis shards one dim of a value, once")
    spelled = _by_counts if all(isinstance(dim, int) for dim in dims) else _by_axes
    return [None if spec is None else spelled(spec) for spec in specs]


def _nothing_of_axes_beside(count: int, dims: Sequence[DimSpec | None]) -> None:
    """Raises Refused for mesh axes or null in a rule that has a number of shards."""
    by_axes = [dim for dim in dims if isinstance(dim, tuple)]
    if by_axes:
        named = [name for dim in by_axes for name in dim]
        axis = f"the axis '{named[0]}'" if named else "a list of axes"
        raise Refused(
            f"{axis} and {count} shards are in one rule",
            "a rule is spelled by mesh axes or by numbers of shards, not by both",
            "beside mesh axes, 1 and null are an unsharded dim",
        )
    if None in dims:
        raise Refused(
            f"null is used beside {count} shards",
            "null is an unsharded dim beside mesh axes; in place of a tensor's list it means derived",
            "write 1 for an unsharded dim",
        )


def _by_counts(spec: Sequence[DimSpec | None]) -> ShardSpec:
    return tuple(dim for dim in spec if isinstance(dim, int))


def _by_axes(spec: Sequence[DimSpec | None]) -> ShardSpec:
    return tuple(dim if isinstance(dim, tuple) else () for dim in spec)


def is_named(spec: ShardSpec) -> bool:
    """Whether a spec is spelled by mesh axes; False for a scalar's, which has no dims."""
    return any(isinstance(dim, tuple) for dim in spec)


def shown_spec(spec: ShardSpec) -> str:
    """A spec as a plan spells it: `[2, 4]`, `[[dp, tp], null]`."""
    return f"[{', '.join(_shown_dim(dim) for dim in spec)}]"


def _shown_dim(dim: DimSpec) -> str:
    if isinstance(dim, int):
        return str(dim)
    return "null" if not dim else dim[0] if len(dim) == 1 else f"[{', '.join(dim)}]"
