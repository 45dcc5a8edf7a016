"""Classes of ranks that do the same: the same file, among ranks of the same classes, over the same links.

It begins with ranks of one file, and takes a class apart as long as its ranks communicate with ranks of other classes; so each rank of a
class does at every moment what the others of it do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from partc.compiler.cost.machine import Link
from partc.compiler.cost.play import Action, Begin, Class, Communicate, Receive, Send
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
            sorted({one.group for one in some if isinstance(one, Communicate) and one.group}),
            sorted({one.peer for one in some if isinstance(one, Send | Receive) and not one.group}),
        )
        for first, some in actions.items()
    }
    distinct = {ranks for lists in groups.values() for ranks in lists.values()}
    links = {ranks: (len(ranks), link_of(ranks).name) for ranks in distinct}
    members: dict[int, list[int]] = {}
    color = _colors(first_of, used, groups, links)
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
            if not isinstance(one, Communicate):
                continue
            if isinstance(one, Send | Receive) and not one.group:
                others[one.tag] = tuple(sorted((number[color[first]], number[color[one.peer]])))
            elif not one.group:
                others[one.tag] = tuple(range(len(members)))
            else:
                if one.group not in sets:
                    sets[one.group] = tuple(sorted({number[color[rank]] for rank in groups[first][one.group]}))
                others[one.tag] = sets[one.group]
        if first != first_of[first]:
            given = {one.tag: one.bytes for one in some if isinstance(one, Begin)}
            some = [
                _over(one, first, groups[first][one.group], link_of, given)
                if isinstance(one, Communicate) and one.group
                else one
                for one in some
            ]
        made.append(Class(tuple(alike), some, others))
    return made


def _colors(
    first_of: Mapping[int, int],
    used: Mapping[int, tuple[Sequence[str], Sequence[int]]],
    groups: Mapping[int, Mapping[str, tuple[int, ...]]],
    links: Mapping[tuple[int, ...], Hashable],
) -> dict[int, int]:
    """Maps each rank to the first rank of its class: the coarsest partition in which ranks of a class meet the same classes, by color
    refinement.

    It begins with the ranks of one file, `first_of`; `used`: by file the groups and the peers with which its ranks communicate.
    """
    color = {rank: first_of[rank] for rank in sorted(first_of)}
    while True:
        met: dict[tuple[int, ...], Hashable] = {}
        seen: dict[Hashable, int] = {}
        found = {}
        for rank in color:
            names, peers = used[first_of[rank]]
            around: list[Hashable] = [color[rank], tuple(color[peer] for peer in peers)]
            for name in names:
                ranks = groups[rank].get(name, ())
                if ranks not in met:
                    met[ranks] = links.get(ranks), tuple(sorted({color[one] for one in ranks}))
                around.append(met[ranks])
            found[rank] = seen.setdefault(tuple(around), rank)
        if len(seen) == len({*color.values()}):
            return color
        color = found


def _over(
    action: Communicate,
    rank: int,
    ranks: Sequence[int],
    link_of: Callable[[Sequence[int]], Link],
    given: Mapping[int, int],
) -> Action:
    """An end of a message or a collective of a rank over the link of these ranks; `given`: by tag of a collective what each gives."""
    link = link_of(ranks)
    if isinstance(action, Send | Receive):
        (peer,) = (one for one in ranks if one != rank)
        side = "to" if isinstance(action, Send) else "from"
        what = action.what.replace(f"' {side} rank {action.peer}", f"' {side} rank {peer}")
        travel = link.send(action.bytes) if isinstance(action, Send) else 0.0
        return replace(action, what=what, peer=peer, travel=travel)
    seconds = link.collective(action.op, len(ranks), given[action.tag])
    beside = link.overlap * seconds
    return replace(action, travel=beside) if isinstance(action, Begin) else replace(action, seconds=seconds - beside)
