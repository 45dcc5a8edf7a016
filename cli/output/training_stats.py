"""Statistics of a rank that trains: nodes of each phase, bytes of parameters and optimizer state, buckets of gradients.

The metadata of nodes names their phase: forward, backward or update. A bucket is a reduction over ranks whose results are gradients that
updates read; the plan's `bucket` bounds its size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partc.runtime.artifact.dim_expression import parse
from partc.runtime.artifact.format import (
    ADAPTER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BYTES,
    CACHE,
    DOMAIN,
    OPTIMIZER,
    PHASE,
    REDUCE_SCATTER,
    REST,
    SCALE,
    Manifest,
)
from partc.runtime.artifact.graph.onnx_graph import metadata_of
from partc.runtime.artifact.graph.row_function import IDS, ROWS
from partc.runtime.artifact.tasks.calls import nodes_of, unrolled

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_GRADIENT = "gradient"


@dataclass(frozen=True)
class TrainingStats:
    """The statistics of one rank: computing nodes, bytes, and the buckets with the bytes that they send together."""

    rank: int
    forward: int
    backward: int
    update: int
    parameters: int
    optimizer: int
    statistics: int
    buckets: int
    bucket_bytes: int


def state_bytes(manifest: Manifest, rank: int) -> dict[str, int]:
    """Maps each kind of state to the bytes that a rank keeps from step to step."""
    found = {"parameter": 0, "optimizer": 0, "statistics": 0, SCALE: 0, REST: 0, CACHE: 0, ADAPTER: 0}
    for record in manifest.state:
        if rank in record.ranks:
            found[record.kind] += manifest.state_bytes_of(record, rank)
    return found


def training_stats(manifest: Manifest, model: ModelProto, rank: int, sizes: Mapping[str, int]) -> TrainingStats:
    """Returns the statistics of a rank, with the symbols at these sizes."""
    computing = [node for node, _ in nodes_of(model) if node.domain != DOMAIN]
    model = unrolled(model, once=True)
    gradients = _gradients(model)
    phases = Counter(entry.value for node in computing for entry in node.metadata_props if entry.key == PHASE)
    buckets = [
        node
        for node in model.graph.node
        if node.domain == DOMAIN
        and node.op_type in (ALL_REDUCE, REDUCE_SCATTER)
        and not gradients.isdisjoint(node.output)
    ]
    packed = _packed_gradients(model)
    kept = state_bytes(manifest, rank)
    return TrainingStats(
        rank=rank,
        forward=len(computing) - phases.total(),
        backward=phases["backward"],
        update=phases["update"],
        parameters=kept["parameter"],
        optimizer=kept["optimizer"],
        statistics=kept["statistics"],
        buckets=len(buckets) + sum(node.op_type == ALL_TO_ALL for node in packed) // 2,  # codes and scales
        bucket_bytes=sum(_stated_bytes(node, sizes) for node in (*buckets, *packed)),
    )


def _gradients(model: ModelProto) -> set[str]:
    """Returns the names of the gradients that updates read, and of the values of which they are copies."""
    formals = {function.name: list(function.input) for function in model.functions}
    makers = {name: node for node in model.graph.node for name in node.output}
    names: set[str] = set()
    for node in model.graph.node:
        given = zip(formals.get(node.op_type, []), node.input, strict=False) if node.domain == OPTIMIZER else ()
        names.update(name for formal, name in given if formal in (_GRADIENT, IDS, ROWS))
    for name in list(names):
        while name in makers and makers[name].op_type in ("Cast", "Identity"):
            name = makers[name].input[0]
            names.add(name)
    return names


def _packed_gradients(model: ModelProto) -> list[NodeProto]:
    """Returns the collectives of gradients that are sent in eight bits: those whose results, reshaped, are dequantized."""
    makers = {name: node for node in model.graph.node for name in node.output}
    unpacked = [name for node in model.graph.node if node.op_type == "DequantizeLinear" for name in node.input]
    moved = [makers.get(makers[name].input[0]) for name in unpacked if name in makers and makers[name].input]
    return [node for node in moved if node is not None and node.domain == DOMAIN]


def _stated_bytes(node: NodeProto, sizes: Mapping[str, int]) -> int:
    """The bytes that a node's metadata states; gradients have fixed shapes."""
    try:
        return parse(metadata_of(node, BYTES, "0"), sizes)(sizes)
    except ValueError:
        return 0


def trained_tensors(manifest: Manifest) -> dict[str, int]:
    """Maps each tensor of the model that a step changes to its number of elements; a tensor that is stored in several parts counts once."""
    trained = [record for record in manifest.state if record.kind == "parameter" and record.next]
    return {record.tensor: math.prod(record.shape) for record in trained}


def evaluation_lines(manifest: Manifest) -> list[str]:
    """Returns a line about evaluations of a pipeline that do not run in microbatches, if there are any."""
    why = manifest.training.not_streamed if manifest.training is not None else ""
    return [f"evaluations run each batch whole, one stage after the other: {why}"] if why else []
