"""A program of one stage and one microbatch as a rank has it, and what ranks of other sizes take at least for its nodes and sums.

    head       of a node: the longest way of nodes, and of the collectives of a layer, that it depends on
    tail       the longest way of what depends on it
    longest    of a rank with some of the nodes: the least head of a set of them, all of the set for each microbatch, and its least tail

`longest` holds for every set and every schedule: a rank computes one node at a time, its first one of the set cannot begin before the least
head, and what depends on its last one takes at least the least tail. Two families of sets are looked at: the nodes whose head is at least
so much, whose tail is then not counted but what a stage updates is, and the nodes whose tail is at least so much.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from partc.cli.simulation.actions import Pricing
from partc.cli.simulation.sizes import FileSizes
from partc.compiler.proposal.degrees import Degrees
from partc.runtime.artifact.format import ALL_REDUCE, CPU, OPTIMIZER
from partc.runtime.artifact.graph.onnx_graph import path_of
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.execution.memory.layout import at_sizes
from partc.runtime.program.steps import Segment, StartCollective, Step, Update

if TYPE_CHECKING:
    from onnx import NodeProto


@dataclass(frozen=True)
class Known:
    """What a rank computes for each microbatch at a path: its seconds, and its head and tail, in seconds, too."""

    path: str
    seconds: float
    head: float
    tail: float


@dataclass(frozen=True)
class Task:
    """The nodes of a microbatch that depend on the batch, and the shortest way to a gradient."""

    nodes: Sequence[Known]
    gradient: float

    @cached_property
    def by_path(self) -> Mapping[str, Sequence[Known]]:
        """The nodes at each path."""
        found = defaultdict[str, list[Known]](list)
        for one in self.nodes:
            found[one.path].append(one)
        return found

    def longest(
        self, paths: Collection[str], microbatches: int, updates: Mapping[str, float], session: float = 0.0
    ) -> float:
        """Seconds of a rank on which these paths run, which updates what is read there after its last microbatch.

        Each microbatch is computed in a `session` at least, which the first may begin before what it waits for is there.
        """
        own = [one for path in paths for one in self.by_path[path]]
        waiting = sorted((min(one.head for one in self.by_path[path]), path) for path in paths)
        longest = behind = others = (microbatches - 1) * session
        for one in sorted(own, key=lambda one: -one.head):
            behind += microbatches * one.seconds
            while waiting and waiting[-1][0] >= one.head:
                behind += updates.get(waiting.pop()[1], 0.0)
            longest = max(longest, one.head + behind)
        first, behind = math.inf, others
        for one in sorted(own, key=lambda one: -one.tail):
            behind += microbatches * one.seconds
            first = min(first, one.head)
            longest = max(longest, first + behind + one.tail)
        return longest


@dataclass(frozen=True)
class _Collective:
    """A collective: what it reads and makes, and whether it is a sum over the ranks of a layer."""

    step: StartCollective
    read: Sequence[str]
    made: Sequence[str]
    is_of_layer: bool

    def seconds(self, sizes: FileSizes, pricing: Pricing) -> float:
        """Seconds over the fastest link of the machine; none of one that is not of a layer."""
        if not self.is_of_layer:
            return 0.0
        call, file = self.step.call, sizes.file
        record = file.collectives[call.tag]
        dtype = dense(record.type)
        if record.shape is None or dtype is None:
            return 0.0
        bytes = dtype.bytes_of(at_sizes(record.shape, file.manifest.symbols, sizes.sizes))
        return min(link.collective(call.op, len(self.step.ranks), bytes) for link in pricing.machine.links)


class Program:
    """The nodes of a rank's file of a plan of these degrees, those that cost the same as one kind; `whole`: the unsharded program."""

    def __init__(
        self,
        sizes: FileSizes,
        pricing: Pricing,
        symbol: str,
        degrees: Degrees = Degrees(),  # noqa: B008
        whole: Program | None = None,
    ) -> None:
        self.sizes, self.pricing, self.symbol = sizes, pricing, symbol
        self.tp, self.records = degrees.tp, sizes.sizes[symbol] * degrees.dp
        self.kinds: list[tuple[NodeProto, Segment]] = []
        self.nodes: list[tuple[str, int, bool, list[str], list[str]]] = []
        """By node its path, its kind, whether it may be sharded further, and what it reads and makes."""
        there = whole.at(degrees.dp) if whole is not None else None
        as_whole = {_shown(there, *one) for one in _nodes(there.file.steps)} if there is not None else set()
        self.order: list[int | _Collective] = []
        """The places of the nodes in `nodes`, and the collectives between them, as the program has them."""
        numbers = dict[object, int]()
        for step in sizes.file.steps:
            if isinstance(step, StartCollective):
                call = step.call
                results = [result for _, result in call.parts] or [*filter(None, [call.result])]
                self.order.append(_Collective(step, call.given, results, _is_of_layer(step, self.tp)))
            for node, segment in _nodes([step]):
                names = sizes.names(segment)
                read, made = ([names.get(name, name) for name in some] for some in (node.input, node.output))
                attributes = tuple(sorted(one.SerializeToString() for one in node.attribute))
                shapes = tuple(
                    (str(sizes.shapes.get(name)), sizes.types.get(name), inner in sizes.fixed(segment))
                    for name, inner in zip((*read, *made), (*node.input, *node.output), strict=True)
                )
                kind = numbers.setdefault((node.domain, node.op_type, attributes, len(read), shapes), len(numbers))
                if kind == len(self.kinds):
                    self.kinds.append((node, segment))
                is_cut = there is None or _shown(sizes, node, segment) not in as_whole
                self.order.append(len(self.nodes))
                self.nodes.append((path_of(node), kind, is_cut, [*filter(None, read)], [*filter(None, made)]))
        self.counts = Counter((kind, is_cut) for _, kind, is_cut, *_ in self.nodes)
        updates = [node for step in sizes.file.steps if isinstance(step, Update) for node in step.nodes]
        self.updated = {name for node in updates for name in node.input}
        self._costs: dict[tuple[int, int], list[tuple[float, float, bool]]] = {}

    @cached_property
    def _readers(self) -> dict[str, set[str]]:
        found = defaultdict[str, set[str]](set)
        for path, _, _, read, _ in self.nodes:
            for name in read:
                found[name].add(path)
        return found

    def readers(self, names: Collection[str]) -> set[str]:
        """The paths of the nodes that read one of these values."""
        return {path for name in names for path in self._readers.get(name, ())}

    def at(self, parts: int) -> FileSizes:
        """The file for one of so many parts of the batch."""
        return self.sizes.at({**self.sizes.sizes, self.symbol: self.records // parts})

    def costs(self, parts: int, shards: int = 1) -> list[tuple[float, float, bool]]:
        """By kind the seconds of a node, those of one that is sharded into so many more at least, and whether it depends on the batch."""
        key = parts, shards
        if key not in self._costs:
            here, other = self.at(parts), self.sizes.at({**self.sizes.sizes, self.symbol: 2 * self.records})
            processor, found = self.pricing.machine.processor(CPU), []
            for node, segment in self.kinds:
                operands = here.of_node(node, segment)
                cost = self.pricing.node(node, *operands)
                is_repeated = operands != other.of_node(node, segment)
                found.append((cost.seconds(processor), cost.in_even_shards(processor, shards), is_repeated))
            self._costs[key] = found
        return self._costs[key]

    def seconds(self, parts: int, shards: int) -> tuple[float, float]:
        """Seconds of a microbatch of one of so many parts of the batch, where what is sharded is sharded into so many more.

        First those that do not depend on the batch.
        """
        costs, once, repeated = self.costs(parts, shards), 0.0, 0.0
        for (kind, is_cut), many in self.counts.items():
            exact, least, is_repeated = costs[kind]
            own = many * (least if is_cut and shards > 1 else exact)
            once, repeated = (once, repeated + own) if is_repeated else (once + own, repeated)
        return once, repeated

    def seconds_by_path(self, parts: int, shards: int, paths: Collection[str], there: int) -> tuple[float, float]:
        """The same where what runs at these paths is not sharded, and has one of `there` parts of the batch."""
        costs, own, once, repeated = self.costs(parts, shards), self.costs(there), 0.0, 0.0
        for path, kind, *_ in self.nodes:
            _, least, is_repeated = costs[kind]
            seconds = own[kind][0] if path in paths else least
            once, repeated = (once, repeated + seconds) if is_repeated else (once + seconds, repeated)
        return once, repeated

    def task(self, parts: int, shards: int, sums: bool) -> Task:
        """The nodes of a microbatch; `sums`: the AllReduces of a layer are on the way between them."""
        costs, here = self.costs(parts, shards), self.at(parts)
        rows: list[tuple[Sequence[str], Sequence[str], float]] = []
        for one in self.order:
            if isinstance(one, _Collective):
                seconds = one.seconds(here, self.pricing) if sums and shards == 1 else 0.0
                rows.append((one.read, one.made, seconds))
                continue
            _, kind, is_cut, read, made = self.nodes[one]
            exact, least, _ = costs[kind]
            rows.append((read, made, least if is_cut and shards > 1 else exact))
        begins, ends, of_batch = list[float](), dict[str, float](), set[str]()
        for one, (reads, makes, seconds) in zip(self.order, rows, strict=True):
            begins.append(max((ends.get(name, 0.0) for name in reads), default=0.0))
            ends.update(dict.fromkeys(makes, begins[-1] + seconds))
            is_repeated = not isinstance(one, _Collective) and costs[self.nodes[one][1]][2]
            if is_repeated or not of_batch.isdisjoint(reads):
                of_batch.update(makes)
        nodes, behind = list[Known](), dict[str, float]()
        for one, begin, (reads, makes, seconds) in zip(self.order[::-1], begins[::-1], rows[::-1], strict=True):
            tail = max((behind.pop(name, 0.0) for name in makes), default=0.0)
            for name in reads:
                behind[name] = max(behind.get(name, 0.0), seconds + tail)
            if not isinstance(one, _Collective) and costs[self.nodes[one][1]][2]:
                nodes.append(Known(self.nodes[one][0], seconds, begin, tail))
        gradients = [ends[name] for name in self.updated & of_batch]
        return Task(nodes, min(gradients, default=0.0))


def _is_of_layer(step: StartCollective, tp: int) -> bool:
    """Whether it is a sum over the ranks of a layer, which are next to each other."""
    first = min(step.ranks, default=0)
    return tp > 1 and step.call.op == ALL_REDUCE and [*step.ranks] == [*range(first, first + tp)]


def _nodes(steps: Sequence[Step]) -> Iterator[tuple[NodeProto, Segment]]:
    """The nodes of all segments, less those of an optimizer."""
    segments = (step for step in steps if isinstance(step, Segment))
    return ((node, one) for one in segments for node in one.formal.nodes if node.domain != OPTIMIZER)


def _shown(sizes: FileSizes, node: NodeProto, segment: Segment) -> Hashable:
    """A node by its place in the model and the sizes of what it reads and makes."""
    return node.name, node.op_type, path_of(node), *map(tuple, sizes.of_node(node, segment))
