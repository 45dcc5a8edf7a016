"""Checks the constants that differ by rank: each can be computed on every rank whose file has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import ModelProto
from partc.runtime.artifact.format import MANIFEST, Manifest
from partc.runtime.artifact.graph.onnx_graph import node_title, path_of
from partc.runtime.artifact.graph.rank_constants import constant_of, group_of, is_rank_constant
from partc.runtime.errors import Violation


def check_constants(manifest: Manifest, models: Mapping[int, ModelProto]) -> Iterator[Violation]:
    """Yields the constants that a rank cannot compute; every rank of a shared file is checked."""
    files = {id(model): model for model in models.values()}
    nodes = {key: [*filter(is_rank_constant, model.graph.node)] for key, model in files.items()}
    for rank, model in models.items():
        if not nodes[id(model)]:
            continue
        groups = manifest.groups_of(rank)
        for node in nodes[id(model)]:
            group = group_of(node)
            fact = f"{MANIFEST} has no list of group '{group}' with rank {rank} in it"
            if group in groups:
                try:
                    constant_of(node, groups[group].index(rank))
                    continue
                except ValueError as error:
                    fact = f"on rank {rank} it has no value: {error}"
            yield Violation(manifest.program(rank), fact, node_title(node), path_of(node), "compile the model again")
