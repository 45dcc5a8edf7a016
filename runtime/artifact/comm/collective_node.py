"""Collective nodes as dataclasses: their fields, and the law of the result's shape. Lookups are read in `lookup_node.py`.

    call = read_call(node, "rank_0000.onnx")
    result_shape(call, (4, 6), 3)          # the result's shape on each of 3 ranks whose inputs have the shape (4, 6)

The law of shapes, for p ranks: the axis that an op splits is divided by p, the axis that it joins is multiplied by p (`collectives.py`);
other dims stay. Negative axes count from the end.

Finds the rank at the other end of a Send or Recv, which names either that rank or a group of pairs (source, target).

Send(x) {peer: 5, tag: 3}            Send(x) {group: 0-512+511, tag: 3}      on rank 7, of the pair (7, 519), this names rank 519
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

from partc.runtime.artifact.comm.border_node import BorderCall, border_call, border_problems
from partc.runtime.artifact.comm.collectives import BODIES, COLLECTIVES, GROUP_OPS, LOOKUPS, CollectiveOp, dynamic_ops
from partc.runtime.artifact.comm.group_call import GroupCall
from partc.runtime.artifact.comm.lookup_node import LookupCall, lookup_call, lookup_problems, wrong_lookup
from partc.runtime.artifact.format import (
    DOMAIN,
    GROUP,
    PEER,
    RANK,
    RECV_BOXES,
    RECV_PEERS,
    REDUCE,
    REDUCTIONS,
    ROOT,
    SEND,
    SEND_BOXES,
    SEND_PEERS,
    SUM,
    TAG,
    Collective,
)
from partc.runtime.artifact.graph.onnx_graph import path_of
from partc.runtime.artifact.tensors.dtypes import Dtype, dense
from partc.runtime.errors import ArtifactError

if TYPE_CHECKING:
    from onnx import AttributeProto, NodeProto


AnyCall: TypeAlias = "CollectiveCall | LookupCall | BorderCall"
Shape: TypeAlias = tuple[int, ...]
Span: TypeAlias = tuple[tuple[int, int, int], ...]
"""A box: per dim begin, end and denominator."""


@dataclass(frozen=True)
class PeerBox:
    """A box of a value that goes to `peer` or comes from it."""

    peer: int
    box: Span


@dataclass(frozen=True)
class CollectiveCall(GroupCall):
    """A collective node of a rank; `source` is None where the rank has no input, `result` where it has no output.

    `axis` is the axis that the op splits or joins; an op that does both (AllToAll) splits `axis` and joins `concat_axis`. `gives` and
    `takes` are the boxes that an Exchange sends and receives. A node of several values has `parts`, the pairs of an input and its output;
    for an AllReduce `source` and `result` then name the one buffer that holds all of them, for other ops they are None.
    """

    LAW: ClassVar[str] = "op, reduction, axis or root"
    source: str | None
    result: str | None
    reduce: str = ""
    axis: int = 0
    concat_axis: int = 0
    root: int = 0
    gives: tuple[PeerBox, ...] = ()
    takes: tuple[PeerBox, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> CollectiveOp:
        """The op's entry in `COLLECTIVES`."""
        return COLLECTIVES[self.op]

    @property
    def join_axis(self) -> int:
        """The axis along which the op, if it joins, concatenates its result."""
        return self.concat_axis if self.kind.splits else self.axis

    @property
    def value(self) -> str:
        return self.parts[0][1] if self.parts else self.result or self.source or ""

    @property
    def in_one_buffer(self) -> bool:
        """Whether its values are adjacent in one buffer, in which the op works in place: only for an AllReduce of several values."""
        return bool(self.parts) and self.kind.keeps_size

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(source for source, _ in self.parts) or tuple(filter(None, [self.source]))

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(result for _, result in self.parts) or tuple(filter(None, [self.result]))

    @property
    def typed(self) -> str | None:
        return self.source

    @property
    def law(self) -> tuple[object, ...]:
        return self.op, self.reduce, self.axis, self.concat_axis, self.root

    @property
    def leaves(self) -> bool:
        """Whether the rank may continue while bytes are still being sent, as after a Send."""
        return self.kind.boxes or not self.outputs

    def renamed(self, names: Mapping[str, str], tag: int, path: str) -> Self:
        parts = tuple((names[source], names[result]) for source, result in self.parts)
        ends = [names.get(name, name) if name else None for name in (self.source, self.result)]
        if parts and self.in_one_buffer:
            ends = [_buffer(parts)] * 2
        return replace(self, source=ends[0], result=ends[1], parts=parts, tag=tag, path=path)


