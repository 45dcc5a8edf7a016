"""Which values of a rank's program share one shard of memory: those of a collective of several, and gradients of one update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from ..artifact.comm_node import Call
from ..artifact.format import Shape, StateRecord
from ..errors import ArtifactError
from ..program.segmentation import Step
from .fusion import FlatBuffer, UpdatePlan, plan_groups

if TYPE_CHECKING:
    from onnx import ModelProto


def bundle_of(call: Call, shapes: Mapping[str, Shape], type: str, where: str) -> FlatBuffer:
    """The memory of a collective of several values; ArtifactError where a shape is not a fixed one."""
    fixed = [_fixed(shapes.get(name)) for name in call.made]
    unknown = [name for name, shape in zip(call.made, fixed, strict=True) if shape is None]
    if unknown:
        raise ArtifactError(
            f"{where}: {call.op} of several values: the shape of '{unknown[0]}' is not fixed\n  help: compile again"
        )
    elements = tuple(prod(shape or ()) for shape in fixed)
    return FlatBuffer(call.result or "", type, call.made, elements)


def plan_updates(
    steps: Sequence[Step],
    model: ModelProto,
    records: Sequence[StateRecord],
    rank: int,
    shapes: Mapping[str, Shape],
    types: Mapping[str, str],
    bundles: Sequence[FlatBuffer],
) -> UpdatePlan:
    """How the updates of a rank run, and the memory that they want."""
    kept = {record.value: record.local_shape(rank) for record in records}
    nexts = {record.next: kept[record.value] for record in records if record.next}
    inputs = {value.name for value in model.graph.input} - kept.keys()
    known = {
        name: shape for name, stated in shapes.items() if (shape := _fixed(stated)) is not None and name not in inputs
    }
    return plan_groups(
        steps,
        {function.name: function for function in model.functions},
        {**known, **kept, **nexts},
        {**types, **{record.value: record.type for record in records}},
        kept.keys(),
        {name: bundle.name for bundle in bundles for name in bundle.members},
    )


def _fixed(shape: Shape) -> tuple[int, ...] | None:
    numbers = [dim for dim in shape or () if isinstance(dim, int)]
    return tuple(numbers) if shape is not None and len(numbers) == len(shape) else None
