"""The actions of a rank in a step with their durations, computed from the rank's file, the sizes of the symbols and a machine.

A segment is one run of a session, and the seconds of its nodes; an update is its function over flat memory, shard by shard, as the runtime
runs it. A message or a collective gives the bytes that the runtime gives the transport. A collective of several values copies them side by
side before it begins, and apart behind it, but for an AllReduce, which works in the memory where they lie.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx_ir as ir
from onnx import FunctionProto, NodeProto
from partc.compiler.cost import play
from partc.compiler.cost.machine import FALLBACK, Machine, Processor
from partc.compiler.cost.play import Action
from partc.compiler.cost.price import LAYOUT, NodeCost, cost_of, function_seconds
from partc.compiler.cost.sizes import FileSizes, Operand
from partc.compiler.cost.turn import turn_of
from partc.runtime.artifact.format import CPU, OPTIMIZER
from partc.runtime.artifact.graph.onnx_graph import path_of
from partc.runtime.artifact.graph.row_function import NEXT, ROWS, is_rowwise
from partc.runtime.artifact.tensors.boxes import slices
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.communication.collective import are_copied
from partc.runtime.execution.memory.layout import at_sizes
from partc.runtime.program.steps import (
    Border,
    Collective,
    Copy,
    LookUp,
    PostRecv,
    Segment,
    Send,
    StartCollective,
    Step,
    Update,
    WaitCollective,
    WaitRecv,
)
from partc.runtime.updates.updater import SHARD

AGREEMENT = -1
"""The tag of the agreement of all ranks on the sizes of a step."""
_ROWS = 8
"""The bytes of a row's number."""


