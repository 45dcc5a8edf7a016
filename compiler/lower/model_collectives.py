"""Collectives that the model itself contains, in a local map, and their transposes in the backward pass.

AllReduce is its own dual, as are AllToAll with its dims exchanged and SendRecv with its pairs turned round; AllGather and ReduceScatter,
Broadcast and Reduce, Gather and Scatter are each other's. What a rank does not get is zeros, in the forward pass as in the backward one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.programs import Comm, Event, Value
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.value_info import Shape
from partc.compiler.lower.comm import CommLowering
from partc.compiler.ops.families.control.local_map import COLLECTIVES, LINE, SPREAD, is_collective
from partc.compiler.sharding.seeding.strategy import refined
from partc.compiler.sharding.values.operands import input_layout_of, output_layout_of
from partc.runtime.artifact import format as fmt
from partc.runtime.artifact.comm import collectives

Attributes = dict[str, int | str | tuple[int, ...]]


@dataclass(frozen=True)
class ModelCollective:
    """A collective of a local map on a group."""

    op_type: str
    axis: str
    size: int
    dim: int = 0
    to: int = 0
    root: int = 0
    reduce: str = "sum"
    pairs: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(node: ir.Node, rank: int) -> ModelCollective:
        """The communication that a node describes; `rank` is the number of dims of its input."""
        said = node.attributes
        dim = said.get_int("dim", 0) % max(rank, 1)
        sources, targets = said.get_ints("sources") or (), said.get_ints("targets") or ()
        return ModelCollective(
            node.op_type,
            said.get_string("axis", ""),
            said.get_int("size", 1),
            dim,
            said.get_int("to", dim) % max(rank, 1),
            said.get_int("root", 0),
            said.get_string("reduce", "sum"),
            tuple(zip(sources, targets, strict=True)),
        )

    @property
    def dual(self) -> ModelCollective:
        """The collective that maps cotangents of the outputs to those of the inputs."""
        turned = tuple((target, source) for source, target in self.pairs)
        dims = (self.to, self.dim) if self.op_type == "AllToAll" else (self.dim, self.to)
        name = COLLECTIVES[self.op_type].dual
        return ModelCollective(name, self.axis, self.size, *dims, self.root, "sum", turned)


NODES: Mapping[str, Callable[[ModelCollective], tuple[str, Attributes]]] = {
    "AllReduce": lambda one: (fmt.ALL_REDUCE, {fmt.REDUCE: one.reduce}),
    "AllGather": lambda one: (fmt.ALL_GATHER, {fmt.AXIS: one.dim}),
    "ReduceScatter": lambda one: (fmt.REDUCE_SCATTER, {fmt.AXIS: one.dim, fmt.REDUCE: fmt.SUM}),
    "AllToAll": lambda one: (fmt.ALL_TO_ALL, {fmt.SPLIT_AXIS: one.dim, fmt.CONCAT_AXIS: one.to}),
    "Broadcast": lambda one: (fmt.BROADCAST, {fmt.ROOT: one.root}),
    "Reduce": lambda one: (fmt.REDUCE_TO, {fmt.ROOT: one.root, fmt.REDUCE: fmt.SUM}),
}
"""Maps each collective to the node of the artifact that does it, with its attributes; the others are messages from rank to rank, an
Exchange.
"""


def write(
    comm: CommLowering,
    collective: ModelCollective,
    group: Group,
    values: tuple[Value, Value],
    of: tuple[ir.Value, ir.Value],
    cause: str,
) -> None:
    """Writes the collective on a group: it reads the first of `values`, and makes the second; `of`: of what they are versions."""
    mesh, named = refined(comm.program.plan.axes_of(group))
    sets, sets_name = comm.subgroups(mesh, named[collective.axis], group)
    shape = comm.values[of[0]].shape
    work = _Work(comm, collective, group, sets, sets_name, values, of, shape, cause)
    comm.job.declare(group, values[1], of[1], comm.values[of[1]].shape)
    if collective.op_type == SPREAD:
        comm.emit(group, "Identity", [values[0]], values[1])
    elif collective.op_type in NODES:
        work.one_node(*NODES[collective.op_type](collective))
    else:
        work.exchanged()


def is_written(node: ir.Node) -> bool:
    """Whether a node is a collective of several ranks."""
    return is_collective(node) and node.attributes.get_int("size", 1) > 1


def write_forward(comm: CommLowering, instance: NodeOnGroup) -> None:
    """The collective of a node, in the programs of its group."""
    node = instance.node
    read, made = input_layout_of(comm.program, instance, 0), output_layout_of(comm.program, instance, 0)
    values, of = (comm.values.at[read], comm.values.at[made]), (read.value, made.value)
    write(comm, ModelCollective.of(node, len(read.layout.cuts)), instance.group, values, of, cause_of(node))


def write_backward(
    comm: CommLowering, instance: NodeOnGroup, values: tuple[Value, Value], cotangents: tuple[ir.Value, ir.Value]
) -> None:
    """The dual of a node's collective: of the output's cotangent it makes the input's. `cotangents`: of what `values` are versions."""
    one = ModelCollective.of(instance.node, len(input_layout_of(comm.program, instance, 0).layout.cuts)).dual
    write(comm, one, instance.group, values, cotangents, f"gradient of '{comm.program.paths[instance.node]}'")


