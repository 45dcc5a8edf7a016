"""Builds the document of a report on an artifact: the facts of `partc inspect` for each class of ranks, and the data of the pictures.

- Messages and collectives are rows: those of the ranks of a class, and of all microbatches, are one row that lists each.
  `{"op": "Send", "value": "h", "bytes": "96*batch", "at": 6144, "times": 8, "ends": [[0, 4, 17], ...]}`: 0 to 4 with the tag 17.
- Ranks have coordinates on the plan's mesh, and lists of ranks lie along some of its axes. On `{"pp": 2, "dp": 2, "tp": 2}` rank 5 is at
  pp 1, dp 0, tp 1; the lists [0, 2], [1, 3] lie along dp.
- The memory of a class of ranks is a curve over a step, with the largest values at its maximum. It is the curve of `partc inspect` before
  arenas are laid out: its maximum is below the peak, which also counts the memory that arenas reserve.
- The schedule of a pipeline is a grid: the start and end of each task on each list of ranks, in units in which a rank's F, B and W take 1.
- A timeline is a step as `partc simulate` plays it, and one step as a trace measured it: the one whose time is nearest to the median.
  Times are seconds from the start of the step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partc.cli.output.pipeline import Pipeline, pipeline_of, saved_by_group
from partc.cli.output.stats import moved, rank_stats
from partc.cli.output.training_stats import training_stats
from partc.cli.report.graph import RankClass, graph_of, rank_classes, type_text
from partc.cli.simulation.run import instant
from partc.compiler.cost.machine_file import read_machine
from partc.compiler.cost.memory import RankMemory, memory_of_ranks, memory_over_step
from partc.compiler.cost.play import Action, Communicate
from partc.compiler.cost.step import Simulation, simulated
from partc.compiler.cost.traced import read_traced
from partc.runtime.artifact.byte_count import largest_text
from partc.runtime.artifact.format import LayoutRecord, Manifest
from partc.runtime.artifact.legal_sizes import typical_sizes
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.trace import CATEGORIES, STEP, Span, read_trace


def schedule_of(pipeline: Pipeline, sizes: Mapping[str, int]) -> dict[str, object]:
    """Returns the rows with their tasks. Raises UsageError for rows that `partc check` refuses."""
    from partc.compiler.schedule.costs import unit_costs
    from partc.compiler.schedule.simulate import simulate

    schedule = pipeline.schedule
    timing = simulate(schedule, unit_costs(schedule.stages))
    homes = [
        {
            "ranks": ranks_text(ranks),
            "stages": sorted(row.stages),
            "row": str(row),
            "idle": idle,
            "microbatches": kept.microbatches,
            "kept": largest_text(kept.bytes),
            "kept_at": kept.at(sizes),
            "tasks": [[str(task), task.stage, str(task.kind), task.microbatch, *timing.spans[task]] for task in tasks],
        }
        for ranks, row, tasks, idle, kept in zip(
            pipeline.stage_ranks, pipeline.rows, schedule.rows, timing.idle, saved_by_group(pipeline), strict=True
        )
    ]
    return {
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "total": timing.total,
        "bubble": timing.bubble,
        "critical": [*map(str, timing.critical)],
        "homes": homes,
    }


_LARGEST = 12


def memory_curve(artifact: Artifact, memory: RankMemory, sizes: Mapping[str, int]) -> dict[str, object]:
    """Returns the memory curve of a rank: the bytes held through the whole step, and for each action the bytes of temporary values."""
    steps, lives = memory_over_step(artifact, memory.rank, sizes)
    kept = sum(one.resident + one.inputs_outputs for one in memory.targets)
    most = max(range(len(steps)), key=lambda at: steps[at].between + steps[at].inside, default=0)
    there = sorted(
        (one for one in lives if one.born <= most <= max([one.died, *one.sends]) and one.bytes),
        key=lambda one: (-one.bytes, one.name),
    )
    return {
        "kept": kept,
        "between": [one.between for one in steps],
        "inside": [one.inside for one in steps],
        "what": [one.what for one in steps],
        "most": most,
        "values": [[one.name, one.bytes, one.born, one.died] for one in there[:_LARGEST]],
        "others": len(there[_LARGEST:]),
    }


def coordinates(mesh: Mapping[str, int], ranks: Sequence[int]) -> dict[str, str]:
    """Maps each axis to the coordinates of these ranks: `0`, or `0-1`."""
    found = [_place(mesh, rank) for rank in ranks]
    return {name: ranks_text(sorted({place[k] for place in found})) for k, name in enumerate(mesh)}


def axes_of(mesh: Mapping[str, int], lists: Sequence[Sequence[int]]) -> str:
    """Returns the axes along which each list contains a complete row of ranks: `dp`, or `dp, tp`; empty for other lists."""
    found = {_along(mesh, ranks) for ranks in lists}
    return found.pop() if len(found) == 1 else ""


def _along(mesh: Mapping[str, int], ranks: Sequence[int]) -> str:
    places = [_place(mesh, rank) for rank in ranks]
    axes = [name for k, name in enumerate(mesh) if len({place[k] for place in places}) > 1]
    return ", ".join(axes) if math.prod(mesh[name] for name in axes) == len(ranks) > 1 else ""


def _place(mesh: Mapping[str, int], rank: int) -> tuple[int, ...]:
    """Returns the coordinates of a rank on the mesh, whose last axis varies fastest."""
    found = []
    for size in reversed([*mesh.values()]):
        rank, at = divmod(rank, size)
        found.append(at)
    return tuple(reversed(found))


_MICROBATCH = re.compile(r"\.\d+$")
_RANK = re.compile(r"\brank \d+")
SEND = "Send"


def communication_rows(
    manifest: Manifest, classes: Sequence[RankClass], sizes: Mapping[str, int], in_tasks: bool
) -> list[dict[str, object]]:
    """Returns the rows, in the order of the manifest. `in_tasks`: whether names of values end with their microbatch."""
    class_of = {rank: k for k, one in enumerate(classes) for rank in one.ranks}
    messages: dict[object, list[list[int]]] = {}
    rows: dict[object, dict[str, object]] = {}
    for record in manifest.transfers:
        value = _MICROBATCH.sub("", record.value) if in_tasks else record.value
        ends = class_of[record.source], class_of[record.target]
        key: object = (SEND, value, ends, str(record.shape), record.bytes, _RANK.sub("", record.cause))
        messages.setdefault(key, []).append([record.source, record.target, record.tag])
        if key not in rows:
            rows[key] = {
                "op": SEND,
                "value": value,
                "type": type_text(record.type, record.shape),
                "bytes": record.bytes,
            }
            rows[key] |= {"at": _at(record.bytes, sizes), "cause": record.cause}
    for call in manifest.collectives:
        value = _MICROBATCH.sub("", call.value) if in_tasks else call.value
        lists = manifest.groups[call.group]
        key = call.op, value, call.group, str(call.shape), call.bytes, call.cause
        messages.setdefault(key, []).append([call.tag])
        if key not in rows:
            rows[key] = {"op": call.op, "value": value, "type": type_text(call.type, call.shape), "bytes": call.bytes}
            rows[key] |= {"at": _at(call.bytes, sizes), "cause": call.cause, "lists": [*map(ranks_text, lists)]}
            rows[key]["axes"] = axes_of(manifest.mesh, lists)
            rows[key] |= {
                "ranks": sum(map(len, lists)),
                "before": layout_text(call.given),
                "after": layout_text(call.made),
            }
    return [{**row, "ends": messages[key], "times": len(messages[key])} for key, row in rows.items()]


def _at(bytes: str, sizes: Mapping[str, int]) -> int | None:
    """Returns the bytes at the sizes; None where they are known only at run time."""
    found = moved([bytes], sizes)
    return None if found.unknown else found.bytes


def layout_text(layout: LayoutRecord | None) -> str:
    """Returns a layout in words: `ranks 0-3 as a 2 x 2 grid: dim 0 sharded over axis 0, partial sum over axis 1`."""
    if layout is None:
        return ""
    grid = f"ranks {layout.ranks} as a grid of {' x '.join(map(str, layout.mesh))}"
    said = [
        f"dim {dim} sharded over axis {' and '.join(map(str, axes))}" for dim, axes in enumerate(layout.cuts) if axes
    ]
    said += [f"partial {reduce} over axis {axis}" for axis, reduce in layout.partial]
    return f"{grid}: {', '.join(said) or 'replicated'}"


@dataclass(frozen=True)
class Request:
    """The options of a report besides the artifact: sizes of symbols, a machine's file, and a trace."""

    sizes: Mapping[str, int]
    machine: Path | None = None
    trace: Path | None = None


