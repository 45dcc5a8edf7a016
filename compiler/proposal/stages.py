"""Assigns modules to stages: runs in the order of the data, even in weights and operations.

The law. The model falls into units: modules, and what is inside of them where one is too large, but for members of a list (`layers.3`),
which stay together while they fit into a stage. Units stand in an order in which each reads of earlier ones alone (`flow.py`), so a stage
does. A unit weighs the mean of its share of the weights and of the operations at typical sizes, or of the seconds on a machine. Where steps
make tokens these are the weights that are read whole: of a table a step reads one row a token, of all else everything. Stages
are within a tenth of equal costs where runs of units allow that, else the heaviest is as light as they allow; within that the stages are as
even as can be (the sum of squares), where fewer bytes that go over a cut count a little. Branches leave several orders: where stages of the
first are uneven, it is that in which the heaviest stage is the lightest, if that is lighter by a tenth, and no more goes over a cut than
two branches for one. If whole members of lists leave stages uneven, a member is cut in parts, but only where no more bytes go over than
between members. Only modules that read weights are named: the rest joins them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
import onnx_ir as ir
from partc.compiler.cost.machine import Machine
from partc.compiler.cost.node import multiply_adds
from partc.compiler.cost.price import cost_of
from partc.compiler.cost.sizes import Operand
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Typed
from partc.compiler.placement.typical_sizes import TypicalSizes
from partc.compiler.proposal.flow import HEAVY, Unit, along, weight_bytes, weights_read
from partc.compiler.proposal.names import patterns
from partc.runtime.artifact.format import CPU
from partc.runtime.artifact.liveness import Span, alive

EVEN = 0.1
"""The share of an equal cost by which a stage may differ."""
_BYTES = 0.05
"""How much the bytes over a cut count where they are as many as over most: attention in its midst hands on far more than a layer."""
_FINEST = 4
_LOOKS_UP = ("Gather", "GatherBlockQuantized")
_GAIN = 0.01
"""The share of all cost by which the heaviest stage must be lighter for a member of a list to be cut."""
_FRONTIERS, _MOST_BITS = 1500, 63
_BRANCHES = 2
"""How many times the bytes of the first order's largest cut may go over one of another order: of experts all values would."""


@dataclass(frozen=True)
class Stage:
    """Units that run together, the paths that name them, the bytes that arrive at typical sizes, and all nodes that run there."""

    units: tuple[Unit, ...]
    paths: tuple[str, ...]
    arriving: int
    nodes: tuple[ir.Node, ...] = ()
    weighed: str = "operations"
    read: str = "weights"

    def lines(self) -> Iterator[str]:
        """The patterns of its paths."""
        yield from patterns(self.paths, lambda pattern: False)

    @property
    def cost(self) -> float:
        """Its share of the cost."""
        return sum(unit.cost for unit in self.units)

    @property
    def reason(self) -> str:
        """Its shares, for a comment."""
        weights, work = (sum(shares) for shares in zip(*((u.weights, u.work) for u in self.units), strict=True))
        return f"{100 * self.cost:.0f} % of the cost: {100 * weights:.0f} % of the {self.read}, {100 * work:.0f} % of the {self.weighed}"


def balanced_stages(program: Typed, count: int, machine: Machine | None = None, generates: bool = False) -> list[Stage]:
    """The stages in order; fewer than `count` where the model has fewer units with weights. `generates`: whether steps make tokens."""
    costs = _Costs(program, machine, generates)
    modules = _units(program, costs, count, in_parts=False)
    whole, stages = _in_order(program, costs, modules, count)
    if uneven(stages) and (order := _evenest_order(whole.units, count)):
        other, others = _in_order(program, costs, modules, count, order)
        sent = [max(stage.arriving for stage in some) for some in (others, stages)]
        is_lighter = _heaviest(others) + EVEN / count < _heaviest(stages)
        if is_lighter and len(others) == len(stages) and sent[0] <= _BRANCHES * sent[1]:
            whole, stages = other, others
    if not uneven(stages):
        return stages
    parts = _Way.of(program, costs, _units(program, costs, count, in_parts=True))
    most = max(whole.crossing)
    cuts = _partition(parts.costs, [size if size <= most else math.inf for size in parts.crossing], count)
    members = {path for unit in whole.units for path in unit.paths}
    apart = parts.stages(cuts, members)
    lighter = _heaviest(apart) + _GAIN < _heaviest(stages) and len(apart) >= len(stages)
    return apart if lighter else stages


