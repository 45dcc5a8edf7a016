"""The other end of a message, as a Send or Recv names it: the rank itself, or a group of pairs of source and target.

Send(x) {peer: 5, tag: 3}            Send(x) {group: 0-512+511, tag: 3}      for rank 7 of the pair (7, 519): rank 519
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from partc.runtime.artifact.format import GROUP, PEER, SEND

if TYPE_CHECKING:
    from onnx import NodeProto


def peer_of(node: NodeProto, groups: Mapping[str, Sequence[int]]) -> int:
    """The rank at the other end, -1 where the node tells none; `groups`: by name the list that has the rank whose node it is."""
    for one in node.attribute:
        if one.name == PEER:
            return int(one.i)
        if one.name == GROUP:
            pair = groups.get(one.s.decode(errors="replace"), ())
            return pair[node.op_type == SEND] if len(pair) == 2 else -1
    return -1
