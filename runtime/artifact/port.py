"""Records of a model's inputs and outputs in the manifest.

Also records of the numbers that a tensor may have, or begins with: labels, ids of rows, laws of first values.

The manifest's records of messages: a record is of one message, or of the messages between many pairs of ranks, which share a tag.

{"tag": 3, "value": "h", "source": 0, "target": 512, "group": "0-512+511", ...}     512 messages: 0 to 512, 1 to 513, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from partc.runtime.artifact.ranks import Box, Boxes, Ranks
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator


class _Law(BaseModel):
    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)


class LabelRecord(_Law):
    """The numbers that an input of labels may have: 0 to `classes` - 1 (0: known only at run time), and the `ignored` ones.

    `metric`: the one that takes no others, where a loss may.
    """

    classes: int = Field(0, ge=0)
    ignored: list[int] = []
    metric: str = ""


class IdsRecord(_Law):
    """The ids of an input: those at `places` along `axis`, or everywhere if none are given, name one of the `rows` of a `table`."""

    table: str
    rows: int = Field(ge=1)
    axis: int = Field(0, ge=0)
    places: list[int] = []


class Law(_Law):
    """First values by element: `offset + factor * d`, d by `draw` from the `stream` (`tensors/law.py`); rows in `zero_rows` are zeros."""

    draw: Literal["constant", "uniform", "normal", "truncated_normal"]
    stream: str = ""
    offset: float = 0.0
    factor: float = 1.0
    zero_rows: tuple[int, ...] = ()


Dim: TypeAlias = int | str
Shape: TypeAlias = list[Dim] | None


class Port(BaseModel):
    """A model input with the ranks that read it, or a model output with the ranks that it is delivered to.

    The shape is the whole value's. `boxes` says what each of the ranks reads or gets of it, in their order; None: all of it. `labels`:
    the numbers that an input of labels may have; `ids`: the tables whose rows an input names. `batch_dim`: the dim along which an input
    holds records, where it holds some; in the file only where it is not the first.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)

    name: str
    type: str
    shape: Shape
    ranks: Ranks
    boxes: Boxes = None
    labels: LabelRecord | None = None
    ids: list[IdsRecord] = []
    batch_dim: int = 0

    @model_validator(mode="after")
    def _has_dim(self) -> Port:
        if self.batch_dim and not (self.shape is not None and 0 < self.batch_dim < len(self.shape)):
            raise ValueError(f"the shape {self.shape} has no dim {self.batch_dim}")
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = written(self)
        return found if self.batch_dim else {key: one for key, one in found.items() if key != "batch_dim"}

    def box(self, rank: int) -> Box | None:
        """The shard that a rank reads or gets; None where it has the global value."""
        return None if self.boxes is None else self.boxes[self.ranks.index(rank)]


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
