"""A Pull, Push, Route or Return node as data, and the reasons why a rank cannot run one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

from partc.runtime.artifact.comm.group_call import GroupCall
from partc.runtime.artifact.format import CAPACITY, GIVERS, GROUP, OWNERS, PULL, PUSH, RETURN, ROUTE, ROW, ROWS, TAG
from partc.runtime.artifact.graph.onnx_graph import path_of
from partc.runtime.artifact.tensors.dtypes import Dtype

if TYPE_CHECKING:
    from onnx import AttributeProto, NodeProto

Shape: TypeAlias = tuple[int, ...]
_NO_PART = "a rank takes part that has neither rows nor ids"


@dataclass(frozen=True)
class LookupCall(GroupCall):
    """A lookup node; a value that the rank does not have is None.

    Pull: `ids` are the ids that are looked up, `operand` is the table and `result` the rows. Push, which has no `ids`: `operand` are the
    rows to send, `numbers` and `result` the received ids and rows. `requests`: the results of a Pull that a Push reads: the ids asked of an
    owner, the counts, and the places. `owners` and `givers` are places in the list; `rows` and `row` give the size of the table.

    Route: `operand` are the rows to send, `ids` their experts, `result` the received rows and `numbers` their experts, counted from the
    rank's first. A Route without `ids` follows the one that made its `requests`: the place of each row among the sent ones, and the numbers
    of rows to and from each rank. A Return reads these, too; its `operand` are the received rows, its `result` the rows in the order of the
    sent ones. Every rank of the list is an owner, and `rows` is the number of experts. `capacity`: the numerator and the denominator that
    limit the rows of a rank for an expert; a row that is not sent has the place -1, and a Return gives zeros for it.
    """

    LAW: ClassVar[str] = "op, owners, givers, rows, row or capacity"
    ids: str | None
    operand: str | None
    numbers: str | None
    result: str | None
    requests: tuple[str | None, ...]
    owners: tuple[int, ...]
    givers: tuple[int, ...]
    rows: int
    row: Shape
    capacity: tuple[int, ...] = ()

    @property
    def value(self) -> str:
        return self.result or self.ids or self.operand or ""

    @property
    def inputs(self) -> tuple[str, ...]:
        if self.op == PUSH:
            return tuple(filter(None, (*self.requests, self.operand)))
        return tuple(filter(None, (self.operand, self.ids, *(() if self.asks else self.requests))))

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.op == PUSH:
            return tuple(filter(None, (self.numbers, self.result)))
        return tuple(filter(None, (self.result, self.numbers, *(self.requests if self.asks else ()))))

    @property
    def asks(self) -> bool:
        """Whether it makes the requests that other lookups read."""
        return self.op == PULL or (self.op == ROUTE and self.ids is not None)

    @property
    def numeric_outputs(self) -> tuple[str, ...]:
        """The outputs other than rows: ids, counts and places."""
        return tuple(name for name in self.outputs if name != self.result)

    @property
    def typed(self) -> str | None:
        return self.operand

    @property
    def law(self) -> tuple[object, ...]:
        return self.op, self.owners, self.givers, self.rows, self.row, self.capacity

    def most(self, count: int) -> int:
        """Returns the most rows that a rank with `count` rows sends to one expert."""
        if not self.capacity:
            return count
        numerator, denominator = self.capacity
        return min(count, -(-numerator * count // (denominator * self.rows)))

    @property
    def rows_of_owner(self) -> int:
        """The number of rows of the table that each owner has."""
        return self.rows // len(self.owners)

    def renamed(self, names: Mapping[str, str], tag: int, path: str) -> Self:
        ends = (self.ids, self.operand, self.numbers, self.result, *self.requests)
        ids, operand, numbers, result, *asked = (names.get(name, name) if name else None for name in ends)
        new = replace(self, ids=ids, operand=operand, numbers=numbers, result=result, requests=tuple(asked))
        return replace(new, tag=tag, path=path)


def lookup_call(node: NodeProto, attributes: Mapping[str, AttributeProto]) -> LookupCall:
    """Returns the call of a valid node."""
    inputs = [*(name or None for name in node.input), *[None] * 4]
    outputs = [*(name or None for name in node.output), *[None] * 4]
    op = node.op_type
    ids = None if op in (PUSH, RETURN) else inputs[1]
    requests = {
        PULL: outputs[1:4],
        PUSH: inputs[:3],
        ROUTE: inputs[2:4] if ids is None else outputs[2:4],
        RETURN: inputs[1:3],
    }
    return LookupCall(
        op=op,
        ids=ids,
        result=outputs[1] if op == PUSH else outputs[0],
        group=attributes[GROUP].s.decode(errors="replace"),
        tag=attributes[TAG].i,
        path=path_of(node),
        operand=inputs[3] if op == PUSH else inputs[0],
        numbers=outputs[0] if op == PUSH else outputs[1] if op == ROUTE else None,
        requests=tuple(requests[op]),
        owners=tuple(attributes[OWNERS].ints),
        rows=attributes[ROWS].i,
        row=tuple(attributes[ROW].ints) if ROW in attributes else (),
        givers=tuple(attributes[GIVERS].ints) if GIVERS in attributes else (),
        capacity=tuple(attributes[CAPACITY].ints) if CAPACITY in attributes else (),
    )


def lookup_problems(node: NodeProto, attributes: Mapping[str, AttributeProto]) -> Iterator[str]:
    """Yields the faults of a node and its attributes as a lookup."""
    most = {PULL: (2, 4), PUSH: (4, 2), ROUTE: (4, 4), RETURN: (3, 1)}[node.op_type]
    if len(node.input) > most[0] or len(node.output) > most[1]:
        yield f"it has {len(node.input)} inputs and {len(node.output)} outputs, and takes {most[0]} and makes {most[1]}"
    givers = list(attributes[GIVERS].ints) if GIVERS in attributes else []
    if len({*givers}) < len(givers) or (node.op_type == PUSH and not givers):
        yield f"its givers are {givers}: different places are needed"
    owners, rows = attributes[OWNERS].ints, attributes[ROWS].i
    if not owners or len({*owners}) < len(owners):
        yield f"its owners are {list(owners)}: different places are needed"
    elif rows <= 0 or rows % len(owners):
        yield f"{rows} rows do not divide into equal runs for {len(owners)} owners"
    capacity = attributes[CAPACITY].ints if CAPACITY in attributes else (1, 1)
    if len(capacity) != 2 or not 0 < capacity[1] <= capacity[0]:
        yield f"its capacity is {list(capacity)}: two numbers are needed, whose quotient is 1 or more"
    if ROW in attributes and any(size < 0 for size in attributes[ROW].ints):
        yield f"its row has the shape {list(attributes[ROW].ints)}"


def wrong_lookup(call: LookupCall, dtype: Dtype | None, ranks: int, place: int) -> Iterator[str]:
    """Yields the reasons for which a rank, at `place` in a list of `ranks` ranks, cannot run a lookup."""
    if dtype is not None and dtype.bits < 8:
        yield f"rows of a {dtype.name} cannot be looked up on other ranks"
    for word, places in (("owner", call.owners), ("giver", call.givers)):
        if wrong := [one for one in places if not 0 <= one < ranks]:
            yield f"its {word} {wrong[0]} is not an index in a list of {ranks} ranks"
    if call.op in (ROUTE, RETURN):
        yield from _contradicts_route(call, ranks)
        return
    owns, gives = place in call.owners, place in call.givers
    yield from _contradicts_pull(call, owns, gives) if call.op == PULL else _contradicts_push(call, owns, gives)
    yield from _contradicts_request(call, owns, gives)


def _contradicts_route(call: LookupCall, ranks: int) -> Iterator[str]:
    """Yields the operands or results that a rank's Route or Return lacks, or has in excess: every rank of the list sends and receives."""
    if call.owners != tuple(range(ranks)):
        yield f"its owners are {list(call.owners)}, and each of the {ranks} ranks has experts, in the order of the list"
    if not call.operand or not call.result:
        yield "it leaves out its rows"
    if None in call.requests or (call.op == ROUTE and call.asks != bool(call.numbers)):
        yield "it leaves out its places, its counts or its ids"


