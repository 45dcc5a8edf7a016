"""The steps of a rank's program: segments of compute nodes, updates, copies, messages, collectives and lookups.

Each names the values that it `reads` and `makes`. A receive makes its value when it is posted, a collective when it begins; a wait reads
nothing, and makes the same values complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from partc.runtime.artifact.comm.border_node import IF, LOOP, BorderCall
from partc.runtime.artifact.comm.collective_node import AnyCall, CollectiveCall
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.format import BEGIN, END, OTHERWISE
from partc.runtime.artifact.graph.onnx_graph import addends, op_and_path, reads

if TYPE_CHECKING:
    from onnx import NodeProto


@dataclass(frozen=True, eq=False)
class Segment:
    """Compute nodes that run in one session, with its inputs, its outputs that others need, and its initializers.

    A segment in a task has the names of one microbatch for its operands; `formal` has the names of the function body, and is the same for
    all calls. `task` is the task in the schedule's notation, `target` the target of all nodes in the file's; `threads`: the most threads
    for a node, 0 for all of the rank's.
    """

    nodes: Sequence[NodeProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initializers: tuple[str, ...]
    task: str = ""
    body: Segment | None = None
    target: str = ""
    threads: int = 0

    @property
    def reads(self) -> tuple[str, ...]:
        """The inputs."""
        return self.inputs

    @property
    def makes(self) -> tuple[str, ...]:
        """The outputs."""
        return self.outputs

    @property
    def sums(self) -> Iterator[tuple[str, str]]:
        """Yields each addend with the sum that may reuse its memory.

        Only the adding node reads the addend, and it reads no element after it has written the sum's.
        """
        names = dict(self.operands)
        for one, made in self.output_pairs:
            if (term := self.formal.added.get(one)) is not None:
                yield names[term], made

    @cached_property
    def added(self) -> dict[str, str]:
        """Maps each output that is a sum to the input to which it adds."""
        makers = {name: node for node in self.nodes for name in node.output}
        counts = Counter(name for node in self.nodes for name in reads(node))
        found: dict[str, str] = {}
        for output in self.outputs:
            node = makers[output]
            terms = [name for name in addends(node) if name in self.inputs and counts[name] == 1]
            found |= {output: terms[0]} if terms else {}
        return found

    @property
    def formal(self) -> Segment:
        """The segment with the names of its nodes' operands."""
        return self.body or self

    @property
    def operands(self) -> list[tuple[str, str]]:
        """The inputs as pairs: the name that the nodes use, and the name in the program."""
        return list(zip(self.formal.inputs, self.inputs, strict=True))

    @property
    def output_pairs(self) -> list[tuple[str, str]]:
        """The outputs as pairs: the name that the nodes use, and the name in the program."""
        return list(zip(self.formal.outputs, self.outputs, strict=True))

    def __str__(self) -> str:
        task = f"{self.task}: " if self.task else ""
        if len(self.nodes) == 1:
            return task + op_and_path(self.nodes[0])
        return f"{task}{len(self.nodes)} nodes from {op_and_path(self.nodes[0])} to {op_and_path(self.nodes[-1])}"


@dataclass(frozen=True)
class Update:
    """Nodes of the optimizer, which overwrite parameters and slots: every reader of the old values comes before this step.

    `groups`: nodes that run as one; `renewed`: shards that are sliced from parameters in each step, each with its new value.
    """

    nodes: Sequence[NodeProto]
    target: str = ""
    groups: Sequence[Sequence[NodeProto]] = ()
    renewed: Sequence[tuple[str, str]] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that the nodes read, without those that they make."""
        made = {*self.makes}
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.input if name and name not in made))

    @property
    def makes(self) -> tuple[str, ...]:
        """The new values of parameters and slots."""
        return tuple(name for node in self.nodes for name in node.output)

    def __str__(self) -> str:
        first = self.nodes[0]
        more = f" and {len(self.nodes) - 1} more" if len(self.nodes) > 1 else ""
        return f"update of '{first.input[0]}'{more} ({first.op_type})"


@dataclass(frozen=True)
class Copy:
    """Copies a value to another of the rank's targets, `to`; `task` is the task that contains it."""

    source: str
    result: str
    to: str
    path: str
    task: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        """The source."""
        return (self.source,)

    @property
    def makes(self) -> tuple[str, ...]:
        """The result."""
        return (self.result,)

    def __str__(self) -> str:
        return f"copy of '{self.source}' to {self.to}{_source(self.path)}"


