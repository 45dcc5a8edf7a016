"""Proves that running a run list gives the same results as running the rank file's nodes in the file's order.

The steps are simulated one by one, for the main graph and for the function of each task:

    values       a step reads only values that exist: from before the row, made by an earlier step, or received and waited for
    segments     a segment states the outside values that its nodes read, its weights, and the values that later steps read; its nodes
                 have one target, and one thread where several would lose additions; running statistics that a node overwrites are
                 among its outputs
    order        messages, collectives, lookups and tasks begin in the order of the file, all of them, and each is waited for
    updates      once a tensor is overwritten nothing reads its old value: no later step, no other node of the update, no message, and no
                 collective that has begun and was not waited for; the guard exists before the update
    groups       nodes that run as one have the same function, attributes and scalars, none reads a value that another makes, and each
                 operand and each result is next in a buffer to that of the node before
    outputs      at the end all outputs exist
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from onnx import FunctionProto, ModelProto, NodeProto
from partc.runtime.artifact.comm.collective_node import CollectiveCall, read_call
from partc.runtime.artifact.comm.collectives import COLLECTIVES
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.format import (
    BEGIN,
    DOMAIN,
    END,
    OPTIMIZER,
    RECV,
    SEND,
    TAG,
    TASKS,
    Manifest,
    StateRecord,
    run_list_file,
)
from partc.runtime.artifact.graph.bodies import is_border, read_model
from partc.runtime.artifact.graph.onnx_graph import integer_of, moved_statistics, node_title, path_of, reads
from partc.runtime.artifact.graph.optimizer_function import is_elementwise
from partc.runtime.artifact.graph.rank_constants import is_rank_constant, names_of
from partc.runtime.artifact.graph.targets import is_copy, target_of
from partc.runtime.artifact.manifest import read_run_list
from partc.runtime.artifact.run_list import RunList, in_one_thread, numbers_of, parsed_step, wants_one_thread
from partc.runtime.artifact.tasks.calls import Call, bodies_of, calls_of
from partc.runtime.artifact.training.scalars import NUMBERS
from partc.runtime.errors import ArtifactError, Violation

_AGAIN = "compile the model again"


def check_run_list(
    folder: Path, file: str, manifest: Manifest, kept: Sequence[StateRecord], model: ModelProto | None = None
) -> list[Violation]:
    """Returns the faults of the run list of the rank file `file`, whose graph is valid; empty where it has no list.

    `kept`: the state of the file's ranks. `model`: the file, if it has already been read.
    """
    name = run_list_file(file)
    if name not in manifest.files:
        return []
    try:
        run = read_run_list(folder, manifest, file)
        return [*_Player(file, model or read_model(folder / file), run, manifest, kept).play()]
    except ArtifactError as error:
        fact = str(error).splitlines()[0].removeprefix(f"{folder / name}, ")
        return [Violation(name, fact, help=_AGAIN)]


class _WrongListError(Exception):
    """A fault of a run list, with the node that it concerns."""

    def __init__(self, fact: str, node: NodeProto | None = None) -> None:
        super().__init__(fact)
        self.node = node


class _Player:
    """Simulates the rows of a run list; a row stops at its first wrong step."""

    def __init__(
        self, file: str, model: ModelProto, run: RunList, manifest: Manifest, kept: Sequence[StateRecord]
    ) -> None:
        self.name, self.run, self.main, self.guard = run_list_file(file), run, manifest.name, manifest.guard
        self.graph = model.graph
        self.nodes = [node for node in model.graph.node if not is_rank_constant(node)]
        self.bodies = bodies_of(model)
        self.calls = calls_of(self.nodes, self.bodies, file)
        self.single = in_one_thread(one for one in model.functions if one.domain != TASKS)
        self.following = {one.next: one.value for one in kept if one.next}
        self.functions = {one.name: one for one in model.functions if one.domain == OPTIMIZER}
        self.next_to: dict[str, str] = {}
        """Maps each value to the value that follows it in memory: in a buffer of the list, or among the values of one collective."""
        for node in self.nodes:
            if node.domain == DOMAIN and node.op_type in COLLECTIVES and len(node.output) > 1:
                call = read_call(node, file)
                if isinstance(call, CollectiveCall) and not call.kind.joins:
                    self.next_to |= dict(pairwise(call.outputs))
        buffered = {name for pair in self.next_to.items() for name in pair}
        for row in run.buffers:
            if not buffered.isdisjoint(row.members) or len({*row.members}) < len(row.members):
                raise ArtifactError(f"'{row.members[0]}' and on are in several buffers")
            buffered.update(row.members)
            self.next_to |= dict(pairwise(row.members))
        inputs = {port.name for port in model.graph.input}
        fixed = {one.name for one in self.graph.initializer}
        fixed |= {one.values.name for one in self.graph.sparse_initializer}
        self.weights = (fixed - inputs) | {*names_of(model)}

    def play(self) -> Iterator[Violation]:
        """Simulates all rows, and yields the violations."""
        rows: dict[str, Callable[[], None]] = {self.main: self._main}
        for name, calls in self._calls_by_name().items():
            rows[name] = lambda name=name, calls=calls: self._task(name, calls)  # type: ignore[misc]
        for name, play in rows.items():
            try:
                if name not in self.run.rows:
                    raise _WrongListError("there is no such row")
                play()
            except _WrongListError as error:
                node = error.node
                title, path = (node_title(node), path_of(node)) if node is not None else ("", "")
                yield Violation(self.name, f"row '{name}': {error}", title, path, _AGAIN)
        if unknown := [name for name in self.run.rows if name not in rows]:
            yield Violation(self.name, f"row '{unknown[0]}' is of nothing in the file", help=_AGAIN)

    def _calls_by_name(self) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = {}
        for call in self.calls.values():
            found.setdefault(call.node.op_type, []).append(call)
        return found

    def _main(self) -> None:
        outputs = [port.name for port in self.graph.output]
        calls = {call.cell: (at, call) for at, call in self.calls.items()}
        _Row(self, self.nodes, [port.name for port in self.graph.input], self.weights, outputs, calls).play(self.main)

    def _task(self, name: str, calls: Sequence[Call]) -> None:
        body = self.bodies[name]
        operands = zip(body.function.input, *(call.node.input for call in calls), strict=True)
        shared = {formal for formal, *others in operands if formal in self.weights and {*others} == {formal}}
        weights = {*shared, *body.constants}
        _Row(self, body.nodes, body.function.input, weights, body.function.output, {}).play(name)


class _Row:
    """The state of a row while it is simulated."""

    def __init__(
        self,
        player: _Player,
        nodes: Sequence[NodeProto],
        inputs: Iterable[str],
        weights: Collection[str],
        outputs: Sequence[str],
        calls: Mapping[str, tuple[int, Call]],
    ) -> None:
        self.player, self.nodes, self.weights, self.outputs, self.calls = player, nodes, weights, outputs, calls
        self.there = {*inputs, *weights}
        ends = ((at, node) for at, node in enumerate(nodes) if node.domain == DOMAIN and not is_copy(node))
        self.ends = {integer_of(node, TAG, 0): at for at, node in ends}
        self.begun: list[int] = []
        """The indices of messages, collectives, lookups and tasks among the nodes, in the order in which they begin."""
        self.pending: dict[int, tuple[list[str], list[str]]] = {}
        """Maps the tag of each communication that has begun and was not waited for to its operands and its results."""
        self.outside: list[set[str]] = []
        """For each body that has begun, the values that were there before."""
        self.leaving: set[str] = set()
        """Values that messages may read to the end of the step."""
        self.done: set[int] = set()
        self.overwritten: set[str] = set()

    def play(self, name: str) -> None:
        """Simulates the row `name`; raises for the first step that is wrong."""
        run = self.player.run
        for cell in run.rows[name].split():
            letter, number = parsed_step(cell)
            if letter == "S" and number < len(run.segments):
                self.segment(cell, number)
            elif letter == "U" and number < len(run.updates):
                self.update(cell, number)
            elif letter == "C" and number < len(self.nodes) and is_copy(self.nodes[number]):
                self.run_nodes(cell, [number])
            elif letter == "B" and number < len(self.nodes) and is_border(self.nodes[number]):
                self.border(cell, number)
            elif letter and letter in "RXAWL" and number in self.ends and not is_border(self.nodes[self.ends[number]]):
                self.communicate(cell, letter, number)
            elif not letter and cell in self.calls:
                at, call = self.calls[cell]
                self.begin(cell, at)
                self.read(cell, call.node, call.node.input)
                self.make(cell, [at], call.node.output)
            else:
                raise _WrongListError(f"{cell[:40]} is of nothing in the file")
        if self.pending:
            raise _WrongListError(f"nothing waits for {min(self.pending)}")
        wanted = sorted([*self.ends.values(), *(at for at, _ in self.calls.values())])
        if len(self.begun) != len(wanted):
            missing = self.nodes[next(at for at in wanted if at not in {*self.begun})]
            raise _WrongListError("no step begins it", missing)
        if lost := [value for value in self.outputs if value not in self.there]:
            raise _WrongListError(f"no step makes the output '{lost[0]}'")

    def border(self, cell: str, at: int) -> None:
        """Passes a border of a body: what is made in it is read in it alone, and all that has begun there is waited for there."""
        node = self.nodes[at]
        self.begin(cell, at)
        self.read(cell, node, node.input)
        if self.pending:
            raise _WrongListError(f"{cell} is passed before {min(self.pending)} is waited for", node)
        if node.op_type == BEGIN:
            self.outside.append({*self.there})
        elif not self.outside:
            raise _WrongListError(f"{cell} ends a body that has not begun", node)
        else:
            self.there = {*self.outside[-1]}
        if node.op_type == END:
            self.outside.pop()
        self.make(cell, [at], node.output)

    def segment(self, cell: str, number: int) -> None:
        row = self.player.run.segments[number]
        numbers = self.numbers(cell, row.nodes)
        nodes = [self.nodes[at] for at in numbers]
        for node in nodes:
            if node.domain in (DOMAIN, TASKS):
                raise _WrongListError(f"{cell} has it, which is not a node of a segment", node)
            if target_of(node) != row.target:
                raise _WrongListError(f"{cell} runs it on '{row.target}', its target is '{target_of(node)}'", node)
            if row.threads != 1 and wants_one_thread(node, self.player.single):
                raise _WrongListError(f"{cell} runs it in several threads, of which two may add to one element", node)
            if lost := [name for name in moved_statistics(node) if name not in row.outputs]:
                raise _WrongListError(f"{cell} does not give '{lost[0]}', which it writes over what is kept", node)
        needed = self.run_nodes(cell, numbers, row.outputs)
        weights = {name for name in needed if name in self.weights}
        if {*row.inputs} != needed - weights or {*row.weights} != weights or len({*row.inputs}) < len(row.inputs):
            wrong = sorted((needed - weights) ^ {*row.inputs} | weights ^ {*row.weights}) or row.inputs
            raise _WrongListError(f"{cell} says otherwise than its nodes whether they read '{wrong[0]}'")

    def update(self, cell: str, number: int) -> None:
        row, player = self.player.run.updates[number], self.player
        numbers = self.numbers(cell, row.nodes)
        replaced: dict[str, int] = {}
        for at in numbers:
            node = self.nodes[at]
            replaces = node.domain == OPTIMIZER and not player.following.keys().isdisjoint(node.output)
            if not replaces or target_of(node) != row.target:
                raise _WrongListError(f"{cell} has it, which is not an update on '{row.target}'", node)
            replaced |= {player.following[name]: at for name in node.output if name in player.following}
        if player.guard and player.guard not in self.there:
            raise _WrongListError(
                f"{cell} runs before '{player.guard}' is there, by which it is decided whether it runs"
            )
        self.run_nodes(cell, numbers)
        in_flight = {name for given, _ in self.pending.values() for name in given} | self.leaving
        for name, at in replaced.items():
            if name in in_flight:
                raise _WrongListError(
                    f"{cell} overwrites '{name}' while communication may still read it", self.nodes[at]
                )
            if others := [other for other in numbers if other != at and name in self.nodes[other].input]:
                raise _WrongListError(f"{cell} overwrites '{name}', which this node of it reads", self.nodes[others[0]])
        self.overwritten |= replaced.keys()
        groups = [self.numbers(cell, group) for group in row.groups]
        if groups and sorted(at for group in groups for at in group) != numbers:
            raise _WrongListError(f"the groups of {cell} are not its nodes")
        for group in groups:
            function = player.functions.get(self.nodes[group[0]].op_type)
            if len(group) == 1 or function is None or not is_elementwise(function):
                if len(group) > 1:
                    raise _WrongListError(f"{cell} runs it as one with others", self.nodes[group[0]])
                continue
            made = {name for at in group for name in self.nodes[at].output}
            for before, after in pairwise(self.nodes[at] for at in group):
                if (
                    before.op_type != after.op_type
                    or [*before.attribute] != [*after.attribute]
                    or made & {*after.input}
                ):
                    fact = f"{cell} runs it as one with {node_title(before)}, which does something else"
                    raise _WrongListError(fact, after)
                self.follows(cell, function, before, after)

    def follows(self, cell: str, function: FunctionProto, before: NodeProto, after: NodeProto) -> None:
        """Raises where a node's operands or results are not next to those of the node before."""
        player, formals = self.player, [*function.input, *function.output]
        pairs = zip(formals, (*before.input, *before.output), (*after.input, *after.output), strict=True)
        for formal, first, two in pairs:
            if formal in NUMBERS and first == two:
                continue
            first, two = player.following.get(first, first), player.following.get(two, two)
            if formal in NUMBERS or player.next_to.get(first) != two:
                raise _WrongListError(
                    f"{cell} runs it as one, and nothing says that '{two}' follows '{first}' in memory", after
                )

    def communicate(self, cell: str, letter: str, tag: int) -> None:
        at = self.ends[tag]
        node = self.nodes[at]
        call = read_call(node, self.player.name) if node.op_type not in (SEND, RECV) else None
        kinds = "X" if node.op_type == SEND else "RW" if call is None else "L" if isinstance(call, LookupCall) else "AW"
        if letter not in kinds:
            raise _WrongListError(f"{cell} is not a step of it", node)
        inputs, outputs = (node.input, node.output) if call is None else (call.inputs, call.outputs)
        if letter == "W":
            if tag not in self.pending:
                raise _WrongListError(f"{cell} waits for what has not begun, or was waited for", node)
            self.make(cell, [at], self.pending.pop(tag)[1])
            return
        self.begin(cell, at)
        self.read(cell, node, inputs)
        if letter == "X" or (letter == "A" and (call is None or not outputs or call.op == "Exchange")):
            self.leaving |= {*inputs}
        if letter in "RA" and outputs:
            self.pending[tag] = [*inputs], [*outputs]
        else:
            self.make(cell, [at], outputs)

    def begin(self, cell: str, at: int) -> None:
        """Records that communication or a task begins; raises if it is out of the order of the file."""
        if self.begun and at <= self.begun[-1]:
            raise _WrongListError(f"{cell} begins out of the order of the file", self.nodes[at])
        self.begun.append(at)

    def run_nodes(self, cell: str, numbers: Sequence[int], outputs: Collection[str] | None = None) -> set[str]:
        """Simulates nodes one after the other, and returns the values that they read from elsewhere.

        Afterwards the values `outputs` exist, by default all that the nodes make.
        """
        inside, needed = set[str](), set[str]()
        for at in numbers:
            outer = [name for name in reads(self.nodes[at]) if name not in inside]
            self.read(cell, self.nodes[at], outer)
            needed.update(outer)
            inside.update(filter(None, self.nodes[at].output))
        if outputs is not None and not inside.issuperset(outputs):
            raise _WrongListError(f"{cell} gives '{min({*outputs} - inside)}', which its nodes do not make")
        self.make(cell, numbers, inside if outputs is None else outputs)
        return needed

    def read(self, cell: str, node: NodeProto, names: Iterable[str]) -> None:
        for name in filter(None, names):
            if name not in self.there:
                raise _WrongListError(f"{cell} reads '{name}' before it is there", node)
            if name in self.overwritten:
                raise _WrongListError(f"{cell} reads '{name}' after it is overwritten", node)

    def make(self, cell: str, numbers: Iterable[int], names: Iterable[str]) -> None:
        for at in numbers:
            if at in self.done:
                raise _WrongListError(f"{cell} runs it again", self.nodes[at])
            self.done.add(at)
        self.there.update(filter(None, names))

    def numbers(self, cell: str, text: str) -> list[int]:
        try:
            return numbers_of(text, len(self.nodes))
        except ValueError as error:
            raise _WrongListError(f"{cell}: {error}") from None
