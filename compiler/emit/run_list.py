"""Decides how a rank file's nodes run, and writes it as a run list (`runtime/artifact/run_list.py`): segments, updates, rows of steps.

The order of the file is kept for all communication. A segment ends before a Send of a value that it makes, and before the first node that
needs a received value that was not yet waited for; any other division would only cost time. A receive is posted at its place in the file,
or before the segment that is open there, and waited for at the first use of its value. A collective begins like a Send and is waited for
like a receive. So communication overlaps computation as far as the order allows, and no rank waits for an event that is later in the global
order.

Nodes that are correct only in one thread are in a segment of such nodes (`runtime/artifact/run_list.py`), with the zeros to which
they add.

A new segment begins before nodes that are recomputed: in one session with the nodes that made the values first, onnxruntime would merge
both, and keep the values. A segment has the nodes of one target, and a Copy is a step.

If a rank gathers stored parameters, which it has from the beginning, a scattered sum that begins waits for the one before it: so unsharded
gradients of at most one unit are in memory while those of the next are computed.

With ZeRO, ops that cut shards only for updates wait for the next update: the shards are not needed earlier.

The module also decides which updates of a rank file run as one: nodes of one function whose operands are adjacent in memory. A rank file
has one node of `partc.optimizer` for each parameter. The functions are element-wise, so it makes no difference whether they run on one
tensor or on several adjacent ones. Memory is laid out accordingly: gradients in the order of their updates, which for a bucket is the order
in which it is reduced, and parameters and the optimizer's tensors likewise.

    Momentum(a, a.grad, a.momentum), Momentum(b, b.grad, b.momentum)     ->     Momentum([a b], [a.grad b.grad], [a.momentum b.momentum])

With ZeRO a rank updates a shard that it cuts out of a parameter in each step. Shards that are updated as one are adjacent, and their new
values replace them. The updates of one step may run in any order, so equal ones are grouped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from onnx import FunctionProto, ModelProto, NodeProto
from partc.runtime.artifact.comm.border_node import BorderCall
from partc.runtime.artifact.comm.collective_node import CollectiveCall, read_call
from partc.runtime.artifact.comm.collectives import COLLECTIVES
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.format import ALL_GATHER, CPU, DOMAIN, OPTIMIZER, RECV, REDUCE_SCATTER, SEND, TAG, TASKS
from partc.runtime.artifact.graph.bodies import opened
from partc.runtime.artifact.graph.onnx_graph import integer_of, is_recomputed, moved_statistics, reads
from partc.runtime.artifact.graph.optimizer_function import NEXT, is_elementwise
from partc.runtime.artifact.graph.rank_constants import is_rank_constant, names_of
from partc.runtime.artifact.graph.row_function import is_rowwise
from partc.runtime.artifact.graph.targets import is_copy, output_target, target_of
from partc.runtime.artifact.run_list import (
    BufferRow,
    Key,
    RunList,
    SegmentRow,
    UpdateRow,
    in_one_thread,
    numbers_of,
    numbers_text,
    wants_one_thread,
)
from partc.runtime.artifact.tasks.calls import Call, bodies_of, calls_of
from partc.runtime.artifact.tensors.dtypes import type_text
from partc.runtime.artifact.training.scalars import NUMBERS


def run_list(model: ModelProto, name: str, guard: str = "", kept: Collection[str] = ()) -> RunList:
    """Returns the run list of a rank file, whose main row is called `name`; time is linear in the nodes.

    Updates wait for the value `guard`. `kept`: the values that the rank keeps from step to step.
    """
    model = opened(model)
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    weights |= {sparse.values.name for sparse in graph.sparse_initializer}
    weights = (weights - {value.name for value in graph.input}) | set(names_of(model))
    nodes = [node for node in graph.node if not is_rank_constant(node)]
    calls = calls_of(nodes, bodies_of(model), name)
    functions = [function for function in model.functions if function.domain != TASKS]
    single = in_one_thread(functions)
    updating = {function.name for function in functions if is_elementwise(function) or is_rowwise(function)}
    inputs, outputs = ([value.name for value in ports] for ports in (graph.input, graph.output))
    rows_list = RunList(rows={}, segments=[], updates=[])
    main = _Nodes(nodes, [*inputs, *weights], outputs, single)
    rows_list.rows[name] = main.row(rows_list, weights, main.cut(updating, calls, guard))
    if rows_list.updates:
        _add_groups(rows_list, model, nodes, calls.values(), {*kept})
    for function, body in {call.node.op_type: call.body for call in calls.values()}.items():
        alike = [call.node.input for call in calls.values() if call.node.op_type == function]
        operands = zip(body.function.input, *alike, strict=True)
        shared = {name for name, *others in operands if name in weights and {*others} == {name}}
        part = _Nodes(list(body.nodes), list(body.function.input), list(body.function.output), single)
        rows_list.rows[function] = part.row(rows_list, shared | {*body.constants}, part.cut((), {}))
    return rows_list


def _add_groups(
    rows_list: RunList, model: ModelProto, nodes: Sequence[NodeProto], calls: Iterable[Call], kept: Collection[str]
) -> None:
    """Adds to a list the groups of updates that run as one, and the memory that they need."""
    numbers = [numbers_of(row.nodes, len(nodes)) for row in rows_list.updates]
    steps = [[nodes[at] for at in some] for some in numbers]
    names = {name for step in steps for node in step for name in node.input}
    copied = {node.output[0]: node.input[0] for node in nodes if is_copy(node)}
    names |= {*copied.values()}
    ports = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    types = {port.name: type_text(port.type) for port in ports if port.name in names}
    targets = {name: target for node in nodes if (target := output_target(node)) != CPU for name in node.output}
    for call in calls:
        of = {
            formal: name
            for formal, name in zip(call.body.function.output, call.node.output, strict=True)
            if name in names
        }
        if not of:
            continue
        types |= {of[port.name]: type_text(port.type) for port in call.body.function.value_info if port.name in of}
        inside = {name: output_target(node) for node in call.body.nodes for name in node.output if name in of}
        targets |= {of[formal]: target for formal, target in inside.items() if target != CPU}
    for result, source in copied.items():
        types |= {result: types[source]} if source in types else {}
    functions = {one.name: one for one in model.functions if one.domain == OPTIMIZER}
    plan = plan_groups(steps, functions, types, kept, _coalesced(nodes), targets)
    places = {
        id(node): at for some, step in zip(numbers, steps, strict=True) for at, node in zip(some, step, strict=True)
    }
    for index, row in enumerate(rows_list.updates):
        groups = [numbers_text(places[id(node)] for node in group) for group in plan.groups[index]]
        pairs = plan.renewed.get(index, [])
        rows_list.updates[index] = row.model_copy(update={"groups": groups, "renewed": pairs})
    for kind, buffers in (("state", plan.state), ("step", [*plan.gradients, *plan.shards])):
        rows_list.buffers.extend(BufferRow(kind=kind, members=[*some]) for some in buffers if len(some) > 1)


def _coalesced(nodes: Sequence[NodeProto]) -> dict[str, tuple[str, int]]:
    """Maps each value in the buffer of a coalesced collective to the collective and the value's index in it."""
    places: dict[str, tuple[str, int]] = {}
    for node in nodes:
        if node.domain == DOMAIN and len(node.output) > 1 and node.op_type in COLLECTIVES:
            call = read_call(node, node.name)
            if isinstance(call, CollectiveCall) and call.parts and not call.kind.joins:
                places |= {name: (node.name, place) for place, name in enumerate(call.outputs)}
    return places


