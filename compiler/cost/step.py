"""Simulates a step of an artifact on a machine: the actions of all ranks, with the memory of each.

simulated(artifact, machine, {"batch": 64})      what `partc simulate build/ --machine machine.yaml --set batch=64` shows

Classes of ranks that do the same: the same file, among ranks of the same classes, over the same links.

It begins with ranks of one file, and takes a class apart as long as its ranks communicate with ranks of other classes; so each rank of a
class does at every moment what the others of it do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.compiler.cost.actions import Pricing, rank_actions
from partc.compiler.cost.machine import Link, Machine
from partc.compiler.cost.memory import RankMemory, memory_of_ranks
from partc.compiler.cost.play import Action, Begin, Class, Communicate, Compute, Played, Receive, Send, play
from partc.compiler.cost.sizes import FileSizes
from partc.compiler.cost.traced import Traced
from partc.runtime.artifact.format import Manifest
from partc.runtime.artifact.legal_sizes import is_legal, refusal, typical_sizes
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.errors import ArtifactError, UsageError
from partc.runtime.program.rank_file import read_rank_file


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
    classes = []
    for alike in members.values():
        first = alike[0]
        class_actions = actions[first_of[first]]
        others: dict[int, tuple[int, ...]] = {}
        sets: dict[str, tuple[int, ...]] = {}
        for action in class_actions:
            if not isinstance(action, Communicate):
                continue
            if isinstance(action, Send | Receive) and not action.group:
                others[action.tag] = tuple(sorted((number[color[first]], number[color[action.peer]])))
            elif not action.group:
                others[action.tag] = tuple(range(len(members)))
            else:
                if action.group not in sets:
                    sets[action.group] = tuple(sorted({number[color[rank]] for rank in groups[first][action.group]}))
                others[action.tag] = sets[action.group]
        if first != first_of[first]:
            given = {one.tag: one.bytes for one in class_actions if isinstance(one, Begin)}
            class_actions = [
                _over(one, first, groups[first][one.group], link_of, given)
                if isinstance(one, Communicate) and one.group
                else one
                for one in class_actions
            ]
        classes.append(Class(tuple(alike), class_actions, others))
    return classes


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
        colors = {}
        for rank in color:
            names, peers = used[first_of[rank]]
            around: list[Hashable] = [color[rank], tuple(color[peer] for peer in peers)]
            for name in names:
                ranks = groups[rank].get(name, ())
                if ranks not in met:
                    met[ranks] = links.get(ranks), tuple(sorted({color[one] for one in ranks}))
                around.append(met[ranks])
            colors[rank] = seen.setdefault(tuple(around), rank)
        if len(seen) == len({*color.values()}):
            return color
        color = colors


def _over(
    action: Communicate,
    rank: int,
    ranks: Sequence[int],
    link_of: Callable[[Sequence[int]], Link],
    given_bytes: Mapping[int, int],
) -> Action:
    """An end of a message or a collective of a rank over the link of these ranks; `given_bytes`: by tag of a collective what each gives."""
    link = link_of(ranks)
    if isinstance(action, Send | Receive):
        (peer,) = (one for one in ranks if one != rank)
        side = "to" if isinstance(action, Send) else "from"
        what = action.what.replace(f"' {side} rank {action.peer}", f"' {side} rank {peer}")
        travel = link.send(action.bytes) if isinstance(action, Send) else 0.0
        return replace(action, what=what, peer=peer, travel=travel)
    seconds = link.collective(action.op, len(ranks), given_bytes[action.tag])
    beside = link.overlap * seconds
    return replace(action, travel=beside) if isinstance(action, Begin) else replace(action, seconds=seconds - beside)


@dataclass(frozen=True)
class Simulation:
    """A played step; by class the memory of its ranks, `unknown` the values whose size only a run tells."""

    played: Played
    sizes: Mapping[str, int]
    memory: Mapping[int, RankMemory]
    unknown: int
    files: Mapping[str, FileSizes]
    """The distinct rank files by name."""

    @property
    def bytes(self) -> list[int]:
        """For each class, the bytes of a rank's messages and collectives in a step."""
        return [
            sum(action.bytes for action in one.actions if isinstance(action, Communicate))
            for one in self.played.classes
        ]

    @property
    def operations(self) -> list[float]:
        """For each class, the operations of a rank; a multiply-add counts as two."""
        return [
            sum(action.operations for action in one.actions if isinstance(action, Compute))
            for one in self.played.classes
        ]

    @property
    def critical(self) -> list[tuple[str, float]]:
        """The durations on the step's critical path: modules, messages and collectives by their source names, the longest first."""
        total = defaultdict[str, float](float)
        for _, action, seconds in self.played.critical:
            match action:
                case Compute(modules=modules) if whole := sum(modules.values()):
                    for path, part in modules.items():
                        total[path] += seconds * part / whole
                case Communicate(op=op) if op:
                    total[f"{op} {action.path}".strip()] += seconds
                case Communicate():
                    total[action.what] += seconds
                case _:
                    total[action.path or action.what] += seconds
        return sorted(total.items(), key=lambda one: (-one[1], one[0]))


