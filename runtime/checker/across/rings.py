"""Proves that ring attention computes every pair of runs of tokens once: each rank reads the blocks that it needs, in their order.

The metadata `partc.hop` of a node that reads a block names the block: `k 2` is the keys of hop 2, which are those of the rank two places
before in the list of the ring. `causal` says that a token sees only itself and earlier ones, so a rank needs only its own block and those
of earlier ranks. The checker follows a block back over as many messages as its hop: it must be the value that its owner reads in hop 0.

    rank 3 of 0-1-2-3    k 2 <- message 9 <- rank 2: k 1 <- message 5 <- rank 1: k 0

`fold` says the same of 2p runs, of which the rank at place r has r and 2p-1-r. A Slice with `q 2 half` or `k 2 half` takes one of the two;
its bounds say which. The pairs of runs that all ranks compute are counted: those that see each other once, and no others.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto
from partc.runtime.artifact.format import EXCHANGE, GROUP, HOP, PHASE, RECV_PEERS, TAG
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of, node_title, path_of, reads, text_of
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import Violation

Ring = tuple[str, str, str, str]
"""A ring: a function of the file, the path of an attention, its phase, and an operand."""
_HALF = "half"


@dataclass
class _Rank:
    """A rank's messages by the values received, the values that it sends by tag, and for each ring the value and the node of each hop."""

    file: str
    received: dict[str, NodeProto] = field(default_factory=dict)
    sent: dict[int, str] = field(default_factory=dict)
    hops: dict[Ring, dict[int, tuple[str, NodeProto]]] = field(default_factory=dict)
    kinds: dict[Ring, str] = field(default_factory=dict)
    """Maps each ring to `causal`, `fold`, or nothing."""
    halves: dict[tuple[Ring, int], set[str]] = field(default_factory=dict)
    """Maps each ring and hop to the runs of its block, or of its queries, that are read: `first`, `second`, `both`, or an unknown part."""

    def add(self, nodes: Sequence[NodeProto], function: str) -> None:
        """Records the messages and hops among nodes."""
        makers, readers = dict[str, NodeProto](), dict[str, list[NodeProto]]()
        hops = [metadata_of(node, HOP) for node in nodes]
        for node in nodes if any(hop.endswith(" fold") for hop in hops) else ():
            makers |= dict.fromkeys(node.output, node)
            for name in {*reads(node)}:
                readers.setdefault(name, []).append(node)
        for node, text in zip(nodes, hops, strict=True):
            if node.op_type == EXCHANGE:
                self.received |= dict.fromkeys(node.output, node)
                self.sent |= dict.fromkeys(
                    [integer_of(node, TAG, -1)] if node.input else [], next(iter(node.input), "")
                )
            operand, _, rest = text.partition(" ")
            if rest:
                hop, _, kind = rest.partition(" ")
                ring = function, path_of(node), metadata_of(node, PHASE), operand
                if kind == _HALF:
                    if operand == "q":
                        half = _half_of(node, makers) if node.output[0] in readers else "both"
                        self.halves.setdefault((ring, int(hop)), set()).add(half)
                    continue
                self.hops.setdefault(ring, {})[int(hop)] = node.input[0], node
                self.kinds[ring] = kind
                if kind == "fold":
                    self.halves.setdefault((ring, int(hop)), set()).update(_runs_read(node, readers, makers))

    def pairs(self, ring: Ring, place: int, size: int) -> Counter[tuple[int, int]]:
        """Returns how often the rank at a place computes the scores of each pair of runs, queries and keys, in folded order.

        Pairs that the causal mask of hop 0 hides do not count.
        """
        own, counts = (place, 2 * size - 1 - place), Counter[tuple[int, int]]()
        for hop in self.hops[ring]:
            block = ((place - hop) % size, 2 * size - 1 - (place - hop) % size)
            queries, keys = self.halves.get(((*ring[:3], "q"), hop), {"both"}), self.halves.get((ring, hop), set())
            for query, key in itertools.product(_runs(own, queries), _runs(block, keys)):
                counts[query, key] += int(hop > 0 or query >= key)
        return counts


def rank_records(subject: Subject) -> dict[int, _Rank]:
    """Returns the messages and the hops of each rank."""
    ranks = dict[int, _Rank]()
    for file, members in subject.shared.by_file(subject.models).items():
        records, model = _Rank(file), subject.models[members[0]]
        records.add(model.graph.node, "")
        for function in model.functions:
            records.add(function.node, function.name)
        ranks |= dict.fromkeys(members, records)
    return ranks