@dataclass
class _Event:
    """A step other than a segment, with the values that it touches; for a Copy also its result, and for an update its nodes."""

    cell: str
    touches: Sequence[str] = ()
    made: str = ""
    nodes: list[int] = field(default_factory=list)
    target: str = ""


@dataclass
class _Cutter:
    """The state of the single pass over the nodes; a segment is a list of node numbers."""

    steps: list[_Event | list[int]] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    pending: dict[str, _Event] = field(default_factory=dict)
    again: bool = False
    """Whether the last compute node was a recomputed one."""
    zeros: str = ""
    """The result of the last compute node, if it is a constant of a given shape."""
    target: str = ""
    """The target of the last compute node."""
    alone: bool = False
    """Whether the open segment is a segment of one thread."""
    guard: str = ""
    """The condition under which an update runs."""
    stores: bool = False
    """Whether a stored parameter was gathered."""
    scattered: Sequence[str] = ()
    """The results of the last scattered sum after a gather of a stored parameter."""
    unread: list[str] = field(default_factory=list)
    """The results of the last gather of a stored parameter that nothing reads: they are waited for when the next gather begins."""
    deferred: list[tuple[int, NodeProto]] = field(default_factory=list)
    """Nodes whose results only updates read; they run right before the next update."""

    def close(self) -> None:
        if self.open:
            self.steps.append(self.open)
            self.open, self.made = [], set()

    def wait(self, names: Iterable[str], closes: bool = True) -> None:
        """Waits for values; `closes`: whether the next node reads them, so that the open segment ends before the wait."""
        if not self.pending:
            return
        waited = {id(step): step for name in names if (step := self.pending.get(name)) is not None}
        if not waited:
            return
        if closes:
            self.close()
        self.steps.extend(waited.values())
        for name in [name for name, step in self.pending.items() if id(step) in waited]:
            del self.pending[name]

    def compute(self, index: int, node: NodeProto, operands: Iterable[str], alone: bool = False) -> None:
        """Adds a node to the open segment or a new one; `alone`: whether it needs a one-thread segment, with the zeros to which it adds."""
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

    def give(self, names: Sequence[str], step: _Event) -> None:
        """Adds a step that sends values from the rank or to another target."""
        self.wait(names)
        if any(name in self.made for name in names):
            self.close()
        self.steps.append(step)

    def call(self, task: Call) -> None:
        """Adds a task's call, which waits for all its inputs: so all calls of a body are divided in the same way."""
        self.wait(task.node.input)
        self.close()
        self.steps.append(_Event(task.cell, task.node.input))

    def update(self, index: int, node: NodeProto) -> None:
        """Adds a step that overwrites values which earlier nodes read."""
        self.wait([*node.input, self.guard])
        self.close()
        deferred, self.deferred = self.deferred, []
        for at, one in deferred:
            self.compute(at, one, reads(one))
        self.close()
        last, target = self.steps[-1] if self.steps else None, target_of(node)
        if not (isinstance(last, _Event) and last.nodes and last.target == target):
            last = _Event("", [], target=target)
            self.steps.append(last)
        last.nodes.append(index)
        last.touches = [*last.touches, *node.input]

    def communicate(self, index: int, node: NodeProto, gathers: bool = False, unread: bool = False) -> None:
        """Adds the steps of a node that communicates or copies.

        `gathers`: whether it gathers values that the rank has from the beginning. `unread`: whether nothing reads its result here.
        """
        if gathers:
            self.wait(self.unread, closes=False)
            self.stores, self.unread = True, []
        tag = integer_of(node, TAG, 0)
        if node.op_type == SEND:
            self.give([node.input[0]], _Event(f"X{tag}", node.input))
        elif node.op_type == RECV:
            self.steps.append(_Event(f"R{tag}", node.output))
            self.pending[node.output[0]] = _Event(f"W{tag}", node.output)
        elif is_copy(node):
            self.give(node.input, _Event(f"C{index}", node.input, made=node.output[0]))
        else:
            call = read_call(node, node.name)
            touches = [*call.inputs, *call.outputs]
            if isinstance(call, BorderCall):
                self.wait([*self.pending])
                self.close()
                self.again, self.target, self.alone, self.zeros = False, "", False, ""
                self.steps.append(_Event(f"B{index}", touches))
            elif isinstance(call, LookupCall):
                self.give(call.inputs, _Event(f"L{tag}", touches))
            else:
                self.give(call.inputs, _Event(f"A{tag}", touches))
                if node.op_type == REDUCE_SCATTER and self.stores:
                    self.wait(self.scattered, closes=False)
                    self.scattered = call.outputs
                wait = _Event(f"W{tag}", touches)
                self.unread += call.outputs if unread else []
                if call.outputs:
                    self.pending |= dict.fromkeys(call.outputs, wait)


