"""The batches that one rank reads from a stream: all ranks read the same batches, and each takes its own records.

Whether a batch is the last of an epoch is known only when the next one has been requested: so the stream is always one batch ahead. A
smaller last batch is dropped or read, according to the plan's `drop_last`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from ...errors import UsageError
from ...user_code import UserCodeError
from ..batches import Read
from ..code import Batch
from ..rank_inputs import uneven_rest
from ..sampler import Position
from .reader import StreamReader
from .stream import Stream, StreamBatch


class StreamBatches:
    """The batches of a rank. `lenient`: a smaller last batch that ranks cannot share is dropped instead of raising an error."""

    def __init__(self, stream: Stream, reader: StreamReader, drop_last: bool, lenient: bool = False) -> None:
        self.batch, self.batches, self.records = stream.batch, stream.batches, stream.records
        self.again, self.stateful = stream.again, stream.stateful
        self.reads = bool(reader.inputs.ports)
        self._stream, self._reader, self._drop_last, self._lenient = stream, reader, drop_last, lenient

    def check(self, position: Position) -> None:
        """Raises UsageError where the position does not exist."""
        known = self.batches is None or position.batch < self.batches
        if position.epoch < 0 or position.batch < 0 or not known:
            raise UsageError(
                f"there is no batch {position.batch} of epoch {position.epoch}: an epoch has {self.batches} batches of {self.batch}\n"
                "  help: continue with the data and the batch size that training began with"
            )

    def at(self, records: int, epoch: int) -> Position | None:
        """Returns the position after `records` records of an epoch; None where no batch begins there or the epoch is shorter."""
        whole, rest = divmod(records, self.batch)
        known = self.batches is None or whole < self.batches
        return None if rest or not known else Position(epoch, whole)

    def read(self, position: Position, state: JsonValue, epochs: int | None) -> Iterator[Read]:
        """Yields the batches from a position on."""
        try:
            yield from self._read(position, state, epochs)
        except UserCodeError as error:
            raise error.when(f"on rank {self._reader.inputs.rank}") from error.__cause__

    def _read(self, position: Position, state: JsonValue, epochs: int | None) -> Iterator[Read]:
        while epochs is None or position.epoch < epochs:
            number = position.batch
            for received, last in self._epoch(position, state):
                at = Position(position.epoch, number)
                batch: Batch = {} if received is None else self._reader.read(received, at)
                following = None if last is None else Position(at.epoch + 1) if last else Position(at.epoch, number + 1)
                number += 1
                size = self._size(at) if received is None else received.size
                yield Read(batch, size, following, None if received is None else received.state)
            position, state = Position(position.epoch + 1), None

    def _size(self, at: Position) -> int:
        """Returns the number of records of a batch that this rank does not read; the full size if the epoch's length is not known."""
        if self.records is None or self.batches is None or at.batch + 1 < self.batches:
            return self.batch
        return min(self.batch, self.records - at.batch * self.batch)

    def _epoch(self, position: Position, state: JsonValue) -> Iterator[tuple[StreamBatch | None, bool | None]]:
        """Yields the batches of an epoch from a position on, each with whether it is the last.

        Values that this rank does not know are None.
        """
        if not self.reads:
            number = position.batch
            while self.batches is None or number < self.batches:
                number += 1
                yield None, None if self.batches is None else number == self.batches
            return
        held: StreamBatch | None = None
        number = position.batch
        for given in self._whole(position, state):
            if held is not None:
                yield held, False
            held, number = given, number + 1
            if number == self.batches:  # the last batch of a known number: do not wait for another one
                break
        if held is None or (self.batches is not None and number < self.batches):
            raise self._ended_early(position, number)
        yield held, True

    def _whole(self, position: Position, state: JsonValue) -> Iterator[StreamBatch]:
        """Yields the batches of an epoch; a smaller batch is an error unless it is the last, which is read or dropped as configured."""
        small: tuple[int, StreamBatch] | None = None
        stream = self._stream.epoch(position.epoch, position.batch, state)
        try:
            for number, received in enumerate(stream, position.batch):
                where = f"{self._reader.where}: batch {number} of epoch {position.epoch} has {received.size} records"
                if small is not None:
                    raise UsageError(
                        f"{self._reader.where}: batch {small[0]} of epoch {position.epoch} has {small[1].size} records, and is not "
                        f"the last; batches have {self.batch}\n  help: give batches of one size, the last but for a smaller one"
                    )
                if received.size > self.batch:
                    raise UsageError(f"{where}; batches have {self.batch}\n  help: give batches of one size")
                if received.size == self.batch:
                    yield received
                else:
                    small = number, received
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        if small is not None and not self._drop_last:
            for law, _ in uneven_rest(self._reader.inputs, self.batch, small[1].size):
                if self._lenient:
                    return
                raise UsageError(
                    f"{self._reader.where}: the last batch of epoch {position.epoch} has {small[1].size} records, and {law}\n"
                    "  help: write drop_last: true, or choose a batch size that leaves none"
                )
            yield small[1]

    def _ended_early(self, position: Position, number: int) -> UsageError:
        """Returns the error for an epoch that has ended too early."""
        where = self._reader.where
        if self.batches is not None:
            return UsageError(
                f"{where}: epoch {position.epoch} has ended after {number} batches, and its length says {self.batches}\n"
                "  help: give it the length that it has"
            )
        if position.batch:
            return UsageError(
                f"{where}: epoch {position.epoch} has fewer than the {position.batch} batches after which the checkpoint was saved\n"
                "  help: resume with the data that training began with"
            )
        return UsageError(
            f"{where}: epoch {position.epoch} has ended before its first batch of {self.batch} records\n"
            "  help: choose a smaller batch, or give more records"
        )
