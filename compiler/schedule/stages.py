"""The stages of a pipeline: the homes on which each of them runs, and the edges along which values and cotangents go.

A home is what has one row of tasks: a rank, or a group of ranks that run the same tasks at the same time. Stages are numbered so
that every edge goes from a lower to a higher number. Which task waits for which follows:

    sFi   waits for aFi of every edge a -> s
    sBi   waits for sFi, and for tBi of every edge s -> t that carries a gradient
    sWi   waits for sBi

Forms of a chain that schedules know, over three homes:

    0 1 2                 one stage a home
    0 1 2 0 1 2           a loop: interleaved, each home has every third stage
    0 1 2 2 1 0           a V: there and back, so that the first home has the first stage and the last
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from partc.runtime.artifact.tasks.task import Kind, Task


class Edge(NamedTuple):
    """All values that one stage hands to another; `gradient`: whether cotangents come back (not of masks or labels)."""

    source: int
    target: int
    gradient: bool = True


@dataclass(frozen=True)
class Stages:
    """`stage_ranks[s]`: the homes of stage s, several where its group covers those of other stages. `ranks[h]`: the ranks of home h.

    `backward[s]`: whether the stage has a backward pass: not in inference, and not where nothing before its end is trained.
    """

    stage_ranks: tuple[tuple[int, ...], ...]
    edges: tuple[Edge, ...]
    ranks: tuple[tuple[int, ...], ...]
    backward: tuple[bool, ...]

    def __post_init__(self) -> None:
        count = len(self.stage_ranks)
        if not count or len(self.backward) != count:
            raise ValueError(
                f"{count} stages have homes and {len(self.backward)} say whether they have a backward pass"
            )
        for edge in self.edges:
            if not 0 <= edge.source < edge.target < count:
                raise ValueError(
                    f"the edge {edge.source} -> {edge.target} does not go to a higher one of {count} stages"
                )
        for stage, homes in enumerate(self.stage_ranks):
            if not homes or list(homes) != sorted(set(homes)) or homes[0] < 0 or homes[-1] >= len(self.ranks):
                raise ValueError(f"stage {stage} is on homes {homes} of {len(self.ranks)}")

    def __len__(self) -> int:
        return len(self.stage_ranks)

    @property
    def rows(self) -> int:
        """The number of homes, each of which has a row."""
        return len(self.ranks)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that it reads from."""
        return tuple(tuple(sorted({e.source for e in self.edges if e.target == s})) for s in range(len(self)))

    @cached_property
    def gradient_edges(self) -> tuple[Edge, ...]:
        """The edges along which cotangents come back: of those that carry one, between stages with a backward pass."""
        return tuple(e for e in self.edges if e.gradient and self.backward[e.source] and self.backward[e.target])

    @cached_property
    def gradient_targets(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages whose cotangents its backward pass reads."""
        return tuple(tuple(sorted({e.target for e in self.gradient_edges if e.source == s})) for s in range(len(self)))

    @cached_property
    def splittable(self) -> tuple[bool, ...]:
        """For each stage, whether B and W can be two tasks: only where a cotangent leaves the stage, since B would else be empty."""
        leaving = {edge.target for edge in self.gradient_edges}
        return tuple(s in leaving for s in range(len(self)))

    @cached_property
    def on(self) -> tuple[tuple[int, ...], ...]:
        """For each home, its stages."""
        return tuple(tuple(s for s, homes in enumerate(self.stage_ranks) if h in homes) for h in range(self.rows))

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """For each stage, the most edges on a path from it to a last stage."""
        found = [0] * len(self)
        for edge in sorted(self.edges, reverse=True):
            found[edge.source] = max(found[edge.source], found[edge.target] + 1)
        return tuple(found)

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that it reads from or that read from it, in order."""
        pairs = {(e.source, e.target) for e in self.edges} | {(e.target, e.source) for e in self.edges}
        return tuple(tuple(sorted(b for a, b in pairs if a == s)) for s in range(len(self)))

    @cached_property
    def _known_needs(self) -> dict[Task, tuple[Task, ...]]:
        return {}

    def needs(self, task: Task) -> tuple[Task, ...]:
        """The tasks that must have ended before one begins, apart from those before it in its row."""
        found = self._known_needs.get(task)
        if found is None:
            found = self._known_needs[task] = self._needs(task)
        return found

    def _needs(self, task: Task) -> tuple[Task, ...]:
        stage, kind, i = task
        if kind is Kind.FORWARD:
            return tuple(Task(source, kind, i) for source in self.sources[stage])
        if kind is Kind.WEIGHT:
            return (Task(stage, Kind.BACKWARD, i),)
        return (Task(stage, Kind.FORWARD, i), *(Task(target, kind, i) for target in self.gradient_targets[stage]))

    def crosses(self, a: int, b: int) -> bool:
        """Whether what goes from one stage to another is a message: not where both are on the same homes."""
        return self.stage_ranks[a] != self.stage_ranks[b]

    def label(self, *homes: int) -> str:
        """Homes as people read them: `rank 3`, `ranks 0-3`, `ranks 0,2`."""
        ranks = [rank for home in homes for rank in self.ranks[home]]
        if len(ranks) == 1:
            return f"rank {ranks[0]}"
        run = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        return f"ranks {ranks[0]}-{ranks[-1]}" if run else f"ranks {','.join(map(str, ranks))}"

    @cached_property
    def is_one_each(self) -> bool:
        """Whether every stage has one home, for itself alone."""
        return all(len(homes) == 1 for homes in self.stage_ranks) and len(set(self.stage_ranks)) == len(self)

    @cached_property
    def turns(self) -> int:
        """The number of stages of each home, where the stages loop over the same homes in the same order; else 0."""
        period = len(set(self.stage_ranks))
        one_home = all(len(homes) == 1 for homes in self.stage_ranks)
        looped = all(homes == self.stage_ranks[s % period] for s, homes in enumerate(self.stage_ranks))
        return len(self) // period if one_home and looped and len(self) % period == 0 else 0

    @cached_property
    def is_vee(self) -> bool:
        """Whether every home has two stages, the second ones in reverse order."""
        one_home = all(len(homes) == 1 for homes in self.stage_ranks)
        return one_home and len(self) == 2 * len(set(self.stage_ranks)) and self.stage_ranks == self.stage_ranks[::-1]

    @property
    def is_pointed_vee(self) -> bool:
        """Whether these are a V but for the stage at its point, which is one and not two: 0 1 2 1 0."""
        one_home = all(len(homes) == 1 for homes in self.stage_ranks)
        return (
            one_home
            and len(self) == 2 * len(set(self.stage_ranks)) - 1 > 1
            and self.stage_ranks == self.stage_ranks[::-1]
        )


def chain(homes: Sequence[int], backward: bool = True) -> Stages:
    """Stages that each read from the one before; home h is rank h."""
    edges = [Edge(s, s + 1) for s in range(len(homes) - 1)]
    return graph([(home,) for home in homes], edges, backward)


def graph(homes: Sequence[tuple[int, ...]], edges: Iterable[Edge], backward: bool = True) -> Stages:
    """Stages with any edges; home h is rank h."""
    ranks = tuple((h,) for h in range(1 + max(max(some) for some in homes)))
    return Stages(tuple(homes), tuple(sorted(edges)), ranks, (backward,) * len(homes))


def grouped(groups: Sequence[Sequence[int]], edges: Iterable[Edge], backward: Sequence[bool]) -> Stages:
    """Stages placed on groups of ranks. Ranks that have the same stages are one home; where groups overlap, a stage has several.

    Groups [0, 1], [2, 3] are two homes of two ranks; [0, 1], [0, 1, 2, 3] are the homes 0, 1 and 2, 3, and the second stage is on both.
    """
    of: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted({rank for group in groups for rank in group}):
        of.setdefault(tuple(s for s, group in enumerate(groups) if rank in group), []).append(rank)
    homes = [tuple(h for h, stages in enumerate(of) if s in stages) for s in range(len(groups))]
    return Stages(tuple(homes), tuple(sorted(edges)), tuple(map(tuple, of.values())), tuple(backward))