def cause_of(node: ir.Node) -> str:
    """Why a collective of the model is there."""
    return f"written at {node.metadata_props.get(LINE, 'the model')}"


@dataclass
class _Work:
    comm: CommLowering
    collective: ModelCollective
    group: Group
    sets: tuple[Group, ...]
    sets_name: str
    values: tuple[Value, Value]
    of: tuple[ir.Value, ir.Value]
    shape: Shape | None
    cause: str

    def event(self, op_type: str) -> tuple[int, str]:
        count = self.collective.size
        sent = {
            fmt.ALL_REDUCE: Fraction(2 * (count - 1), count),
            fmt.ALL_GATHER: Fraction(count - 1),
            fmt.REDUCE_SCATTER: Fraction(count - 1, count),
            fmt.ALL_TO_ALL: Fraction(count - 1, count),
        }.get(op_type, Fraction(count - 1, count) if self.collective.op_type == "Scatter" else Fraction(1))
        amount = self.comm.amount(self.of[0], sent)
        tag = len(self.comm.events)
        self.comm.events.append(
            Event(tag, op_type, self.of[1], self.values[1], self.sets, self.sets_name, self.shape, amount, self.cause)
        )
        return tag, amount

    def append(
        self, ranks: Group, op_type: str, given: bool, made: bool, said: Attributes, event: tuple[int, str]
    ) -> None:
        inputs, outputs = (self.values[0],) if given else (), (self.values[1],) if made else ()
        attributes: Attributes = {fmt.GROUP: self.sets_name, **said}
        step = Comm(op_type, inputs, outputs, attributes, event[0], self.of[1], self.cause, event[1])
        self.comm.append(ranks, step)

    def one_node(self, op_type: str, said: Attributes) -> None:
        """A node on every rank: where one rank gives, it alone has an input; where one takes, it alone has an output, others zeros."""
        kind, event = collectives.COLLECTIVES[op_type], self.event(op_type)
        if not kind.root:
            self.append(self.group, op_type, True, True, said, event)
            return
        gives = kind.root == "gives"
        roots = tuple(ranks[self.collective.root] for ranks in self.sets)
        others = tuple(rank for rank in self.group if rank not in roots)
        self.append(roots, op_type, True, True, said, event)
        self.append(others, op_type, not gives, gives, said, event)
        if not gives:
            self.no_result(others)

    def exchanged(self) -> None:
        """A Gather, Scatter or SendRecv: boxes from rank to rank."""
        event = self.event(fmt.EXCHANGE)
        rank = len(self.shape or ())
        without: list[int] = []
        for ranks in self.sets:
            sends: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
            receives: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
            for source, target, given, taken in self.routes():
                sends.setdefault(source, []).append((ranks[target], _box(rank, self.collective.dim, given)))
                receives.setdefault(target, []).append((ranks[source], _box(rank, self.collective.dim, taken)))
            for place, own in enumerate(ranks):
                leaving, coming = sends.get(place, []), receives.get(place, [])
                if not coming:
                    without.append(own)
                if not leaving and not coming:
                    continue
                said: Attributes = {
                    fmt.SEND_PEERS: tuple(peer for peer, _ in leaving),
                    fmt.SEND_BOXES: tuple(number for _, box in leaving for number in box),
                    fmt.RECV_PEERS: tuple(peer for peer, _ in coming),
                    fmt.RECV_BOXES: tuple(number for _, box in coming for number in box),
                    fmt.RANK: rank,
                }
                self.append((own,), fmt.EXCHANGE, bool(leaving), bool(coming), said, event)
        self.no_result(tuple(without))

    def routes(self) -> Sequence[tuple[int, int, tuple[int, int], tuple[int, int]]]:
        """Source and target by their places, and which shard along the dim is given and taken, of how many."""
        size, root, whole = self.collective.size, self.collective.root, (0, 1)
        match self.collective.op_type:
            case "Gather":
                return [(place, root, whole, (place, size)) for place in range(size)]
            case "Scatter":
                return [(root, place, (place, size), whole) for place in range(size)]
            case _:
                return [(source, target, whole, whole) for source, target in self.collective.pairs]

    def no_result(self, ranks: Group) -> None:
        """Writes zeros on ranks that receive nothing, in the shape that the others have: of what they give, with one dim multiplied."""
        if not ranks:
            return
        out, dtype = self.values[1], self.of[0].dtype
        assert dtype is not None
        shape = self.comm.derived_op(ranks, "Shape", [self.values[0]], out, "given")
        if COLLECTIVES[self.collective.op_type].multiplies:
            times = [self.collective.size if dim == self.collective.dim else 1 for dim in range(len(self.shape or ()))]
            shape = self.comm.derived_op(
                ranks, "Mul", [shape, self.comm.constant(ranks, out, "times", times)], out, "shape"
            )
        zero = ir.tensor(np.zeros(1, dtype.numpy()))
        self.comm.emit(ranks, "ConstantOfShape", [shape], out, value=zero)


def _box(rank: int, dim: int, shard: tuple[int, int]) -> tuple[int, ...]:
    """Begin, end and denominator per dim: one shard along `dim`, all along the others."""
    number, of = shard
    return tuple(one for place in range(rank) for one in ((number, number + 1, of) if place == dim else (0, 1, 1)))
