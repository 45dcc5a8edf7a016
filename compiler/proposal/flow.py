"""Units in the order of the data flow, and for each remaining node the unit with which it runs.

A file lists nodes in any order that runs, often with what is made of inputs and shapes first: the keys and values of a cache, masks. So the
place of a module's first node says nothing of when it runs. Edges lead from unit to unit, through whatever lies between; constants, shape
arithmetic and masks make no edge, since they are computed wherever they are read. Units that read of each other in a circle, such as two
modules that are called in turn, are one; but a small one among them, such as a norm that all layers share, is not a unit and runs with its
readers.

    layers.1 <- layers.0 <- embed     and    layers.1 <- past_1_key      embed, layers.0, layers.1
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.ir.program import Placed, Typed
from partc.compiler.placement.computed_at_readers import repeatable
from partc.compiler.proposal.degrees import Degrees
from partc.runtime.artifact import format as fmt

HEAVY = 1000
"""A weight is large from one part in so many of all on."""
_SMALL = 0.02
"""The share of all weights up to which a unit of a circle is left to its readers."""


@dataclass
class Unit:
    """Modules or nodes that are placed as one, the places of the units that they read, and their shares of all weights and operations."""

    paths: tuple[str, ...] = ()
    reads: frozenset[int] = frozenset()
    weights: float = 0.0
    work: float = 0.0

    @property
    def cost(self) -> float:
        return (self.weights + self.work) / 2


def along(
    program: Typed, modules: Sequence[tuple[str, list[ir.Node]]], order: Sequence[int] = ()
) -> tuple[list[Unit], dict[ir.Node, int]]:
    """The units in order, without shares, and the place of the unit of every node but those that run wherever they are read.

    `order`: another order of the units that are given without it, in which each is behind what it reads, too.
    """
    index = {node: k for k, node in enumerate(program.model.graph)}
    floating = floats(program)
    named = {path: some for path, nodes in modules if (some := [node for node in nodes if node not in floating])}
    read = weights_read(program)
    weights = {
        path: sum(map(weight_bytes, {value: None for node in nodes for value in read.get(node, ())}))
        for path, nodes in named.items()
    }
    while True:
        of = {node: path for path, nodes in named.items() for node in nodes}
        sources = _sources(program, of, floating)
        edges: dict[str, set[str]] = {path: set() for path in named}
        for node, path in of.items():
            for value in program.reads[node]:
                edges[path].update(sources.get(value, frozenset()) - {path})
        circles = [circle for circle in _circles(edges) if len(circle) > 1]
        small = {path for circle in circles for path in circle if weights[path] <= _SMALL * sum(weights.values())}
        if not small or small >= named.keys():
            break
        named = {path: nodes for path, nodes in named.items() if path not in small}
    first = {path: min(map(index.__getitem__, nodes), default=0) for path, nodes in named.items()}
    groups = _in_order([sorted(circle, key=first.__getitem__) for circle in _circles(edges)], edges, first, weights)
    groups = [groups[k] for k in order] or groups
    place = {path: k for k, group in enumerate(groups) for path in group}
    reads = [{place[source] for path in group for source in edges[path]} - {k} for k, group in enumerate(groups)]
    units = [Unit(tuple(group), frozenset(some)) for group, some in zip(groups, reads, strict=True)] or [Unit()]
    return units, _places(program, {node: place[path] for node, path in of.items()}, floating)


def against_the_way(program: Placed, degrees: Degrees) -> dict[str, int]:
    """Maps paths to the nodes that read from a later stage than theirs, with that stage; and to the nodes of no single stage, with their
    first reader's.

    What no line of a placement names follows the producer that has most bytes of its inputs, also where it reads of a later stage, too:
    a residual's sum.

    A node that `sharding` alone names and that reads inputs alone would run on all ranks.
    """
    latest_readers: dict[str, int] = {}
    each = degrees.ranks // degrees.stages
    own = {node: placed.groups[0] for node, placed in program.placement.items() if not placed.follows}
    at = {node: group[0] // each for node, group in own.items()}
    nodes = list(program.model.graph)
    for node in reversed(nodes):
        if node in own and len(own[node]) > each:
            readers = [at[use.node] for out in node.outputs for use in out.uses() if use.node in at]
            at[node] = latest_readers[program.paths[node]] = min(readers, default=0)
    for node in nodes:
        before = [at[p] for value in program.reads[node] if (p := value.producer()) in at]
        if node in at and at[node] < (latest := max(before, default=0)):
            at[node] = latest_readers[program.paths[node]] = latest
    return latest_readers


def floats(program: Typed) -> set[ir.Node]:
    """The nodes that run wherever they are read: of constants, of sizes alone, or cheaply of inputs without a large weight."""
    known: set[ir.Value] = set(program.model.graph.initializers.values())
    reasons: dict[ir.Node, str] = {}
    for node in program.model.graph:
        sized = node.op_type in ("Shape", "Size") and node.domain in ("", "ai.onnx")
        if sized or all(value in known for value in program.reads[node]):
            known.update(node.outputs)
            reasons[node] = fmt.SHAPE_ARITHMETIC
    sizes = {value: weight_bytes(value) for value in program.model.graph.initializers.values()}
    large = {value for value, size in sizes.items() if size * HEAVY > sum(sizes.values())}
    read = weights_read(program)
    for node in repeatable(program, {}, reasons, ()):
        if not large.isdisjoint((*program.reads[node], *read.get(node, ()))):
            large.update(node.outputs)
        else:
            reasons[node] = fmt.MADE_OF_INPUTS
    return set(reasons)


def weights_read(program: Typed) -> dict[ir.Node, list[ir.Value]]:
    """The initializers that each node reads, also through a Transpose and the like of them; those nodes themselves read none."""
    of: dict[ir.Value, list[ir.Value]] = {value: [value] for value in program.model.graph.initializers.values()}
    by_node: dict[ir.Node, list[ir.Value]] = {}
    for node in program.model.graph:
        values = program.reads[node]
        read = list(dict.fromkeys(root for value in values for root in of.get(value, ())))
        if all(value in of for value in values):
            of.update(dict.fromkeys(node.outputs, read))
        else:
            by_node[node] = read
    return by_node


def stored_bytes(value: ir.Value) -> int:
    """The bytes of an initializer."""
    return 0 if value.const_value is None else value.const_value.nbytes


def weight_bytes(value: ir.Value) -> int:
    """The bytes of an initializer that is a weight; a table of indices, which exporters fold out of a mask, has 0."""
    indices = value.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
    return 0 if indices else stored_bytes(value)


def _sources(program: Typed, of: Mapping[ir.Node, str], floating: set[ir.Node]) -> dict[ir.Value, frozenset[str]]:
    """Maps each value to the units that it depends on, through nodes of no unit."""
    sources: dict[ir.Value, frozenset[str]] = {}
    for node in program.model.graph:
        if node in of:
            sources.update(dict.fromkeys(node.outputs, frozenset((of[node],))))
        elif node not in floating:
            sets = {sources[value] for value in program.reads[node] if value in sources}
            if sets:
                made = next(iter(sets)) if len(sets) == 1 else frozenset[str]().union(*sets)
                sources.update(dict.fromkeys(node.outputs, made))
    return sources


def _circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected units, each with itself at least, what is read before its readers (Tarjan's order)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []
    for start in edges:
        if start in number:
            continue
        number[start] = low[start] = len(number)
        stack.append(start)
        open_ = [(start, iter(sorted(edges[start])))]
        while open_:
            path, rest = open_[-1]
            after = next(rest, None)
            if after is None:
                open_.pop()
                if open_:
                    low[open_[-1][0]] = min(low[open_[-1][0]], low[path])
                if low[path] == number[path]:
                    at = stack.index(path)
                    components.append(stack[at:])
                    for each in stack[at:]:
                        low[each] = len(edges) + len(number)  # closed: no later unit joins it
                    del stack[at:]
            elif after not in number:
                number[after] = low[after] = len(number)
                stack.append(after)
                open_.append((after, iter(sorted(edges[after]))))
            elif after in stack:
                low[path] = min(low[path], number[after])
    return components


def _in_order(
    groups: list[list[str]], edges: Mapping[str, Iterable[str]], first: Mapping[str, int], weights: Mapping[str, int]
) -> list[list[str]]:
    """The groups behind what they read, and as close as can be: of what a group reads the one with more weights behind it comes first.

    So a table stands before its reader, not at the head of the file, and of two towers the smaller is done when both are read.
    """
    of = {path: k for k, group in enumerate(groups) for path in group}
    reads = [{of[source] for path in group for source in edges[path]} - {k} for k, group in enumerate(groups)]
    behind: list[int] = []  # bit sets; circles come in an order in which what is read stands before its readers
    for k, some in enumerate(reads):
        behind.append(functools.reduce(operator.or_, (behind[source] for source in some), 1 << k))
    own = [sum(weights[path] for path in group) for group in groups]
    heavy = [sum(size for j, size in enumerate(own) if bits >> j & 1) for bits in behind]
    begins = [first[group[0]] for group in groups]
    last = sorted(set(range(len(groups))).difference(*reads), key=lambda k: (-heavy[k], begins[k]))
    ordered: dict[int, None] = {}
    waiting = [(k, False) for k in reversed(last)]
    while waiting:
        k, done = waiting.pop()
        if done:
            ordered[k] = None
        elif k not in ordered:
            waiting.append((k, True))
            waiting += [(j, False) for j in sorted(reads[k], key=lambda j: (heavy[j], -begins[j])) if j not in ordered]
    return [groups[k] for k in ordered]


def _places(program: Typed, own: Mapping[ir.Node, int], floating: set[ir.Node]) -> dict[ir.Node, int]:
    """The unit of every node: its own, else the last that it reads from; of what reads from none, the first that reads it."""
    units: dict[ir.Node, int] = {}
    for node in program.model.graph:
        before = [units[p] for value in program.reads[node] if (p := value.producer()) in units]
        if node in own or (before and node not in floating):
            units[node] = own[node] if node in own else max(before)
    readers: dict[ir.Node, list[ir.Node]] = {}
    for node in program.model.graph:
        for value in program.reads[node]:
            if (producer := value.producer()) is not None:
                readers.setdefault(producer, []).append(node)
    for node in reversed(list(program.model.graph)):
        if node not in units and node not in floating:
            units[node] = min((units[r] for r in readers.get(node, ()) if r in units), default=0)
    return {node: units[node] for node in program.model.graph if node in units}
