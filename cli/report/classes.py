"""Groups ranks into classes of equal programs, whose files differ only in peers and tags of messages: a report shows each class once.

If ranks 1 to 3 of a job compute the same, and each receives a value from a different rank, they are one class, although each has a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from partc.runtime.artifact.format import CAUSE, PEER, RECV_PEERS, SEND_PEERS, TAG

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto
    from partc.runtime.artifact.manifest import Artifact

_OF_ONE_RANK = frozenset({PEER, TAG, SEND_PEERS, RECV_PEERS})
"""Attributes in which the ranks of a class may differ."""


@dataclass(frozen=True)
class RankClass:
    """Ranks with equal programs, and the program of the first of them."""

    ranks: tuple[int, ...]
    model: ModelProto


def rank_classes(artifact: Artifact) -> list[RankClass]:
    """Returns the classes of all ranks, in the order of their first ranks."""
    found: dict[str, tuple[list[int], ModelProto]] = {}
    for ranks in artifact.manifest.by_file(range(artifact.manifest.ranks)).values():
        model = artifact.model(ranks[0])
        signature = hashlib.sha256(b"".join(_lines(model))).hexdigest()
        found.setdefault(signature, ([], model))[0].extend(ranks)
    some = [RankClass(tuple(sorted(ranks)), model) for ranks, model in found.values()]
    return sorted(some, key=lambda one: one.ranks)


def _lines(model: ModelProto) -> Iterator[bytes]:
    """Yields the rank's computation and communication, and the shapes of its values, as bytes to hash."""
    graph = model.graph
    for node in chain(graph.node, *(function.node for function in model.functions)):
        yield _node(node)
    for value in chain(graph.input, graph.output, graph.value_info):
        yield value.SerializeToString(deterministic=True)
    for tensor in graph.initializer:
        yield repr((tensor.name, tensor.data_type, list(tensor.dims))).encode()


def _node(node: NodeProto) -> bytes:
    said = sorted((one.key, one.value) for one in node.metadata_props if one.key != CAUSE)
    attributes = sorted(
        one.SerializeToString(deterministic=True) for one in node.attribute if one.name not in _OF_ONE_RANK
    )
    return repr((node.domain, node.op_type, list(node.input), list(node.output), attributes, said)).encode()
