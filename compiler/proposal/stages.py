"""Which modules run on which stage: runs along the data's way, even in weights and operations.

The law. The model falls into units: modules, and what is inside of them where one is too large, but for members of a list (`layers.3`),
which stay together while they fit into a stage. Units stand in an order in which each reads of earlier ones alone (`flow.py`), so a stage
does. A unit weighs the mean of its share of the weights and of the operations at middling sizes. Stages are within a tenth of equal
costs where runs of units allow that, else the heaviest is as light as they allow; within that the stages are as even as can be (the sum
of squares), where fewer bytes that go over a cut count a little. Only modules with weights are named: the rest joins them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.operations import multiply_adds
from partc.compiler.ir.program import Program
from partc.compiler.placement.middling import Middling
from partc.compiler.proposal.flow import HEAVY, Unit, along, weight_bytes, weights_read
from partc.compiler.proposal.names import patterns

EVEN = 0.1
"""By how much of an equal cost a stage may differ."""
_BYTES = 0.05
_FINEST = 4


@dataclass(frozen=True)
class Stage:
    """Units that run together, the bytes that arrive from the stages before at middling sizes, and all nodes that run there."""

    units: tuple[Unit, ...]
    arriving: int
    nodes: tuple[ir.Node, ...] = ()

    def lines(self) -> Iterator[str]:
        """The patterns of its units."""
        yield from patterns([path for unit in self.units for path in unit.paths], lambda pattern: False)

    @property
    def cost(self) -> float:
        """Its share of the cost."""
        return sum(unit.cost for unit in self.units)

    @property
    def reason(self) -> str:
        """Its shares, for a comment."""
        weights, work = (sum(shares) for shares in zip(*((u.weights, u.work) for u in self.units), strict=True))
        return f"{100 * self.cost:.0f} % of the cost: {100 * weights:.0f} % of the weights, {100 * work:.0f} % of the operations"


def balanced_stages(program: Program, count: int) -> list[Stage]:
    """The stages in order; fewer than `count` where the model has fewer units with weights."""
    costs = _Costs(program)
    units, at = along(program, _units(program, costs, count))
    for node, k in at.items():
        costs.add(units[k], node)
    crossing = _crossing(program, at, len(units))
    cuts = _partition([unit.cost for unit in units], crossing, min(count, len(units)))
    ends = [*cuts, len(units)]
    return [
        Stage(
            tuple(units[begin:end]),
            crossing[begin] if begin else 0,
            tuple(node for node, k in at.items() if begin <= k < end),
        )
        for begin, end in zip([0, *cuts], ends, strict=True)
    ]


def uneven(stages: Sequence[Stage]) -> bool:
    """Whether a stage costs more than a tenth above its equal share."""
    return bool(stages) and max(stage.cost for stage in stages) * len(stages) > 1 + EVEN + 1e-9


class _Costs:
    """Shares of all weights and operations by node; a weight counts for the node that reads it first."""

    def __init__(self, program: Program) -> None:
        self.program, self.sizes = program, Middling(program)
        first: dict[ir.Value, ir.Node] = {}
        for node, weights in weights_read(program).items():
            for value in weights:
                first.setdefault(value, node)
        self.bytes: dict[ir.Node, int] = {}
        self.products = {node for value, node in first.items() if value.shape is not None and len(value.shape) > 1}
        for value, node in first.items():
            self.bytes[node] = self.bytes.get(node, 0) + weight_bytes(value)
        self.operations = {node: self._operations(node) for node in program.model.graph}
        self.all_bytes = max(1, sum(self.bytes.values()))
        self.all_operations = max(1, sum(self.operations.values()))

    def _operations(self, node: ir.Node) -> int:
        some = [[self._sizes(value) for value in values] for values in (node.inputs, node.outputs)]
        return multiply_adds(node, *some)

    def _sizes(self, value: ir.Value | None) -> list[int] | None:
        shape = self.program.values[value].shape if value is not None and value in self.program.values else None
        return None if shape is None else list(map(self.sizes.dim, shape))

    def add(self, unit: Unit, node: ir.Node) -> None:
        unit.weights += self.bytes.get(node, 0) / self.all_bytes
        unit.work += self.operations[node] / self.all_operations

    def is_heavy(self, node: ir.Node) -> bool:
        return self.bytes.get(node, 0) * HEAVY > self.all_bytes


def _units(program: Program, costs: _Costs, count: int) -> list[tuple[str, list[ir.Node]]]:
    """The modules and nodes that are placed as one and have weights: each with its path."""
    found: list[tuple[str, list[ir.Node]]] = []
    waiting = [("", list(program.model.graph))]
    while waiting:
        module, nodes = waiting.pop()
        inside: dict[str, list[ir.Node]] = {}
        depth = len(module.split(".")) if module else 0
        for node in nodes:
            parts = program.paths[node].split(".")
            inside.setdefault(".".join(parts[: depth + 1]), []).append(node)
        for path, some in inside.items():
            unit = Unit()
            for node in some:
                costs.add(unit, node)
            single = sum(node in costs.products for node in some) < 2
            listed = path.rpartition(".")[2].isdigit() and unit.cost <= (1 + EVEN) / count
            if not (single or listed or unit.cost <= 1 / (_FINEST * count)):
                waiting.append((path, some))
            elif any(map(costs.is_heavy, some)):
                found.append((path, some))
    return found


def _crossing(program: Program, at: dict[ir.Node, int], count: int) -> list[int]:
    """Per unit the bytes that go from the ones before it to it or to later ones, at middling sizes."""
    sizes = Middling(program)
    changes = [0] * (count + 1)
    for node, own in at.items():
        for out in node.outputs:
            last = max((at[use.node] for use in out.uses() if use.node in at), default=0)
            if last > own:
                changes[own + 1] += sizes.bytes_of(out)
                changes[last + 1] -= sizes.bytes_of(out)
    found, running = [], 0
    for change in changes[:count]:
        running += change
        found.append(running)
    return found


def _partition(costs: Sequence[float], crossing: Sequence[int], count: int) -> list[int]:
    """The indices at which runs begin, except the first."""
    n = len(costs)
    upto = np.concatenate([[0.0], np.cumsum(costs)])
    toll = _BYTES * np.array(crossing, float) / max(1, *crossing)
    least = np.full((count + 1, n + 1), math.inf)
    least[0, 0] = 0.0
    for k in range(1, count + 1):
        for end in range(k, n + 1):
            least[k, end] = np.maximum(least[k - 1, :end], upto[end] - upto[:end]).min()
    equal = upto[n] / count
    close = _runs(upto, toll, count, ((1 - EVEN) * equal, (1 + EVEN) * equal))
    return close or _runs(upto, toll, count, (0.0, max(float(least[count, n]), (1 + EVEN) * equal)))


def _runs(upto: np.ndarray, toll: np.ndarray, count: int, allowed: tuple[float, float]) -> list[int]:
    """The begins of the most even runs whose costs are within what is allowed; none where there are no such runs."""
    n = len(upto) - 1
    even = np.full((count + 1, n + 1), math.inf)
    even[0, 0] = 0.0
    begins = np.zeros((count + 1, n + 1), int)
    for k in range(1, count + 1):
        for end in range(k, n + 1):
            runs = upto[end] - upto[:end]
            fits = (runs >= allowed[0] - 1e-9) & (runs <= allowed[1] + 1e-9)
            ways = np.where(fits, even[k - 1, :end] + runs**2 + toll[:end], math.inf)
            begins[k, end] = ways.argmin()
            even[k, end] = ways[begins[k, end]]
    if even[count, n] == math.inf:
        return []
    found = [n]
    for k in range(count, 1, -1):
        found.append(int(begins[k, found[-1]]))
    return found[:0:-1]
