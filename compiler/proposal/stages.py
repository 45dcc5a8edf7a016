"""Which modules run on which stage: runs of the graph's order, even in weights and operations.

The law. The model falls into units in the order of the graph: modules, and what is inside of them where one is too large, but for
members of a list (`layers.3`), which stay together while they fit into a stage. A unit weighs the mean of its share of the weights
and of the operations at middling sizes. The heaviest stage is at most a tenth above the least that runs of units allow; within that the
stages are as even as can be (the sum of squares), where fewer bytes that go over a cut count a little. Only modules with weights
are named: the rest joins them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.operations import multiply_adds
from partc.compiler.ir.program import Program
from partc.compiler.placement.middling import Middling
from partc.compiler.proposal.names import patterns

_SLACK, _BYTES = 1.1, 0.05
_FINEST = 4


@dataclass
class Unit:
    """A module or node that is placed as one: its path, nodes, and shares of all weights and operations."""

    path: str
    nodes: list[ir.Node] = field(default_factory=list)
    weights: float = 0.0
    work: float = 0.0
    heavy: bool = False

    @property
    def cost(self) -> float:
        return (self.weights + self.work) / 2


@dataclass(frozen=True)
class Stage:
    """Units that run together, and the bytes that arrive from the stages before at middling sizes."""

    units: tuple[Unit, ...]
    arriving: int

    def lines(self) -> Iterator[str]:
        """The patterns of its units."""
        yield from patterns([unit.path for unit in self.units if unit.heavy], lambda pattern: False)

    @property
    def reason(self) -> str:
        """Its shares, for a comment."""
        weights, work = (100 * sum(shares) for shares in zip(*((u.weights, u.work) for u in self.units), strict=True))
        return f"{weights:.0f} % of the weights, {work:.0f} % of the operations"


def balanced_stages(program: Program, count: int) -> list[Stage]:
    """The stages in order; fewer than `count` where the model has fewer units with weights."""
    costs = _Costs(program)
    units = _merged(_units(program, costs, count))
    crossing = _crossing(program, units)
    cuts = _partition([unit.cost for unit in units], crossing, min(count, len(units)))
    ends = [*cuts, len(units)]
    return [
        Stage(tuple(units[begin:end]), crossing[begin] if begin else 0)
        for begin, end in zip([0, *cuts], ends, strict=True)
    ]


class _Costs:
    """Shares of all weights and operations by node; a weight counts for the node that reads it first."""

    def __init__(self, program: Program) -> None:
        self.program, self.sizes = program, Middling(program)
        first: dict[ir.Value, ir.Node] = {}
        for node in program.model.graph:
            for value in program.reads[node]:
                if value.is_initializer():
                    first.setdefault(value, node)
        self.bytes: dict[ir.Node, int] = {}
        self.products = {node for value, node in first.items() if value.shape is not None and len(value.shape) > 1}
        for value, node in first.items():
            size = value.const_value.nbytes if value.const_value is not None else 0
            self.bytes[node] = self.bytes.get(node, 0) + size
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
        unit.nodes.append(node)
        unit.weights += self.bytes.get(node, 0) / self.all_bytes
        unit.work += self.operations[node] / self.all_operations
        unit.heavy |= self.bytes.get(node, 0) * 1000 > self.all_bytes


def _units(program: Program, costs: _Costs, count: int) -> list[Unit]:
    """The model's units in the order of their first nodes."""
    found: list[Unit] = []
    waiting = [("", list(program.model.graph))]
    while waiting:
        module, nodes = waiting.pop()
        inside: dict[str, list[ir.Node]] = {}
        depth = len(module.split(".")) if module else 0
        for node in nodes:
            parts = program.paths[node].split(".")
            inside.setdefault(".".join(parts[: depth + 1]), []).append(node)
        for path, some in inside.items():
            unit = Unit(path)
            for node in some:
                costs.add(unit, node)
            single = sum(node in costs.products for node in some) < 2
            listed = path.rpartition(".")[2].isdigit() and unit.cost <= 1 / count
            if single or listed or unit.cost <= 1 / (_FINEST * count):
                found.append(unit)
            else:
                waiting.append((path, some))
    index = {node: k for k, node in enumerate(program.model.graph)}
    return sorted(found, key=lambda unit: index[unit.nodes[0]])


def _merged(units: Sequence[Unit]) -> list[Unit]:
    """The units with weights; what has none adds its work to the one before."""
    found: list[Unit] = []
    for unit in units:
        if unit.heavy or not found:
            found.append(unit)
        else:
            before = found[-1]
            found[-1] = Unit(
                before.path,
                [*before.nodes, *unit.nodes],
                before.weights + unit.weights,
                before.work + unit.work,
                before.heavy,
            )
    return found if len(found) < 2 or found[0].heavy else _first_joins(found)


def _first_joins(units: list[Unit]) -> list[Unit]:
    first, second, *rest = units
    nodes = [*first.nodes, *second.nodes]
    return [Unit(second.path, nodes, first.weights + second.weights, first.work + second.work, second.heavy), *rest]


def _crossing(program: Program, units: Sequence[Unit]) -> list[int]:
    """Per unit the bytes that go from the ones before it to it or to later ones, at middling sizes."""
    sizes = Middling(program)
    at = {node: k for k, unit in enumerate(units) for node in unit.nodes}
    changes = [0] * (len(units) + 1)
    constants = set(program.model.graph.initializers.values())
    for node in program.model.graph:
        if all(value in constants for value in program.reads[node]):
            constants.update(node.outputs)
            continue
        for out in node.outputs:
            last = max((at[use.node] for use in out.uses() if use.node in at), default=0)
            if last > at[node]:
                changes[at[node] + 1] += sizes.bytes_of(out)
                changes[last + 1] -= sizes.bytes_of(out)
    found, running = [], 0
    for change in changes[: len(units)]:
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
    bound = least[count, n] * _SLACK + 1e-9
    even = np.full((count + 1, n + 1), math.inf)
    even[0, 0] = 0.0
    begins = np.zeros((count + 1, n + 1), int)
    for k in range(1, count + 1):
        for end in range(k, n + 1):
            runs = upto[end] - upto[:end]
            ways = np.where(runs <= bound, even[k - 1, :end] + runs**2 + toll[:end], math.inf)
            begins[k, end] = ways.argmin()
            even[k, end] = ways[begins[k, end]]
    found = [n]
    for k in range(count, 1, -1):
        found.append(int(begins[k, found[-1]]))
    return found[:0:-1]
