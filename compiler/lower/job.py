"""The program of the whole job under construction: one ordered list of ops over values, each op with the ranks that run it.

What ranks have (constants, weights, state) is recorded once, too, with the ranks that have it. A rank's program is a filter of these lists,
and ranks with the same filter share it: distinct programs are found at the end, by splitting the set of all ranks by the ranks of every op
and record. So writing costs by what is written, whatever the number of ranks.

    0-1   %h = MatMul(%x, %w)      0, 2   Transfer(%h)      2   %y = Relu(%h)        distinct programs: of 0, of 1, and of 2

A message is one op of two ranks; that one of them sees it as a Send and the other as a Recv is found out at the end, too. Messages from the
ranks of one group to those of another are one op, whose ends share a program each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import onnx_ir as ir
from partc.compiler.ir.constants import Constant
from partc.compiler.ir.local_form import LocalForm
from partc.compiler.ir.programs import Comm, Compute, RankTensor, State, TaskKind, Value
from partc.compiler.ir.sharded import Group, Ranks, ShardedValue, all_ranks, ranks_of, split
from partc.compiler.ir.value_info import Shape
from partc.runtime.artifact import format as fmt
from partc.runtime.spellings import first_free

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Transfer:
    """Messages: each of `targets` gets what its place in `sources` has, under the same name; no rank is both.

    `group` is the name of the pairs, empty of a single message; `value`, `cause` and `bytes` are as a `Comm` says.
    """

    moved: Value
    sources: Group
    targets: Group
    tag: int
    value: ir.Value
    cause: str
    bytes: str
    group: str = ""
    task: TaskKind = TaskKind.FORWARD

    @property
    def reads(self) -> tuple[Value, ...]:
        """The values that the sources send."""
        return (self.moved,)

    @property
    def makes(self) -> tuple[Value, ...]:
        """The values that the targets receive."""
        return (self.moved,)

    def seen_by(self, ranks: Ranks) -> list[Comm]:
        """The message as some ranks, which do the same, have it in their program: a Send, a Recv, or nothing."""
        ends = (
            (self.sources, fmt.SEND, (self.moved,), (), self.targets),
            (self.targets, fmt.RECV, (), (self.moved,), self.sources),
        )
        return [
            Comm(
                op,
                given,
                made,
                {fmt.GROUP: self.group} if self.group else {fmt.PEER: peers[0]},
                self.tag,
                self.value,
                self.cause,
                self.bytes,
                self.task,
            )
            for own, op, given, made, peers in ends
            if ranks_of(own) & ranks
        ]


JobOp: TypeAlias = Compute | Comm | Transfer
Placed: TypeAlias = tuple[JobOp, Ranks]
"""An op and the ranks that do it."""


@dataclass(eq=False, slots=True)
class _Record(Generic[T]):
    value: Value
    item: T
    ranks: Ranks


class Records(Generic[T]):
    """The records of ranks about values: items in the order in which they were listed, each with its ranks. A rank has one item of a
    value.
    """

    def __init__(self) -> None:
        self._all: list[_Record[T]] = []
        self._of: dict[Value, list[_Record[T]]] = {}
        self._ranks: dict[Value, Ranks] = {}

    def __iter__(self) -> Iterator[tuple[Value, T, Ranks]]:
        return ((one.value, one.item, one.ranks) for one in self._all if one.ranks)

    def copy(self) -> Records[T]:
        """Records of their own with the same contents."""
        found = Records[T]()
        for value, item, ranks in self:
            found.add(ranks, value, item)
        return found

    def ranks(self, value: Value) -> Ranks:
        """The ranks that have an item of this value."""
        return self._ranks.get(value, 0)

    def add(self, ranks: Group | Ranks, value: Value, item: T) -> None:
        """Lists an item on those of the ranks that have none of this value."""
        there = self.ranks(value)
        if new := ranks_of(ranks) & ~there:
            record = _Record(value, item, new)
            self._all.append(record)
            self._of.setdefault(value, []).append(record)
            self._ranks[value] = there | new

    def drop(self, value: Value) -> None:
        """Takes the items of a value off the lists of all ranks."""
        for one in self._of.pop(value, ()):
            one.ranks = 0
        self._ranks.pop(value, None)


RECORDS = ("inputs", "weights", "constants", "listed", "state", "scalars", "outputs", "concatenated")
"""The names of a job's records, each with its ranks."""


