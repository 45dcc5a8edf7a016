"""The program of one rank, and what ranks of other plans take at least for parts of it: for what a stage has of a microbatch.

    way        of stages: values that one makes and the next one reads, from the first stage forward to the last, and back
    task       of a stage: all of its nodes that are on ways forward, or back; `late` is what of these only feeds gradients of weights
    sum        of a layer, over the ranks that share it: as a plan that was played has it, by the value that it makes
    idle       a rank waits for a sum, unless it has nodes of the same stage that neither make what is summed up nor depend on the sum

A rank computes one node at a time, and has one collective under way at a time, so of a set of nodes that follow a message and are followed
by another one it takes their seconds, and those in which it is idle; each sum of a chain ends a session.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from partc.cli.simulation.actions import Pricing
from partc.cli.simulation.sizes import FileSizes
from partc.compiler.cost.machine import FALLBACK
from partc.compiler.pipelines.bodies import PRODUCTS
from partc.compiler.search.candidate import Candidate
from partc.runtime.artifact.format import ALL_REDUCE, CPU, OPTIMIZER
from partc.runtime.artifact.graph.onnx_graph import path_of
from partc.runtime.artifact.tasks.task import parse
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.execution.memory.layout import at_sizes
from partc.runtime.program.steps import Segment, StartCollective, Step, Update

if TYPE_CHECKING:
    from onnx import NodeProto

Mask: TypeAlias = NDArray[np.bool_]
"""A set of nodes of a program."""
Seconds: TypeAlias = NDArray[np.float64]
"""By node its seconds."""


@dataclass(frozen=True)
class Sum:
    """A sum over the ranks of a layer: the node that makes what is summed up, and the bytes of one of so many parts of the batch."""

    node: int
    bytes: Callable[[int], float]


@dataclass(frozen=True)
class Layers:
    """How a plan that was played shares layers: `is_whole`, which nodes each rank of a layer has as one rank has them, and the sums."""

    is_whole: Mask
    sums: Sequence[Sum]


class Program:
    """The nodes of the unsharded program, those that cost the same as one kind; `symbol` is what counts records."""

    def __init__(self, sizes: FileSizes, pricing: Pricing, symbol: str) -> None:
        self.sizes, self.pricing, self.symbol = sizes, pricing, symbol
        self.records = sizes.sizes[symbol]
        self.kinds: list[tuple[NodeProto, Segment]] = []
        self.nodes: list[tuple[NodeProto, Segment]] = []
        self.paths, self.reads, self.makes = list[str](), list[list[str]](), list[list[str]]()
        of_node, numbers = list[int](), dict[object, int]()
        for node, segment in _nodes(sizes.file.steps):
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
            of_node.append(kind)
            self.nodes.append((node, segment))
            self.paths.append(path_of(node))
            self.reads.append([*filter(None, read)])
            self.makes.append([*filter(None, made)])
        self.kind = np.array(of_node, dtype=np.intp)
        self.maker = {name: at for at, made in enumerate(self.makes) for name in made}
        updates = [node for step in sizes.file.steps if isinstance(step, Update) for node in step.nodes]
        self.updated = {name for node in updates for name in node.input}
        self._costs: dict[tuple[int, int], tuple[Seconds, Seconds]] = {}
        self._adding: dict[tuple[int, int], Seconds] = {}
        self._in_tasks: dict[bytes, Mask] = {}

    @cached_property
    def readers(self) -> Mapping[str, Sequence[int]]:
        """By value the nodes that read it."""
        found = defaultdict[str, list[int]](list)
        for at, read in enumerate(self.reads):
            for name in read:
                found[name].append(at)
        return found

    @cached_property
    def makers(self) -> Sequence[Sequence[int]]:
        """By node those that make what it reads."""
        return [[*{self.maker[name] for name in read if name in self.maker}] for read in self.reads]

    @cached_property
    def before(self) -> Sequence[int]:
        """By node, as bits, the nodes on which it depends."""
        found = list[int]()
        for makers in self.makers:
            bits = 0
            for maker in makers:
                bits |= found[maker] | 1 << maker
            found.append(bits)
        return found

    @cached_property
    def behind(self) -> Sequence[int]:
        """By node, as bits, the nodes that depend on it."""
        found = [0] * len(self.nodes)
        for at in reversed(range(len(self.nodes))):
            for maker in self.makers[at]:
                found[maker] |= found[at] | 1 << at
        return found

    @cached_property
    def forward(self) -> int:
        """As bits, the nodes on which the outputs of the program depend, such as its loss."""
        bits = 0
        for maker in {self.maker[one.name] for one in self.sizes.file.manifest.outputs if one.name in self.maker}:
            bits |= self.before[maker] | 1 << maker
        return bits

    @cached_property
    def backward(self) -> int:
        """As bits, nodes of the backward pass, which no node of the forward pass stands behind."""
        named = [any(".grad" in name for name in made) for made in self.makes]
        return bits_of(np.array(named, dtype=bool)) & ~self.forward

    @cached_property
    def repeated(self) -> Mask:
        """The nodes that depend on the batch, in their sizes or by what they read: each microbatch has them."""
        here, other = self.at(1), self.sizes.at({**self.sizes.sizes, self.symbol: 2 * self.records})
        return np.array([here.of_node(*one) != other.of_node(*one) for one in self.kinds], dtype=bool)[self.kind]

    def mask(self, bits: int) -> Mask:
        """A set of nodes that is given as bits."""
        count = len(self.nodes)
        text = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), dtype=np.uint8)
        return np.unpackbits(text, bitorder="little")[:count].astype(bool)

    def at(self, parts: int) -> FileSizes:
        """The file for one of so many parts of the batch."""
        return self.sizes.at({**self.sizes.sizes, self.symbol: self.records // parts})

    def bytes(self, name: str, parts: int) -> float:
        """The bytes of a value of one of so many parts of the batch; 0 where its size is not known."""
        found = self.at(parts).operand(name)
        return 0.0 if found.sizes is None else found.bytes

    def seconds(self, parts: int, shards: int = 1) -> tuple[Seconds, Seconds]:
        """By node its seconds for one of so many parts of the batch, and those of one of so many shards of it at least."""
        key = parts, shards
        if key not in self._costs:
            here, processor = self.at(parts), self.pricing.machine.processor(CPU)
            costs = [self.pricing.node(node, *here.of_node(node, segment)) for node, segment in self.kinds]
            exact = np.array([one.seconds(processor) for one in costs])[self.kind]
            least = exact
            if shards > 1:
                least = np.array([one.in_even_shards(processor, shards) for one in costs])[self.kind]
            self._costs[key] = exact, least
        return self._costs[key]

    def longest(self, seconds: Seconds) -> float:
        """Seconds of the nodes of which each depends on the one before, and that take longest together: however many ranks have them."""
        ends = list[float]()
        for own, makers in zip(seconds.tolist(), self.makers, strict=True):
            ends.append(own + max((ends[maker] for maker in makers), default=0.0))
        return max(ends, default=0.0)

    def adding(self, parts: int, shards: int) -> Seconds:
        """By node what a rank takes more for one microbatch of several at least: a gradient is added to the sum of those before.

        A Gemm does that itself; behind other nodes one more does.
        """
        key = parts, shards
        if key not in self._adding:
            here, processor = self.at(parts), self.pricing.machine.processor(CPU)
            kernel, of_kind = processor.kernel(FALLBACK), np.zeros(len(self.kinds))
            makers = np.array([self.maker[name] for name in self.updated if name in self.maker], dtype=np.intp)
            makers = makers[self.repeated[makers]]
            for kind in {*self.kind[makers].tolist()}:
                node, segment = self.kinds[kind]
                if node.op_type not in ("Gemm", "MatMul", "ReduceSum"):
                    continue
                given, made = here.of_node(node, segment)
                bytes = 0.0 if made[0] is None or made[0].sizes is None else made[0].bytes
                of_kind[kind] = kernel(3 * bytes / shards)
                if node.op_type == "Gemm":
                    cost = self.pricing.node(node, given, made)
                    more = replace(cost, moved=cost.moved + bytes)
                    of_kind[kind] = more.in_even_shards(processor, shards) - cost.in_even_shards(processor, shards)
            found = np.zeros(len(self.nodes))
            found[makers] = of_kind[self.kind[makers]]
            self._adding[key] = found
        return self._adding[key]

    def in_task(self, nodes: Mask) -> Mask:
        """The transposes that do not depend on the batch, and stand in a task with these nodes, of which products read them."""
        key = nodes.tobytes()
        if key not in self._in_tasks:
            found = self._in_tasks[key] = np.zeros(len(self.nodes), dtype=bool)
            for at in np.flatnonzero(nodes):
                waiting = list(self.reads[at]) if self.nodes[at][0].op_type in PRODUCTS else []
                while waiting:
                    maker = self.maker.get(waiting.pop())
                    if maker is None or self.repeated[maker] or self.nodes[maker][0].op_type != "Transpose":
                        continue
                    found[maker] = True
                    waiting += self.reads[maker]
        return self._in_tasks[key]

    def layers(self, one: Candidate, files: Iterable[FileSizes]) -> Layers:
        """What the rank files of a candidate that was played say of how its layers are shared."""
        degrees, alike = one.degrees, dict[object, Callable[[int], float]]()
        parts, each = degrees.dp * one.microbatches, degrees.dp * degrees.tp
        shown, sums = dict[tuple[str, str], set[object]](), dict[int, Sum]()
        first = {file.file.rank // each: file for file in reversed([*files])}
        for file in first.values():
            for step in file.file.steps:
                if isinstance(step, StartCollective) and (found := self._sum(step, file, one, alike)) is not None:
                    sums[found.node] = found
            for step in file.file.steps:
                if isinstance(step, Segment) and (not step.task or parse(step.task).microbatch == 0):
                    for node, segment in _nodes([step]):
                        sized = tuple(map(tuple, file.of_node(node, segment)))
                        shown.setdefault((node.name, node.op_type), set()).add(sized)
        here = self.at(parts)
        is_whole = [
            shown.get((node.name, node.op_type)) == {tuple(map(tuple, here.of_node(node, segment)))}
            for node, segment in self.nodes
        ]
        return Layers(np.array(is_whole, dtype=bool), [sums[node] for node in sorted(sums)])

    def _sum(
        self, step: StartCollective, sizes: FileSizes, one: Candidate, alike: dict[object, Callable[[int], float]]
    ) -> Sum | None:
        """A collective that is a sum over the ranks of a layer, which are next to each other, of what the unsharded program makes."""
        first, call, tp = min(step.ranks, default=0), step.call, one.degrees.tp
        if call.op != ALL_REDUCE or [*step.ranks] != [*range(first, first + tp)] or not call.result:
            return None
        task = parse(step.task) if step.task else None
        if task is not None and task.microbatch:
            return None
        value = call.result.removesuffix(".0") if task is not None else call.result
        record = sizes.file.collectives[call.tag]
        dtype = dense(record.type)
        if value not in self.maker or value in self.updated or record.shape is None or dtype is None:
            return None
        shape, symbols, given = record.shape, sizes.file.manifest.symbols, sizes.sizes
        whole = given[self.symbol] * one.degrees.dp * one.microbatches

        def bytes(parts: int) -> float:
            return float(dtype.bytes_of(at_sizes(shape, symbols, {**given, self.symbol: whole // parts})))

        return Sum(self.maker[value], alike.setdefault((str(shape), record.type), bytes))


def bits_of(mask: Mask) -> int:
    """A set of nodes as bits."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def rising(bits: int) -> list[int]:
    """The places of bits, the first one first."""
    some = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(some, bitorder="little")).tolist()


def _nodes(steps: Sequence[Step]) -> Iterator[tuple[NodeProto, Segment]]:
    """The nodes of all segments, less those of an optimizer."""
    segments = (step for step in steps if isinstance(step, Segment))
    return ((node, one) for one in segments for node in one.formal.nodes if node.domain != OPTIMIZER)
