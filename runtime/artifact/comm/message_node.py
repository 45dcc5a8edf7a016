"""Finds the rank at the other end of a Send or Recv, which names either that rank or a group of pairs (source, target).

Send(x) {peer: 5, tag: 3}            Send(x) {group: 0-512+511, tag: 3}      on rank 7, of the pair (7, 519), this names rank 519
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from partc.runtime.artifact.format import GROUP, PEER, SEND

if TYPE_CHECKING:
    from onnx import NodeProto


def peer_of(node: NodeProto, groups: Mapping[str, Sequence[int]]) -> int:
    """Returns the rank at the other end, -1 where the node names none; `groups` maps each group to its list with the node's own rank."""
    for one in node.attribute:
        if one.name == PEER:
            return int(one.i)
        if one.name == GROUP:
            pair = groups.get(one.s.decode(errors="replace"), ())
            return pair[node.op_type == SEND] if len(pair) == 2 else -1
    return -1
