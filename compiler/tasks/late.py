"""Parameters that are updated late: `staleness: k` keeps a queue of k gradients, and a step's update takes the one that is k steps old.

    step t   reads what the updates of steps up to t - 1 - k have made
             w.next = Sgd(w, w.pending.1)        the gradient of step t - k; zeros in the first k steps
             w.pending.1.next = w.pending.2, w.pending.2.next = w.grad

Exactly k, so equal to a queue in one process, whatever the ranks and their speeds. Gradients that are pending are state, and in
checkpoints; those of a table are whole tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.stand_ins import StandIns
from partc.compiler.ir.training import Training
from partc.compiler.lower.job import Job
from partc.compiler.lower.local_view import Gradient


@dataclass(frozen=True)
class Pending:
    """One gradient of a queue, and the value that takes its place."""

    value: Value
    next: Value


@dataclass(frozen=True)
class Queues:
    """Writes the queues of gradients.

    `append` writes nodes on the ranks of a group, over values; `keep` lists a gradient of a queue as state.
    """

    training: Training
    job: Job
    append: Callable[[Group, Sequence[ir.Node], StandIns], None]
    keep: Callable[[Gradient, Pending, int], None]

    def late(self, gradients: Sequence[Gradient], shape: Callable[[Gradient], tuple[int, ...]]) -> list[Gradient]:
        """The gradients that update in a step, of shards of these shapes."""
        return [self._late(one, shape(one)) for one in gradients]

    def _late(self, one: Gradient, shape: Sequence[int]) -> Gradient:
        count = self.training.parameters[one.parameter].staleness
        if not count:
            return one

        base, group = str(one.value).removesuffix(".grad"), one.home.group
        waiting = [self.job.value(group, f"{base}.pending.{k + 1}") for k in range(count)]
        for k, (value, source) in enumerate(zip(waiting, [*waiting[1:], one.value], strict=True)):
            made = self.job.beside(group, value, ".next")
            values = StandIns()
            given, after = (values.of(each, one.parameter.type, ir.Shape(shape)) for each in (source, made))
            self.append(group, [ir.Node("", "Identity", [given], outputs=[after], name=after.name)], values)
            self.keep(one, Pending(value, made), k + 1)
        return replace(one, value=waiting[0])
