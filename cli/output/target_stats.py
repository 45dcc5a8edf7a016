"""Statistics of a rank's targets: ops, copies with their bytes, and how often the rank switches between targets.

Copies and switches are those of a step, of a pipeline with all its microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partc.cli.output.stats import Moved, moved
from partc.cli.output.table import Table
from partc.runtime.artifact.format import BYTES, DOMAIN
from partc.runtime.artifact.graph.onnx_graph import metadata_of
from partc.runtime.artifact.graph.targets import is_copy, output_target, target_of
from partc.runtime.units import size_text

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class TargetStats:
    """A target of a rank: its ops, and the copies that lead to it.

    `switches`: how often the rank changes from an op of this target to one of another.
    """

    rank: int
    target: str
    ops: int
    copies: int
    copied: Moved
    switches: int


def target_stats(model: ModelProto, rank: int, sizes: Mapping[str, int]) -> list[TargetStats]:
    """The targets of a rank, whose tasks stand in place of their calls; none where its file names no target."""
    ops: Counter[str] = Counter()
    switches: Counter[str] = Counter()
    copies: dict[str, list[str]] = {}
    last = ""
    for node in model.graph.node:
        if is_copy(node):
            copies.setdefault(output_target(node), []).append(metadata_of(node, BYTES, "unknown"))
        elif node.domain != DOMAIN and (target := target_of(node)):
            ops[target] += 1
            switches[last] += bool(last) and last != target
            last = target
    if not ops:
        return []
    return [
        TargetStats(
            rank,
            target,
            ops[target],
            len(copies.get(target, ())),
            moved(copies.get(target, ()), sizes),
            switches[target],
        )
        for target in sorted({*ops, *copies})
    ]


def targets_table(stats: Sequence[TargetStats]) -> Iterator[Table]:
    """A row for each target of each rank."""
    if not stats:
        return
    columns = [">rank", "target", ">ops", ">copies to it", "bytes copied a step", ">at this size"]
    table = Table([*columns, ">switches from it"], title="targets")
    for one in stats:
        at = size_text(one.copied.bytes) + ("+?" if one.copied.unknown else "")
        table.add(one.rank, one.target, one.ops, one.copies, one.copied.text, at, one.switches)
    yield table