def document_of(
    artifact: Artifact, request: Request, chosen_sizes: Mapping[str, int] | None = None
) -> dict[str, object]:
    """Returns the document of the artifact's program. Raises UsageError where a trace does not fit.

    `chosen_sizes`: the user's own sizes, by default those of the request; a timeline needs all sizes that are not fixed.
    """
    chosen_sizes = request.sizes if chosen_sizes is None else chosen_sizes
    manifest = artifact.manifest
    sizes = {**typical_sizes(manifest), **{k: v for k, v in request.sizes.items() if k in manifest.symbols}}
    own = {name: size for name, size in chosen_sizes.items() if name in manifest.symbols}
    timeline = None
    if request.machine is not None or request.trace is not None:  # first, since it may be refused
        timeline = timeline_of(artifact, request.machine, request.trace, own)
    classes = rank_classes(artifact)
    memory = memory_of_ranks(artifact, sizes, [one.ranks[0] for one in classes])
    pipeline = pipeline_of(artifact)
    class_rows = _classes(artifact, classes, memory, sizes)
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
        "measures": _measures(manifest, classes, memory, [one["stats"]["sent"]["bytes"] for one in class_rows]),
        "inputs": [_port(one.name, one.type, one.shape, one.ranks) for one in manifest.inputs],
        "outputs": [_port(one.name, one.type, one.shape, one.ranks) for one in manifest.outputs],
        "classes": class_rows,
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
    """Returns the grids of ranks that collectives run over, and the lists of ranks that communicate, with their number of collectives."""
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
    """Returns the measures of `partc diff`."""
    return {
        "messages": len(manifest.transfers) + len(manifest.collectives),
        "bytes": sum(len(one.ranks) * bytes for one, bytes in zip(classes, sent, strict=True)),
        "memory": max(one.peak for one in memory),
        "weights": max(sum(target.weights + target.parameters for target in one.targets) for one in memory),
    }