@dataclass
class _Nodes:
    """Nodes that are divided together, of the main graph or a task's body, with the values available before them and their outputs."""

    nodes: list[NodeProto]
    begun: Collection[str]
    outputs: Sequence[str]
    single: Collection[Key]
    """The functions whose nodes need one thread."""

    def __post_init__(self) -> None:
        self.operands = [list(reads(node)) for node in self.nodes]
        self.alone = {at for at, node in enumerate(self.nodes) if wants_one_thread(node, self.single)}

    def cut(self, updating: Collection[str], calls: Mapping[int, Call], guard: str = "") -> list[_Event | list[int]]:
        """Returns the steps in order; `updating` are the functions that update in place, `calls` maps the numbers of nodes to tasks."""
        kept = {*self.outputs}
        updates = {
            index
            for index, node in enumerate(self.nodes)
            if node.domain == OPTIMIZER and node.op_type in updating and not kept.isdisjoint(node.output)
        }
        deferred = self._deferred(updates) if updates else set()
        cutter = _Cutter(guard=guard)
        begun, read = {*self.begun}, {*self.outputs}.union(*self.operands)
        for index, node in enumerate(self.nodes):
            if index in calls:
                cutter.call(calls[index])
            elif index in updates:
                cutter.update(index, node)
            elif index in deferred:
                cutter.deferred.append((index, node))
            elif node.domain != DOMAIN:
                cutter.compute(index, node, self.operands[index], index in self.alone)
            else:
                gathers = node.op_type == ALL_GATHER and begun.issuperset(node.input)
                cutter.communicate(index, node, gathers, gathers and read.isdisjoint(node.output))
            if node.op_type == "Cast" and begun.issuperset(node.input):
                begun.update(node.output)
        cutter.close()
        cutter.wait(list(cutter.pending))
        return cutter.steps

    def _deferred(self, updates: Collection[int]) -> set[int]:
        """Returns the nodes that cut operands of updates out of values that the rank has from the beginning, and that nothing else reads.

        Their results are needed no earlier than the gradients; made with the nodes before, they would be in memory together with all
        gradients.
        """
        begun, others = {*self.begun}, {*self.outputs}
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

    def row(self, rows_list: RunList, weights: Collection[str], steps: Sequence[_Event | list[int]]) -> str:
        """Returns the text of the steps; adds their segments and updates to the list, each with exactly the outputs that others read.

        A segment or copy without readers is left out, and then the steps that only it needs.
        """
        nodes, operands, wanted = self.nodes, self.operands, set(self.outputs)
        segments, updates, cells = list[SegmentRow](), list[UpdateRow](), list[str | SegmentRow | UpdateRow]()
        for step in reversed(steps):
            if isinstance(step, _Event):
                if step.made and step.made not in wanted:
                    continue
                wanted.update(step.touches)
                if step.nodes:
                    updates.append(UpdateRow(nodes=numbers_text(step.nodes), target=step.target))
                cells.append(updates[-1] if step.nodes else step.cell)
                continue
            wanted.update(name for index in step for name in moved_statistics(nodes[index]))
            made = {name for index in step for name in nodes[index].output}
            if made.isdisjoint(wanted):
                continue
            read_outputs = [name for index in step for name in nodes[index].output if name in wanted]
            read = dict.fromkeys(name for index in step for name in operands[index] if name not in made)
            wanted.update(read)
            segments.append(
                SegmentRow(
                    nodes=numbers_text(sorted(step)),
                    inputs=[name for name in read if name not in weights],
                    outputs=read_outputs,
                    weights=[name for name in read if name in weights],
                    target=target_of(nodes[step[0]]),
                    threads=int(not self.alone.isdisjoint(step)),
                )
            )
            cells.append(segments[-1])
        rows_list.segments.extend(reversed(segments))
        rows_list.updates.extend(reversed(updates))
        texts, counts = list[str](), {"S": len(rows_list.segments), "U": len(rows_list.updates)}
        for cell in cells:
            letter = "S" if isinstance(cell, SegmentRow) else "U"
            counts[letter] -= not isinstance(cell, str)
            texts.append(cell if isinstance(cell, str) else f"{letter}{counts[letter]}")
        return " ".join(reversed(texts))


