"""Cutting a rank's program at its communication nodes into steps: segments of compute nodes, sends, and receives.

The order of the file is kept for everything that communicates. A segment ends before a Send of a value that it makes, and before
the first node that needs a received value that was not waited for yet; all other cuts would only cost. A receive is posted at its place
in the file, or before the segment that is open there, and waited for at the first use of its value. A collective begins like a
Send and is waited for like a receive. So communication overlaps computation as far as the order allows, and no rank waits for
what the global order puts later.

What is right in one thread alone is in a segment of such nodes (`one_thread.py`), with the zeros that it adds to.

A segment begins before nodes that are computed again: in one session with those that made the values first, onnxruntime would take
both for one, and keep the values. It has the nodes of one target, and a Copy is a step.

What cuts shards for updates alone, with ZeRO, waits for the next update: the shards are needed no earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from partc.runtime.artifact.comm.collective_node import CollectiveCall, read_call
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.comm.message_node import peer_of
from partc.runtime.artifact.graph.onnx_graph import (
    integer_of,
    is_recomputed,
    moved_statistics,
    op_and_path,
    reads,
    text_of,
)
from partc.runtime.artifact.graph.onnx_graph import path_of as path_of
from partc.runtime.artifact.graph.optimizer_function import is_elementwise
from partc.runtime.artifact.graph.rank_constants import is_rank_constant, names_of
from partc.runtime.artifact.graph.row_function import is_rowwise
from partc.runtime.artifact.graph.targets import copied_to, is_copy, refuse_unknown_target, target_of
from partc.runtime.artifact.tasks.calls import Body, bodies_of, calls_of
from partc.runtime.artifact.tasks.calls import Call as TaskCall

from ..artifact.format import DOMAIN, GROUP, OPTIMIZER, PEER, RECV, SEND, TAG, TASKS
from ..errors import ArtifactError
from .one_thread import Key, in_one_thread, wants_one_thread
from .soundness import refuse_unsound
from .steps import (
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

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


_Step: TypeAlias = Send | PostRecv | WaitRecv | StartCollective | WaitCollective | LookUp | Copy
_Cut: TypeAlias = _Step | Update | TaskCall | list[int]


@dataclass
class _Segmenter:
    """The state of the one walk over the nodes; a segment is a list of node numbers."""

    steps: list[_Cut] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    pending: dict[str, WaitRecv | WaitCollective] = field(default_factory=dict)
    again: bool = False
    """Whether the last compute node was one that is computed again."""
    zeros: str = ""
    """What the last compute node makes, where that is a constant of a shape."""
    target: str = ""
    """The target of the last compute node."""
    alone: bool = False
    """Whether the open segment is one of one thread."""
    guard: str = ""
    """The condition on which an update runs."""
    deferred: list[tuple[int, NodeProto]] = field(default_factory=list)
    """Nodes of which only updates read, which run right before the next of them."""

    def close(self) -> None:
        if self.open:
            self.steps.append(self.open)
            self.open, self.made = [], set()

    def wait(self, names: Iterable[str]) -> None:
        waited = {id(step): step for name in names if (step := self.pending.get(name)) is not None}
        if not waited:
            return
        self.close()
        self.steps.extend(waited.values())
        for name in [name for name, step in self.pending.items() if id(step) in waited]:
            del self.pending[name]

    def compute(self, index: int, node: NodeProto, operands: Iterable[str], alone: bool = False) -> None:
        """A node of the open segment, or of a new one; `alone`: of one with its like, and with the zeros to which it adds."""
        self.wait(operands)
        again, target = is_recomputed(node), target_of(node)
        onto_zeros = alone and self.open and node.input[0] == self.zeros and target == self.target
        begun = [self.open.pop()] if onto_zeros else []
        if alone != self.alone or begun or (again and not self.again) or target != self.target:
            self.close()
        self.alone = alone
        self.again, self.target = again, target
        self.open += [*begun, index]
        self.made.update(filter(None, node.output))
        self.zeros = node.output[0] if node.op_type == "ConstantOfShape" else ""

    def give(self, names: Sequence[str], step: _Step) -> None:
        """A step that takes values out of the rank, or to another target."""
        self.wait(names)
        if any(name in self.made for name in names):
            self.close()
        self.steps.append(step)

    def call(self, task: TaskCall) -> None:
        """The steps of a task, which waits for all that it is given: so all calls of a body are cut alike."""
        self.wait(task.node.input)
        self.close()
        self.steps.append(task)

    def update(self, node: NodeProto) -> None:
        """A step that overwrites what was read so far."""
        self.wait([*node.input, self.guard])
        self.close()
        deferred, self.deferred = self.deferred, []
        for index, one in deferred:
            self.compute(index, one, reads(one))
        self.close()
        last, target = self.steps[-1] if self.steps else None, target_of(node)
        if isinstance(last, Update) and last.target == target:
            self.steps[-1] = Update([*last.nodes, node], target)
        else:
            self.steps.append(Update([node], target))


def segmented(
    model: ModelProto, where: str, groups: Mapping[str, tuple[int, ...]] | None = None, guard: str = ""
) -> list[Step]:
    """The steps of a rank's program in order; every value is made once and before its use, else ArtifactError names it.

    `where` is the file, for messages; `groups` by group the ranks among which this rank works. Updates wait for the value `guard`, by which
    the runtime decides whether they run. Time is linear in the nodes.
    """
    graph = model.graph
    initializers = {tensor.name for tensor in graph.initializer} | {
        sparse.values.name for sparse in graph.sparse_initializer
    }
    initializers -= {value.name for value in graph.input}
    initializers |= set(names_of(model))
    nodes = [node for node in graph.node if not is_rank_constant(node)]
    calls = calls_of(nodes, bodies_of(model), where)
    inputs, outputs = [value.name for value in graph.input], [value.name for value in graph.output]
    functions = [function for function in model.functions if function.domain != TASKS]
    single = in_one_thread(functions)
    part = _Nodes(nodes, inputs, outputs, initializers, where, groups or {}, single)
    updating = {function.name for function in functions if is_elementwise(function) or is_rowwise(function)}
    cutter = part.segmented(updating, calls, guard)
    bodies: dict[str, list[Step]] = {}
    for name, body in {call.node.op_type: call.body for call in calls.values()}.items():
        alike = [call for call in calls.values() if call.node.op_type == name]
        bodies[name] = _body_steps(body, alike, initializers, where, groups or {}, single)
    found: list[Step] = []
    for step in _segments(cutter.steps, part, outputs):
        found += instantiated(bodies[step.node.op_type], step) if isinstance(step, TaskCall) else [step]
    return found


def _body_steps(
    body: Body,
    calls: Sequence[TaskCall],
    initializers: set[str],
    where: str,
    groups: Mapping[str, tuple[int, ...]],
    single: Collection[Key],
) -> list[Step]:
    """The steps of a body by its own names; initializers are what all its calls take under the name that it has there."""
    function = body.function
    given = zip(function.input, *(call.node.input for call in calls), strict=True)
    shared = {name for name, *others in given if name in initializers and {*others} == {name}}
    inputs = [name for name in function.input if name not in shared]
    part = _Nodes(list(body.nodes), inputs, list(function.output), shared | {*body.constants}, where, groups, single)
    return [
        step
        for step in _segments(part.segmented((), {}).steps, part, function.output)
        if not isinstance(step, TaskCall)
    ]


@dataclass
class _Nodes:
    """Nodes that are cut together, the main graph or the body of a task, with what they are given and what they give."""

    nodes: list[NodeProto]
    inputs: Sequence[str]
    outputs: Sequence[str]
    initializers: set[str]
    where: str
    groups: Mapping[str, tuple[int, ...]]
    single: Collection[Key]
    """The functions whose nodes want one thread."""

    def __post_init__(self) -> None:
        self.operands = [list(reads(node)) for node in self.nodes]
        refuse_unsound(
            self.where, self.initializers, self.inputs, zip(self.nodes, self.operands, strict=True), self.outputs
        )

    def segmented(self, updating: Collection[str], calls: Mapping[int, TaskCall], guard: str = "") -> _Segmenter:
        """Walks over the nodes; `updating` are the functions that update in place, `calls` by place the tasks."""
        kept = {*self.outputs}
        updates = {
            index
            for index, node in enumerate(self.nodes)
            if node.domain == OPTIMIZER and node.op_type in updating and not kept.isdisjoint(node.output)
        }
        deferred = self._deferred(updates) if updates else set()
        cutter = _Segmenter(guard=guard)
        for index, node in enumerate(self.nodes):
            refuse_unknown_target(node, self.where)
            if index in calls:
                cutter.call(calls[index])
            elif index in updates:
                cutter.update(node)
            elif index in deferred:
                cutter.deferred.append((index, node))
            elif node.domain != DOMAIN:
                cutter.compute(index, node, self.operands[index], wants_one_thread(node, self.single))
            elif node.op_type in (SEND, RECV):
                _message_steps(cutter, node, self.where, self.groups)
            elif is_copy(node):
                to = copied_to(node, self.where)
                cutter.give(node.input, Copy(node.input[0], node.output[0], to, path_of(node)))
            else:
                call = read_call(node, self.where)
                ranks = self.groups.get(call.group, ())
                if isinstance(call, LookupCall):
                    cutter.give(call.given, LookUp(call, ranks))
                else:
                    cutter.give(call.given, StartCollective(call, ranks))
                    cutter.pending |= dict.fromkeys(call.made, WaitCollective(call, ranks))
        cutter.close()
        cutter.wait(list(cutter.pending))
        return cutter

    def _deferred(self, updates: Collection[int]) -> set[int]:
        """The nodes that cut what updates read out of values that the rank has from the beginning, and that nothing else reads.

        What they make is needed as late as the gradients; made with the nodes before, it would lie beside all of these.
        """
        begun = {*self.inputs, *self.initializers}
        others = {*self.outputs}
        others.update(name for index, some in enumerate(self.operands) if index not in updates for name in some)
        read = {name for index in updates for name in self.operands[index]}
        return {
            index
            for index, node in enumerate(self.nodes)
            if not read.isdisjoint(node.output)
            and others.isdisjoint(node.output)
            and node.domain not in (DOMAIN, OPTIMIZER, TASKS)
            and begun.issuperset(self.operands[index])
        }


def instantiated(steps: Sequence[Step], task: TaskCall) -> list[Step]:
    """The steps of a body as those of a call, by the names and tags of its microbatch."""
    names, k, cell = task.names, task.microbatch, task.cell
    calls: dict[int, CollectiveCall] = {}

    def called(call: CollectiveCall) -> CollectiveCall:
        if call.tag not in calls:
            calls[call.tag] = call.renamed(names, call.tag + k, f"{call.path}, {cell}")
        return calls[call.tag]

    def renamed(step: Step) -> Step:
        match step:
            case Segment():
                inputs, outputs = (tuple(names[name] for name in some) for some in (step.inputs, step.outputs))
                return Segment(step.nodes, inputs, outputs, step.initializers, cell, step, step.target)
            case Copy():
                path = f"{step.path}, {cell}"
                return replace(step, source=names[step.source], result=names[step.result], path=path, task=cell)
            case StartCollective() | WaitCollective():
                return replace(step, call=called(step.call), task=cell)
            case LookUp():
                return replace(
                    step, call=step.call.renamed(names, step.call.tag + k, f"{step.call.path}, {cell}"), task=cell
                )
            case Send() | PostRecv() | WaitRecv():
                return replace(step, value=names[step.value], tag=step.tag + k, path=f"{step.path}, {cell}")
            case Update():
                raise ArtifactError(f"the task {cell} has an update\n  help: the file was changed; compile again")

    return [renamed(step) for step in steps]


def _message_steps(cutter: _Segmenter, node: NodeProto, where: str, groups: Mapping[str, Sequence[int]]) -> None:
    peer, tag = _ends(node, where, groups)
    said = peer, tag, path_of(node), text_of(node, GROUP)
    if node.op_type == SEND:
        cutter.give([node.input[0]], Send(node.input[0], *said))
        return
    post = PostRecv(node.output[0], *said)
    cutter.pending[post.value] = WaitRecv(post.value, *said)
    cutter.steps.append(post)


def _segments(steps: Sequence[_Cut], part: _Nodes, outputs: Iterable[str]) -> list[Step | TaskCall]:
    """The runs of node numbers among the steps as segments, each giving exactly the values that others need.

    A segment or a copy without readers is left out, and then what only those need.
    """
    nodes, operands, initializers = part.nodes, part.operands, part.initializers
    wanted = set(outputs)
    result: list[Step | TaskCall] = []
    for step in reversed(steps):
        match step:
            case list():
                wanted.update(name for index in step for name in moved_statistics(nodes[index]))
                made = {name for index in step for name in nodes[index].output}
                if made.isdisjoint(wanted):
                    continue
                chosen = [nodes[index] for index in step]
                given = tuple(name for node in chosen for name in node.output if name in wanted)
                read = tuple(dict.fromkeys(n for index in step for n in operands[index] if n not in made))
                inputs = tuple(name for name in read if name not in initializers)
                fixed = tuple(name for name in read if name in initializers)
                wanted.update(read)
                result.append(Segment(chosen, inputs, given, fixed, target=target_of(chosen[0])))
                continue
            case Copy():
                if step.result not in wanted:
                    continue
                wanted.add(step.source)
            case Send() | PostRecv() | WaitRecv():
                wanted.add(step.value)
            case StartCollective() | WaitCollective() | LookUp():
                wanted.update((*step.call.given, *step.call.made))
            case TaskCall():
                wanted.update(step.node.input)
            case Update():
                wanted.update(step.inputs)
        result.append(step)
    return result[::-1]


def _ends(node: NodeProto, where: str, groups: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Peer and tag of a communication node; without its manifest the peer of one of many pairs is -1."""
    counts = (1, 0) if node.op_type == SEND else (0, 1)
    names = {attribute.name for attribute in node.attribute}
    if TAG not in names or names.isdisjoint((PEER, GROUP)) or (len(node.input), len(node.output)) != counts:
        raise ArtifactError(
            f"{where}: {op_and_path(node)} is not a {node.op_type} with '{PEER}', '{TAG}' and one value\n  help: compile again"
        )
    return peer_of(node, groups), integer_of(node, TAG, -1)
