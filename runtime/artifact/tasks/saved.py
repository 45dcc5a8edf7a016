"""The memory that a row saves for backward passes: values of a microbatch that outlive the task that makes or first reads them.

    0F3 makes h.3, 0B3 reads it                   h.3 is kept from 0F3 to 0B3
    1F3 reads h.3, which it received, as 1B3      from 1F3 to 1B3
    2B3 makes d.3, 2W3 reads it                   from 2B3 to 2W3

These values do not count as saved: a sum of gradients, which goes from microbatch to microbatch; values that all microbatches read; the
batch itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partc.runtime.artifact.byte_count import ZERO, ByteCount, of_value, undominated
from partc.runtime.artifact.format import Shape
from partc.runtime.artifact.liveness import Use, alive, spans
from partc.runtime.artifact.tasks.rows import Row
from partc.runtime.artifact.tasks.task import Kind, Task


@dataclass(frozen=True)
class Saved:
    """The most memory that a row saves at once.

    `microbatches`: in microbatches of all the rank's stages. `bytes`: counts of which, at any sizes, one is the largest. `unknown`: the
    number of values whose size is known only at run time, which are not counted.
    """

    microbatches: float
    bytes: tuple[ByteCount, ...]
    unknown: int

    def at(self, sizes: Mapping[str, int]) -> int:
        """The bytes at these sizes of the symbols."""
        return max((one(sizes) for one in self.bytes), default=0)


def saved(row: Row, types: Mapping[str, tuple[str, Shape]]) -> Saved:
    """Returns the most memory that a row saves at once; `types` maps its values to types and shapes."""

    def size(name: str) -> ByteCount | None:
        return of_value(*types[name]) if name in types else None

    uses = [
        Use(*((call.node.input, call.node.output) if task else ((), ())))
        for call, task in zip(row.calls, row.tasks, strict=True)
    ]
    kept = [one for one in spans(uses, size, row.split) if one.first < one.last and _is_saved(row, one.uses)]
    unknown = sum(one.bytes is None for one in kept)
    found = [bytes for _, bytes in alive(kept, ZERO)]
    return Saved(most_microbatches(row.tasks), tuple(undominated(found)), unknown)


def _is_saved(row: Row, uses: Sequence[int]) -> bool:
    """Whether a value that these calls write and read belongs to a single microbatch and is read by a backward task."""
    tasks = [task for at in uses if (task := row.tasks[at]) is not None]
    return len({task.microbatch for task in tasks}) == 1 and any(task.kind is not Kind.FORWARD for task in tasks)


def most_microbatches(tasks: tuple[Task | None, ...]) -> float:
    """The most microbatches that a row saves at once, each from its F to its last backward task; on a rank of v stages each counts 1/v."""
    last = {
        (task.stage, task.microbatch): at for at, task in enumerate(tasks) if task and task.kind is not Kind.FORWARD
    }
    stages = {stage for stage, _ in last}
    kept, most = 0, 0
    for at, task in enumerate(tasks):
        if task is None or (task.stage, task.microbatch) not in last:
            continue
        kept += task.kind is Kind.FORWARD
        most = max(most, kept)
        kept -= last[task.stage, task.microbatch] == at
    return most / len(stages) if stages else 0.0
