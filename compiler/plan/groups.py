"""Ranks and groups of ranks in a plan: the mesh, and the values that `placement` may have.

A mesh is the grid of all ranks by named axes, `{dp: 2, tp: 4}`: its sizes multiply to `ranks`, row-major, last axis fastest. A slice of it,
`{dp: 1}`, is the group of the ranks with these coordinates, in order, and keeps the other axes. A mesh whose sizes do not multiply to
`ranks` is the grid of every group: each list of several ranks in `placement` then has as many ranks as the mesh, and there are no slices.

The mesh's axes within a group: all of them, if the group has the mesh's ranks in the mesh's order; those that vary, in a list that equals a
slice, order included; none in any other list.

Ranks with a role, `roles: {ps: [4, 5]}`, have parameters and only serve: "all ranks" are then the others, the workers, and a mesh of the
workers' number is their grid.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from partc.runtime.artifact.format import MOST_RANKS
from partc.runtime.options import Refused, is_integer, shown
from pydantic import ValidationInfo

Axes: TypeAlias = tuple[tuple[str, int], ...]
"""Mesh axes by name, with their sizes, major first."""

MOST_AXES = 64
DATA_AXIS = "dp"
"""The mesh axis over which records are dealt out, if the mesh has an axis of this name."""
_LAW = "a mesh is the grid of all ranks, or, where it has another size, of every group in 'placement'"


@dataclass(frozen=True)
class Group:
    """Ranks in order, and the mesh axes within them."""

    ranks: tuple[int, ...]
    axes: Axes = ()
    role: str = ""
    """The role of these ranks, if the plan names it."""


@dataclass(frozen=True)
class Frame:
    """The values of a plan against which others are checked; None for those that are faulty, which are reported elsewhere.

    `roles`: a role with faulty ranks has none here. `groups`: the sizes of the lists of several ranks in `placement`, and of the stages'
    groups. `folder`: the folder of the files that the plan names.
    """

    ranks: int | None = None
    mesh: Axes | None = None
    groups: tuple[int, ...] = ()
    folder: Path = Path()
    roles: Mapping[str, tuple[int, ...]] | None = field(default_factory=dict)

    @property
    def spans(self) -> bool:
        """Whether the mesh is the grid of all ranks, or of all workers."""
        return self.mesh is not None and _size(self.mesh) in (self.ranks, self.workers)

    @property
    def workers(self) -> int | None:
        """The number of ranks without a role."""
        return None if self.ranks is None else len(workers_of(self.ranks, (self.roles or {}).values()))


def workers_of(ranks: int, serving: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Returns the ranks that run nodes without a placement: those that do not serve, or all ranks if each of them serves."""
    servers = {rank for some in serving for rank in some}
    return tuple(rank for rank in range(ranks) if rank not in servers) or tuple(range(ranks))


def frame_of(data: Mapping[str, object], folder: Path = Path(), stages: tuple[int, ...] = ()) -> Frame:
    """Returns the frame of a plan's raw data; `stages`: the sizes of the groups of several ranks on which its stages run."""
    ranks, mesh, placement, roles = (data.get(key) for key in ("ranks", "mesh", "placement", "roles"))
    axes: Axes | None = None
    if mesh is None:
        axes = ()
    elif isinstance(mesh, dict) and all(is_integer(size) and size >= 1 for size in mesh.values()):
        axes = tuple(mesh.items())
    lists = [value for value in placement.values() if isinstance(value, list)] if isinstance(placement, dict) else []
    wrong_roles = roles is not None and not isinstance(roles, dict)
    return Frame(
        ranks if isinstance(ranks, int) and is_integer(ranks) and 1 <= ranks <= MOST_RANKS else None,
        axes,
        (*(len(value) for value in lists if len(value) > 1), *stages),
        folder,
        None if wrong_roles else dict(_roles(roles)),
    )


def _roles(data: object) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the roles of a plan's raw data; a role whose value is not a rank or a list of ranks has no ranks."""
    for name, value in data.items() if isinstance(data, dict) else ():
        ranks = value if isinstance(value, list) else [value]
        yield str(name), tuple(ranks) if all(is_integer(rank) and rank >= 0 for rank in ranks) else ()


@functools.lru_cache(maxsize=1024)
def axes_of(mesh: Axes, ranks: int, group: tuple[int, ...]) -> Axes:
    """Returns the axes of `mesh` within a group, among `ranks` ranks in all, by the law in the module's docstring."""
    if len(group) < 2 or not mesh:
        return ()
    if _size(mesh) != ranks:
        return mesh if len(group) == _size(mesh) else ()
    if any(rank >= ranks for rank in group):
        return ()
    grid = _grid(mesh)
    at = [grid[rank] for rank in group]
    varying = [k for k, (_, size) in enumerate(mesh) if size == 1 or len({place[k] for place in at}) > 1]
    fixed = {k: at[0][k] for k in range(len(mesh)) if k not in varying}
    return tuple(mesh[k] for k in varying) if _slice(mesh, fixed) == tuple(group) else ()