def _classes(
    artifact: Artifact, classes: Sequence[RankClass], memory: Sequence[RankMemory], sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Returns the facts of `partc inspect` for the first rank of each class, which hold for all of its ranks."""
    manifest = artifact.manifest
    trains = manifest.training is not None and any(record.next for record in manifest.state)
    rows = []
    for rank_class, needed in zip(classes, memory, strict=True):
        first = rank_class.ranks[0]
        stats = asdict(rank_stats(artifact, first, sizes))
        row: dict[str, Any] = {"ranks": ranks_text(rank_class.ranks), "list": list(rank_class.ranks), "stats": stats}
        row["at"] = coordinates(manifest.mesh, rank_class.ranks)
        row["memory"] = needed.as_json()
        if trains:
            row["training"] = asdict(training_stats(manifest, rank_class.model, first, sizes))
        rows.append(row)
    return rows


def timeline_of(
    artifact: Artifact, machine: Path | None, trace: Path | None, chosen_sizes: Mapping[str, int]
) -> dict[str, object]:
    """Returns the step on a machine, or without a machine with the medians of a trace.

    Raises UsageError where the trace is of another artifact, or has no step.
    """
    traced = read_traced(trace) if trace is not None else None
    if traced is not None:
        traced.refuse_other(artifact.manifest.ranks)
    calibrated = machine is None
    simulation = simulated(
        artifact,
        read_machine(machine) if machine is not None else instant(),
        chosen_sizes,
        traced=traced if calibrated else None,
    )
    if traced is not None and not calibrated:
        traced.calibrated(simulation.played.classes)  # refuses the trace of another artifact
    by = "trace" if calibrated else "machine"
    document: dict[str, object] = {"sizes": dict(simulation.sizes), "by": by, "simulated": _played(simulation)}
    if trace is None or traced is None:
        return document
    measured = {"trace": trace.name, "steps": traced.steps, "median": traced.step, **_measured(trace, traced.step)}
    return {**document, "measured": measured}


def _played(simulation: Simulation) -> dict[str, object]:
    played = simulation.played
    rows = [
        {
            "ranks": ranks_text(one.ranks),
            "first": one.ranks[0],
            "busy": played.busy[k],
            "under_way": played.communication[k],
            "spans": [_span(interval.action, interval.begin, interval.end) for interval in played.intervals[k]],
        }
        for k, one in enumerate(played.classes)
    ]
    critical = [{"name": name, "seconds": seconds} for name, seconds in simulation.critical]
    return {"seconds": played.seconds, "ranks": rows, "critical": critical}


def _span(action: Action, begin: float, end: float) -> list[object]:
    """Returns an action in the page's format: category, name, module, begin, seconds and bytes."""
    category, bytes = ("communication", action.bytes) if isinstance(action, Communicate) else ("compute", 0)
    return [category, action.what, action.path, begin, end - begin, bytes]


def _measured(path: Path, median: float) -> dict[str, object]:
    """Returns the spans of one step by rank: the step whose longest rank is closest to the median."""
    trace = read_trace(path)
    wholes: dict[int, list[Span]] = {}
    for one in trace.spans:
        if one.category == STEP:
            wholes.setdefault(one.about["step"], []).append(one)
    ranks = {one.rank for some in wholes.values() for one in some}
    last = trace.spans[-1].about["step"] if not trace.is_complete else None
    ended = [step for step, some in wholes.items() if len(some) == len(ranks) and step != last] or [*wholes]
    chosen = min(ended, key=lambda step: (abs(max(one.seconds for one in wholes[step]) - median), step))
    begin = min(one.begin for one in wholes[chosen])
    rows = []
    for whole in sorted(wholes[chosen], key=lambda one: one.rank):
        spans = [
            [
                one.category,
                one.name,
                str(one.about.get("module") or ""),
                one.begin - begin,
                one.seconds,
                one.about.get("bytes") or 0,
            ]
            for one in trace.spans
            if one.rank == whole.rank and one.about["step"] == chosen and one.category in CATEGORIES
        ]
        rows.append({"rank": whole.rank, "begin": whole.begin - begin, "seconds": whole.seconds, "spans": spans})
    end = max(one.begin + one.seconds for one in wholes[chosen])
    return {"step": chosen, "seconds": end - begin, "whole": trace.is_complete, "error": trace.error, "ranks": rows}
