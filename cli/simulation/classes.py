"""Classes of ranks that do the same: the same file, among ranks of the same classes, over the same links.

It begins with ranks of one file, and takes a class apart as long as its ranks communicate with ranks of other classes; so each rank of a
class does at every moment what the others of it do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from partc.compiler.cost.machine import Link
from partc.compiler.cost.play import Action, Begin, Class, Finish, Receive, Send
from partc.runtime.artifact.format import Manifest


def classes_of(
    manifest: Manifest, actions: Mapping[int, Sequence[Action]], link_of: Callable[[Sequence[int]], Link]
) -> list[Class]:
    """The classes of all ranks. `actions`: by the first rank of each file what its ranks do; `link_of`: what connects a list's ranks."""
    firsts = {ranks[0]: ranks for ranks in manifest.by_file(range(manifest.ranks)).values()}
    first_of = {rank: first for first, ranks in firsts.items() for rank in ranks}
    groups = {rank: manifest.groups_of(rank) for rank in range(manifest.ranks)}
    used = {
        first: (
            sorted({one.group for one in some if isinstance(one, Begin | Finish) and one.group}),
            sorted({one.peer for one in some if isinstance(one, Send | Receive)}),
        )
        for first, some in actions.items()
    }
    links: dict[Sequence[int], Hashable] = {}
    for lists in groups.values():
        for ranks in lists.values():
            if ranks not in links:
                links[ranks] = len(ranks), link_of(ranks).name
    color = {rank: first_of[rank] for rank in range(manifest.ranks)}
    while True:
        met: dict[Sequence[int], Hashable] = {}
        seen: dict[Hashable, int] = {}
        found = {}
        for rank in range(manifest.ranks):
            names, peers = used[first_of[rank]]
            around: list[Hashable] = [color[rank], tuple(color[peer] for peer in peers)]
            for name in names:
                ranks = groups[rank].get(name, ())
                if ranks not in met:
                    met[ranks] = links.get(ranks), tuple(sorted({color[one] for one in ranks}))
                around.append(met[ranks])
            found[rank] = seen.setdefault(tuple(around), rank)
        if len(seen) == len({*color.values()}):
            break
        color = found
    members: dict[int, list[int]] = {}
    for rank in range(manifest.ranks):
        members.setdefault(color[rank], []).append(rank)
    number = {one: k for k, one in enumerate(members)}
    made = []
    for alike in members.values():
        first = alike[0]
        some = actions[first_of[first]]
        others: dict[int, tuple[int, ...]] = {}
        sets: dict[str, tuple[int, ...]] = {}
        for one in some:
            if isinstance(one, Send | Receive):
                others[one.tag] = tuple(sorted((number[color[first]], number[color[one.peer]])))
            elif isinstance(one, Begin | Finish) and not one.group:
                others[one.tag] = tuple(range(len(members)))
            elif isinstance(one, Begin | Finish):
                if one.group not in sets:
                    sets[one.group] = tuple(sorted({number[color[rank]] for rank in groups[first][one.group]}))
                others[one.tag] = sets[one.group]
        if first != first_of[first]:
            given = {one.tag: one.bytes for one in some if isinstance(one, Begin)}
            some = [
                _over(one, groups[first][one.group], link_of, given[one.tag])
                if isinstance(one, Begin | Finish) and one.group
                else one
                for one in some
            ]
        made.append(Class(tuple(alike), some, others))
    return made


def _over(action: Begin | Finish, ranks: Sequence[int], link_of: Callable[[Sequence[int]], Link], given: int) -> Action:
    """A begin or an end of a collective over the link of these ranks, that each give so many bytes."""
    link = link_of(ranks)
    seconds = link.collective(action.op, len(ranks), given)
    beside = link.overlap * seconds
    return replace(action, travel=beside) if isinstance(action, Begin) else replace(action, seconds=seconds - beside)
