"""The tags of messages between pairs of ranks, as a transport sees them."""

from __future__ import annotations

from partc.runtime.artifact.comm.collectives import COLLECTIVES
from partc.runtime.artifact.comm.lookup_ops import LOOKUPS

from ..artifact.format import Manifest


def wire_tags(manifest: Manifest, largest: int) -> dict[int, int]:
    """Maps the manifest's tags to the transport's: the same, or where those are too large, a count for each pair of ranks.

    Messages between many pairs have one tag, which is new to each of them.

    An Exchange, a Pull or a Push is a message between every two ranks of its lists; the other collectives need no tag of the transport.
    """
    paired = {op.name for op in COLLECTIVES.values() if op.boxes} | LOOKUPS.keys()
    exchanges = [one for one in manifest.collectives if one.op in paired]
    every = [one.tag for one in manifest.transfers] + [one.tag for one in exchanges]
    if all(tag <= largest for tag in every):
        return {tag: tag for tag in every}
    count: dict[tuple[int, int], int] = {}
    tags: dict[int, int] = {}
    for one in manifest.transfers:
        pairs = [(source, target) for source, target in manifest.groups.get(one.group, [[one.source, one.target]])]
        tags[one.tag] = max(count.get(pair, 0) for pair in pairs)
        count |= dict.fromkeys(pairs, tags[one.tag] + 1)
    first = max(count.values(), default=0)
    return tags | {one.tag: first + index for index, one in enumerate(exchanges)}