def _in_order(
    program: Typed,
    costs: _Costs,
    modules: Sequence[tuple[str, list[ir.Node]]],
    count: int,
    order: Sequence[int] = (),
) -> tuple[_Way, list[Stage]]:
    """The units of modules in their order, or in this one, and the best stages of it."""
    way = _Way.of(program, costs, modules, order)
    return way, way.stages(_partition(way.costs, way.crossing, min(count, len(way.units))))


@dataclass(frozen=True)
class _Way:
    """Units along the data's way, with the place of every node and the bytes that go over a cut before each unit."""

    units: list[Unit]
    at: dict[ir.Node, int]
    crossing: list[int]
    weighed: str
    read: str

    @classmethod
    def of(
        cls,
        program: Typed,
        costs: _Costs,
        modules: Sequence[tuple[str, list[ir.Node]]],
        order: Sequence[int] = (),
    ) -> _Way:
        units, at = along(program, modules, order)
        for node, k in at.items():
            costs.add(units[k], node)
        return cls(units, at, _crossing(program, at, len(units)), costs.weighed, costs.told)

    @property
    def costs(self) -> list[float]:
        return [unit.cost for unit in self.units]

    def stages(self, cuts: Sequence[int], members: Collection[str] = ()) -> list[Stage]:
        """The stages that begin at these units; parts of `members` that lie on one stage are named as one."""
        ends = [*zip([0, *cuts], [*cuts, len(self.units)], strict=True)]
        paths = [[path for unit in self.units[begin:end] for path in unit.paths] for begin, end in ends]
        if members:
            modules = [{module for path in own for module in _around(path)} for own in paths]
            on = Counter(module for some in modules for module in some)
            apart = {module for module, stages in on.items() if stages > 1}
            paths = [_joined(own, apart, members) for own in paths]
        nodes: list[list[ir.Node]] = [[] for _ in ends]
        for node, k in self.at.items():
            nodes[bisect.bisect_right(cuts, k)].append(node)
        return [
            Stage(
                tuple(self.units[begin:end]),
                tuple(own),
                self.crossing[begin] if begin else 0,
                tuple(some),
                self.weighed,
                self.read,
            )
            for own, some, (begin, end) in zip(paths, nodes, ends, strict=True)
        ]


def _joined(own: Sequence[str], apart: Collection[str], members: Collection[str]) -> list[str]:
    """The paths of a stage, for all that lies in one module of it the module, up to whole members of lists; `apart` are of several."""
    found = []
    for path in own:
        around = [module for module in _around(path) if any(m in members for m in _around(module))]
        found.append(next((module for module in around if module not in apart), path))
    return list(dict.fromkeys(found))


