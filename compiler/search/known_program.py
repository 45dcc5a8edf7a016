"""What a rank computes in a step of a candidate, by the programs of a search that were simulated.

The unsharded program gives each node's seconds at the sizes of a part of the batch. Which nodes each rank of a layer has whole is
learned of the first candidate over `tp` that was simulated without recomputing; others over as many ranks, or over others that shard
the same dims, have it alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from partc.compiler.cost.actions import Pricing, updated
from partc.compiler.cost.machine import Machine
from partc.compiler.cost.sizes import FileSizes, Operand
from partc.compiler.cost.step import Simulation
from partc.compiler.search.candidate import Candidate
from partc.compiler.search.search import Search
from partc.runtime.artifact.format import CPU, OPTIMIZER
from partc.runtime.artifact.graph.row_function import ROWS
from partc.runtime.artifact.tasks.task import parse
from partc.runtime.program.steps import Segment, Step, Update
from partc.runtime.updates.updater import SHARD

if TYPE_CHECKING:
    from onnx import FunctionProto, NodeProto


class KnownProgram:
    """The simulated programs of a search; `whole` is the unsharded one."""

    def __init__(self, search: Search, whole: Simulation) -> None:
        self.search = search
        (self.sizes,) = whole.files.values()
        symbol = next(iter(search.batch.symbols), "")
        self.symbol = (
            symbol if search.records is not None and search.request.sizes.get(symbol) == search.records else ""
        )
        self.kinds: list[tuple[NodeProto, Segment]] = []
        """A node of each kind: those of one kind cost the same."""
        self.nodes, self.kind = self._read()
        steps = self.sizes.file.steps
        self.functions = [
            pair for step in steps if isinstance(step, Update) for pair in _functions_of(step, self.sizes)
        ]
        self._replicated: dict[int, NDArray[np.bool_]] = {}
        self._machines: dict[int, tuple[Machine, Pricing]] = {}
        self._computed: dict[tuple[int, int, int], float] = {}
        self._updates: dict[tuple[int, float], float] = {}

    def learn(self, one: Candidate, simulation: Simulation) -> None:
        """Takes how layers are sharded from a candidate over `tp` that was simulated."""
        tp = one.degrees.tp
        if self.symbol and tp > 1 and not (one.by_module or one.recompute) and tp not in self._replicated:
            self._replicated[tp] = self._on_all_ranks(one, simulation.files.values())
            self._computed.clear()

    def computed(self, one: Candidate) -> float | None:
        """Seconds of a microbatch on a rank, of all stages; None where it is not known how layers are sharded, or nodes have no price."""
        busy, tp, parts = self._busy(one.degrees.ranks), one.degrees.tp, one.degrees.dp * one.microbatches
        machine, pricing = self._machines[busy]
        if not self.symbol or machine.segments or (tp > 1 and (one.by_module or not self._alike(tp))):
            return None
        if (key := (busy, parts, tp)) not in self._computed:
            sizes = self._at(parts)
            costs = [pricing.node(node, *sizes.of_node(node, segment)) for node, segment in self.kinds]
            processor = machine.processor(CPU)
            seconds = np.array([cost.seconds(processor) for cost in costs])[self.kind]
            if tp > 1:
                shards = np.array([cost.in_shards(tp).seconds(processor) for cost in costs])[self.kind]
                seconds = np.where(self._replicated[self._alike(tp)], seconds, shards)
            self._computed[key] = float(seconds.sum())
        return self._computed[key]

    def updating(self, ranks: int, share: float) -> float:
        """Seconds of the update of a share of all parameters on a rank of so many, as it is simulated."""
        if (key := (self._busy(ranks), share)) not in self._updates:
            machine, pricing = self._machines[key[0]]
            total = 0.0
            for function, operands in self.functions:
                sizes = (math.prod(one.sizes or ()) for one in operands)
                given = tuple(
                    one if many == 1 else Operand((max(2, round(share * many)),), one.item)
                    for one, many in zip(operands, sizes, strict=True)
                )
                total += pricing.function(function, given, machine.processor(CPU), SHARD)
            self._updates[key] = total
        return self._updates[key]

    def _busy(self, ranks: int) -> int:
        """How many ranks of a host work at the same time, of so many in all."""
        request = self.search.request
        busy = request.machine.busy(ranks, request.hosts)
        if busy not in self._machines:
            machine = request.machine.among(busy)
            self._machines[busy] = machine, Pricing(machine)
        return busy

    def _alike(self, tp: int) -> int:
        """Over how many ranks a simulated candidate shards the same dims as one over `tp`; 0 where none does."""
        some = [known for known in self._replicated if known == tp or self.search.is_sharded_alike(known, tp)]
        return tp if tp in some else min(some, default=0)

    def _at(self, parts: int) -> FileSizes:
        """The unsharded program for one of so many parts of the batch."""
        records = self.sizes.sizes[self.symbol] // parts
        return self.sizes.at({**self.sizes.sizes, self.symbol: records})

    def _read(self) -> tuple[list[tuple[NodeProto, Segment]], NDArray[np.intp]]:
        """The nodes of the unsharded program, and the number of each node's kind."""
        sizes, nodes, numbers = self.sizes, [*_nodes(self.sizes.file.steps)], dict[object, int]()
        kinds = list[int]()
        for node, segment in nodes:
            names = sizes.names(segment)
            operands = [(names.get(name, name), name) for name in (*node.input, *node.output)]
            attributes = tuple(sorted(one.SerializeToString() for one in node.attribute))
            shapes = tuple(
                (str(sizes.shapes.get(name)), sizes.types.get(name), inner in sizes.fixed(segment))
                for name, inner in operands
            )
            kind = numbers.setdefault((node.domain, node.op_type, attributes, len(node.input), shapes), len(numbers))
            if kind == len(self.kinds):
                self.kinds.append((node, segment))
            kinds.append(kind)
        return nodes, np.array(kinds, dtype=np.intp)

    def _on_all_ranks(self, one: Candidate, files: Iterable[FileSizes]) -> NDArray[np.bool_]:
        """Which nodes each rank of a layer has at the sizes that one rank alone has."""
        each, shown = one.degrees.dp * one.degrees.tp, dict[tuple[str, str], set[object]]()
        for file in {file.file.rank // each: file for file in reversed([*files])}.values():
            for step in file.file.steps:
                if isinstance(step, Segment) and (not step.task or parse(step.task).microbatch == 0):
                    for node, segment in _nodes([step]):
                        sized = tuple(map(tuple, file.of_node(node, segment)))
                        shown.setdefault((node.name, node.op_type), set()).add(sized)
        here = self._at(one.degrees.dp * one.microbatches)
        known = (
            shown.get((node.name, node.op_type)) == {tuple(map(tuple, here.of_node(node, segment)))}
            for node, segment in self.nodes
        )
        return np.fromiter(known, dtype=bool)


def _nodes(steps: Sequence[Step]) -> Iterator[tuple[NodeProto, Segment]]:
    """The nodes of all segments, less those of an optimizer."""
    segments = (step for step in steps if isinstance(step, Segment))
    return ((node, one) for one in segments for node in one.formal.nodes if node.domain != OPTIMIZER)


def _functions_of(update: Update, sizes: FileSizes) -> Iterator[tuple[FunctionProto, list[Operand]]]:
    """The functions that update parameters, with their operands, those of all that are updated alike as one; of rows none."""
    functions = {one.name: one for one in sizes.file.model.functions}
    for name, operands in updated(update, functions, sizes):
        if ROWS not in functions[name].input:
            yield functions[name], operands
