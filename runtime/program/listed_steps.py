"""Makes the steps of a rank's program from its run list (`artifact/run_list.py`).

A task's row is read once; the steps of each call are copies of it with the names and tags of the call's microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from partc.runtime.artifact.comm.border_node import IF, BorderCall
from partc.runtime.artifact.comm.collective_node import AnyCall, CollectiveCall, peer_of, read_call
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.graph.bodies import is_border
from partc.runtime.artifact.graph.onnx_graph import integer_of, op_and_path, path_of, text_of
from partc.runtime.artifact.graph.rank_constants import is_rank_constant
from partc.runtime.artifact.graph.targets import copied_to, is_copy
from partc.runtime.artifact.run_list import RunList, numbers_of, parsed_step
from partc.runtime.artifact.tasks.calls import Call, bodies_of, calls_of

from ..artifact.format import BEGIN, DOMAIN, END, GROUP, PEER, RECV, SEND, TAG, TARGETS
from ..errors import ArtifactError
from .steps import (
    Border,
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

_MESSAGES: dict[tuple[str, str], type[Send | PostRecv | WaitRecv]] = {
    ("X", SEND): Send,
    ("R", RECV): PostRecv,
    ("W", RECV): WaitRecv,
}
_LIST = "the run list: "


def listed_steps(
    model: ModelProto, run: RunList, row: str, where: str, groups: Mapping[str, tuple[int, ...]] | None = None
) -> list[Step]:
    """Returns the steps of the row called `row`; ArtifactError, naming the file `where`, for a list that does not fit the file's nodes.

    `groups`: maps each group to the ranks among which this rank works.
    """
    reader = _Reader(model, run, where, groups or {})
    return reader.steps(row, reader.nodes)


class _Reader:
    def __init__(self, model: ModelProto, run: RunList, where: str, groups: Mapping[str, tuple[int, ...]]) -> None:
        self.run, self.where, self.groups = run, where, groups
        self.nodes = [node for node in model.graph.node if not is_rank_constant(node)]
        calls = calls_of(self.nodes, bodies_of(model), where)
        self.calls = {call.cell: call for call in calls.values()}
        self.tasks: dict[str, list[Step]] = {}
        """Maps each function to the steps of a task, with the function's own names."""
        self.called: dict[int, AnyCall] = {}
        """Calls by the identity of their nodes, so that a collective's start and its wait have the same call."""

    def steps(self, name: str, nodes: Sequence[NodeProto]) -> list[Step]:
        """Returns the steps of a row over the nodes of its graph or function."""
        if name not in self.run.rows:
            self.refuse(f"it has no row '{name}'")
        ends = {integer_of(node, TAG, 0): node for node in nodes if node.domain == DOMAIN and not is_copy(node)}
        borders = self.borders(nodes)
        done, begun, waited = Counter[int](), list[int](), list[int]()
        steps: list[Step] = []
        for cell in self.run.rows[name].split():
            letter, number = parsed_step(cell)
            if not letter:
                steps += self.task(cell, nodes)
            elif letter == "S":
                steps.append(self.segment(number, cell, nodes, done))
            elif letter == "U":
                steps.append(self.update(number, cell, nodes, done))
            elif letter == "C":
                if number >= len(nodes) or not is_copy(nodes[number]):
                    self.refuse(f"there is no node for {cell}")
                node = nodes[number]
                steps.append(Copy(node.input[0], node.output[0], copied_to(node, self.where), path_of(node)))
            elif letter == "B":
                if number not in borders:
                    self.refuse(f"there is no border of a body for {cell}")
                steps.append(borders[number])
            elif number not in ends:
                self.refuse(f"no node has the tag of {cell}")
            else:
                steps.append(self.communication(letter, cell, ends[number]))
                begun += [number] if letter in "RA" and any(ends[number].output) else []
                waited += [number] if letter == "W" else []
        if again := [node for node, times in done.items() if times > 1]:
            self.refuse(f"node {again[0]} of row '{name}' runs {done[again[0]]} times")
        if sorted(begun) != sorted(waited) or len({*begun}) < len(begun):
            self.refuse(f"row '{name}' does not wait once for each message and collective that begins")
        if [step for step in steps if isinstance(step, Border)] != list(borders.values()):
            self.refuse(f"row '{name}' does not pass each border of a body once, in order")
        return steps

    def borders(self, nodes: Sequence[NodeProto]) -> dict[int, Border]:
        """Maps the number of each border of a body to its step."""
        calls, open_, whole = dict[int, BorderCall](), list[list[int]](), dict[int, list[int]]()
        for number, node in enumerate(nodes):
            if not is_border(node):
                continue
            call = read_call(node, self.where)
            assert isinstance(call, BorderCall)
            calls[number] = call
            if call.op == BEGIN:
                open_.append([])
            if not open_ or (open_[-1] and calls[open_[-1][0]].kind != call.kind):
                self.refuse(f"{op_and_path(node)} is not within a body")
            open_[-1].append(number)
            if call.op == END:
                one = open_.pop()
                if len(one) != (3 if call.kind == IF else 2) or len(calls[one[0]].carried) > len(call.operands):
                    self.refuse(f"{op_and_path(node)} ends another body than began")
                whole |= dict.fromkeys(one, one)
        if open_:
            self.refuse("a body does not end")
        return {
            number: Border(call, self.groups.get(call.group, ()), calls[whole[number][0]], calls[whole[number][-1]])
            for number, call in calls.items()
        }

    def chosen(self, numbers: str, cell: str, nodes: Sequence[NodeProto], done: Counter[int]) -> list[NodeProto]:
        """Returns the nodes of a segment or an update, and counts them in `done`."""
        try:
            found = numbers_of(numbers, len(nodes))
        except ValueError as error:
            self.refuse(f"{cell}: {error}")
        done.update(found)
        return [nodes[number] for number in found]

    def segment(self, number: int, cell: str, nodes: Sequence[NodeProto], done: Counter[int]) -> Segment:
        if number >= len(self.run.segments):
            self.refuse(f"there is no segment for {cell}")
        row = self.run.segments[number]
        chosen = self.chosen(row.nodes, cell, nodes, done)
        made = {name for node in chosen for name in node.output}
        if row.target and row.target not in TARGETS:
            self.refuse(f"the target of {cell} is '{row.target}'; a target is one of {', '.join(TARGETS)}")
        if not row.outputs or not made.issuperset(row.outputs):
            self.refuse(f"the nodes of {cell} do not make what it gives")
        inputs, outputs, weights = tuple(row.inputs), tuple(row.outputs), tuple(row.weights)
        return Segment(chosen, inputs, outputs, weights, target=row.target, threads=row.threads)

    def update(self, number: int, cell: str, nodes: Sequence[NodeProto], done: Counter[int]) -> Update:
        if number >= len(self.run.updates):
            self.refuse(f"there is no update for {cell}")
        row = self.run.updates[number]
        found = self.chosen(row.nodes, cell, nodes, done)
        again = Counter[int]()
        groups = [self.chosen(group, cell, nodes, again) for group in row.groups] or [[node] for node in found]
        if (row.groups and again.keys() != {*numbers_of(row.nodes, len(nodes))}) or max(again.values(), default=1) > 1:
            self.refuse(f"the groups of {cell} are not its nodes")
        return Update(found, row.target, groups, row.renewed)

    def communication(self, letter: str, cell: str, node: NodeProto) -> Step:
        """Returns the step for a message, a collective or a lookup."""
        if node.op_type in (SEND, RECV):
            if (kind := _MESSAGES.get((letter, node.op_type))) is None:
                self.refuse(f"{cell} is not a step of a {node.op_type}")
            value = [*node.input, *node.output]
            names = {attribute.name for attribute in node.attribute}
            if (
                TAG not in names
                or names.isdisjoint((PEER, GROUP))
                or len(value) != 1
                or len(node.input) != (node.op_type == SEND)
            ):
                fact = f"{op_and_path(node)} is not a {node.op_type} with '{PEER}', '{TAG}' and one value"
                raise ArtifactError(f"{self.where}: {fact}\n  help: compile again")
            peer, tag = peer_of(node, self.groups), integer_of(node, TAG, 0)
            return kind(value[0], peer, tag, path_of(node), text_of(node, GROUP))
        if id(node) not in self.called:
            self.called[id(node)] = read_call(node, self.where)
        call = self.called[id(node)]
        ranks = self.groups.get(call.group, ())
        if isinstance(call, LookupCall) and letter == "L":
            return LookUp(call, ranks)
        if isinstance(call, LookupCall) or letter not in "AW":
            self.refuse(f"{cell} is not a step of a {node.op_type}")
        assert isinstance(call, CollectiveCall)
        return StartCollective(call, ranks) if letter == "A" else WaitCollective(call, ranks)

    def task(self, cell: str, nodes: Sequence[NodeProto]) -> list[Step]:
        """Returns the steps of a call of a task."""
        call = self.calls.get(cell)
        if call is None or nodes is not self.nodes:
            self.refuse(f"the file has no task '{cell[:40]}'")
        name = call.node.op_type
        if name not in self.tasks:
            self.tasks[name] = self.steps(name, call.body.nodes)
        return instantiated(self.tasks[name], call)

    def refuse(self, fact: str) -> NoReturn:
        """Raises ArtifactError for a list that does not fit the file."""
        raise ArtifactError(f"{self.where}: {_LIST}{fact}\n  help: the file was changed; compile again")


def instantiated(steps: Sequence[Step], task: Call) -> list[Step]:
    """Returns the steps of a function body for one call, with the names and tags of its microbatch."""
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
                return replace(step, inputs=inputs, outputs=outputs, task=cell, body=step)
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
            case Update() | Border():
                raise ArtifactError(
                    f"the task {cell} has an update or a body\n  help: the file was changed; compile again"
                )

    return [renamed(step) for step in steps]