def _around(path: str) -> list[str]:
    """The modules around a path, the outermost first, and the path."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def uneven(stages: Sequence[Stage]) -> bool:
    """Whether a stage costs more than a tenth above its equal share."""
    return _heaviest(stages) * len(stages) > 1 + EVEN + 1e-9


def _heaviest(stages: Sequence[Stage]) -> float:
    return max((stage.cost for stage in stages), default=0.0)


class _Costs:
    """Shares of all weights and operations by node; a weight counts for the node that reads it first.

    Where steps make tokens those do not count that are looked up alone.
    """

    def __init__(self, program: Typed, machine: Machine | None, generates: bool) -> None:
        self.program, self.sizes = program, TypicalSizes(program)
        self.weighed = "operations" if machine is None else f"time on {PurePath(machine.where).name}"
        self.told = "weights that are read whole" if generates else "weights"
        self.read = weights_read(program)
        first: dict[ir.Value, ir.Node] = {}
        for node, weights in self.read.items():
            for value in weights:
                if not (generates and node.op_type in _LOOKS_UP):
                    first.setdefault(value, node)
        self.bytes: dict[ir.Node, int] = {}
        self.products = {node for value, node in first.items() if value.shape is not None and len(value.shape) > 1}
        for value, node in first.items():
            self.bytes[node] = self.bytes.get(node, 0) + weight_bytes(value)
        self.operations = {node: self._work(node, machine) for node in program.model.graph}
        self.all_bytes = max(1, sum(self.bytes.values()))
        self.all_operations = sum(self.operations.values()) or 1.0

    def _work(self, node: ir.Node, machine: Machine | None) -> float:
        """The multiply-adds of a node; on a machine its seconds."""
        inputs, outputs = ([self._sizes(value) for value in some] for some in (node.inputs, node.outputs))
        if machine is None:
            return multiply_adds(node, inputs, outputs)
        operands = [
            [
                None
                if sizes is None or value is None
                else Operand(tuple(sizes), self.program.values[value].item_bytes or 1)
                for value, sizes in zip(values, some, strict=True)
            ]
            for values, some in ((node.inputs, inputs), (node.outputs, outputs))
        ]
        return cost_of(node, *operands).seconds(machine.processor(CPU))

    def _sizes(self, value: ir.Value | None) -> list[int] | None:
        shape = self.program.values[value].shape if value is not None and value in self.program.values else None
        return None if shape is None else list(map(self.sizes.dim, shape))

    def add(self, unit: Unit, node: ir.Node) -> None:
        unit.weights += self.bytes.get(node, 0) / self.all_bytes
        unit.work += self.operations[node] / self.all_operations

    def is_heavy(self, node: ir.Node) -> bool:
        """Whether it reads large weights; of one that several nodes read, each must be named, wherever the weight counts."""
        return sum(map(weight_bytes, self.read.get(node, ()))) * HEAVY > self.all_bytes


def _units(program: Typed, costs: _Costs, count: int, in_parts: bool) -> list[tuple[str, list[ir.Node]]]:
    """The modules and nodes that are placed as one and have weights: each with its path."""
    units: list[tuple[str, list[ir.Node]]] = []
    waiting = [("", list(program.model.graph))]
    while waiting:
        module, nodes = waiting.pop()
        inside: dict[str, list[ir.Node]] = {}
        depth = len(module.split(".")) if module else 0
        for node in nodes:
            parts = program.paths[node].split(".")
            inside.setdefault(".".join(parts[: depth + 1]), []).append(node)
        for path, unit_nodes in inside.items():
            unit = Unit()
            for node in unit_nodes:
                costs.add(unit, node)
            single = sum(node in costs.products for node in unit_nodes) < 2
            listed = not in_parts and path.rpartition(".")[2].isdigit() and unit.cost <= (1 + EVEN) / count
            if not (single or listed or unit.cost <= 1 / (_FINEST * count)):
                waiting.append((path, unit_nodes))
            elif any(map(costs.is_heavy, unit_nodes)):
                units.append((path, unit_nodes))
    return units


def _crossing(program: Typed, at: dict[ir.Node, int], count: int) -> list[int]:
    """For each unit, the bytes that pass from earlier units to it or to later ones, at typical sizes."""
    sizes, crossing = TypicalSizes(program), []
    for node, own in at.items():
        for out in node.outputs:
            last = max((at[use.node] for use in out.uses() if use.node in at), default=0)
            if last > own:
                crossing.append(Span(name_of(out), own + 1, last, (), sizes.bytes_of(out)))
    totals, found = dict(alive(crossing, 0)), [0]
    for k in range(count):
        found.append(totals.get(k, found[-1]))
    return found[1:]


def _partition(costs: Sequence[float], crossing: Sequence[float], count: int) -> list[int]:
    """The indices at which runs begin, except the first; none begins where the bytes are infinite.

    An equal cost is one of all costs, as `uneven` has it: what runs wherever it is read belongs to no stage.
    """
    if count > len(costs):
        return []
    usual = float(np.median([size for size in crossing[1:] if size < math.inf] or [0]))
    upto = np.concatenate([[0.0], np.cumsum(costs)])
    toll = _BYTES * np.array(crossing, float) / max(1.0, usual)
    if close := _runs(upto, toll, count, ((1 - EVEN) / count, (1 + EVEN) / count)):
        return close
    n = len(costs)
    runs = np.where(_follows(n) & np.isfinite(toll[:n]), upto[:, None] - upto[:n], math.inf)
    heaviest = np.append(0.0, np.full(n, math.inf))
    for _ in range(count):
        heaviest = np.maximum(heaviest[:n], runs).min(axis=1)
    return _runs(upto, toll, count, (0.0, max(float(heaviest[n]), (1 + EVEN) / count)))


def _evenest_order(units: Sequence[Unit], count: int) -> list[int]:
    """An order of units in which the heaviest of so many stages is as light as in any; none where there are too many orders to try.

    A stage ends at a frontier: a set of units that has all that its units read. The least heaviest stage before each frontier is found
    of those before the frontiers within it. Where units are one behind the other, there is one frontier behind each.
    """
    if len(units) >= _MOST_BITS:
        return []
    needs = [sum(1 << source for source in unit.reads) for unit in units]
    sums = reached = {0}
    for _ in units:
        reached = {f | 1 << k for f in reached for k, need in enumerate(needs) if not f >> k & 1 and not need & ~f}
        sums = sums | reached
        if len(sums) > _FRONTIERS:
            return []
    frontiers = np.array(sorted(sums), np.int64)
    costs = np.array([sum(unit.cost for k, unit in enumerate(units) if f >> k & 1) for f in map(int, frontiers)])
    within = (frontiers[:, None] & ~frontiers[None, :]) == 0
    stage = np.where(within, costs[None, :] - costs[:, None], math.inf)
    heaviest, came = np.where(frontiers == 0, 0.0, math.inf), []
    for _ in range(count):
        ways = np.maximum(heaviest[:, None], stage)
        came.append(ways.argmin(axis=0))
        heaviest = ways.min(axis=0)
    ends = [len(frontiers) - 1]
    for step in reversed(came):
        ends.append(int(step[ends[-1]]))
    sets = [int(frontiers[end]) for end in reversed(ends)]
    return [k for a, b in itertools.pairwise(sets) for k in range(len(units)) if (b & ~a) >> k & 1]


def _runs(upto: np.ndarray, toll: np.ndarray, count: int, allowed: tuple[float, float]) -> list[int]:
    """The begins of the most even runs whose costs are within what is allowed; none where there are no such runs."""
    n = len(upto) - 1
    runs = upto[:, None] - upto[:n]
    fits = _follows(n) & (runs >= allowed[0] - 1e-9) & (runs <= allowed[1] + 1e-9)
    squares = np.where(fits, runs**2, math.inf)
    even = np.append(0.0, np.full(n, math.inf))
    begins = np.zeros((count + 1, n + 1), int)
    for k in range(1, count + 1):
        ways = even[:n] + squares + toll[:n]
        begins[k] = ways.argmin(axis=1)
        even = ways.min(axis=1)
    if even[n] == math.inf:
        return []
    found = [n]
    for k in range(count, 1, -1):
        found.append(int(begins[k, found[-1]]))
    return found[:0:-1]


def _follows(n: int) -> np.ndarray:
    """Maps the end and begin of a run to whether it has units."""
    return np.arange(n + 1)[:, None] > np.arange(n)