def _contradicts_pull(call: LookupCall, owns: bool, gives: bool) -> Iterator[str]:
    """The operands or results that a rank's Pull lacks, or has in excess; `gives`: whether its Push sends rows back."""
    if owns != bool(call.operand):
        yield "an owner gives no table" if owns else "a rank that is not an owner gives a table"
    if not owns and not call.ids:
        yield _NO_PART
    if bool(call.ids) != bool(call.result):
        yield "a rank has ids and the rows that they name, or neither"
    if gives and not call.ids:
        yield "a giver has no ids"


def _contradicts_push(call: LookupCall, owns: bool, gives: bool) -> Iterator[str]:
    """The operands or results that a rank's Push lacks, or has in excess."""
    if owns and not (call.numbers and call.result):
        yield "an owner gets no ids and rows"
    elif not owns and (call.numbers or call.result):
        yield "a rank that is not an owner gets ids and rows"
    if not owns and not gives:
        yield _NO_PART
    if gives != bool(call.operand):
        yield "a giver has no rows to give" if gives else "a rank that is not a giver gives rows"


def _contradicts_request(call: LookupCall, owns: bool, gives: bool) -> Iterator[str]:
    """Yields the values linking a Push to its Pull that a rank lacks, or has in excess."""
    words = [word for word, so in (("an owner", owns), ("a giver", gives)) if so]
    role, due = " and ".join(words) or "neither owner nor giver", (owns, owns or gives, gives)
    for word, name, wanted in zip(("the ids asked of it", "counts", "places"), call.requests, due, strict=True):
        if bool(name) != (wanted and bool(call.givers)):
            back = "" if call.givers else ", and no rank gives rows back"
            yield f"it {'has' if name else 'leaves out'} {word}, and is {role}{back}"
