"""Lines about the slots of an artifact that generates: the memory of their caches on a rank, the number that fits, the bytes of a draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partc.runtime.artifact.format import CACHE, Manifest
from partc.runtime.generation.sampling import LogitShards
from partc.runtime.units import count, size_text


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