def checked_mesh(mesh: dict[str, int], info: ValidationInfo) -> dict[str, int]:
    """Returns the mesh; raises Refused unless its size is that of all ranks, of the workers or of a group in `placement`."""
    if len(mesh) > MOST_AXES:
        fact = f"the mesh has {len(mesh):,} axes"
        raise Refused(fact, f"a mesh has at most {MOST_AXES}", "leave out axes of size 1")
    frame, size = frame_in(info), math.prod(mesh.values())
    if not mesh or frame.ranks is None or size == frame.ranks or size in frame.groups:
        return mesh
    if size == frame.workers:
        return mesh
    there = f"there are {frame.ranks} ranks" if frame.ranks != 1 else "there is 1 rank"
    there += f", of which {frame.workers} work" if frame.workers != frame.ranks else ""
    groups = ", ".join(str(group) for group in dict.fromkeys(frame.groups))
    more = f" and groups of {groups}" if groups else ""
    fact = f"the mesh {shown_mesh(tuple(mesh.items()))} has {size} ranks, but {there}{more}"
    raise Refused(fact, _LAW, f"choose sizes that multiply to {frame.ranks}, or set 'ranks' to {size}")


def placed(value: object, info: ValidationInfo) -> Group:
    """Returns the group that a placement of a plan names."""
    return group_of(value, frame_in(info))


def group_of(value: object, frame: Frame) -> Group:
    """Returns the group that a placement names: a rank, a list of ranks, a role, or a slice of the mesh; raises Refused."""
    if role := _meant_role(value, frame):
        raise Refused(f"expected a rank, ranks or a role, but got {shown(value)}", help=f"write {{role: {role}}}")
    match value:
        case list() | tuple():
            return _listed(value, frame)
        case {"role": name, **rest} if "role" not in dict(frame.mesh or ()):
            return _of_role(name, rest, frame)
        case dict():
            return _sliced(value, frame)
        case _:
            return Group((_rank(value, frame),))


def _meant_role(value: object, frame: Frame) -> str:
    """Returns the role that is named in place of a rank, or under another key than `role`; "" if there is none."""
    if isinstance(value, dict) and len(value) == 1 and "role" not in value:
        value = next(iter(value.values()))
    return value if isinstance(value, str) and value in (frame.roles or ()) else ""


def rank_of(value: object, info: ValidationInfo) -> int:
    """Returns a rank; raises Refused if it does not exist."""
    return _rank(value, frame_in(info))


def _rank(value: object, frame: Frame) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"expected a rank, an integer, but got {shown(value)}")
    ranks = frame.ranks
    if value < 0 or (ranks is not None and value >= ranks):
        there = "no negative ranks" if ranks is None else f"{ranks} rank{'s' if ranks != 1 else ''}"
        last = "" if ranks is None else f" to {ranks - 1}"
        more = "" if value < 0 else f", or set 'ranks' to at least {value + 1}"
        raise Refused(f"rank {value}, but there are {there}", help=f"choose a rank from 0{last}{more}")
    return value


def ranks_of(value: list[object], info: ValidationInfo, empty: str) -> tuple[int, ...]:
    """Returns a list of distinct ranks in its order; `empty`: the remedy for an empty list."""
    return _ranks(value, frame_in(info), empty)


def _ranks(value: Sequence[object], frame: Frame, empty: str) -> tuple[int, ...]:
    if not value:
        raise Refused("the list of ranks is empty", help=empty)
    ranks = tuple(_rank(rank, frame) for rank in value)
    twice = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
    if twice:
        raise Refused(f"rank {twice[0]} is in the list twice", help="name every rank once")
    return ranks


def ranks_text(group: Sequence[int]) -> str:
    """Returns a group as text for messages: `rank 3`, `ranks 0-3`, `ranks 0, 2`."""
    if len(group) == 1:
        return f"rank {group[0]}"
    if tuple(group) == tuple(range(group[0], group[-1] + 1)):
        return f"ranks {group[0]}-{group[-1]}"
    return f"ranks {', '.join(map(str, group))}"


def shown_mesh(mesh: Axes) -> str:
    """Returns a mesh as text for messages: `dp=2 x tp=4`."""
    return " x ".join(f"{name}={size}" for name, size in mesh)


def _listed(value: Sequence[object], frame: Frame) -> Group:
    ranks = _ranks(value, frame, "name a rank, or leave the line out for all ranks")
    mesh = frame.mesh or ()
    if mesh and not frame.spans and len(ranks) > 1 and _size(mesh) in frame.groups and len(ranks) != _size(mesh):
        fact = f"a group of {len(ranks)} ranks, but the mesh {shown_mesh(mesh)} has {_size(mesh)}"
        help = f"name {_size(mesh)} ranks, or give a mesh of all {frame.ranks} ranks and slices of it"
        raise Refused(fact, _LAW, help)
    return Group(
        ranks, axes_of(mesh, spanned(mesh, frame.ranks, frame.workers), ranks) if frame.ranks is not None else ()
    )


