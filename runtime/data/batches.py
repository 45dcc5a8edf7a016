"""The source from which a loader reads batches in turn: records in the plan's order, or a stream in its own.

for one in batches.read(Position(2, 30), None, None):     a batch, and where the next one is
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from ..user_code import UserCodeError
from .code import Batch
from .reader import Reader
from .sampler import Order, Position


@dataclass(frozen=True)
class Read:
    """A batch as a rank has read it, with the records that it has on all ranks, and where the next batch is.

    `state`: what the source says of that place, where it can be told to go on from there. A rank that reads nothing has no `following`
    where the length of an epoch is not known.
    """

    batch: Batch
    size: int
    following: Position | None
    state: JsonValue = None


class Batches(Protocol):
    """The batches of a rank."""

    batch: int
    """The records of a batch on all ranks together."""
    batches: int | None
    """The batches of an epoch; None where that is not known."""
    records: int | None
    """The records of an epoch, those that are dropped too; None where that is not known."""
    again: str
    """How a place inside an epoch is found again, where it costs more than going there; empty where it does not."""
    stateful: bool
    """Whether the source says its state with each batch."""
    reads: bool
    """Whether this rank reads anything."""

    def check(self, position: Position) -> None:
        """UsageError where there is no such position."""
        ...

    def at(self, records: int, epoch: int) -> Position | None:
        """The position behind so many records of an epoch, whatever batches they were read in; None where no batch begins there."""
        ...

    def read(self, position: Position, state: JsonValue, epochs: int | None) -> Iterator[Read]:
        """The batches from a position on, without end, or up to a number of epochs."""
        ...


class OrderedBatches:
    """Records that are read by indices, in an order that all ranks know."""

    again, stateful = "", False

    def __init__(self, reader: Reader, order: Order) -> None:
        self.reader, self.order = reader, order
        self.batch, self.reads = order.batch, True
        self.batches: int | None = order.batches
        self.records: int | None = order.records

    def check(self, position: Position) -> None:
        """UsageError where there is no such position."""
        self.order.check(position)

    def at(self, records: int, epoch: int) -> Position | None:
        """The position behind so many records of an epoch; none where the order depends on the size of a batch."""
        depends = self.order.interleave > 1 or self.order.buckets is not None
        whole, rest = divmod(records, self.batch)
        return None if rest or depends or whole >= self.order.batches else Position(epoch, whole)

    def read(self, position: Position, state: JsonValue, epochs: int | None) -> Iterator[Read]:
        """The batches from a position on."""
        epoch, order = -1, self.order
        while epochs is None or position.epoch < epochs:
            if position.epoch != epoch:
                epoch, indices = position.epoch, order.epoch(position.epoch)
            try:
                batch = self.reader.read(position, indices[position.batch * order.batch :][: order.batch])
            except UserCodeError as error:
                place = f"in batch {position.batch} of epoch {position.epoch} on rank {self.reader.rank}"
                raise error.when(place) from error.__cause__
            following = order.after(position)
            yield Read(batch, order.size(position), following)
            position = following
