"""All that a report knows of an artifact, as one document: the facts of `partc inspect` by class of ranks, and what pictures need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partc.cli.output.pipeline import pipeline_of
from partc.cli.output.stats import rank_stats
from partc.cli.output.training_stats import training_stats
from partc.cli.report.classes import RankClass, rank_classes
from partc.cli.report.communication import communication_rows
from partc.cli.report.graph import graph_of, type_text
from partc.cli.report.memory import memory_curve
from partc.cli.report.mesh import coordinates
from partc.cli.report.schedule import schedule_of
from partc.cli.report.timeline import timeline_of
from partc.compiler.cost.memory import RankMemory, memory_of_ranks
from partc.runtime.artifact.format import Manifest
from partc.runtime.artifact.legal_sizes import typical_sizes
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.calls import unrolled


@dataclass(frozen=True)
class Request:
    """What the options ask for besides the artifact: sizes of symbols, a machine's file, and a trace."""

    sizes: Mapping[str, int]
    machine: Path | None = None
    trace: Path | None = None


def document_of(artifact: Artifact, asked: Request, given: Mapping[str, int] | None = None) -> dict[str, object]:
    """The document of the program that the artifact is seen from; UsageError where a trace does not fit.

    `given`: the sizes that the user gave, by default those asked for, of which a timeline needs all that are not settled.
    """
    given = asked.sizes if given is None else given
    manifest = artifact.manifest
    sizes = {**typical_sizes(manifest), **{k: v for k, v in asked.sizes.items() if k in manifest.symbols}}
    own = {name: size for name, size in given.items() if name in manifest.symbols}
    timeline = None
    if asked.machine is not None or asked.trace is not None:  # first, since it may be refused
        timeline = timeline_of(artifact, asked.machine, asked.trace, own)
    classes = rank_classes(artifact)
    memory = memory_of_ranks(artifact, sizes, [one.ranks[0] for one in classes])
    pipeline = pipeline_of(artifact)
    found = _classes(artifact, classes, memory, sizes)
    document: dict[str, object] = {
        "folder": str(artifact.folder),
        "program": manifest.name,
        "programs": artifact.programs,
        "model": manifest.model.name,
        "plan": manifest.plan.name if manifest.plan is not None else "",
        "digest": artifact.digest,
        "partc": manifest.partc,
        "ranks": manifest.ranks,
        "mesh": manifest.mesh,
        "meshes": _meshes(artifact),
        "sizes": sizes,
        "given": sorted(own),
        "symbols": {name: one.model_dump(mode="json") for name, one in manifest.symbols.items()},
        "measures": _measures(manifest, classes, memory, [one["stats"]["sent"]["bytes"] for one in found]),
        "inputs": [_port(one.name, one.type, one.shape, one.ranks) for one in manifest.inputs],
        "outputs": [_port(one.name, one.type, one.shape, one.ranks) for one in manifest.outputs],
        "classes": found,
        "communication": communication_rows(manifest, classes, sizes, pipeline is not None),
        "graph": graph_of(manifest, classes),
        "memory": [memory_curve(artifact, one, sizes) for one in memory],
    }
    if pipeline is not None:
        document["schedule"] = schedule_of(pipeline, sizes)
    if timeline is not None:
        document["timeline"] = timeline
    return document


def _port(name: str, type: str, shape: Sequence[int | str] | None, ranks: Sequence[int]) -> dict[str, object]:
    return {"name": name, "type": type_text(type, shape), "ranks": ranks_text(ranks)}


def _meshes(artifact: Artifact) -> list[dict[str, object]]:
    """The grids of ranks that collectives are over, and the lists that work together, with the number of collectives."""
    groups: dict[str, int] = {}
    for one in artifact.manifest.collectives:
        groups[one.group] = groups.get(one.group, 0) + 1
    grids = [
        f"ranks {layout.ranks} as {' x '.join(map(str, layout.mesh))}"
        for one in artifact.manifest.collectives
        for layout in (one.given, one.made)
        if layout is not None and len(layout.mesh) > 1
    ]
    found: list[dict[str, object]] = [{"grid": text} for text in dict.fromkeys(grids)]
    for name, count in groups.items():
        lists = artifact.manifest.groups[name]
        found.append({"lists": [*map(ranks_text, lists)], "collectives": count})
    return found


def _measures(
    manifest: Manifest, classes: Sequence[RankClass], memory: Sequence[RankMemory], sent: Sequence[int]
) -> dict[str, int]:
    """The measures of `partc diff`."""
    return {
        "messages": len(manifest.transfers) + len(manifest.collectives),
        "bytes": sum(len(one.ranks) * bytes for one, bytes in zip(classes, sent, strict=True)),
        "memory": max(one.peak for one in memory),
        "weights": max(sum(target.weights + target.parameters for target in one.targets) for one in memory),
    }


def _classes(
    artifact: Artifact, classes: Sequence[RankClass], memory: Sequence[RankMemory], sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The facts of `partc inspect` of the first rank of each class, which are those of all of its ranks."""
    manifest = artifact.manifest
    trains = manifest.training is not None and any(record.next for record in manifest.state)
    found = []
    for one, needed in zip(classes, memory, strict=True):
        first = one.ranks[0]
        stats = asdict(rank_stats(artifact, first, sizes))
        row: dict[str, Any] = {"ranks": ranks_text(one.ranks), "list": list(one.ranks), "stats": stats}
        row["at"] = coordinates(manifest.mesh, one.ranks)
        row["memory"] = needed.as_json()
        if trains:
            row["training"] = asdict(training_stats(manifest, unrolled(one.model), first, sizes))
        found.append(row)
    return found
