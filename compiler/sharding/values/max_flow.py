"""Minimum cut of a directed graph between a source and a sink, by maximum flow (Dinic's algorithm).

The cost of a cut is the sum of the costs of the edges from the source's side to the sink's. Of all minimum cuts the one with the fewest
nodes on the source's side is returned; its nodes are on that side in every other minimum cut. Flow is pushed along shortest augmenting
paths until there is none: the source's side is then the set of nodes that the source still reaches over edges with remaining capacity.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

Node = TypeVar("Node", bound=Hashable)

ALWAYS = 1 << 200
"""The cost of an edge that is never cut."""


class FlowNetwork(Generic[Node]):
    """A directed graph with capacities: `edge` adds to it, `source_side` cuts it."""

    def __init__(self) -> None:
        self._numbers: dict[Node, int] = {}
        self._edges: list[list[int]] = []
        self._target: list[int] = []
        self._room: list[int] = []

    def edge(self, begin: Node, end: Node, cost: int) -> None:
        """Adds an edge with the cost of cutting it; the costs of edges from one node to another add up."""
        here, there, number = self._number(begin), self._number(end), len(self._target)
        self._edges[here].append(number)
        self._edges[there].append(number + 1)
        self._target += (there, here)
        self._room += (cost, 0)

    def source_side(self, source: Node, sink: Node) -> set[Node]:
        """The nodes on the source's side of the minimum cut."""
        begin, end = self._number(source), self._number(sink)
        while (levels := self._levels(begin))[end] >= 0:
            left = [iter(edges) for edges in self._edges]
            while self._push(begin, end, levels, left):
                pass
        names: Mapping[int, Node] = {number: node for node, number in self._numbers.items()}
        return {names[at] for at, level in enumerate(levels) if level >= 0}

    def _number(self, node: Node) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self._edges)
            self._edges.append([])
        return self._numbers[node]

    def _levels(self, begin: int) -> list[int]:
        """Maps each node to its distance from the source over edges with remaining capacity; -1 where it cannot be reached."""
        levels = [-1] * len(self._edges)
        levels[begin] = 0
        waiting = deque([begin])
        while waiting:
            at = waiting.popleft()
            for edge in self._edges[at]:
                if self._room[edge] and levels[self._target[edge]] < 0:
                    levels[self._target[edge]] = levels[at] + 1
                    waiting.append(self._target[edge])
        return levels

    def _push(self, begin: int, end: int, levels: list[int], left: list[Iterator[int]]) -> bool:
        """Pushes flow along one augmenting path through the levels; returns whether there was one. `left`: edges that are still to be
        tried.
        """
        way: list[int] = []
        at = begin
        while at != end:
            edge = next((e for e in left[at] if self._room[e] and levels[self._target[e]] == levels[at] + 1), None)
            if edge is not None:
                way.append(edge)
                at = self._target[edge]
            elif way:
                at = self._target[way.pop() ^ 1]
            else:
                return False
        room = min(self._room[edge] for edge in way)
        for edge in way:
            self._room[edge] -= room
            self._room[edge ^ 1] += room
        return True