def chosen_sizes(artifact: Artifact, requested: Mapping[str, int], partly: bool = False) -> dict[str, int]:
    """The sizes of all symbols: those given, a training's batch, or the only legal one; UsageError names those that are not known.

    `partly`: the sizes may be of several artifacts, of which each has some.
    """
    manifest, problems = artifact.manifest, []
    typical = typical_sizes(manifest)
    batch = manifest.training.settings.batch if manifest.training is not None else None
    firsts = {port.shape[0] for port in manifest.inputs if port.shape}
    for name in requested:
        if partly and name not in manifest.symbols:
            continue
        if name not in manifest.symbols:
            known = ", ".join(manifest.symbols) or "none"
            problems.append(f"--set {name}: there is no such symbol\n  help: the symbols are {known}")
        elif not is_legal(requested[name], manifest.symbols[name]):
            problems.append(refusal(f"--set {name}", requested[name], name, manifest.symbols[name]))
    for name, symbol in manifest.symbols.items():
        is_batch = batch is not None and name in firsts and typical[name] == batch
        if name not in requested and not is_batch and symbol.max != symbol.min:
            fact = f"{artifact.folder}: the size of '{name}' is not known, by which its times are computed"
            problems.append(f"{fact}\n  help: give it, such as --set {name}={typical[name]}")
    if problems:
        raise UsageError("\n".join(problems))
    return {**typical, **{name: size for name, size in requested.items() if name in manifest.symbols}}


def simulated(
    artifact: Artifact,
    machine: Machine,
    requested: Mapping[str, int],
    hosts: int = 1,
    traced: Traced | None = None,
    alike: bool = False,
) -> Simulation:
    """A step of the artifact's program; `hosts` share its ranks evenly, `traced` is what was measured of it.

    `alike`: ranks that do about as much in about as many actions have the memory of the first of them, which saves to lay it out for each.
    """
    artifact = artifact.shared()
    manifest, sizes = artifact.manifest, chosen_sizes(artifact, requested)
    if traced is not None:
        traced.refuse_other(manifest.ranks)
    pricing, unknown = Pricing(machine.among(machine.busy(manifest.ranks, hosts))), set[str]()
    actions, files = {}, {}
    for ranks in manifest.by_file(range(manifest.ranks)).values():
        file = FileSizes(read_rank_file(artifact, ranks[0]), sizes)
        actions[ranks[0]] = rank_actions(file, pricing)
        unknown |= file.unknown
        files[manifest.program(ranks[0])] = file
    classes = classes_of(manifest, actions, machine.link)
    if traced is not None:
        classes = traced.calibrated(classes)
    try:
        played = play(classes, machine.cores * hosts, 0.0 if traced is not None else machine.links[0].wake)
    except ValueError as error:
        raise ArtifactError(f"{artifact.folder}: {error}\n  help: see what `partc check` says of it") from None
    firsts = {one.ranks[0]: one.ranks[0] for one in classes}
    if alike:
        seen = dict[Hashable, int]()
        for one, busy in zip(classes, played.busy, strict=True):
            firsts[one.ranks[0]] = seen.setdefault((f"{len(one.actions):.2g}", f"{busy:.2g}"), one.ranks[0])
    memory = memory_of_ranks(artifact, sizes, [*{*firsts.values()}], {name: one.file for name, one in files.items()})
    of = {one.rank: one for one in memory}
    return Simulation(played, sizes, {rank: of[other] for rank, other in firsts.items()}, len(unknown), files)
