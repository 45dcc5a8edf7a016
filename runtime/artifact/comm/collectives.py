"""The collectives: one entry each, which schema, node reader, shape law, runtime, numpy reference and checker read.

What the ranks of a list get of what they give follows from four fields of an entry, p ranks given:

    splits    the input is cut into p blocks along this axis, the i-th for the list's i-th rank; else every rank is given all of it
    reduces   what comes from the ranks is reduced element by element
    joins     what comes from the ranks is joined along this axis, in the list's order
    root      "gives": the root's value alone goes to all; "takes": the root alone has a result

    AllReduce  reduces          ReduceScatter  splits, reduces     Reduce     reduces, root takes
    AllGather  joins            AllToAll       splits, joins       Broadcast  root gives

So a new one is an entry, by `register` or in the table below, and a primitive of the transports where none of theirs does it:

    register(CollectiveOp("Gather", "The values of all ranks joined along an axis, on one rank.", (ALONG, OF_ROOT),
                          joins=AXIS, root="takes", reference=lambda given, place, a: np.concatenate(given, a[AXIS])))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from partc.runtime.artifact.format import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AXIS,
    BROADCAST,
    CONCAT_AXIS,
    EXCHANGE,
    GROUP,
    MAX,
    RANK,
    RECV_BOXES,
    RECV_PEERS,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_TO,
    ROOT,
    SEND_BOXES,
    SEND_PEERS,
    SPLIT_AXIS,
    SUM,
    TAG,
)
from partc.runtime.artifact.tensors.dtypes import Array

Reference: TypeAlias = Callable[[Sequence[Array], int, Mapping[str, Any]], Array]
"""The result of one rank: of the values that ranks give, in the list's order, of its place in the list, and of the attributes."""


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
    """A collective: what it does, and the numpy reference of that.

    `coalesces`: it takes several values of one type, which travel as one. `dynamic`: it takes a value whose shape is known only when
    the step runs. `boxes`: it is messages between pairs of ranks (Exchange), and none of the other fields says what it does.
    """

    splits: str = ""
    joins: str = ""
    reduces: bool = False
    root: Literal["", "gives", "takes"] = ""
    coalesces: bool = False
    dynamic: bool = False
    boxes: bool = False
    reference: Reference | None = None

    @property
    def every_attribute(self) -> tuple[Attribute, ...]:
        return (*super().every_attribute, *([BY] if self.reduces else []))

    @property
    def keeps_size(self) -> bool:
        """Whether the result is as large as the input on every rank that has both, and may take its place in memory."""
        return not (self.splits or self.joins or self.boxes or self.root == "takes")


AMONG = Attribute(GROUP, "string", "The group of the manifest among whose lists of ranks it happens.")
NUMBER = Attribute(TAG, "int", "The number that all nodes of one transfer or collective carry, and no other node.")
BY = Attribute(REDUCE, "string", "sum, max or min.")
ALONG = Attribute(AXIS, "int", "The axis along which shards lie.")
OF_ROOT = Attribute(ROOT, "int", "The place in the list of the rank whose value it is.")
COLLECTIVES: dict[str, CollectiveOp] = {}
"""Maps names to all collectives; `register` adds one."""


def register(op: CollectiveOp) -> CollectiveOp:
    """Make a collective known to all that reads rank files."""
    COLLECTIVES[op.name] = op
    return op


def dynamic_ops() -> str:
    """The collectives that take a value of unknown shape, for messages."""
    return " and ".join(op.name for op in COLLECTIVES.values() if op.dynamic)


def reduced(values: Sequence[Array], reduce: str) -> Array:
    """The element-wise reduction of values, in their order."""
    total: Any = values[0]
    for value in values[1:]:
        total = (
            total + value if reduce == SUM else np.maximum(total, value) if reduce == MAX else np.minimum(total, value)
        )
    found: Array = total
    return found


def block(value: Array, axis: int, place: int, ranks: int) -> Array:
    """The part of a value for the rank of a place."""
    return np.split(value, ranks, axis)[place]


register(
    CollectiveOp(
        ALL_REDUCE,
        "The element-wise reduction of the values of all ranks, on every rank; several values of one type travel as one.",
        reduces=True,
        coalesces=True,
        dynamic=True,
        reference=lambda given, place, a: reduced(given, a[REDUCE]),
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
        reference=lambda given, place, a: np.concatenate(given, a[AXIS]),
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
        reference=lambda given, place, a: block(reduced(given, a[REDUCE]), a[AXIS], place, len(given)),
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
        reference=lambda given, place, a: np.concatenate(
            [block(value, a[SPLIT_AXIS], place, len(given)) for value in given], a[CONCAT_AXIS]
        ),
    )
)
register(
    CollectiveOp(
        REDUCE_TO,
        "The element-wise reduction of the values of all ranks, on one rank.",
        (OF_ROOT,),
        reduces=True,
        root="takes",
        reference=lambda given, place, a: reduced(given, a[REDUCE]),
    )
)
register(
    CollectiveOp(
        BROADCAST,
        "The value of one rank, on every rank.",
        (OF_ROOT,),
        root="gives",
        reference=lambda given, place, a: given[0],
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