def check_rings(subject: Subject) -> Iterator[Violation]:
    """Yields a violation for each block that is not the one of its hop, and for each hop that is missing."""
    ranks = rank_records(subject)
    lists = dict[Ring, set[tuple[int, ...]]]()
    for rank, rank_rings in ranks.items():
        for ring, hops in rank_rings.hops.items():
            first = rank_rings.received.get(hops[1][0]) if 1 in hops else None
            for hop, (value, node) in hops.items():
                if hop and (group := _list_of(first, rank, subject)) is not None:
                    lists.setdefault(ring, set()).add(group)
                    if fact := _strange(ranks, rank, ring, hop, value, group):
                        yield Violation(
                            rank_rings.file, fact, node_title(node), path_of(node), "compile the model again"
                        )
                elif hop:
                    fact = f"it begins with '{value}', which no message brings, and is of hop {hop}"
                    yield Violation(rank_rings.file, fact, node_title(node), path_of(node), "compile the model again")
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
    """Yields violations of ranks that lack a hop of a ring, or have an additional one, or read other runs than those of the hop."""
    kinds = {ranks[rank].kinds.get(ring, "") for rank in group if rank in ranks and ring in ranks[rank].hops}
    kind = next(iter(kinds), "") if len(kinds) == 1 else ""
    for place, rank in enumerate(group):
        if rank not in ranks:
            continue
        have, need = {*ranks[rank].hops.get(ring, {})}, {*range(place + 1 if kind == "causal" else len(group))}
        if have != need:
            number = min(have ^ need)
            fact = f"'{ring[1]}' {'computes' if number in have else 'lacks'} hop {number} of {ring[3]}"
            law = "every pair of runs of tokens that see each other is computed once"
            yield Violation(ranks[rank].file, f"{fact}: {law}", help="compile the model again")
        elif kind == "fold" and (fact := _wrong_pair(ranks[rank], ring, place, len(group))):
            yield Violation(ranks[rank].file, fact, help="compile the model again")
    if len(kinds) > 1:
        fact = f"'{ring[1]}' has its tokens in different orders on ranks {', '.join(map(str, group))}"
        yield Violation(ranks[group[0]].file, fact, help="compile the model again")


def _wrong_pair(rank: _Rank, ring: Ring, place: int, size: int) -> str:
    """The first pair of runs that a rank computes as often as it must not, in folded order; empty if there is none."""
    counts = rank.pairs(ring, place, size)
    for query, key in itertools.product((place, 2 * size - 1 - place), range(2 * size)):
        if (times := counts[query, key]) != (need := int(query >= key)):
            fact = f"'{ring[1]}' computes runs {query} x {key} of {ring[3]} {times} times, and {need} is right"
            return f"{fact}: every pair of runs of tokens that see each other is computed once"
    return ""


def _runs(two: tuple[int, int], read: set[str]) -> list[int]:
    """The runs among two that are read, each as often as it is; of an unknown part none."""
    parts = {"first": two[:1], "second": two[1:], "both": two}
    return [run for one in read for run in parts.get(one, ())]


def _runs_read(node: NodeProto, readers: Mapping[str, list[NodeProto]], makers: Mapping[str, NodeProto]) -> set[str]:
    """The runs of a block that are read: by Slices of halves after a node, or by others as a whole."""
    runs, waiting = set[str](), [*node.output]
    while waiting:
        for reader in readers.get(waiting.pop(), ()):
            if reader.op_type in ("Cast", "Transpose"):
                waiting += reader.output
            elif reader.op_type != "Shape":
                is_half = metadata_of(reader, HOP).endswith(f" {_HALF}")
                runs.add(_half_of(reader, makers) if is_half else "both")
    return runs


def _half_of(node: NodeProto, makers: Mapping[str, NodeProto]) -> str:
    """The half that a Slice takes by its bounds, which are 0, the middle and the end; for others `unknown`."""
    begin, end = (_bound(makers.get(name)) for name in node.input[1:3])
    return {("0", "middle"): "first", ("middle", "end"): "second"}.get((begin, end), "unknown")


def _bound(maker: NodeProto | None) -> str:
    return "0" if maker is None else {"Div": "middle", "Shape": "end"}.get(maker.op_type, "unknown")
