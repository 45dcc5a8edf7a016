"""Proves that attention in a ring computes every pair of runs of tokens once: each rank reads the blocks that it needs, in their order.

`partc.hop` of a node that begins with a block says which: `k 2` are the keys of hop 2, those of the rank two places before in the list of
the ring; `causal` that a token sees those up to itself alone, and so a rank needs the blocks of earlier ranks and its own. A block is
followed over as many messages as its hop says: it must end at what its owner reads in hop 0.

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
"""A function of the file, the path of an attention, its phase, and an operand."""


@dataclass
class _Rank:
    """The messages of a rank by what it receives, the values that it sends by tag, and for each ring the value and node of each hop."""

    file: str
    received: dict[str, NodeProto] = field(default_factory=dict)
    sent: dict[int, str] = field(default_factory=dict)
    hops: dict[Ring, dict[int, tuple[str, NodeProto]]] = field(default_factory=dict)
    causal: set[Ring] = field(default_factory=set)

    def add(self, nodes: Iterable[NodeProto], function: str) -> None:
        """Notes the messages and hops among nodes."""
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
    """A violation for each block that is another than its hop says, and for each hop that is missing."""
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
    """The list of a ring: the ranks of the message of the first hop, in which all take part."""
    groups = subject.manifest.groups.get(text_of(message, GROUP), []) if message is not None else []
    return next((tuple(ranks) for ranks in groups if rank in ranks), None)


def _strange(ranks: Mapping[int, _Rank], rank: int, ring: Ring, hop: int, value: str, group: tuple[int, ...]) -> str:
    """In what a block is another than that of its hop; empty where it is that."""
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
    """Violations of ranks of a ring that lack a hop, or have one more than there are."""
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