def _of_role(name: object, rest: Mapping[object, object], frame: Frame) -> Group:
    if rest:
        raise Refused(f"a role and '{next(iter(rest))}'", help="write {role: ps}, and the ranks in 'roles'")
    if not isinstance(name, str):
        raise Refused(
            f"expected the name of a role, but got {shown(name)}",
            help=f"write {{role: {next(iter(frame.roles or ()), 'ps')}}}",
        )
    if frame.roles is None or frame.roles.get(name) == ():
        return Group(())
    if name not in frame.roles:
        known = f"the roles are {', '.join(frame.roles)}" if frame.roles else "there are no roles"
        last = (frame.ranks or 4) - 1
        raise Refused(f"{shown(name)} is no role", known, f"declare it: 'roles: {{{name}: [{last - 1}, {last}]}}'")
    return Group(frame.roles[name], role=name)


def spanned(mesh: Axes, ranks: int, workers: int | None) -> int:
    """Returns the number of ranks of which a mesh is the grid, unless it is the grid of each group: all ranks, or the workers."""
    return workers if workers is not None and _size(mesh) == workers else ranks


def checked_role(value: object, info: ValidationInfo) -> Group:
    """Returns the ranks of a role, given as a rank or a list."""
    frame = frame_in(info)
    listed = value if isinstance(value, list) else [value]
    return Group(_ranks(listed, frame, "name at least one rank"))


def checked_roles(roles: dict[str, Group], info: ValidationInfo) -> dict[str, Group]:
    """Returns the roles; raises Refused if a rank has two, or if the mesh is the workers' and they are not the first ranks."""
    frame, taken = frame_in(info), dict[int, str]()
    for name, group in roles.items():
        for rank in group.ranks:
            if rank in taken:
                law = "a rank has one role, or works"
                raise Refused(f"rank {rank} is of the role '{taken[rank]}', too", law, "name it once", name)
            taken[rank] = name
    if frame.ranks is not None and frame.mesh and _size(frame.mesh) == frame.workers != frame.ranks:
        workers = workers_of(frame.ranks, [group.ranks for group in roles.values()])
        if workers != tuple(range(len(workers))):
            law = "the first ranks are the workers' grid"
            fact = f"{ranks_text(workers)} work, and the mesh {shown_mesh(frame.mesh)} is theirs"
            raise Refused(fact, law, f"give the roles the ranks from {len(workers)} on")
    return roles


def _sliced(value: dict[str, object], frame: Frame) -> Group:
    law = "a slice of the mesh fixes the coordinate of one or more of its axes: {pp: 1}"
    if frame.mesh is None or frame.ranks is None:
        return Group(())
    sizes = dict(frame.mesh)
    if not sizes:
        raise Refused("a slice of the mesh, but there is no mesh", law, "declare 'mesh: {pp: 2, tp: 4}'")
    if not value:
        raise Refused("the slice fixes no axis", law, f"name one of {', '.join(sizes)}, or leave the line out")
    if not frame.spans:
        fact = f"a slice of the mesh {shown_mesh(frame.mesh)}, which has {_size(frame.mesh)} of {frame.ranks} ranks"
        raise Refused(fact, _LAW, "name the ranks in a list")
    fixed: dict[int, int] = {}
    for name, index in value.items():
        if name not in sizes:
            raise Refused(f"'{name}' is not an axis of the mesh", f"the mesh has the axes {', '.join(sizes)}", key=name)
        if not isinstance(index, int) or isinstance(index, bool):
            raise Refused(f"expected an index along '{name}', but got {shown(index)}", law, key=name)
        if not 0 <= index < sizes[name]:
            fact = f"index {index} along '{name}', whose size is {sizes[name]}"
            raise Refused(fact, help=f"choose an index from 0 to {sizes[name] - 1}", key=name)
        fixed[list(sizes).index(name)] = index
    ranks = _slice(frame.mesh, fixed)
    inside = tuple(axis for k, axis in enumerate(frame.mesh) if k not in fixed)
    return Group(ranks, inside if len(ranks) > 1 else ())


@functools.lru_cache(maxsize=16)
def _grid(mesh: Axes) -> list[tuple[int, ...]]:
    """Returns the coordinates of every rank."""
    return list(itertools.product(*(range(size) for _, size in mesh)))


def _slice(mesh: Axes, fixed: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(rank for rank, at in enumerate(_grid(mesh)) if all(at[k] == index for k, index in fixed.items()))


def _size(mesh: Axes) -> int:
    return math.prod(size for _, size in mesh)


def frame_in(info: ValidationInfo) -> Frame:
    """Returns the frame in which a value is validated."""
    return info.context if isinstance(info.context, Frame) else Frame()