class Job:
    """The ops of `size` ranks in one order, and what the ranks have; `reserved`: names of the model's own values and of their versions.

    A set of ranks is given as a group, or as the bits of an integer (`Ranks`).
    """

    def __init__(self, size: int, reserved: Collection[str] = ()) -> None:
        self.size, self.reserved = size, frozenset(reserved)
        self.steps: list[Placed] = []
        self.inputs: Records[ShardedValue] = Records()
        self.weights: Records[RankTensor] = Records()
        self.constants: Records[Constant] = Records()
        self.listed: Records[None] = Records()
        """Values of known type."""
        self.state: Records[State] = Records()
        self.scalars: Records[None] = Records()
        self.outputs: Records[ShardedValue] = Records()
        """The outputs of a program besides those of the model."""
        self.concatenated: Records[None] = Records()
        """Values that are concatenated over all microbatches, one after the other."""
        self.forms: dict[ir.Node, list[tuple[LocalForm, Ranks]]] = {}
        """Maps each node to its local forms that are here: a smaller group of these ranks may have the node again."""
        self.created: dict[Value, Ranks] = {}
        """The values that the model does not have, in the order of their making, each with the ranks on which it has one name."""
        self._scalars: dict[str, Value] = {}
        self._numbers: dict[str, Value] = {}
        self._replaced: dict[JobOp, list[tuple[Ranks, tuple[Placed, ...]]]] = {}

    @property
    def everyone(self) -> Ranks:
        """All ranks of the job."""
        return all_ranks(self.size)

    def copy(self) -> Job:
        """A job of its own with the same contents."""
        copied = Job(self.size, self.reserved)
        copied.steps = list(self.steps)
        for records in RECORDS:
            setattr(copied, records, getattr(self, records).copy())
        copied.forms = {node: list(forms) for node, forms in self.forms.items()}
        copied.created, copied._scalars, copied._numbers = dict(self.created), dict(self._scalars), dict(self._numbers)
        copied._replaced = {op: list(others) for op, others in self._replaced.items()}
        return copied

    def value(self, ranks: Group | Ranks, hint: str, *others: str, base: Value | None = None) -> Value:
        """A new value on these ranks, which is called as the hint says, or one of the others: the first one that is free there."""
        made = Value(hint, base, others=others)
        self.created[made] = ranks_of(ranks)
        return made

    def derived_on(self, ranks: Group | Ranks, base: Value, suffix: str) -> Value:
        """A new value on these ranks that is named after another."""
        return self.value(ranks, suffix, base=base)

    def extend(self, ranks: Group | Ranks, value: Value) -> None:
        """Has a value on more ranks, under the same name."""
        if value in self.created:
            self.created[value] |= ranks_of(ranks)

    def known(self, value: Value) -> Ranks:
        """The ranks that have a value, or on which nothing else has its name."""
        return self.created.get(value, 0) | self.listed.ranks(value)

    def scalar(self, ranks: Group | Ranks, name: str) -> Value:
        """A number that each step is given under this name."""
        value = self._scalars.setdefault(name, Value(name))
        self.scalars.add(ranks, value, None)
        return value

    def number(self, name: str) -> Value:
        """A value that all ranks have alike, such as the loss scale: the one of this name."""
        if name not in self._numbers:
            self._numbers[name] = self.value(self.everyone, name)
        return self._numbers[name]

    def append(self, ranks: Group | Ranks, steps: Iterable[JobOp]) -> None:
        """Writes ops after these ranks' ops so far."""
        if some := ranks_of(ranks):
            self.steps += [(step, some) for step in steps]

    def replace(self, ranks: Group | Ranks, old: JobOp, new: Sequence[Placed]) -> None:
        """Puts ops in the place of one on these ranks."""
        self._replaced.setdefault(old, []).append((ranks_of(ranks), tuple(new)))

    @property
    def program(self) -> list[Placed]:
        """All ops in order, with replaced ones in the places of old ones."""
        return self._now(self.steps)

    def take(self, start: int) -> list[Placed]:
        """Removes the ops from a place on, and returns them, with replaced ones in the places of old ones."""
        taken = self._now(self.steps[start:])
        del self.steps[start:]
        return taken

    def _now(self, steps: Iterable[Placed]) -> list[Placed]:
        ops: list[Placed] = []
        for step, ranks in steps:
            for some, new in reversed(self._replaced.get(step, ())):
                ops += [(one, both) for one, those in new if (both := those & ranks & some)]
                ranks &= ~some
            if ranks:
                ops.append((step, ranks))
        return ops

    def declare(self, ranks: Group | Ranks, value: Value, of: ir.Value, shape: Shape | None) -> None:
        """Lists a value with its type and local shape on these ranks."""
        if value.of is None or value.shape is None:
            value.of, value.shape = of, shape
        self.listed.add(ranks, value, None)
        self.extend(ranks, value)

    def constant(self, ranks: Group | Ranks, value: Value, constant: Constant) -> Value:
        """Has a value be a constant on these ranks."""
        self.constants.add(ranks, value, constant)
        return value

    def derived(self, name: str) -> str:
        """The name, or where a value of the model has it, the name with a stroke."""
        return first_free(name, self.reserved.__contains__)

    def distinct(self, groups: Iterable[Group] = ()) -> list[Ranks]:
        """The sets of ranks that do and have the same; those that differ in being among one of `groups` are apart, too."""
        program = self.program
        sets = {ranks for _, ranks in program} | {ranks_of(group) for group in groups}
        sets |= {ranks_of(step.sources) for step, _ in program if isinstance(step, Transfer)}
        for records in RECORDS:
            sets |= {ranks for _, _, ranks in getattr(self, records)}
        return split(self.everyone, sets)
