"""`stages` of a plan's `pipeline`: which nodes form each stage, and the ranks that run it.

    stages: ["tokens, layers.[0-3]", "layers.[4-7], norm, head"]
    stages: [{nodes: "layers.[0-3]", on: 0}, {nodes: "layers.[4-7]", on: 1}, {nodes: [norm, head], on: 0}]

A stage is patterns with commas between them, a list of such texts, or a mapping that has its ranks, too. The order is that of the data
flow: a stage reads only from earlier ones. Without `on`, stages are assigned to p homes (ranks or groups) in turn:

    mesh with an axis pp            its p slices {pp: 0}, {pp: 1}, ...
    else                            p runs of consecutive ranks: as many as stages, or one for each rank where there are more stages
    as many stages as homes         one each                 0 1 2
    a multiple of them              a loop                   0 1 2 0 1 2
    two each, with schedule zbv     there and back, a V      0 1 2 2 1 0
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from partc.compiler.plan.groups import Frame, Group, group_of, placed, shown_mesh
from partc.compiler.plan.pattern import checked_pattern
from partc.runtime.options import Refused, is_integer, shown
from partc.runtime.spellings import nearest
from pydantic import PlainValidator, ValidationInfo

AXIS = "pp"
"""The mesh axis over which stages are spread."""
_TWICE = ("interleaved", "zbv")
"""Schedules for which a home has at least two stages."""
_KEYS = ("nodes", "on")
_COMMA = re.compile(r"\\.|[\[{]|[\]}]|,|[^\\\[\]{},]+", re.DOTALL)
_LAW = "a stage is patterns, 'layers.[0-3], norm', a list of them, or {nodes: ..., on: 0}"

Steps: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class StageRule:
    """A stage of a plan: its patterns, each with its line, and the group that runs it."""

    patterns: tuple[tuple[str, str], ...]
    ranks: tuple[int, ...]
    where: str


@dataclass(frozen=True)
class StageEntry:
    """A stage as it is written: its patterns with their places below that of the stage; `on` is None where nothing is said."""

    nodes: tuple[tuple[str, Steps], ...]
    on: Group | None = None

    def rule(self, ranks: tuple[int, ...], where: Callable[..., str], *steps: str | int) -> StageRule:
        """The stage on its ranks; `where` gives the place of a path, `steps` is the stage's."""
        patterns = tuple((pattern, where(*steps, *below)) for pattern, below in self.nodes)
        return StageRule(patterns, ranks, where(*steps))


def _entry(value: object, info: ValidationInfo) -> StageEntry:
    if not isinstance(value, dict):
        return StageEntry(tuple(_patterns(value, ())))
    for key in value:
        if key not in _KEYS:
            near = nearest(str(key), _KEYS, 1)
            raise Refused(f"unknown key '{key}'", help=f"the keys here are {', '.join(near or _KEYS)}", key=str(key))
    if "nodes" not in value:
        raise Refused("'nodes' is missing", _LAW)
    on = placed(value["on"], info) if "on" in value else None
    return StageEntry(tuple(_patterns(value["nodes"], ("nodes",))), on)


def _patterns(value: object, steps: Steps) -> list[tuple[str, Steps]]:
    items = [(item, (*steps, k)) for k, item in enumerate(value)] if isinstance(value, list) else [(value, steps)]
    patterns = []
    for item, at in items:
        if not isinstance(item, str):
            raise Refused(f"expected patterns, but got {shown(item)}", _LAW)
        patterns += [(checked_pattern(pattern), at) for pattern in apart(item)]
    if not patterns:
        raise Refused("the stage names no nodes", _LAW, "name its modules or nodes, or remove it")
    return patterns


def apart(text: str) -> list[str]:
    """Splits a text into patterns at its commas; commas within brackets and braces do not split, and `\\,` is a comma of a name."""
    texts, depth = [""], 0
    for token in _COMMA.findall(text):
        depth += (token in "[{") - (token in "]}")
        if token == "," and depth <= 0:
            texts.append("")
        else:
            texts[-1] += token
    return [pattern.strip() for pattern in texts if pattern.strip()]