@dataclass
class UpdatePlan:
    """The groups of nodes of each step, and the lists of values that are adjacent in memory."""

    groups: dict[int, list[list[NodeProto]]] = field(default_factory=dict)
    gradients: list[tuple[str, ...]] = field(default_factory=list)
    state: list[tuple[str, ...]] = field(default_factory=list)
    shards: list[tuple[str, ...]] = field(default_factory=list)
    """Shards that are cut out of parameters in each step, and their new values."""
    renewed: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """Maps each step to its shards, each with the new value that replaces it."""


def plan_groups(
    steps: Sequence[Sequence[NodeProto]],
    functions: Mapping[str, FunctionProto],
    types: Mapping[str, str],
    kept: Collection[str],
    buffered: Mapping[str, tuple[str, int]],
    targets: Mapping[str, str] = MappingProxyType({}),
) -> UpdatePlan:
    """Groups the nodes of each step of updates. `types`: the types of the updates' operands. `targets`: the targets of values that have
    one.

    `buffered`: maps a value that a coalesced collective puts into a buffer to the buffer and the value's index in it.
    """
    plan = UpdatePlan()
    reads = Counter(name for step in steps for node in step for name in {*node.input})
    again = {name for name, count in reads.items() if count > 1}
    laid: set[str] = set()
    loose: dict[tuple[str, int, str], list[str]] = {}
    for index, step in enumerate(steps):
        nodes = [(node, functions[node.op_type]) for node in step]
        by_rows = [[node] for node, function in nodes if is_rowwise(function)]
        dense = [(node, function) for node, function in nodes if not is_rowwise(function)]
        found = [_Member(node, function, types, kept, targets, again) for node, function in dense]
        runs = list(_runs(_alike_together(found), buffered))
        plan.groups[index] = [*([one.node for one in run] for run in runs), *by_rows]
        for run in runs:
            for operand in [tuple(names) for names in zip(*(one.tensors for one in run), strict=True)]:
                if operand[0] in kept and not laid.intersection(operand):
                    laid.update(operand)
                    plan.state.append(operand)
            for pairs in zip(*(one.shards for one in run), strict=True):
                if not again.isdisjoint(name for name, _ in pairs):
                    continue
                plan.renewed.setdefault(index, []).extend(pairs)
                plan.shards += [tuple(some) for some in zip(*pairs, strict=True)]
            gradients = [one.gradient for one in run]
            if all(name and name not in buffered for name in gradients):
                key = types[gradients[0]], index, targets.get(gradients[0], "")
                loose.setdefault(key, []).extend(dict.fromkeys(gradients))
    plan.gradients += [tuple(names) for names in loose.values()]
    return plan