@dataclass(frozen=True)
class Message:
    """One end of a transfer in the file: the value, the rank at the other end, the tag, and the op's source name.

    `group`: the name of the pairs of ranks, if many messages share one tag. `target`: the target whose memory it goes from or to, if that
    is not the host (`device_messages.py`).
    """

    value: str
    peer: int
    tag: int
    path: str
    group: str = ""
    target: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        """The value, if it is sent."""
        return (self.value,) if isinstance(self, Send) else ()

    @property
    def makes(self) -> tuple[str, ...]:
        """The value, if it is received."""
        return () if isinstance(self, Send) else (self.value,)


@dataclass(frozen=True)
class Send(Message):
    """Sends the value to `peer`; it may be overwritten once the send is complete."""

    def __str__(self) -> str:
        return f"Send of '{self.value}' to rank {self.peer}{_source(self.path)}"


@dataclass(frozen=True)
class PostRecv(Message):
    """Posts the receive of the value, which from here on owns the value's buffer."""

    def __str__(self) -> str:
        return f"posting of Recv of '{self.value}' from rank {self.peer}{_source(self.path)}"


@dataclass(frozen=True)
class WaitRecv(Message):
    """Waits for the receive of the value, which is needed now."""

    def __str__(self) -> str:
        return f"Recv of '{self.value}' from rank {self.peer}{_source(self.path)}"


@dataclass(frozen=True)
class Collective:
    """One end of a collective: the call, and the ranks that take part; no ranks if a file is read without its manifest.

    `task`: the task that contains it, in the schedule's notation. `target`: the target of its values, if that is not the host.
    """

    call: CollectiveCall
    ranks: tuple[int, ...]
    task: str = ""
    target: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        """The operands, when it begins."""
        return self.call.inputs if isinstance(self, StartCollective) else ()

    @property
    def makes(self) -> tuple[str, ...]:
        """The results."""
        return self.call.outputs


@dataclass(frozen=True)
class StartCollective(Collective):
    """Begins the collective: from here on its input is read and its output written."""

    def __str__(self) -> str:
        return f"beginning of {_among(self.call, self.ranks)}"


@dataclass(frozen=True)
class WaitCollective(Collective):
    """Waits for the collective, whose output is needed now."""

    def __str__(self) -> str:
        return _among(self.call, self.ranks)


@dataclass(frozen=True)
class LookUp:
    """One end of a Pull, Push, Route or Return, which is complete when it has begun; `ranks` and `task` as those of a collective."""

    call: LookupCall
    ranks: tuple[int, ...]
    task: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        """The operands of the call."""
        return self.call.inputs

    @property
    def makes(self) -> tuple[str, ...]:
        """The results of the call."""
        return self.call.outputs

    def __str__(self) -> str:
        return _among(self.call, self.ranks)


@dataclass(frozen=True)
class Border:
    """A border of a body in which ranks communicate (`artifact/graph/bodies.py`).

    `first` and `last` are the calls of the node's Begin and End; `ranks` as those of a collective.
    """

    call: BorderCall
    ranks: tuple[int, ...]
    first: BorderCall
    last: BorderCall
    task: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        """The operands; at the end of a turn also the states, which the next turn reads, and between branches the results of the first."""
        call, more = self.call, tuple[str, ...]()
        if call.kind == LOOP and call.op == END:
            more = self.first.outputs
        if call.kind == IF and call.op == OTHERWISE:
            more = self.last.outputs
        return (*call.inputs, *more)

    @property
    def makes(self) -> tuple[str, ...]:
        """The results of the call."""
        return self.call.outputs

    def __str__(self) -> str:
        words = {BEGIN: "begin", OTHERWISE: "other branch", END: "end"}
        return f"{words[self.call.op]} of the {self.call.kind}{_source(self.call.path)}"


def bodies_of(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """Returns the steps that begin and end each Loop, inner ones first."""
    pairs, open_ = list[tuple[int, int]](), list[int]()
    for index, step in enumerate(steps):
        if isinstance(step, Border) and step.call.op == BEGIN:
            open_.append(index)
        elif isinstance(step, Border) and step.call.op == END:
            begin = open_.pop()
            pairs += [(begin, index)] if step.call.kind == LOOP else []
    return pairs


Step: TypeAlias = (
    Segment | Copy | Send | PostRecv | WaitRecv | StartCollective | WaitCollective | LookUp | Update | Border
)


def _among(call: AnyCall, ranks: Sequence[int]) -> str:
    listed = f", ranks {', '.join(map(str, ranks))}" if ranks else ""
    return f"{call.op} of '{call.value}' in group '{call.group}'{listed}{_source(call.path)}"


def _source(path: str) -> str:
    return f" ({path})" if path else ""
