"""Writes and reads the metadata of `partc export`: the model's declarations, the marks of its nodes, and which weights are trainable."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache

import onnx_ir as ir
from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.annotation_keys import DECLARED, TRAINABLE, decode, encode
from partc.compiler.ir.declared import Declared, Decoding, Placement, TpPlanEntry
from partc.compiler.ir.graph import FROZEN_STATISTICS, UNBIASED, nodes_of
from partc.compiler.plan.rules import Dataset, ShardingRule
from partc.compiler.plan.target import TargetRule
from pydantic import TypeAdapter


@dataclass(frozen=True)
class _StoredDeclarations:
    """The fields of `Declared` that are stored: all but annotations, which have keys of their own."""

    placements: tuple[Placement, ...] = ()
    symbols: dict[str, Symbol] = field(default_factory=dict)
    sharding: tuple[ShardingRule, ...] = ()
    dataset: Dataset | None = None
    targets: tuple[TargetRule, ...] = ()
    tp_plan: tuple[TpPlanEntry, ...] = ()
    start: tuple[int, ...] = ()
    decoding: Decoding = field(default_factory=Decoding)


@cache
def _schema() -> TypeAdapter[_StoredDeclarations]:
    from pydantic import TypeAdapter

    return TypeAdapter(_StoredDeclarations)


def write_declared(model: ir.Model, declared: Declared, trained: Collection[str] | None) -> None:
    """Writes a model's declarations, its nodes' marks and whether each weight is in `trained` (None: no such mark) into its metadata."""
    written = _StoredDeclarations(
        declared.placements,
        {**declared.symbols},
        declared.sharding,
        declared.dataset,
        declared.targets,
        declared.tp_plan,
        declared.start,
        declared.decoding,
    )
    if written != _StoredDeclarations():
        model.metadata_props[DECLARED] = _schema().dump_json(written).decode()
    for node in nodes_of(model.graph):
        for key in (UNBIASED, FROZEN_STATISTICS):
            if key in node.meta:
                node.metadata_props[key] = encode(bool(node.meta[key]))
    for name, value in model.graph.initializers.items():
        if trained is not None:
            value.metadata_props[TRAINABLE] = encode(name in trained)


def read_declared(model: ir.Model, where: str) -> Declared:
    """Reads the declarations that `write_declared` wrote, and removes their metadata. Raises CompileError where it is broken."""
    try:
        text = model.metadata_props.pop(DECLARED, None)
        written = _StoredDeclarations() if text is None else _schema().validate_json(text)
        for node in nodes_of(model.graph):
            for key in (UNBIASED, FROZEN_STATISTICS):
                if key in node.metadata_props:
                    node.meta[key] = decode(node.metadata_props, key) is True
                    del node.metadata_props[key]
        for value in model.graph.initializers.values():
            if TRAINABLE in value.metadata_props:
                value.meta[TRAINABLE] = decode(value.metadata_props, TRAINABLE) is True
                del value.metadata_props[TRAINABLE]
    except ValueError as error:
        law = " ".join(str(error).split())
        help_ = "export the model again with `partc export`"
        raise CompileError(Problem(where, "its metadata of declarations is broken", law, help_)) from None
    return Declared(
        placements=written.placements,
        symbols=written.symbols,
        sharding=written.sharding,
        dataset=written.dataset,
        targets=written.targets,
        tp_plan=written.tp_plan,
        start=written.start,
        decoding=written.decoding,
    )