class Pricing:
    """Prices the steps of rank files on a machine; nodes, segments and functions of operands that are alike are priced once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._nodes: dict[object, NodeCost] = {}
        self._functions: dict[object, float] = {}
        self._segments: dict[object, tuple[float, dict[str, float], float]] = {}

    def node(self, node: NodeProto, given: Sequence[Operand | None], made: Sequence[Operand | None]) -> NodeCost:
        """Returns the cost of a node."""
        attributes = tuple(sorted(one.SerializeToString() for one in node.attribute))
        key = node.domain, node.op_type, attributes, tuple(given), tuple(made)
        if key not in self._nodes:
            self._nodes[key] = cost_of(shown(node), given, made)
        return self._nodes[key]

    def segment(self, segment: Segment, sizes: FileSizes) -> tuple[float, dict[str, float], float]:
        """Seconds of a segment, of its modules, and its operations."""
        processor = self.machine.processor(segment.target or CPU)
        modules, operations = defaultdict[str, float](float), 0.0
        functions = {one.name: one for one in sizes.file.model.functions}
        of, read, nodes = sizes.of_segment(segment), sizes.reader(segment), segment.formal.nodes
        called = tuple(
            functions[node.op_type].SerializeToString(deterministic=True)
            for node in nodes
            if node.domain == OPTIMIZER and node.op_type in functions
        )
        text = b"".join(node.SerializeToString(deterministic=True) for node in nodes)
        key = segment.target, text, called, tuple(of.values())
        if key in self._segments:
            return self._segments[key]
        for node in nodes:
            if node.domain == OPTIMIZER and node.op_type in functions:
                operands = [of.get(name) for name in node.input]
                modules[path_of(node)] += self.function(functions[node.op_type], operands, processor)
                continue
            turn = turn_of(node, read) if node.op_type == "Scan" else None
            operand: Callable[[str], Operand | None] = of.get if turn is None else turn.operand
            count = 1 if turn is None else turn.count
            for one in (node,) if turn is None else turn.body.node:
                sides = ([operand(name) if name else None for name in names] for names in (one.input, one.output))
                cost = self.node(one, *sides)
                modules[path_of(node)] += count * cost.seconds(processor)
                operations += count * cost.operations
        seconds = processor.session + sum(modules.values())
        known = self.machine.segments.get(digest(segment, sizes)) if self.machine.segments else None
        found = self._segments[key] = known if known is not None else seconds, modules, operations
        return found

    def update(self, update: Update, functions: Mapping[str, FunctionProto], sizes: FileSizes) -> float:
        """Seconds of an update, in shards."""
        processor = self.machine.processor(update.target or CPU)
        found = updated(update, functions, sizes)
        return sum(self.function(functions[name], operands, processor, SHARD) for name, operands in found)

    def function(
        self, function: FunctionProto, operands: Sequence[Operand | None], processor: Processor, shard: int = 0
    ) -> float:
        """Seconds of a function, as `function_seconds`."""
        key = function.SerializeToString(deterministic=True), tuple(operands), id(processor), shard
        if key not in self._functions:
            self._functions[key] = function_seconds(function, operands, processor, shard)
        return self._functions[key]


def updated(
    update: Update, functions: Mapping[str, FunctionProto], sizes: FileSizes
) -> list[tuple[str, list[Operand]]]:
    """The functions that an update calls, with their operands: once on all that it updates alike, which lies side by side, and once on the
    rows of a table, where the rows that are looked up stand for the table."""
    flat, by_rows = dict[tuple[str, ...], list[Operand]](), list[tuple[str, list[Operand]]]()
    for node in update.nodes:
        if (function := functions.get(node.op_type)) is None:
            continue
        arguments = [sizes.operand(name) for name in node.input]
        if is_rowwise(function):
            tables = {name.removesuffix(NEXT) for name in function.output}
            rows = arguments[[*function.input].index(ROWS)]
            of = zip(function.input, arguments, strict=True)
            by_rows.append((node.op_type, [rows if formal in tables else one for formal, one in of]))
            continue
        alike = node.op_type, *sorted(str(one.SerializeToString(deterministic=True)) for one in node.attribute)
        operands = flat.setdefault(alike, [Operand((0,), one.item) for one in arguments])
        for k, one in enumerate(arguments):
            count, before = math.prod(one.sizes or ()), math.prod(operands[k].sizes or ())
            operands[k] = Operand((count if count == 1 else before + count,), one.item)
    return [*((alike[0], operands) for alike, operands in flat.items()), *by_rows]


def shown(node: NodeProto) -> ir.Node:
    """The node by itself, without the bodies that it may have."""
    return ir.Node(
        node.domain,
        node.op_type,
        inputs=[ir.Value(name=name) if name else None for name in node.input],
        attributes=[
            ir.serde.deserialize_attribute(one) for one in node.attribute if not (one.HasField("g") or one.graphs)
        ],
        outputs=[ir.Value(name=name) for name in node.output],
    )


def rank_actions(sizes: FileSizes, pricing: Pricing) -> list[Action]:
    """The actions of a rank in their order."""
    return list(_Rank(sizes, pricing).actions())


class _Rank:
    def __init__(self, sizes: FileSizes, pricing: Pricing) -> None:
        self.sizes, self.pricing, self.file = sizes, pricing, sizes.file
        self.functions = {one.name: one for one in self.file.model.functions}
        self.priced: dict[int, tuple[float, dict[str, float], float]] = {}
        self.left = dict[int, float]()

    def actions(self) -> Iterator[Action]:
        manifest, machine = self.file.manifest, self.pricing.machine
        processor = machine.processor(CPU)
        yield play.Compute("what a step does beside its actions", seconds=processor.step)
        if manifest.ranks > 1:
            travel = machine.links[0].collective("AllReduce", manifest.ranks, 0)
            what = "the agreement on the sizes of a step"
            yield play.Begin(what, tag=AGREEMENT, travel=travel)
            yield play.Finish(what, tag=AGREEMENT)
        for step in self.file.steps:
            yield from self.of(step)

    def of(self, step: Step) -> Iterator[Action]:
        machine, what = self.pricing.machine, str(step)
        match step:
            case Segment():
                key = id(step.formal)
                if key not in self.priced:
                    self.priced[key] = self.pricing.segment(step, self.sizes)
                seconds, modules, operations = self.priced[key]
                path = path_of(step.formal.nodes[0])
                yield play.Compute(what, path, step.task, seconds, operations, modules)
            case Update():
                seconds = self.pricing.update(step, self.functions, self.sizes)
                yield play.Compute(what, "update", seconds=seconds)
            case Copy():
                moved = 2 * self.sizes.operand(step.source).bytes
                seconds = machine.processor(step.to).kernel("layout")(moved)
                yield play.Compute(what, step.path, step.task, seconds)
            case Send():
                bytes = self.message(step.tag)
                travel = machine.link((self.file.rank, step.peer)).send(bytes)
                yield play.Send(
                    what,
                    step.path,
                    tag=step.tag,
                    group=step.group,
                    peer=step.peer,
                    travel=travel,
                    bytes=bytes,
                )
            case WaitRecv():
                yield play.Receive(what, step.path, tag=step.tag, group=step.group, peer=step.peer)
            case StartCollective() | LookUp():
                call, bytes = step.call, self.given(step)
                link = machine.link(step.ranks)
                seconds = link.collective(call.op, len(step.ranks), bytes)
                beside = 0.0 if isinstance(step, LookUp) else link.overlap * seconds
                packing, placing = (0.0, 0.0) if isinstance(step, LookUp) else self.copies(step)
                self.left[call.tag] = seconds - beside + placing
                at = what, call.path, step.task
                yield play.Begin(*at, packing, tag=call.tag, op=call.op, travel=beside, bytes=bytes, group=call.group)
                if isinstance(step, LookUp):
                    yield play.Finish(*at, self.left[call.tag], tag=call.tag, op=call.op, group=call.group)
            case WaitCollective():
                call, seconds = step.call, self.left.get(step.call.tag, 0.0)
                yield play.Finish(what, call.path, step.task, seconds, tag=call.tag, op=call.op, group=call.group)
            case PostRecv() | Border():  # a body is played once
                pass

    def copies(self, step: StartCollective) -> tuple[float, float]:
        """Seconds in which a collective packs what it gives, and puts what has come into its places.

        Several values are copied side by side: gradients and parameters of a bucket, which no cache holds since they were made.
        One value is copied piece by piece where it is split or joined along another axis than the first.
        """
        call, count = step.call, len(step.ranks)
        record = self.file.collectives[call.tag]
        dtype = dense(record.type)
        if count < 2 or call.kind.boxes or call.in_one_buffer or record.shape is None or dtype is None:
            return 0.0, 0.0
        shape = at_sizes(record.shape, self.file.manifest.symbols, self.sizes.sizes)
        packs, places = (True, True) if call.parts else are_copied(call, shape, count)
        given = dtype.bytes_of(shape)
        made = given * count if call.kind.joins else given
        made = made // count if call.kind.splits else made
        processor = self.pricing.machine.processor(CPU)
        copy = processor.kernel(FALLBACK).streamed if call.parts else processor.kernel(LAYOUT)
        return copy(2 * given) if packs else 0.0, copy(2 * made) if places else 0.0

    def message(self, tag: int) -> int:
        """The bytes of a message."""
        record = self.file.transfers[tag]
        dtype = dense(record.type)
        if record.shape is None or dtype is None:
            self.sizes.unknown.add(record.value)
            return 0
        return dtype.bytes_of(at_sizes(record.shape, self.file.manifest.symbols, self.sizes.sizes))

    def given(self, step: Collective | LookUp) -> int:
        """The bytes that the rank gives a collective: its input, of an Exchange the boxes of others, of a lookup at most."""
        record = self.file.collectives[step.call.tag]
        dtype = dense(record.type)
        if record.shape is None or dtype is None:
            self.sizes.unknown.add(record.value)
            return 0
        shape = at_sizes(record.shape, self.file.manifest.symbols, self.sizes.sizes)
        if isinstance(step, LookUp):
            ids = math.prod(shape)
            row = math.prod(step.call.row) * dtype.bits // 8
            return ids * (_ROWS + row if step.call.op == "Pull" else row)
        call = step.call
        if not call.kind.boxes:
            gives = call.kind.root != "gives" or step.ranks[call.root] == self.file.rank
            return dtype.bytes_of(shape) if gives and len(step.ranks) > 1 else 0
        source = self.sizes.operand(call.source).sizes if call.source else None
        if source is None:
            return 0
        boxes = (slices(one.box, source) for one in call.gives if one.peer != self.file.rank)
        return sum(dtype.bytes_of(tuple(part.stop - part.start for part in box)) for box in boxes)


def digest(segment: Segment, sizes: FileSizes) -> str:
    """A segment by what it computes, whatever its values are called: ops, attributes, and how values of which sizes go through them."""
    numbers: dict[str, int] = {}
    text = hashlib.sha256()
    for node in segment.formal.nodes:
        given, made = sizes.of_node(node, segment)
        attributes = sorted(one.SerializeToString() for one in node.attribute)
        places = [numbers.setdefault(name, len(numbers)) for name in (*node.input, *node.output)]
        shown = [None if one is None else (one.sizes, one.item) for one in (*given, *made)]
        text.update(repr((node.domain, node.op_type, attributes, places, shown)).encode())
    return text.hexdigest()[:16]
