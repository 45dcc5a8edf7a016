"""The unsharded model as a program of one rank: the reference for comparisons with compiled programs, for measurements and inspection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto, numpy_helper
from partc.cli.comparison.first_difference import Compiled
from partc.cli.comparison.variant import variant
from partc.compiler.comparison.rounding import perturb
from partc.runtime.artifact.format import Law, Manifest
from partc.runtime.artifact.graph.bodies import read_model
from partc.runtime.artifact.tensors.dtypes import Array, dense
from partc.runtime.artifact.tensors.law import full_tensor
from partc.runtime.artifact.tensors.stored_weight import numbers

if TYPE_CHECKING:
    from partc.compiler.frontend.source import Source
    from partc.compiler.plan.rules import Plan

DRAWS = 4


def compile_alone(source: Source, plan: Plan, out: Path, shards: int = 1) -> Compiled:
    """Compiles the model on one rank: with the plan's placement, shardings and mesh removed, and a pipeline schedule that one rank can run.

    `shards`: the number of shards of the batch over ranks. A microbatch has the records of all these shards; where statistics are those of
    parts, a microbatch is one part.
    """
    from partc.compiler.pipeline import compile_source
    from partc.compiler.plan.pipeline import MICROBATCH
    from partc.compiler.plan.rules import Dataset
    from partc.compiler.rewrite.unrolled import unrolled

    pipeline = plan.pipeline
    if pipeline is not None:
        pipeline = replace(pipeline, schedule="gpipe", memory=None, rows=(), stages=(), pieces=shards, parts=0)
    if pipeline is not None and plan.pipeline is not None and pipeline.statistics == "part":
        pipeline = replace(pipeline, microbatches=plan.pipeline.parts, pieces=1, statistics=MICROBATCH)
    alone = replace(
        plan,
        ranks=1,
        placement=(),
        roles={},
        sharding=(),
        mesh=(),
        dataset=Dataset(),
        outputs=(),
        pipeline=pipeline,
        train=None
        if plan.train is None
        else plan.train.model_copy(
            update={
                "accumulate": plan.train.accumulate if pipeline is None else pipeline.microbatches,
                "optimizer": plan.train.optimizer.model_copy(update={"shard": None, "target": None}),
            }
        ),
        target=(),
    )
    declared = replace(source.declared, placements=(), sharding=(), annotations=None, dataset=None, targets=())
    whole = replace(source, model=unrolled(source.model.clone(), dict(plan.mesh)), declared=declared)
    report = compile_source(whole, alone, out)
    return Compiled(report.program, out)


def perturbed(folder: Path, out: Path, seed: int) -> Path:
    """Writes a copy of an artifact whose operands are changed by units in the last place."""

    def change(rank: int, model: ModelProto, manifest: Manifest) -> Manifest:
        perturb(model, seed)
        return manifest

    return variant(folder, out, change)


def scaled_seed(folder: Path, out: Path, number: int) -> Path:
    """Writes a copy of a training artifact whose gradients are `number` times as large: those of a sum over as many ranks."""

    def change(rank: int, model: ModelProto, manifest: Manifest) -> Manifest:
        for tensor in model.graph.initializer:
            if tensor.name in ("loss.seed", "loss.seed.factor"):
                array = numpy_helper.to_array(tensor)
                tensor.CopyFrom(numpy_helper.from_array((array * number).astype(array.dtype), tensor.name))
        return manifest

    return variant(folder, out, change)


def first_values(folder: Path, manifest: Manifest) -> dict[str, Array]:
    """Maps each state tensor's global name to its value before the first step, in a program of one rank."""
    tensors = {one.name: one for one in read_model(folder / manifest.program(0)).graph.initializer}
    values: dict[str, Array] = {}
    for record in manifest.state:
        if record.value in tensors:
            values[record.tensor] = numbers(tensors[record.value], folder, manifest)
        elif isinstance(record.initial, Law):
            dtype = dense(record.type)
            assert dtype is not None
            values[record.tensor] = full_tensor(record.initial, tuple(record.shape), dtype.numpy)
        else:
            values[record.tensor] = np.full(record.shape, record.initial, np.float64)
    return values


def batch_shards(manifest: Manifest) -> int:
    """The number of shards in which the batch arrives, which is the number of ranks of a sum over ranks."""
    cuts = (
        {tuple(box[port.batch_dim]) for box in port.boxes if box} for port in manifest.inputs if port.boxes is not None
    )
    return max((len(cut) for cut in cuts), default=1)


def is_quantized(folder: Path, manifest: Manifest) -> bool:
    """Whether a model has quantized values, which are rounded to few integers."""
    import onnx

    model = onnx.load(folder / manifest.program(0), load_external_data=False)
    return any("Quant" in node.op_type or "Integer" in node.op_type for node in model.graph.node)


def merged(*spreads: Mapping[str, Array]) -> dict[str, Array]:
    """The element-wise maximum of the noises."""
    found: dict[str, Array] = {}
    for one in spreads:
        for name, array in one.items():
            found[name] = np.maximum(found[name], array) if name in found else array
    return found
