"""Cutting a rank's program at its communication nodes into steps: segments of compute nodes, sends, and receives.

The order of the file is kept for everything that communicates. A segment ends before a Send of a value that it makes, and before
the first node that needs a received value nobody has waited for; all other cuts would only cost. A receive is posted at its place
in the file, or before the segment that is open there, and waited for at the first use of its value. A collective begins like a
Send and is waited for like a receive. So communication overlaps computation as far as the order allows, and no rank waits for
what the global order puts later.

A segment begins before nodes that are computed again: in one session with those that made the values first, onnxruntime would take
both for one, and keep the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ..artifact.comm_node import Call, read_call
from ..artifact.format import DOMAIN, OPTIMIZER, PEER, RECV, SEND, TAG
from ..artifact.onnx_graph import is_recomputed, op_and_path, reads
from ..artifact.onnx_graph import path_of as path_of
from ..artifact.optimizer_function import is_elementwise
from ..artifact.rank_constants import is_rank_constant, names_of
from ..errors import ArtifactError

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_SHOWN = 10


@dataclass(frozen=True)
class Segment:
    """Compute nodes that run in one session: values in, values out that others need, and the initializers among its operands."""

    nodes: Sequence[NodeProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initializers: tuple[str, ...]

    def __str__(self) -> str:
        if len(self.nodes) == 1:
            return op_and_path(self.nodes[0])
        return f"{len(self.nodes)} nodes from {op_and_path(self.nodes[0])} to {op_and_path(self.nodes[-1])}"


@dataclass(frozen=True)
class Update:
    """Nodes of the optimizer, which overwrite parameters and slots: every reader of the old values comes before this step."""

    nodes: Sequence[NodeProto]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The values that the nodes read and none of them makes."""
        made = {name for node in self.nodes for name in node.output}
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.input if name and name not in made))

    def __str__(self) -> str:
        first = self.nodes[0]
        more = f" and {len(self.nodes) - 1} more" if len(self.nodes) > 1 else ""
        return f"update of '{first.input[0]}'{more} ({first.op_type})"


@dataclass(frozen=True)
class Message:
    """One end of a transfer as the file says it: the value, the rank at the other end, the tag, and the op's source name."""

    value: str
    peer: int
    tag: int
    path: str


@dataclass(frozen=True)
class Send(Message):
    """The value leaves for `peer`; it may be overwritten once the send is complete."""

    def __str__(self) -> str:
        return f"Send of '{self.value}' to rank {self.peer}{_source(self.path)}"


@dataclass(frozen=True)
class PostRecv(Message):
    """The receive is posted: from here on the value's buffer belongs to it."""

    def __str__(self) -> str:
        return f"posting of Recv of '{self.value}' from rank {self.peer}{_source(self.path)}"


@dataclass(frozen=True)
class WaitRecv(Message):
    """The value is needed: the receive must be complete."""

    def __str__(self) -> str:
        return f"Recv of '{self.value}' from rank {self.peer}{_source(self.path)}"


@dataclass(frozen=True)
class _Collective:
    """One end of a collective: the call, and the ranks that take part; no ranks where a file is read without its manifest."""

    call: Call
    ranks: tuple[int, ...]

    def _text(self) -> str:
        ranks = f", ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.call.op} of '{self.call.value}' in group '{self.call.group}'{ranks}{_source(self.call.path)}"


@dataclass(frozen=True)
class StartCollective(_Collective):
    """The collective begins: from here on its input is read and its output written."""

    def __str__(self) -> str:
        return f"beginning of {self._text()}"


@dataclass(frozen=True)
class WaitCollective(_Collective):
    """The collective's output is needed: it must be complete."""

    def __str__(self) -> str:
        return self._text()


Step: TypeAlias = Segment | Send | PostRecv | WaitRecv | StartCollective | WaitCollective | Update


@dataclass
class _Segmenter:
    """The state of the one walk over the nodes; a segment is a list of node numbers."""

    steps: list[Message | _Collective | Update | list[int]] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    pending: dict[str, WaitRecv | WaitCollective] = field(default_factory=dict)
    again: bool = False
    """Whether the last compute node was one that is computed again."""

    def close(self) -> None:
        if self.open:
            self.steps.append(self.open)
            self.open, self.made = [], set()

    def wait(self, names: Iterable[str]) -> None:
        waited = [name for name in dict.fromkeys(names) if name in self.pending]
        if waited:
            self.close()
        found = dict.fromkeys(self.pending[name] for name in waited)
        self.steps.extend(found)
        for name in [name for name, step in self.pending.items() if step in found]:
            del self.pending[name]

    def compute(self, index: int, node: NodeProto, operands: Iterable[str]) -> None:
        """A node of the open segment, or of a new one."""
        self.wait(operands)
        again = is_recomputed(node)
        if again and not self.again:
            self.close()
        self.again = again
        self.open.append(index)
        self.made.update(filter(None, node.output))

    def give(self, names: Sequence[str], step: Message | _Collective) -> None:
        """A step that takes values out of the rank."""
        self.wait(names)
        if any(name in self.made for name in names):
            self.close()
        self.steps.append(step)

    def update(self, node: NodeProto) -> None:
        """A step that overwrites what was read so far."""
        self.wait(node.input)
        self.close()
        if self.steps and isinstance(self.steps[-1], Update):
            self.steps[-1] = Update([*self.steps[-1].nodes, node])
        else:
            self.steps.append(Update([node]))