def read_call(node: NodeProto, where: str) -> AnyCall:
    """Reads a node of `GROUP_OPS` as a call; ArtifactError, naming the file `where`, if the op is unknown or the node is not valid."""
    if node.op_type not in GROUP_OPS:
        raise ArtifactError(
            f"{where}: this partc does not know the op '{DOMAIN}.{node.op_type}'\n  help: install a newer partc"
        )
    attributes = {attribute.name: attribute for attribute in node.attribute}
    name = node.name or next(filter(None, (*node.output, *node.input)), "")
    problems = [*_problems(node, attributes)]
    if problems:
        lines = [f"{where}: {node.op_type} '{name}': {problem}" for problem in problems]
        raise ArtifactError("\n".join([*lines, "  help: compile again"]))

    def number(name: str) -> int:
        return attributes[name].i if name in attributes else 0

    if node.op_type in LOOKUPS:
        return lookup_call(node, attributes)
    if node.op_type in BODIES:
        return border_call(node, attributes)
    kind = COLLECTIVES[node.op_type]
    parts = tuple(zip(node.input, node.output, strict=True)) if len(node.input) > 1 else ()
    source, result = next(filter(None, node.input), None), next(filter(None, node.output), None)
    if parts:
        source = result = _buffer(parts) if kind.keeps_size else None
    return CollectiveCall(
        op=node.op_type,
        source=source,
        result=result,
        group=attributes[GROUP].s.decode(errors="replace"),
        tag=number(TAG),
        path=path_of(node),
        reduce=attributes[REDUCE].s.decode(errors="replace") if REDUCE in attributes else "",
        axis=number(kind.splits or kind.joins),
        concat_axis=number(kind.joins if kind.splits else ""),
        root=number(ROOT),
        gives=_shards(attributes, SEND_PEERS, SEND_BOXES),
        takes=_shards(attributes, RECV_PEERS, RECV_BOXES),
        parts=parts,
    )


def _buffer(parts: Sequence[tuple[str, str]]) -> str:
    """The name of the buffer that holds several adjacent values."""
    return f"{parts[0][1]} and {len(parts) - 1} more"


def result_shape(call: CollectiveCall, shape: Shape, ranks: int) -> Shape:
    """Returns the shape of the result on each of `ranks` ranks whose inputs have the shape `shape`.

    ValueError where an axis does not exist or is not divisible by the ranks. An Exchange's result has the shape that its rank file states.
    """
    kind = call.kind
    if kind.splits:
        shape = _scaled(shape, place_of(call.axis, shape), 1, ranks)
    if kind.joins:
        shape = _scaled(shape, place_of(call.join_axis, shape), ranks, 1)
    return shape


def wrong_end(call: CollectiveCall, is_root: bool) -> str:
    """Returns the fault of the operand or result of a call with a root, on the root or on another rank; empty if it has none."""
    who, root = "its root" if is_root else "a rank that is not its root", call.kind.root
    if root == "takes" and bool(call.result) != is_root:
        return f"{who} {'gets nothing' if is_root else 'gets a result'}"
    if root == "gives" and is_root and not call.source:
        return f"{who} gives nothing"
    return f"{who} gets nothing" if root == "gives" and not is_root and not call.result else ""


def contradictions(call: AnyCall, record: Collective, ranks: Sequence[int], rank: int) -> Iterator[str]:
    """Yields the reasons why `rank` cannot run a call that the manifest lists as `record`; `ranks`: the group's list that has `rank`."""
    if isinstance(call, BorderCall):
        return
    dtype = dense(record.type)
    if dtype is None:
        yield f"a {record.type} cannot take part in a collective"
    if isinstance(call, LookupCall):
        yield from wrong_lookup(call, dtype, len(ranks), ranks.index(rank))
        return
    if dtype is not None and call.reduce and not reducible(dtype, call.reduce):
        yield f"a {record.type} has no {call.reduce}"
    if record.shape is None and not call.kind.dynamic:
        yield f"the shape of its input is not known; only {dynamic_ops()} take such"
    if not 0 <= call.root < len(ranks):
        yield f"its root is {call.root}, and its list has {len(ranks)} ranks"
    elif wrong := wrong_end(call, ranks[call.root] == rank):
        yield wrong
    if outside := sorted({one.peer for one in (*call.gives, *call.takes)} - {*ranks}):
        yield f"its peer {outside[0]} is not in its list, ranks {', '.join(map(str, ranks))}"


