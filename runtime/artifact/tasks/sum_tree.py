"""The binary tree by which the parts of a batch are added, the same for any number of ranks.

A node of the tree is a run of parts, low to high - 1. The size of its left half is the largest power of two below its own size: (0, 24) has
the halves (0, 16) and (16, 24). A rank has a run of parts and adds up the largest nodes within it, its roots; the rank that owns a sum adds
the roots of all ranks. So the expression is that of the tree for every division of the parts into runs.

    24 parts on 4 ranks: the roots are (0, 4) (4, 6) | (6, 8) (8, 12) | (12, 16) (16, 18) | (18, 20) (20, 24)

A run has at most 2 log2(parts) roots, and one root if the run is a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

Node: TypeAlias = tuple[int, int]


def middle(node: Node) -> int:
    """The first part of the right half of a node of several parts."""
    low, high = node
    return low + (1 << (high - low - 1).bit_length() - 1)


def roots(node: Node, run: Node) -> list[Node]:
    """The largest nodes at or below `node` that are inside a run, in order."""
    if node[1] <= run[0] or run[1] <= node[0]:
        return []
    if run[0] <= node[0] and node[1] <= run[1]:
        return [node]
    return [root for half in halves(node) for root in roots(half, run)]


def halves(node: Node) -> tuple[Node, Node]:
    """The two halves of a node of several parts."""
    return (node[0], middle(node)), (middle(node), node[1])


def nodes(node: Node) -> Iterator[Node]:
    """Yields the nodes of several parts at and below this one, each after its halves."""
    if node[1] - node[0] > 1:
        for half in halves(node):
            yield from nodes(half)
        yield node


def run_of(place: int, ranks: int, parts: int) -> Node:
    """The run of parts that the rank at a place has."""
    return parts * place // ranks, parts * (place + 1) // ranks
