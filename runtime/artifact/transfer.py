"""The manifest's records of messages: a record is of one message, or of the messages between many pairs of ranks, which share a tag.

{"tag": 3, "value": "h", "source": 0, "target": 512, "group": "0-512+511", ...}     512 messages: 0 to 512, 1 to 513, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from partc.runtime.artifact.port import Shape
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Transfer(BaseModel):
    """One message: `value` from rank `source` to rank `target`; `bytes` is an expression, 'unknown' where the shape is.

    `group`, in the file only where there is one: of a record of many messages the name of their pairs, source and target, of which
    `source` and `target` are the first.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)

    tag: int
    value: str
    source: int
    target: int
    type: str
    shape: Shape
    bytes: str
    cause: str
    group: str = ""

    @model_serializer(mode="wrap")
    def _without_defaults(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = written(self)
        return found if self.group else {key: one for key, one in found.items() if key != "group"}


Groups = Mapping[str, Sequence[Sequence[int]]]
"""Maps names to disjoint lists of ranks."""


def one_by_one(transfers: Iterable[Transfer], groups: Groups) -> list[Transfer]:
    """Expands records of many messages into one record for each message."""
    return [
        one.model_copy(update={"source": source, "target": target}) if one.group else one
        for one in transfers
        for source, target in groups.get(one.group, [[one.source, one.target]])
    ]


def by_rank(messages: Iterable[Transfer]) -> dict[int, list[Transfer]]:
    """Maps each rank to the messages that it sends or receives, in the order of `messages`."""
    found: dict[int, list[Transfer]] = {}
    for one in messages:
        for rank in (one.source, one.target):
            found.setdefault(rank, []).append(one)
    return found


def bad_pairs(transfer: Transfer, groups: Groups) -> str:
    """Returns the fault of the pairs of a record of many messages; empty where they are valid."""
    pairs = groups.get(transfer.group, ())
    if all(len(pair) == 2 for pair in pairs) and [*map(tuple, pairs[:1])] == [(transfer.source, transfer.target)]:
        return ""
    return f"its group '{transfer.group}' is not pairs of a source and a target, which begin with its own"
