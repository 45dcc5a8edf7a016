"""Proves that ring attention computes every pair of runs of tokens once: each rank reads the blocks that it needs, in their order.

The metadata `partc.hop` of a node that reads a block names the block: `k 2` is the keys of hop 2, which are those of the rank two places
before in the list of the ring. `causal` says that a token sees only itself and earlier ones, so a rank needs only its own block and those
of earlier ranks. The checker follows a block back over as many messages as its hop: it must be the value that its owner reads in hop 0.

    rank 3 of 0-1-2-3    k 2 <- message 9 <- rank 2: k 1 <- message 5 <- rank 1: k 0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from onnx import NodeProto
from partc.runtime.artifact.format import EXCHANGE, GROUP, HOP, PHASE, RECV_PEERS, TAG
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of, node_title, path_of, text_of
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import Violation

Ring = tuple[str, str, str, str]
"""A ring: a function of the file, the path of an attention, its phase, and an operand."""


@dataclass
class _Rank:
    """A rank's messages by the values received, the values that it sends by tag, and for each ring the value and the node of each hop."""

    file: str
    received: dict[str, NodeProto] = field(default_factory=dict)
    sent: dict[int, str] = field(default_factory=dict)
    hops: dict[Ring, dict[int, tuple[str, NodeProto]]] = field(default_factory=dict)
    causal: set[Ring] = field(default_factory=set)

    def add(self, nodes: Iterable[NodeProto], function: str) -> None:
        """Records the messages and hops among nodes."""
        for node in nodes:
            if node.op_type == EXCHANGE:
                self.received |= dict.fromkeys(node.output, node)
                self.sent |= dict.fromkeys(
                    [integer_of(node, TAG, -1)] if node.input else [], next(iter(node.input), "")
                )
            operand, _, rest = metadata_of(node, HOP).partition(" ")
            if rest:
                hop, _, causal = rest.partition(" ")
                ring = function, path_of(node), metadata_of(node, PHASE), operand
                self.hops.setdefault(ring, {})[int(hop)] = node.input[0], node
                self.causal |= {ring} if causal else set()


def check_rings(subject: Subject) -> Iterator[Violation]:
    """Yields a violation for each block that is not the one of its hop, and for each hop that is missing."""
    ranks = dict[int, _Rank]()
    for file, members in subject.manifest.by_file(subject.models).items():
        for rank in members:
            ranks[rank] = one = _Rank(file)
            model = subject.models[rank]
            one.add(model.graph.node, "")
            for function in model.functions:
                one.add(function.node, function.name)
    lists = dict[Ring, set[tuple[int, ...]]]()
    for rank, one in ranks.items():
        for ring, hops in one.hops.items():
            first = one.received.get(hops[1][0]) if 1 in hops else None
            for hop, (value, node) in hops.items():
                if hop and (group := _list_of(first, rank, subject)) is not None:
                    lists.setdefault(ring, set()).add(group)
                    if fact := _strange(ranks, rank, ring, hop, value, group):
                        yield Violation(one.file, fact, node_title(node), path_of(node), "compile the model again")
                elif hop:
                    fact = f"it begins with '{value}', which no message brings, and is of hop {hop}"
                    yield Violation(one.file, fact, node_title(node), path_of(node), "compile the model again")
    for ring, groups in lists.items():
        for group in sorted(groups):
            yield from _missing(ranks, ring, group)


def _list_of(message: NodeProto | None, rank: int, subject: Subject) -> tuple[int, ...] | None:
    """The ranks of a ring in order: those of the first hop's message, in which all take part."""
    groups = subject.manifest.groups.get(text_of(message, GROUP), []) if message is not None else []
    return next((tuple(ranks) for ranks in groups if rank in ranks), None)


def _strange(ranks: Mapping[int, _Rank], rank: int, ring: Ring, hop: int, value: str, group: tuple[int, ...]) -> str:
    """The difference between a block and the block of its hop; empty if they are the same."""
    owner, at = group[(group.index(rank) - hop) % len(group)], rank
    for step in range(hop):
        message = ranks[at].received.get(value)
        attributes = [] if message is None else message.attribute
        peers = [peer for one in attributes if one.name == RECV_PEERS for peer in one.ints]
        if message is None or len(peers) != 1 or peers[0] not in ranks:
            return f"its block passes {step} ranks, and hop {hop} passes as many as its number"
        at, tag = peers[0], integer_of(message, TAG, -1)
        value = ranks[at].sent.get(tag, "")
    first = ranks[at].hops.get(ring, {}).get(0)
    if at != owner or first is None or first[0] != value:
        return f"its block is '{value}' of rank {at}, and hop {hop} is of '{first[0] if first else ''}' of rank {owner}"
    return ""


def _missing(ranks: Mapping[int, _Rank], ring: Ring, group: tuple[int, ...]) -> Iterator[Violation]:
    """Yields violations of ranks that lack a hop of a ring, or have an additional one."""
    causal = any(rank in ranks and ring in ranks[rank].causal for rank in group)
    for place, rank in enumerate(group):
        if rank not in ranks:
            continue
        have, need = {*ranks[rank].hops.get(ring, {})}, {*range(place + 1 if causal else len(group))}
        if have != need:
            number = min(have ^ need)
            fact = f"'{ring[1]}' {'computes' if number in have else 'lacks'} hop {number} of {ring[3]}"
            law = "every pair of runs of tokens that see each other is computed once"
            yield Violation(ranks[rank].file, f"{fact}: {law}", help="compile the model again")