def segmented(model: ModelProto, where: str, groups: Mapping[str, tuple[int, ...]] | None = None) -> list[Step]:
    """The steps of a rank's program in order; every value is made once and before its use, else ArtifactError names it.

    `where` is the file, for messages; `groups` by group the ranks among which this rank works. Time is linear in the nodes.
    """
    graph = model.graph
    nodes = list(graph.node)
    initializers = {tensor.name for tensor in graph.initializer} | {
        sparse.values.name for sparse in graph.sparse_initializer
    }
    initializers -= {value.name for value in graph.input}
    initializers |= set(names_of(model))
    nodes = [node for node in nodes if not is_rank_constant(node)]
    operands = [list(reads(node)) for node in nodes]
    _check(graph, nodes, operands, initializers, where)
    kept = {value.name for value in graph.output}
    updating = {function.name: is_elementwise(function) for function in model.functions}
    cutter = _Segmenter()
    for index, node in enumerate(nodes):
        if node.domain == OPTIMIZER and updating.get(node.op_type) and not kept.isdisjoint(node.output):
            cutter.update(node)
        elif node.domain != DOMAIN:
            cutter.compute(index, node, operands[index])
        elif node.op_type in (SEND, RECV):
            _cut_message(cutter, node, where)
        else:
            call = read_call(node, where)
            ranks = (groups or {}).get(call.group, ())
            cutter.give(call.given, StartCollective(call, ranks))
            finish = WaitCollective(call, ranks)
            for name in call.made:
                cutter.pending[name] = finish
    cutter.close()
    cutter.wait(list(cutter.pending))
    return _segments(cutter.steps, nodes, operands, initializers, [value.name for value in graph.output])


def _cut_message(cutter: _Segmenter, node: NodeProto, where: str) -> None:
    peer, tag = _ends(node, where)
    if node.op_type == SEND:
        cutter.give([node.input[0]], Send(node.input[0], peer, tag, path_of(node)))
        return
    post = PostRecv(node.output[0], peer, tag, path_of(node))
    cutter.pending[post.value] = WaitRecv(post.value, peer, tag, post.path)
    cutter.steps.append(post)


def _source(path: str) -> str:
    return f" ({path})" if path else ""


def _segments(
    steps: Sequence[Message | _Collective | Update | list[int]],
    nodes: Sequence[NodeProto],
    operands: Sequence[Sequence[str]],
    initializers: set[str],
    outputs: Sequence[str],
) -> list[Step]:
    """The runs of node numbers among the steps as segments, each giving exactly the values that others need.

    A segment that nobody needs anything of is left out.
    """
    wanted = set(outputs)
    reads: list[tuple[str, ...]] = []
    for step in steps:
        if isinstance(step, list):
            made = {name for index in step for name in nodes[index].output}
            reads.append(tuple(dict.fromkeys(name for index in step for name in operands[index] if name not in made)))
            wanted.update(reads[-1])
            wanted.update(name for index in step for name in _moved_statistics(nodes[index]))
        elif isinstance(step, Message):
            reads.append(())
            wanted.add(step.value)
        elif isinstance(step, _Collective):
            reads.append(())
            wanted.update((*step.call.given, *step.call.made))
        else:
            reads.append(())
            wanted.update(step.inputs)
    result: list[Step] = []
    for step, read in zip(steps, reads, strict=True):
        if isinstance(step, list):
            chosen = [nodes[index] for index in step]
            given = tuple(name for node in chosen for name in node.output if name in wanted)
            inputs = tuple(name for name in read if name not in initializers)
            if given:
                result.append(Segment(chosen, inputs, given, tuple(name for name in read if name in initializers)))
        elif isinstance(step, Send | PostRecv | WaitRecv | StartCollective | WaitCollective | Update):
            result.append(step)
    return result


def _moved_statistics(node: NodeProto) -> Sequence[str]:
    """The running statistics that a BatchNormalization makes in training mode.

    onnxruntime writes them over those that it is given, which are kept, unless they are outputs of the session.
    """
    trains = node.op_type == "BatchNormalization" and any(
        one.name == "training_mode" and one.i for one in node.attribute
    )
    return [name for name in node.output[1:3] if name] if trains else []


def _check(
    graph: GraphProto, nodes: Sequence[NodeProto], operands: Sequence[Sequence[str]], initializers: set[str], where: str
) -> None:
    """Every value made exactly once, and before it is used."""
    makers = dict.fromkeys(initializers, "an initializer")
    problems: list[str] = []

    def make(name: str, maker: str) -> None:
        if name in makers:
            problems.append(f"{where}: the value '{name}' is made twice, by {makers[name]} and by {maker}")
        makers[name] = maker

    for value in graph.input:
        make(value.name, "a model input")
    for node, needed in zip(nodes, operands, strict=True):
        problems += [
            f"{where}: {op_and_path(node)} needs the value '{name}', which nothing before it makes"
            for name in dict.fromkeys(needed)
            if name not in makers
        ]
        for name in filter(None, node.output):
            make(name, op_and_path(node))
    problems += [
        f"{where}: the output '{value.name}' is made by nothing" for value in graph.output if value.name not in makers
    ]
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ArtifactError("\n".join([*problems[:_SHOWN], *more, "  help: the file was changed; compile again"]))


def _ends(node: NodeProto, where: str) -> tuple[int, int]:
    """Peer and tag of a communication node."""
    counts = (1, 0) if node.op_type == SEND else (0, 1)
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    if PEER not in numbers or TAG not in numbers or (len(node.input), len(node.output)) != counts:
        raise ArtifactError(
            f"{where}: {op_and_path(node)} is not a {node.op_type} with '{PEER}', '{TAG}' and one value\n  help: compile again"
        )
    return numbers[PEER], numbers[TAG]
