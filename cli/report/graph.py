"""Builds the graph of an artifact for a picture: the nodes of each class of ranks, with the values between them.

Each task of a pipeline appears once, as the calls of its first microbatch. Texts are indices into a list, since most of them occur often.

    {"texts": ["Gemm", ...], "classes": [{"ranks": "0-3", "values": [[name, type, bytes], ...], "nodes": [[op, path, ...], ...]}]}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from onnx import ModelProto, NodeProto
from partc.runtime.artifact.byte_count import of_tensor
from partc.runtime.artifact.comm.collectives import GROUP_OPS
from partc.runtime.artifact.format import (
    BYTES,
    CAUSE,
    CUT,
    DOMAIN,
    GROUP,
    PATH,
    PEER,
    PHASE,
    RECV,
    RECV_PEERS,
    RULE,
    SEND,
    SEND_PEERS,
    TAG,
    TASK,
    Manifest,
)
from partc.runtime.artifact.graph.onnx_graph import integer_of, reads, text_of
from partc.runtime.artifact.graph.targets import is_copy, output_target, target_of
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.checker.graph.declared import ValueType, declared_types

if TYPE_CHECKING:
    from partc.runtime.artifact.manifest import Artifact


_OF_ONE_RANK = frozenset({PEER, TAG, SEND_PEERS, RECV_PEERS})
"""Attributes in which the ranks of a class may differ."""


@dataclass(frozen=True)
class RankClass:
    """Ranks with equal programs, and the program of the first of them."""

    ranks: tuple[int, ...]
    model: ModelProto


def rank_classes(artifact: Artifact) -> list[RankClass]:
    """Returns the classes of all ranks, in the order of their first ranks.

    Programs of a class are equal but for peers and tags of messages: ranks that compute the same, and receive a value from different
    ranks, are one class, although each has a file.
    """
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


COLUMNS = ("op", "path", "phase", "task", "target", "why", "cut", "bytes", "tag", "inputs", "outputs")
"""The columns of a node's row; `bytes` is the expression of a message or collective, `tag` is -1 for other nodes."""


@dataclass
class Texts:
    """A list of texts without repetition, and the index of each."""

    texts: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        """Returns the index of a text, and adds the text where it is new."""
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)
        return self.numbers[text]


def graph_of(manifest: Manifest, classes: Sequence[RankClass]) -> dict[str, object]:
    """Returns the graph of all classes in the form of the JSON document."""
    texts = Texts()
    found = [_class(manifest, one, texts) for one in classes]
    return {"columns": COLUMNS, "texts": texts.texts, "classes": found}


def _class(manifest: Manifest, ranks: RankClass, texts: Texts) -> dict[str, object]:
    model = unrolled(ranks.model, once=True)
    types: dict[str, ValueType] = declared_types(model)
    weights = {tensor.name: of_tensor(tensor) for tensor in model.graph.initializer}
    for record in manifest.state:
        if ranks.ranks[0] in record.ranks and (dtype := dense(record.type)) is not None:
            weights[record.value] = dtype.bytes_of(record.local_shape(ranks.ranks[0]))
    groups = manifest.groups_of(ranks.ranks[0])
    values: dict[str, int] = {}
    rows: list[list[int]] = []

    def place(name: str) -> int:
        if name not in values:
            values[name] = len(values)
            shown = type_text(*types[name]) if name in types else ""
            rows.append([texts.number(name), texts.number(shown), weights.get(name, 0)])
        return values[name]

    nodes = []
    for node in _without_repeats(model):
        said = {entry.key: entry.value for entry in node.metadata_props}
        communicates = node.domain == DOMAIN and not is_copy(node)
        shown = [
            _op(node, groups),
            said.get(PATH) or node.name or next(iter(node.output), ""),
            said.get(PHASE, ""),
            said.get(TASK, ""),
            target_of(node) or "",
            said.get(CAUSE if node.domain == DOMAIN else RULE, ""),
            said.get(CUT, ""),
            said.get(BYTES, "") if communicates else "",
        ]
        tag = integer_of(node, TAG, -1) if communicates else -1
        ends = ([place(name) for name in names if name] for names in (reads(node), node.output))
        nodes.append([*map(texts.number, shown), tag, *ends])
    return {
        "ranks": ranks_text(ranks.ranks),
        "size": len(ranks.ranks),
        "first": ranks.ranks[0],
        "nodes": nodes,
        "values": rows,
    }


def nodes_once(ranks: RankClass) -> list[NodeProto]:
    """Returns the nodes of a class of ranks, with each task once."""
    return _without_repeats(unrolled(ranks.model, once=True))


def _without_repeats(model: ModelProto) -> list[NodeProto]:
    """Returns the nodes without messages of later microbatches: no node reads the received values, and the sent ones were sent before."""
    read = {name for node in model.graph.node for name in reads(node)} | {value.name for value in model.graph.output}
    sent: set[tuple[str, int]] = set()
    kept_nodes = []
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type == RECV and read.isdisjoint(node.output):
            continue
        if node.domain == DOMAIN and node.op_type == SEND:
            message = node.input[0], integer_of(node, PEER, -1)
            if message in sent:
                continue
            sent.add(message)
        kept_nodes.append(node)
    return kept_nodes


def _op(node: NodeProto, groups: Mapping[str, tuple[int, ...]]) -> str:
    """Returns the op of a node, for a collective with the number of its ranks."""
    if is_copy(node):
        return f"Copy to {output_target(node)}"
    if node.domain == DOMAIN and node.op_type in GROUP_OPS:
        return f"{node.op_type} of {len(groups.get(text_of(node, GROUP), ()))}"
    return node.op_type


def type_text(type: str, shape: Sequence[int | str] | None) -> str:
    """Returns a type with its shape: `float[batch, 10]`."""
    dims = "" if shape is None else f"[{', '.join(map(str, shape))}]"
    return type.removeprefix("tensor(").removesuffix(")") + dims if type.startswith("tensor(") else type + dims
