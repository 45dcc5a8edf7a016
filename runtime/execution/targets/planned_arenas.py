"""How many bytes the arenas of a rank's targets take at given sizes, without a session or a step: what a rank asks for when it runs.

    planned_arenas(artifact, 0, {"batch": 16})      {"cpu": 1024, "cuda": 4096}

An arena holds the values between segments; what is inside of one is onnxruntime's. The target `cuda` has the same bytes wherever it
runs. What collectives need beside their values, on the CPU, is that of ranks in one process; MPI may need other scratch.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...artifact import dim_expression as expression
from ...artifact.dtypes import element, type_text
from ...artifact.format import CPU, Shape, SymbolRecord
from ...artifact.manifest import Artifact
from ...artifact.tasks import declared
from ...communication.in_process import LocalWorld
from ...devices.devices import Devices
from ...program.copy_runs import copied_buffers
from ...program.flat_buffers import coalesced_buffers
from ...program.liveness import in_place_aliases, lifetimes
from ...program.locations import locations
from ...program.memory_plan import assign
from ...program.rank_file import RankFile, read_rank_file
from ...program.steps import Copy
from ...program.value_table import ValueTable, known_shapes, promised_shapes, types_from_manifest, value_table
from ...updates.fusion import plan_updates
from ..collective_plans import plan_collectives, scratch_lifetimes
from ..symbol_bindings import Binder
from ..wire_tags import wire_tags

_UNSTATED = "tensor(float)"
"""Stands for the type of a value of unknown shape, which no arena holds."""


def planned_arenas(artifact: Artifact, rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """By target the bytes of its arena, those of nodes on `device` with the CPU's."""
    file = read_rank_file(artifact, rank)
    manifest = file.manifest
    bound = Binder(manifest, rank, frozenset(file.inputs)).bound
    promises = promised_shapes(file, bound)
    kept = {record.value: record.local_shape(rank) for record in file.state}
    values = _values(artifact, file, bound)
    shapes = {name: _at(shape, manifest.symbols, sizes) for name, shape in values.shapes.items()}
    transport = LocalWorld(manifest.ranks).transport(rank)
    wire = wire_tags(manifest, transport.tags)
    promised = {tag: _at(shape, manifest.symbols, sizes) for tag, shape in promises.items()}
    works = plan_collectives(file.steps, values, kept, promised, shapes, transport, wire)
    aliases = in_place_aliases(file.steps, values.live_ranges, values.slots, (), values.are_alike)
    held = {name: values.dtype(name).bytes_of(one) for name, one in shapes.items() if name not in values.flat_places}
    lives = [*lifetimes(values.live_ranges, aliases, held), *scratch_lifetimes(file.steps, works)]
    targets = {CPU, *values.targets.values()}
    return {
        target: assign([life for life in lives if values.targets.get(life.name, CPU) == target]).bytes
        for target in sorted(targets)
    }


def _values(artifact: Artifact, file: RankFile, bound: frozenset[str]) -> ValueTable:
    promises = promised_shapes(file, bound)
    shapes = known_shapes(file, bound, promises)
    buffers = coalesced_buffers(file, shapes)
    types, main = _types(file), file.manifest.is_main
    begun = None if main else _lying(read_rank_file(artifact.beside(), file.rank))
    targets = locations(file, Devices(), begun)
    if main:
        plan = plan_updates(file, shapes, types, buffers, targets)
        buffers += plan.gradients
        buffers += copied_buffers(file, [*buffers, *plan.kept], shapes, types) if targets else []
    weights = {tensor.name for tensor in file.model.graph.initializer}
    return value_table(file, types, shapes, promises, buffers, weights, targets)


def _lying(file: RankFile) -> dict[str, str]:
    """Where the main program has what a rank keeps."""
    kept = {record.value for record in file.state}
    return {name: target for name, target in locations(file, Devices()).items() if name in kept}


def _types(file: RankFile) -> dict[str, str]:
    found = {**dict.fromkeys((*file.computed, *file.results), _UNSTATED), **types_from_manifest(file)}
    found |= {tensor.name: f"tensor({element(tensor.data_type)})" for tensor in file.model.graph.initializer}
    found |= {name: text for name, value in declared(file.model, file.where) if (text := type_text(value.type))}
    for step in file.steps:
        if isinstance(step, Copy):
            found[step.result] = found.get(step.source, _UNSTATED)
    return found


def _at(shape: Shape, symbols: Mapping[str, SymbolRecord], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(expression.parse(dim, symbols)(sizes) for dim in shape or ())
