"""Ranks' programs while they are written: ranks that have done the same so far share one draft, and part where they differ.

So writing costs by distinct programs, not by ranks: data parallel copies are one draft from beginning to end.

    drafts.of((0, 1, 2, 3))     one draft, if these four ranks are just those that share it
    drafts.of((2, 3))           a draft of their own from now on, with all that stands there so far
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from partc.compiler.program import Array, Held, Kept, Shape, Step


@dataclass
class Draft:
    """A program that is being written, and the ranks whose it is, rising."""

    ranks: list[int]
    steps: list[Step] = field(default_factory=list)
    weights: dict[str, Held] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    made: dict[ir.Node, set[str]] = field(default_factory=dict)
    """By node the names that it has made here: on a smaller group of these ranks it may stand again."""
    types: dict[str, tuple[ir.Value, Shape | None]] = field(default_factory=dict)
    replaced: dict[int, tuple[Step, ...]] = field(default_factory=dict)
    """By `id` of a step what stands in its place, where the backward pass asks a node for more than it gave."""
    kept: dict[str, Kept] = field(default_factory=dict)
    scalars: dict[str, None] = field(default_factory=dict)

    @property
    def program(self) -> list[Step]:
        """The steps in order, each as it finally is."""
        return [final for step in self.steps for final in self.replaced.get(id(step), (step,))]

    def part_with(self, ranks: Sequence[int]) -> Draft:
        """Hands some of the ranks over to a draft with the same contents."""
        gone = set(ranks)
        self.ranks = [rank for rank in self.ranks if rank not in gone]
        made = {node: set(names) for node, names in self.made.items()}
        return Draft(
            sorted(gone),
            list(self.steps),
            dict(self.weights),
            dict(self.constants),
            made,
            dict(self.types),
            dict(self.replaced),
            dict(self.kept),
            dict(self.scalars),
        )


class Drafts:
    """The draft of every rank."""

    def __init__(self, ranks: int) -> None:
        self._by_rank = [Draft(list(range(ranks)))] * ranks
        self._found: dict[tuple[int, ...], tuple[Draft, ...]] = {}

    def __iter__(self) -> Iterator[Draft]:
        return iter(self._by_rank)

    def of(self, ranks: tuple[int, ...]) -> tuple[Draft, ...]:
        """The drafts that are just these ranks', each once; a draft that others share is parted first."""
        if (found := self._found.get(ranks)) is not None:
            return found
        sharing: dict[int, list[int]] = {}
        for rank in ranks:
            sharing.setdefault(id(self._by_rank[rank]), []).append(rank)
        for some in sharing.values():
            draft = self._by_rank[some[0]]
            if len(some) < len(draft.ranks):
                own = draft.part_with(some)
                for rank in some:
                    self._by_rank[rank] = own
                self._found.clear()
        found = tuple({id(self._by_rank[rank]): self._by_rank[rank] for rank in ranks}.values())
        self._found[ranks] = found
        return found
