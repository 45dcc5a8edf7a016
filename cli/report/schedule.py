"""The schedule of a pipeline as a grid: when each task of each home begins and ends, in units in which a rank's F, B and W take 1."""

from __future__ import annotations

from collections.abc import Mapping

from partc.cli.output.pipeline import Pipeline, saved_by_home
from partc.runtime.artifact.byte_count import largest_text
from partc.runtime.artifact.ranks import ranks_text


def schedule_of(pipeline: Pipeline, sizes: Mapping[str, int]) -> dict[str, object]:
    """The rows with their tasks; UsageError for rows that `partc check` refuses."""
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
            pipeline.homes, pipeline.rows, schedule.rows, timing.idle, saved_by_home(pipeline), strict=True
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