def place_of(axis: int, shape: Shape) -> int:
    """Returns the axis counted from the front; ValueError where the shape has no such axis."""
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"there is no axis {axis} in a value of {len(shape)} dims")
    return axis % len(shape)


def reducible(dtype: Dtype, reduce: str) -> bool:
    """Whether values of a type can be reduced by `reduce`: complex numbers only by a sum, since they have no order."""
    return reduce == SUM or not dtype.name.startswith("complex")


def _scaled(shape: Shape, axis: int, times: int, by: int) -> Shape:
    size = shape[axis] * times
    if size % by:
        raise ValueError(f"axis {axis} of {size} is not divisible by {by} ranks")
    return (*shape[:axis], size // by, *shape[axis + 1 :])


def _shards(attributes: Mapping[str, AttributeProto], peers: str, boxes: str) -> tuple[PeerBox, ...]:
    if peers not in attributes:
        return ()
    rank = attributes[RANK].i
    numbers = list(attributes[boxes].ints) if boxes in attributes else []
    dims = [(numbers[at], numbers[at + 1], numbers[at + 2]) for at in range(0, len(numbers), 3)]
    return tuple(
        PeerBox(peer, tuple(dims[index * rank : (index + 1) * rank]))
        for index, peer in enumerate(attributes[peers].ints)
    )


def _problems(node: NodeProto, attribute_of: Mapping[str, AttributeProto]) -> list[str]:
    """Returns the reasons why a node is not a valid call."""
    attributes = GROUP_OPS[node.op_type].every_attribute
    problems = [
        f"its attribute '{one.name}' is missing" for one in attributes if one.required and one.name not in attribute_of
    ]
    if node.op_type in LOOKUPS:
        return problems or [*lookup_problems(node, attribute_of)]
    if node.op_type in BODIES:
        return problems or [*border_problems(node, attribute_of)]
    kind = COLLECTIVES[node.op_type]
    sources, results = [*filter(None, node.input)], [*filter(None, node.output)]
    if kind.coalesces and len(sources) > 1:
        axis = kind.splits or kind.joins
        if axis in attribute_of and attribute_of[axis].i != 0:
            problems.append(f"its axis is {attribute_of[axis].i}, and several values are cut along axis 0")
        if len(sources) != len(results) or len(sources) != len(node.input):
            problems.append(f"it has {len(sources)} inputs and {len(results)} outputs, and makes one of each")
        sources, results = sources[:1], results[:1]
    if len(sources) > 1 or (not sources and not kind.boxes and kind.root != "gives"):
        problems.append(f"it has {len(sources)} inputs, and takes one")
    if len(results) > 1 or (not results and not kind.boxes and not kind.root):
        problems.append(f"it has {len(results)} outputs, and makes one")
    if REDUCE in attribute_of and (reduction := attribute_of[REDUCE].s.decode(errors="replace")) not in REDUCTIONS:
        problems.append(f"its reduction is '{reduction}'; it is one of {', '.join(REDUCTIONS)}")
    if kind.boxes and not problems:
        problems += _box_problems(attribute_of, bool(sources), SEND_PEERS, SEND_BOXES, "input")
        problems += _box_problems(attribute_of, bool(results), RECV_PEERS, RECV_BOXES, "output")
    return problems


def _box_problems(found: Mapping[str, AttributeProto], there: bool, peers: str, boxes: str, kind: str) -> Sequence[str]:
    count = len(found[peers].ints) if peers in found else 0
    numbers = list(found[boxes].ints) if boxes in found else []
    rank = found[RANK].i
    if len(numbers) != 3 * rank * count:
        return [f"'{boxes}' has {len(numbers)} numbers, and {count} boxes of {rank} dims need {3 * rank * count}"]
    if bool(count) != there:
        return [f"it has {count} '{peers}' and {'an' if there else 'no'} {kind}"]
    cells = [tuple(numbers[at : at + 3]) for at in range(0, len(numbers), 3)]
    wrong = [cell for cell in cells if not 0 <= cell[0] <= cell[1] <= cell[2] or cell[2] == 0]
    return [f"'{boxes}' has {cell[0]}/{cell[2]} to {cell[1]}/{cell[2]}" for cell in wrong[:1]]


def peer_of(node: NodeProto, groups: Mapping[str, Sequence[int]]) -> int:
    """Returns the rank at the other end, -1 where the node names none; `groups` maps each group to its list with the node's own rank."""
    for one in node.attribute:
        if one.name == PEER:
            return int(one.i)
        if one.name == GROUP:
            pair = groups.get(one.s.decode(errors="replace"), ())
            return pair[node.op_type == SEND] if len(pair) == 2 else -1
    return -1
