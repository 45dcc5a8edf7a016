"""What each target of a rank has and is sent: ops, weights and state, copies with their bytes; and how often a rank changes its target.

Copies and switches are those of a step, of a pipeline with all its microbatches. A weight counts on every target that reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partc.cli.output.stats import Moved, moved, tensor_bytes
from partc.cli.output.table import Table
from partc.cli.output.units import size
from partc.runtime.artifact.dtypes import dense
from partc.runtime.artifact.format import BYTES, CPU, DOMAIN, TARGET, Manifest
from partc.runtime.artifact.onnx_graph import reads
from partc.runtime.artifact.targets import is_copy, target_made_on, target_of

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class TargetStats:
    """A target of a rank: its ops, the bytes of weights and of what training keeps there, and the copies that lead to it.

    `switches`: how often the rank changes from an op of this target to one of another.
    """

    rank: int
    target: str
    ops: int
    held: int
    copies: int
    copied: Moved
    switches: int


@dataclass(frozen=True)
class _Copied:
    bytes: str


def target_stats(manifest: Manifest, model: ModelProto, rank: int, sizes: Mapping[str, int]) -> list[TargetStats]:
    """The targets of a rank, whose tasks stand in place of their calls; none where its file names no target."""
    ops: Counter[str] = Counter()
    switches: Counter[str] = Counter()
    copies: dict[str, list[_Copied]] = {}
    last = ""
    for node in model.graph.node:
        if is_copy(node):
            stated = next((entry.value for entry in node.metadata_props if entry.key == BYTES), "unknown")
            copies.setdefault(target_made_on(node), []).append(_Copied(stated))
        elif node.domain != DOMAIN and (target := target_of(node)):
            ops[target] += 1
            switches[last] += bool(last) and last != target
            last = target
    if not ops:
        return []
    held = _held(manifest, model, rank)
    return [
        TargetStats(
            rank,
            target,
            ops[target],
            held[target],
            len(copies.get(target, ())),
            moved(copies.get(target, ()), sizes),
            switches[target],
        )
        for target in sorted({*ops, *copies, *held})
    ]


def _held(manifest: Manifest, model: ModelProto, rank: int) -> Counter[str]:
    """By target the bytes of weights that are read there, and of the state that lies there."""
    held: Counter[str] = Counter()
    targets = {
        one.name: entry.value for one in model.graph.input for entry in one.metadata_props if entry.key == TARGET
    }
    for record in manifest.state:
        if rank in record.ranks:
            dtype = dense(record.type)
            held[targets.get(record.value) or CPU] += dtype.bytes_of(record.local_shape(rank)) if dtype else 0
    state = {record.value for record in manifest.state}
    readers: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in reads(node):
            readers.setdefault(name, set()).add(target_of(node) or CPU)
    for tensor in model.graph.initializer:
        if tensor.name not in state:
            for target in readers.get(tensor.name, ()):
                held[target] += tensor_bytes(tensor)
    return held


def targets_table(stats: Sequence[TargetStats]) -> Iterator[Table]:
    """A row for each target of each rank."""
    if not stats:
        return
    columns = [">rank", "target", ">ops", ">weights and state", ">copies to it", "bytes copied a step", ">at this size"]
    table = Table([*columns, ">switches from it"], title="targets")
    for one in stats:
        at = size(one.copied.bytes) + ("+?" if one.copied.unknown else "")
        table.add(one.rank, one.target, one.ops, size(one.held), one.copies, one.copied.text, at, one.switches)
    yield table
