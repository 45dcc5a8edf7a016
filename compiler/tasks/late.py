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
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.training import Training
from partc.compiler.lower.builders import ProgramBuilders
from partc.compiler.lower.local_view import Gradient


@dataclass(frozen=True)
class Pending:
    """One gradient of a queue: its name on ranks, and that of the value that takes its place."""

    name: str
    next: str


@dataclass(frozen=True)
class Queues:
    """Writes the queues of gradients; `append` writes nodes on the ranks of a group, `keep` lists a gradient of one as state."""

    training: Training
    builders: ProgramBuilders
    append: Callable[[Group, Sequence[ir.Node]], None]
    keep: Callable[[Gradient, Pending, int], None]

    def late(self, gradients: Sequence[Gradient], shape: Callable[[Gradient], tuple[int, ...]]) -> list[Gradient]:
        """The gradients that update in a step, of shards of these shapes."""
        return [self._late(one, shape(one)) for one in gradients]

    def _late(self, one: Gradient, shape: Sequence[int]) -> Gradient:
        count = self.training.parameters[one.parameter].staleness
        if not count:
            return one

        def value(name: str) -> ir.Value:
            return ir.Value(name=name, type=one.parameter.type, shape=ir.Shape(shape))

        base = one.name.removesuffix(".grad")
        names = [self.builders.derived(f"{base}.pending.{k + 1}") for k in range(count)]
        nodes = []
        for k, (name, source) in enumerate(zip(names, [*names[1:], one.name], strict=True)):
            pending = Pending(name, self.builders.derived(f"{name}.next"))
            nodes.append(ir.Node("", "Identity", [value(source)], outputs=[value(pending.next)], name=pending.next))
            self.keep(one, pending, k + 1)
        self.append(one.home.group, nodes)
        return replace(one, name=names[0])
