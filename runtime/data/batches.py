"""The source from which a loader reads batches one after the other: records in the plan's order, or a stream in its own order.

for one in batches.read(Position(2, 30), None, None):    each batch, with the position of the next one
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
    """A batch as a rank has read it, with its number of records on all ranks together, and the position of the next batch.

    `state`: the source's state at that position, if the source can resume from a state. On a rank that reads nothing `following` is None if
    the length of an epoch is not known.
    """

    batch: Batch
    size: int
    following: Position | None
    state: JsonValue = None


class Batches(Protocol):
    """A source of a rank's batches."""

    batch: int
    """The number of records of a batch on all ranks together."""
    batches: int | None
    """The number of batches of an epoch; None where it is not known."""
    records: int | None
    """The number of records of an epoch, including dropped ones; None where it is not known."""
    again: str
    """Text that says how a position inside an epoch is reached, if that takes time; else empty."""
    stateful: bool
    """Whether the source gives its state with each batch."""
    reads: bool
    """Whether this rank reads anything."""

    def check(self, position: Position) -> None:
        """Raises UsageError where the position does not exist."""
        ...

    def at(self, records: int, epoch: int) -> Position | None:
        """Returns the position after `records` records of an epoch; None where no batch begins there.

        The batches before may have had any size.
        """
        ...

    def read(self, position: Position, state: JsonValue, epochs: int | None) -> Iterator[Read]:
        """Yields the batches from a position on, without end or until `epochs` epochs are over."""
        ...


class OrderedBatches:
    """Batches of records that are read by indices, in an order that all ranks know."""

    again, stateful = "", False

    def __init__(self, reader: Reader, order: Order) -> None:
        self.reader, self.order = reader, order
        self.batch, self.reads = order.batch, True
        self.batches: int | None = order.batches
        self.records: int | None = order.records

    def check(self, position: Position) -> None:
        """Raises UsageError where the position does not exist."""
        self.order.check(position)

    def at(self, records: int, epoch: int) -> Position | None:
        """Returns the position after `records` records of an epoch.

        None where no batch begins there, or where the order depends on the batch size.
        """
        depends = self.order.interleave > 1 or self.order.buckets is not None
        whole, rest = divmod(records, self.batch)
        return None if rest or depends or whole >= self.order.batches else Position(epoch, whole)

    def read(self, position: Position, state: JsonValue, epochs: int | None) -> Iterator[Read]:
        """Yields the batches from a position on."""
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
