"""The updates of the unsharded program of a search, priced for a share of all parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from partc.compiler.cost.actions import Pricing, updated
from partc.compiler.cost.machine import Machine
from partc.compiler.cost.sizes import FileSizes, Operand
from partc.compiler.cost.step import Simulation
from partc.compiler.search.search import Request
from partc.runtime.artifact.format import CPU
from partc.runtime.artifact.graph.row_function import ROWS
from partc.runtime.program.steps import Update
from partc.runtime.updates.updater import SHARD

if TYPE_CHECKING:
    from onnx import FunctionProto


class KnownUpdates:
    """The updates of the unsharded model; `whole` is its simulation."""

    def __init__(self, request: Request, whole: Simulation) -> None:
        (sizes,) = whole.files.values()
        self.request = request
        self.functions = [
            pair for step in sizes.file.steps if isinstance(step, Update) for pair in _functions_of(step, sizes)
        ]
        self._machines: dict[int, tuple[Machine, Pricing]] = {}
        self._seconds: dict[tuple[int, float], float] = {}

    def seconds(self, ranks: int, share: float) -> float:
        """Seconds of the update of a share of all parameters on a rank of so many, as it is simulated."""
        busy = self.request.machine.busy(ranks, self.request.hosts)
        if busy not in self._machines:
            machine = self.request.machine.among(busy)
            self._machines[busy] = machine, Pricing(machine)
        if (key := (busy, share)) not in self._seconds:
            machine, pricing = self._machines[busy]
            total = 0.0
            for function, operands in self.functions:
                sizes = (math.prod(one.sizes or ()) for one in operands)
                given = tuple(
                    one if many == 1 else Operand((max(2, round(share * many)),), one.item)
                    for one, many in zip(operands, sizes, strict=True)
                )
                total += pricing.function(function, given, machine.processor(CPU), SHARD)
            self._seconds[key] = total
        return self._seconds[key]


def _functions_of(update: Update, sizes: FileSizes) -> Iterator[tuple[FunctionProto, list[Operand]]]:
    """The functions that update parameters, with their operands, those of all that are updated alike as one; of rows none."""
    functions = {one.name: one for one in sizes.file.model.functions}
    for name, operands in updated(update, functions, sizes):
        if ROWS not in functions[name].input:
            yield functions[name], operands
