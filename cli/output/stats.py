"""Statistics of an artifact's ranks: nodes, weights, bytes moved.

Bytes moved are those of messages and of collectives, in which a rank receives as many as it sends: sums of expressions in the symbols
(`28*batch + 32`) and their value at chosen sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from partc.cli.output.training_stats import state_bytes
from partc.runtime.artifact.byte_count import ZERO, ByteCount, of_tensor, of_text
from partc.runtime.artifact.format import BYTES, CACHE, DOMAIN, TAG, Manifest
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.calls import nodes_of, tensors_of
from partc.runtime.generation.sampling import LogitShards
from partc.runtime.units import count, size_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from onnx import ModelProto


T = TypeVar("T", bound="DataclassInstance")

_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Moved:
    """The bytes of some transfers: the sum as an expression, its value at chosen sizes, and the number of transfers of unknown size."""

    text: str
    bytes: int
    unknown: int


@dataclass(frozen=True)
class RankStats:
    """The statistics of one rank."""

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
    """Returns the `figures` of all ranks, in order; they are computed once for all ranks that share a file, whose ops and sizes are the
    same.

    `facts`: returns a key of whatever else the figures of a rank depend on.
    """
    of_rank: dict[int, Sequence[T]] = {}
    for ranks in artifact.manifest.by_file(range(artifact.manifest.ranks)).values():
        model, known = artifact.model(ranks[0]), dict[Hashable, Sequence[T]]()
        for rank in ranks:
            if (key := facts(rank)) not in known:
                known[key] = figures(model, rank)
            of_rank[rank] = [replace(one, rank=rank) for one in known[key]]
    return [one for rank in sorted(of_rank) for one in of_rank[rank]]


def all_rank_stats(artifact: Artifact, sizes: Mapping[str, int]) -> list[RankStats]:
    """Returns the statistics of all ranks."""

    def messages(rank: int) -> Hashable:
        return tuple([(one.source == rank, one.bytes) for one in artifact.manifest.messages_of(rank)])

    return by_rank(artifact, lambda model, rank: [rank_stats(artifact, rank, sizes, model)], messages)


def rank_stats(artifact: Artifact, rank: int, sizes: Mapping[str, int], model: ModelProto | None = None) -> RankStats:
    """Returns the statistics of a rank with the symbols at these sizes; `model`: its file, if it is already read."""
    model, manifest = model or artifact.model(rank), artifact.manifest
    stated, messages = {one.tag: one.bytes for one in manifest.collectives}, manifest.messages_of(rank)
    collectives, nodes = list[str](), 0
    for node, microbatch in nodes_of(model):
        if node.domain != DOMAIN:
            nodes += 1
        elif (tag := integer_of(node, TAG, -1) + microbatch) in stated:
            collectives.append(metadata_of(node, BYTES, stated[tag]))  # as the rank's own node states them
    state = {record.value for record in manifest.state if rank in record.ranks}
    kept = state_bytes(manifest, rank)
    weights = sum(of_tensor(tensor) for name, tensor in tensors_of(model).items() if name not in state)
    weights += kept["parameter"] + kept["statistics"]
    return RankStats(
        rank=rank,
        nodes=nodes,
        weights=weights,
        sent=moved([*(one.bytes for one in messages if one.source == rank), *collectives], sizes),
        received=moved([*(one.bytes for one in messages if one.target == rank), *collectives], sizes),
    )


def moved(texts: Iterable[str], sizes: Mapping[str, int]) -> Moved:
    """Sums the bytes of some messages, collectives or copies; `texts` has an expression in the symbols for each."""
    known, unknown = _sum(texts)
    return Moved(_text(known, unknown), known(sizes), unknown)


def moved_text(texts: Iterable[str]) -> str:
    """Returns the same sum as an expression, without sizes."""
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
    """Returns lines about parameters that ranks store in shards: their units, the gathers of a step, and the peaks of gathered bytes."""
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


def slot_lines(manifest: Manifest, unfused: Sequence[str] = ()) -> Iterator[str]:
    """Yields lines for the rank with the most cache memory; none for an artifact that does not generate, or a program other than the main.

    `unfused`: the attention nodes that read the caches of all slots up to the longest sequence.
    """
    record = manifest.generation
    if record is None:
        return
    kept: dict[int, int] = {}
    for one in manifest.state:
        for rank in one.ranks if one.kind == CACHE else ():
            kept[rank] = kept.get(rank, 0) + manifest.state_bytes_of(one, rank)
    most = max(kept.values(), default=0)
    size = size_text(most * record.runs // record.slots)
    turns = f", in {record.groups} groups that take turns" if record.groups > 1 else ""
    slots = f"{count(record.slots, 'slot')} of {record.length} tokens{turns}"
    if record.encoder is not None:
        slots += f", an encoder's input of {record.encoder.length}"
    text = f"{slots}: caches of {size_text(most)} on a rank, {size} for each of its slots"
    if record.memory is not None and record.room is not None:
        text += f"; 'memory' of {size_text(record.memory)} has room for {count(record.room, 'slot')}"
    yield text
    if record.stop:
        yield f"a sequence ends after token {' or '.join(map(str, record.stop))}"
    if unfused:
        more = f" and {len(unfused) - 1} more" if unfused[1:] else ""
        fact = f"Attention '{unfused[0]}'{more}, whose mask is not causal or not proven so"
        yield f"{fact}, {'read' if more else 'reads'} the entries of all slots up to the longest sequence"
    if record.logits and manifest.ranks > 1:
        shards = LogitShards.of(next(port for port in manifest.outputs if port.name == record.logits))
        text = f"a token that is drawn: {size_text(shards.told)} more of each rank"
        if shards.is_sharded:
            text += f", {shards.first} candidates of each of {shards.count} shards of its logits"
            text += "; more where these have too little weight"
        yield text