@dataclass(frozen=True)
class _Member:
    """One update node, with its operands divided into tensors and numbers."""

    node: NodeProto
    function: FunctionProto
    types: Mapping[str, str]
    kept: Collection[str]
    targets: Mapping[str, str]
    again: Set[str]
    """Values that several updates read: each would be adjacent to the gradients of its own updates."""

    @cached_property
    def shared(self) -> tuple[bool, ...]:
        """Whether each operand is a single number."""
        return tuple(formal in NUMBERS for formal in self.function.input)

    @cached_property
    def tensors(self) -> list[str]:
        return [name for name, one in zip(self.node.input, self.shared, strict=True) if not one]

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        return tuple(name for name, one in zip(self.node.input, self.shared, strict=True) if one)

    @cached_property
    def gradient(self) -> str:
        """The one tensor that is neither kept nor replaced, and that no other update reads; else empty."""
        replaced = self._replaced
        others = [name for name in self.tensors if name not in self.kept and name not in replaced]
        own = len(others) == 1 and self.again.isdisjoint((*others, *replaced)) and others[0] not in self.node.output
        return others[0] if own else ""

    @property
    def shards(self) -> list[tuple[str, str]]:
        """The operands that are replaced and not kept: shards cut out of parameters in each step, with their new values."""
        return [(name, made) for name, made in self._replaced.items() if name not in self.kept]

    @cached_property
    def _replaced(self) -> dict[str, str]:
        """Maps each operand for which the function makes a new value to that value."""
        made = dict(zip(self.function.output, self.node.output, strict=True))
        pairs = zip(self.function.input, self.node.input, strict=True)
        return {name: made[following] for formal, name in pairs if (following := f"{formal}{NEXT}") in made}

    @cached_property
    def key(self) -> tuple[object, ...]:
        """A key, equal for nodes with the same function and operands of the same kind: kept parameters, or shards cut out in each step."""
        attributes = tuple(sorted(one.SerializeToString(deterministic=True) for one in self.node.attribute))
        kept = tuple(name in self.kept for name in self.tensors)
        kind = self.types[self.tensors[0]]
        return self.node.op_type, attributes, self.numbers, kept, kind, self.targets.get(self.gradient)

    @property
    def is_alone(self) -> bool:
        """Whether it runs by itself: memory is laid out only for one gradient and for kept values, not for other results."""
        return not self.gradient or not all(formal.endswith(NEXT) for formal in self.function.output)


def _alike_together(members: Sequence[_Member]) -> list[_Member]:
    """The members sorted into groups of one key, in the order of each group's first; unsorted if one reads another's result."""
    made = {name for one in members for name in one.node.output}
    if any(not made.isdisjoint(one.node.input) for one in members):
        return list(members)
    places: dict[object, int] = {}
    for one in members:
        places.setdefault(one.key, len(places))
    return sorted(members, key=lambda one: places[one.key])


def _runs(members: Sequence[_Member], buffered: Mapping[str, tuple[str, int]]) -> Iterator[list[_Member]]:
    """Yields runs of adjacent members that can run as one."""
    run: list[_Member] = []
    for member in members:
        fits = bool(run) and run[-1].key == member.key and not member.is_alone and not run[-1].is_alone
        if fits and _follows(buffered.get(run[-1].gradient), buffered.get(member.gradient)):
            run.append(member)
            continue
        if run:
            yield run
        run = [member]
    if run:
        yield run


def _follows(before: tuple[str, int] | None, after: tuple[str, int] | None) -> bool:
    """Whether a gradient directly follows another in its buffer; two gradients without a buffer can still be laid out so."""
    if before is None or after is None:
        return before is after
    return after == (before[0], before[1] + 1)