_Names: TypeAlias = str | list[str]
_Named: TypeAlias = dict[str, str | list[str] | int | list[int] | dict[str, int]]
StageForm: TypeAlias = Annotated[StageEntry, PlainValidator(_entry, json_schema_input_type=_Names | _Named)]


def groups_of(stages: Sequence[StageEntry], schedule: object, frame: Frame) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each stage. Raises Refused."""
    silent = [k for k, stage in enumerate(stages) if stage.on is None]
    if silent and len(silent) < len(stages):
        said = next(k for k, stage in enumerate(stages) if stage.on is not None)
        fact = f"stage {said} says where it runs, and stage {silent[0]} does not"
        raise Refused(fact, "the ranks of all stages are given, or of none", "write 'on' for every stage")
    if silent:
        return _spread(len(stages), schedule, frame)
    return tuple(stage.on.ranks for stage in stages if stage.on is not None)


def _spread(count: int, schedule: object, frame: Frame) -> tuple[tuple[int, ...], ...]:
    ranks = frame.workers
    if ranks is None or frame.mesh is None:
        return ((0,),) * count
    if frame.mesh and frame.spans:
        size = dict(frame.mesh).get(AXIS, 0)
        if not size:
            fact = f"the mesh {shown_mesh(frame.mesh)} has no axis '{AXIS}' along which the stages would be"
            help = f"write mesh: {{{AXIS}: {count}, ...}}, or say where each stage runs: {{nodes: ..., on: 0}}"
            raise Refused(fact, help=help)
        homes = [group_of({AXIS: k}, frame).ranks for k in range(size)]
        if count % size:
            raise _uneven(count, f"the {size} slices of mesh axis '{AXIS}'", size)
    else:
        size = stage_ranks_of(count, ranks, schedule)
        if not size:
            raise _uneven(count, f"{ranks} ranks", ranks)
        homes = [tuple(range(k * ranks // size, (k + 1) * ranks // size)) for k in range(size)]
    if schedule == "zbv" and count == 2 * size:
        return (*homes, *reversed(homes))
    return tuple(homes) * (count // size)


def stage_ranks_of(count: int, ranks: int, schedule: object) -> int:
    """The number of runs of ranks into which a plan without a mesh axis for stages divides them; 0 where the numbers do not fit."""
    most = count // 2 if schedule in _TWICE and count % 2 == 0 else count
    if ranks % most == 0:
        return most
    return ranks if most % ranks == 0 else 0


def _uneven(count: int, homes: str, size: int) -> Refused:
    below, above = count - count % size, count + -count % size
    fitting = " or ".join(str(some) for some in (below, above) if some)
    help = f"make it {fitting} stages, or say where each one runs: {{nodes: ..., on: 0}}"
    return Refused(f"{count} stages cannot be divided evenly among {homes}", help=help)


def sizes_of_groups(data: Mapping[str, object]) -> tuple[int, ...]:
    """The sizes of the groups of several ranks on which the stages of a plan run, from the plan's raw data."""
    pipeline, ranks = data.get("pipeline"), data.get("ranks")
    stages = pipeline.get("stages") if isinstance(pipeline, dict) else None
    if not isinstance(stages, list) or not stages or not isinstance(ranks, int) or not is_integer(ranks) or ranks < 1:
        return ()
    lists = [stage["on"] for stage in stages if isinstance(stage, dict) and isinstance(stage.get("on"), list)]
    if any(isinstance(stage, dict) and "on" in stage for stage in stages):
        return tuple(len(one) for one in lists if len(one) > 1)
    homes = stage_ranks_of(len(stages), ranks, pipeline.get("schedule") if isinstance(pipeline, dict) else None)
    return (ranks // homes,) if homes and ranks > homes else ()
