"""What an artifact's ranks do, in numbers: nodes, weights, bytes moved.

Bytes moved are those of messages and of collectives, of which a rank gets as many as it sends: sums of expressions in the symbols
(`28*batch + 32`) and their value at chosen sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from partc.cli.output.training_stats import state_bytes
from partc.runtime.artifact.byte_count import ZERO, ByteCount, of_tensor, of_text
from partc.runtime.artifact.format import BYTES, DOMAIN, TAG, Manifest
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.units import count, size_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from onnx import ModelProto

T = TypeVar("T", bound="DataclassInstance")

_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Moved:
    """Bytes of some transfers: the sum as an expression, its value at chosen sizes, and how many have no known size."""

    text: str
    bytes: int
    unknown: int


@dataclass(frozen=True)
class RankStats:
    """The numbers of one rank."""

    rank: int
    nodes: int
    weights: int
    sent: Moved
    received: Moved


def by_rank(
    artifact: Artifact,
    figures: Callable[[ModelProto, int], Sequence[T]],
    facts: Callable[[int], Hashable] = lambda rank: (),
) -> list[T]:
    """The `figures` of all ranks, in order: those of a program are made once for all ranks of a file, whose ops and sizes are the same.

    `facts`: those that the figures of a rank depend on besides its program.
    """
    found: dict[int, Sequence[T]] = {}
    for ranks in artifact.manifest.by_file(range(artifact.manifest.ranks)).values():
        model, known = unrolled(artifact.model(ranks[0])), dict[Hashable, Sequence[T]]()
        for rank in ranks:
            if (key := facts(rank)) not in known:
                known[key] = figures(model, rank)
            found[rank] = [replace(one, rank=rank) for one in known[key]]
    return [one for rank in sorted(found) for one in found[rank]]


def all_rank_stats(artifact: Artifact, sizes: Mapping[str, int]) -> list[RankStats]:
    """The numbers of all ranks."""

    def messages(rank: int) -> Hashable:
        return tuple([(one.source == rank, one.bytes) for one in artifact.manifest.messages_of(rank)])

    return by_rank(artifact, lambda model, rank: [rank_stats(artifact, rank, sizes, model)], messages)


def rank_stats(artifact: Artifact, rank: int, sizes: Mapping[str, int], model: ModelProto | None = None) -> RankStats:
    """The numbers of a rank, with the symbols at these sizes; `model`: its program, unrolled, where it is read already."""
    model, manifest = model or unrolled(artifact.model(rank)), artifact.manifest
    stated, messages = {one.tag: one.bytes for one in manifest.collectives}, manifest.messages_of(rank)
    collectives = [  # as the rank's own nodes state them
        metadata_of(node, BYTES, stated[tag])
        for node in model.graph.node
        if node.domain == DOMAIN and (tag := integer_of(node, TAG, -1)) in stated
    ]
    state = {record.value for record in manifest.state if rank in record.ranks}
    kept = state_bytes(manifest, rank)
    weights = sum(of_tensor(tensor) for tensor in model.graph.initializer if tensor.name not in state)
    weights += kept["parameter"] + kept["statistics"]
    return RankStats(
        rank=rank,
        nodes=sum(node.domain != DOMAIN for node in model.graph.node),
        weights=weights,
        sent=moved([*(one.bytes for one in messages if one.source == rank), *collectives], sizes),
        received=moved([*(one.bytes for one in messages if one.target == rank), *collectives], sizes),
    )


def moved(texts: Iterable[str], sizes: Mapping[str, int]) -> Moved:
    """The bytes of some messages, collectives or copies together; `texts` has those of each, expressions in the symbols."""
    known, unknown = _sum(texts)
    return Moved(_text(known, unknown), known(sizes), unknown)


def moved_text(texts: Iterable[str]) -> str:
    """The same sum as an expression, without sizes."""
    return _text(*_sum(texts))


def _sum(texts: Iterable[str]) -> tuple[ByteCount, int]:
    known, unknown = ZERO, 0
    for text in texts:
        if text == _UNKNOWN:
            unknown += 1
        else:
            known += of_text(text)
    return known, unknown


def _text(known: ByteCount, unknown: int) -> str:
    parts = ([str(known)] if known.terms else []) + ([f"{unknown} unknown"] if unknown else [])
    return " + ".join(parts) or "0"


def stored_lines(manifest: Manifest) -> list[str]:
    """Lines about parameters that ranks store in shards: their units, what is gathered in a step, and what ranks have of it at once."""
    if (stored := manifest.stored) is None:
        return []
    tensors, freed = sum(len(one.tensors) for one in stored.units), sum(one.freed for one in stored.units)
    how = (
        "freed after each pass"
        if freed == len(stored.units)
        else f"{freed} of them freed after each pass"
        if freed
        else "kept"
    )
    gathers = count(sum(one.gathers for one in stored.units), "gather")
    peaks = "; ".join(
        f"{size_text(one.bytes)} on rank{'s' * (len(one.ranks) > 1)} {ranks_text(one.ranks)}" for one in stored.peaks
    )
    units = count(len(stored.units), "unit")
    return [f"stores {count(tensors, 'parameter')} in shards: {units}, {how}, {gathers} a step, at once {peaks}"]
