"""The ops by which the ranks of a list communicate: one entry each, which schema, node reader, shape law, runtime and checker read.

Four fields of an entry determine the results of the ranks of a list from their inputs; p is the number of ranks:

    splits    the input is cut into p blocks along this axis, the i-th for the list's i-th rank; else every rank gets all of it
    reduces   the blocks of the ranks are reduced element by element
    joins     the blocks of the ranks are concatenated along this axis, in the list's order
    root      "gives": only the root's value is sent to all; "takes": only the root has a result

    AllReduce  reduces          ReduceScatter  splits, reduces     Reduce     reduces, root takes
    AllGather  joins            AllToAll       splits, joins       Broadcast  root gives

So a new collective is an entry, by `register` or in the table below, and a primitive of the transports if none of theirs does it:

    register(CollectiveOp("Gather", "The values of all ranks joined along an axis, on one rank.", (ALONG, OF_ROOT),
                          joins=AXIS, root="takes"))

By lookups ranks read and write rows of a table on other ranks; the ids determine the senders and receivers:

    Pull       every rank gets the rows of a table for its ids; the owners have a run of rows each
    Push       rows are sent back to their owners, which know the ids from the Pull
    Route      every rank's rows are sent to the owners of their ids: the experts of tokens
    Return     a row for each that came by a Route is sent back to its rank and place

A lookup is complete when it has begun: its sizes are those of the ids, known only at run time.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal, cast

from partc.runtime.artifact.format import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AXIS,
    BEGIN,
    BROADCAST,
    CAPACITY,
    CONCAT_AXIS,
    END,
    EXCHANGE,
    GIVERS,
    GROUP,
    KIND,
    OTHERWISE,
    OWNERS,
    PULL,
    PUSH,
    RANK,
    RECV_BOXES,
    RECV_PEERS,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_TO,
    RETURN,
    ROOT,
    ROUTE,
    ROW,
    ROWS,
    SEND_BOXES,
    SEND_PEERS,
    SPLIT_AXIS,
    TAG,
)


@dataclass(frozen=True)
class Attribute:
    """An attribute of a node of `partc.comm`."""

    name: str
    type: Literal["int", "ints", "string", "strings"]
    doc: str
    required: bool = True


@dataclass(frozen=True)
class GroupOp:
    """An op by which the ranks of a list communicate: its name, one sentence, and its attributes besides group and tag."""

    name: str
    doc: str
    attributes: tuple[Attribute, ...] = ()

    @property
    def every_attribute(self) -> tuple[Attribute, ...]:
        """All attributes of a node."""
        return (AMONG, NUMBER, *self.attributes)


@dataclass(frozen=True)
class CollectiveOp(GroupOp):
    """A collective and its effect.

    `coalesces`: whether it takes several values of one type, which are sent as one. `dynamic`: whether it takes a value whose shape is
    known only when the step runs. `boxes`: whether it is messages between pairs of ranks (Exchange), for which none of the other fields
    applies.
    """

    splits: str = ""
    joins: str = ""
    reduces: bool = False
    root: Literal["", "gives", "takes"] = ""
    coalesces: bool = False
    dynamic: bool = False
    boxes: bool = False

    @property
    def every_attribute(self) -> tuple[Attribute, ...]:
        return (*super().every_attribute, *([BY] if self.reduces else []))

    @property
    def keeps_size(self) -> bool:
        """Whether the result has the size of the input on every rank that has both, and may reuse its memory."""
        return not (self.splits or self.joins or self.boxes or self.root == "takes")


AMONG = Attribute(GROUP, "string", "The group of the manifest among whose lists of ranks it happens.")
NUMBER = Attribute(TAG, "int", "The number that all nodes of one transfer or collective carry, and no other node.")
BY = Attribute(REDUCE, "string", "sum, max or min.")
ALONG = Attribute(AXIS, "int", "The axis along which shards lie.")
OF_ROOT = Attribute(ROOT, "int", "The place in the list of the rank whose value it is.")
COLLECTIVES: dict[str, CollectiveOp] = {}
"""Maps names to all collectives; `register` adds one."""


def register(op: CollectiveOp) -> CollectiveOp:
    """Makes a collective known to all readers of rank files."""
    COLLECTIVES[op.name] = op
    return op


def dynamic_ops() -> str:
    """Returns the names of the collectives that take a value of unknown shape, for messages."""
    return " and ".join(op.name for op in COLLECTIVES.values() if op.dynamic)


register(
    CollectiveOp(
        ALL_REDUCE,
        "The element-wise reduction of the values of all ranks, on every rank; several values of one type travel as one.",
        reduces=True,
        coalesces=True,
        dynamic=True,
    )
)
register(
    CollectiveOp(
        ALL_GATHER,
        "The values of all ranks joined along an axis, on every rank.",
        (ALONG,),
        joins=AXIS,
        coalesces=True,
        dynamic=True,
    )
)
register(
    CollectiveOp(
        REDUCE_SCATTER,
        "The element-wise reduction of the values of all ranks, of which each rank gets its shard along an axis.",
        (ALONG,),
        splits=AXIS,
        reduces=True,
        coalesces=True,
    )
)
register(
    CollectiveOp(
        ALL_TO_ALL,
        "Each rank gives every rank a shard along one axis, and joins what it gets along another.",
        (
            Attribute(SPLIT_AXIS, "int", "The axis that is split into a shard for each rank."),
            Attribute(CONCAT_AXIS, "int", "The axis along which the shards that come are joined."),
        ),
        splits=SPLIT_AXIS,
        joins=CONCAT_AXIS,
    )
)
register(
    CollectiveOp(
        REDUCE_TO,
        "The element-wise reduction of the values of all ranks, on one rank.",
        (OF_ROOT,),
        reduces=True,
        root="takes",
    )
)
register(
    CollectiveOp(
        BROADCAST,
        "The value of one rank, on every rank.",
        (OF_ROOT,),
        root="gives",
    )
)
register(
    CollectiveOp(
        EXCHANGE,
        "Boxes of the input go to ranks, and boxes that come from ranks make the output.",
        (
            Attribute(RANK, "int", "The number of dims."),
            Attribute(SEND_PEERS, "ints", "The ranks that boxes of the input go to.", False),
            Attribute(
                SEND_BOXES, "ints", "For each such box and each dim of the input: begin, end and denominator.", False
            ),
            Attribute(RECV_PEERS, "ints", "The ranks that boxes of the output come from.", False),
            Attribute(
                RECV_BOXES, "ints", "For each such box and each dim of the output: begin, end and denominator.", False
            ),
        ),
        boxes=True,
    )
)
_OF_TABLES = (
    Attribute(
        OWNERS, "ints", "The places in the list of the ranks that have equal runs of the table's rows, in their order."
    ),
    Attribute(ROWS, "int", "The number of the table's rows in all."),
    Attribute(ROW, "ints", "The shape of a row; none where it is a number.", False),
    Attribute(GIVERS, "ints", "The places in the list of the ranks that give rows back.", False),
)
LOOKUPS = {
    op.name: op
    for op in (
        GroupOp(
            PULL,
            "The rows of a table, of which the owners have equal runs, that each rank's ids name; and what a Push reads of them.",
            _OF_TABLES,
        ),
        GroupOp(
            PUSH,
            "What each giver gives to rows of a table goes to their owners: a row for each of the ids that an owner was asked by a Pull.",
            _OF_TABLES,
        ),
        GroupOp(
            ROUTE,
            "Every rank's rows go to the ranks that own what their ids name, of which each has an equal run; or, without ids, as by the "
            "Route whose places and counts it has.",
            (
                *_OF_TABLES[:3],
                Attribute(
                    CAPACITY,
                    "ints",
                    "Two numbers a and b: of a rank's m rows the first ceil(a m / (b rows)) for each id are sent, and no other; without it "
                    "all are.",
                    False,
                ),
            ),
        ),
        GroupOp(
            RETURN,
            "A row for each row that came by a Route goes back to the rank and the place that it came from.",
            _OF_TABLES[:3],
        ),
    )
}
_OF_BODY = (Attribute(KIND, "string", "The op whose body it is: If or Loop."),)
BODIES = {
    BEGIN: GroupOp(BEGIN, "The ranks begin an If or a Loop: its operands, and what each turn is given.", _OF_BODY),
    OTHERWISE: GroupOp(OTHERWISE, "The results of the branch of an If before it; the other branch follows.", _OF_BODY),
    END: GroupOp(END, "What a turn of a Loop, or the other branch of an If, gives; and the node's results.", _OF_BODY),
}
"""The borders of bodies in which ranks communicate (`graph/bodies.py`): no value moves there; all ranks of the list pass them together."""
GROUP_OPS: Mapping[str, GroupOp] = ChainMap(*cast(list[MutableMapping[str, GroupOp]], [COLLECTIVES, LOOKUPS, BODIES]))
"""Maps names to all ops of groups: the collectives, including those that are registered later, the lookups, and the borders of bodies."""
