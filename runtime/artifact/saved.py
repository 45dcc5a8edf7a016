"""What a row keeps for backward passes: values of a microbatch that outlive the task that makes or first reads them.

    0F3 makes h.3, 0B3 reads it                   h.3 is kept from 0F3 to 0B3
    1F3 reads h.3, which it received, as 1B3      from 1F3 to 1B3
    2B3 makes d.3, 2W3 reads it                   from 2B3 to 2W3

A sum of gradients, which goes from microbatch to microbatch, is no saved value, nor is what all microbatches read, nor the batch itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .byte_count import ZERO, ByteCount, of_value, undominated
from .cells import Kind, Task
from .format import Shape
from .rows import Row


@dataclass(frozen=True)
class Saved:
    """The most that a row keeps: `microbatches` in units of all stages of the rank, and bytes, of which one is the largest.

    `unknown`: values whose size only a run tells, which are left out.
    """

    microbatches: float
    bytes: tuple[ByteCount, ...]
    unknown: int

    def at(self, sizes: Mapping[str, int]) -> int:
        """The bytes at sizes of the symbols."""
        return max((one(sizes) for one in self.bytes), default=0)


def saved(row: Row, types: Mapping[str, tuple[str, Shape]]) -> Saved:
    """What a row keeps at most; `types` are those of its values."""
    spans = {name: span for name, span in _spans(row).items() if name not in row.split}
    changes: list[ByteCount] = [ZERO] * (len(row.calls) + 1)
    unknown = 0
    for name, (first, last) in spans.items():
        size = of_value(*types[name]) if name in types else None
        unknown += size is None
        if size is not None:
            changes[first] += size
            changes[last + 1] -= size
    kept, found = ZERO, list[ByteCount]()
    for at, change in enumerate(changes):
        if at and any(number < 0 for number in change.terms.values()):
            found.append(kept)
        kept += change
    return Saved(most_microbatches(row.tasks), tuple(undominated(found)), unknown)


def _spans(row: Row) -> dict[str, tuple[int, int]]:
    """By value that is kept the places of the tasks between which it is."""
    spans: dict[str, tuple[int, int]] = {}
    readers: dict[str, set[Task]] = {}
    for at, (call, task) in enumerate(zip(row.calls, row.tasks, strict=True)):
        if task is None:
            continue
        for name in call.node.output:
            spans.setdefault(name, (at, at))
            readers.setdefault(name, set()).add(task)
        for name in call.node.input:
            spans[name] = spans.get(name, (at, at))[0], at
            readers.setdefault(name, set()).add(task)
    return {name: span for name, span in spans.items() if span[0] < span[1] and _is_saved(readers[name])}


def _is_saved(tasks: set[Task]) -> bool:
    return len({task.microbatch for task in tasks}) == 1 and any(task.kind is not Kind.FORWARD for task in tasks)


def most_microbatches(tasks: tuple[Task | None, ...]) -> float:
    """The most microbatches that a row keeps, each from its F to its last backward task; one of v stages of a rank counts for 1/v."""
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
