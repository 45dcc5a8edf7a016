"""The memory of each target of a rank: what it holds from step to step, and the most that values of a step take there.

    parameters          what is read there, and parameters and statistics that lie there; a weight counts on every target that reads it
    optimizer           what else is kept from step to step and lies there
    between segments    the arena of the values that segments, copies and messages hand on: exactly the bytes that the runtime asks for
    peak                all of these, and where more lives at once inside of segments, that: an estimate

Nodes on `device` count to the CPU, which is their target without `--device`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partc.cli.output.stats import largest_live_set, tensor_bytes, updated_in_place
from partc.cli.output.table import Table
from partc.runtime.artifact.dtypes import dense
from partc.runtime.artifact.format import CPU, DEVICE, TARGET, Manifest
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.onnx_graph import reads
from partc.runtime.artifact.targets import target_made_on, target_of
from partc.runtime.artifact.tasks import unrolled
from partc.runtime.units import size_text

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_SIZES = ("Shape", "Size")


@dataclass(frozen=True)
class TargetMemory:
    """The bytes of a rank on one of its targets; `arena` is None where these sizes do not tell; `unknown`: values that `peak` lacks."""

    rank: int
    target: str
    parameters: int
    optimizer: int
    arena: int | None
    peak: int
    unknown: int


def target_memory(artifact: Artifact, rank: int, sizes: Mapping[str, int]) -> list[TargetMemory]:
    """The memory of a rank by target, with the symbols at these sizes."""
    from partc.runtime.execution.targets.planned_arenas import planned_arenas
    from partc.runtime.program.segmentation import segmented

    file = artifact.model(rank)
    model, manifest = unrolled(file), artifact.manifest
    parameters, optimizer = _held(manifest, model, rank)
    lying = _lying(model)
    apart = {record.value for record in manifest.state if rank in record.ranks}
    apart |= updated_in_place(segmented(file, manifest.program(rank), guard=manifest.guard))
    try:
        arenas: Mapping[str, int] = planned_arenas(artifact, rank, sizes)
    except ValueError:  # a dim is no whole number at these sizes
        arenas = {}
    found = []
    for target in sorted({*parameters, *optimizer, *arenas, *lying.values()}):
        elsewhere = {name for name, one in lying.items() if one != target}
        live, unknown = largest_live_set(model, sizes, apart | elsewhere)
        peak = parameters[target] + optimizer[target] + max(live, arenas.get(target, 0))
        arena = arenas.get(target, 0) if arenas else None
        found.append(TargetMemory(rank, target, parameters[target], optimizer[target], arena, peak, unknown))
    return found


def _held(manifest: Manifest, model: ModelProto, rank: int) -> tuple[Counter[str], Counter[str]]:
    """By target the bytes of weights that are read there and of parameters that lie there, and of the rest of the state."""
    parameters: Counter[str] = Counter()
    optimizer: Counter[str] = Counter()
    targets = {
        one.name: entry.value for one in model.graph.input for entry in one.metadata_props if entry.key == TARGET
    }
    for record in manifest.state:
        dtype = dense(record.type)
        if rank in record.ranks and dtype is not None:
            of = parameters if record.kind in ("parameter", "statistics") else optimizer
            of[_named(targets.get(record.value, CPU))] += dtype.bytes_of(record.local_shape(rank))
    state = {record.value for record in manifest.state}
    readers: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in reads(node):
            readers.setdefault(name, set()).add(_named(target_of(node)))
    for tensor in model.graph.initializer:
        if tensor.name not in state:
            for target in readers.get(tensor.name, ()):
                parameters[target] += tensor_bytes(tensor)
    return parameters, optimizer


def _lying(model: ModelProto) -> dict[str, str]:
    """By input and made value the target where it lies; sizes lie on the CPU."""
    found = {port.name: CPU for port in model.graph.input}
    for node in model.graph.node:
        target = CPU if _is_size(node) else _named(target_made_on(node))
        found |= dict.fromkeys((name for name in node.output if name), target)
    return found


def _is_size(node: NodeProto) -> bool:
    return node.op_type in _SIZES and not node.domain


def _named(target: str) -> str:
    return CPU if target in ("", DEVICE) else target


def memory_table(memory: Sequence[TargetMemory]) -> Iterator[Table]:
    """A row for each target of each rank."""
    if not memory:
        return
    columns = [">rank", "target", ">parameters", ">optimizer", ">between segments", ">peak memory"]
    table = Table(columns, title="memory by target")
    for one in memory:
        arena = "?" if one.arena is None else size_text(one.arena)
        peak = size_text(one.peak) + ("+?" if one.unknown else "")
        table.add(one.rank, one.target, size_text(one.parameters), size_text(one.optimizer), arena, peak)
    yield table
