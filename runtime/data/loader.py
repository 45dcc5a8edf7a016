"""Batches for the steps of one rank, in the order that all ranks share, read ahead of them.

loader = open_loader(Spec.parse("digits.npz"), manifest.inputs, rank, batch=32, seed=7)
with loader:
    for inputs in loader:                   without end, or for `epochs`
        program(**inputs)
        loader.position()                   of the next batch: what a checkpoint keeps, and `seek` takes
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import TracebackType

from partc.runtime.artifact.training.data_spec import Spec

from ..artifact.format import Port
from ..errors import UsageError
from ..user_code import UserCodeError
from .code import Batch, Code
from .constants import constants
from .dataset import open_data
from .prefetch import PATIENCE, Prefetcher
from .reader import Reader
from .sampler import Order, Position

DEPTH = 2


class Loader:
    """An iterator over batches. `depth` of them are read ahead by a thread; 0: each is read when it is asked for."""

    def __init__(
        self, reader: Reader, order: Order, depth: int = DEPTH, epochs: int | None = None, fixed: Batch | None = None
    ) -> None:
        if depth < 0:
            raise UsageError(f"{depth} batches cannot be read ahead\n  help: take 0 or more")
        self.order = order
        self._reader = reader
        self._depth = depth
        self._epochs = epochs
        self._fixed = fixed or {}
        self._position = Position()
        self._ahead: Prefetcher[Batch] | None = None
        self._direct: Iterator[Batch] | None = None

    def position(self) -> Position:
        """Where the next batch is."""
        return self._position

    def seek(self, position: Position) -> None:
        """Go on with the batch at this position; what was read ahead is dropped. UsageError where there is none."""
        self.order.check(position)
        self.close()
        self._position = position

    def close(self, patience: float | None = None) -> None:
        """Ends the reading ahead, in `patience` seconds or not at all. Reading goes on with the next batch where one is asked for."""
        if self._ahead is not None:
            self._ahead.close(patience)
        self._ahead = self._direct = None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """By input, this rank's part of the next batch: arrays that are the caller's own."""
        try:
            batch = self._next()
        except BaseException:
            self.close(PATIENCE)
            raise
        self._position = self.order.after(self._position)
        return {**batch, **self._fixed}

    def peek(self) -> Batch | None:
        """What the next batch will be, where it has been read ahead; does not wait."""
        batch = self._ahead.peek() if self._ahead is not None else None
        return None if batch is None else {**batch, **self._fixed}

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if error is None else PATIENCE)

    def _next(self) -> Batch:
        if not self._depth:
            self._direct = self._direct or self._batches(self._position)
            return next(self._direct)
        if self._ahead is None:
            self._ahead = Prefetcher(self._batches(self._position), self._depth)
        return self._ahead.next()

    def _batches(self, position: Position) -> Iterator[Batch]:
        epoch, order = -1, self.order
        while self._epochs is None or position.epoch < self._epochs:
            if position.epoch != epoch:
                epoch, indices = position.epoch, order.epoch(position.epoch)
            try:
                batch = self._reader.read(position, indices[position.batch * order.batch :][: order.batch])
            except UserCodeError as error:
                place = f"in batch {position.batch} of epoch {position.epoch} on rank {self._reader.rank}"
                raise error.when(place) from error.__cause__
            yield batch
            position = order.after(position)


def open_loader(
    spec: Spec,
    ports: Sequence[Port],
    rank: int,
    batch: int,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = True,
    interleave: int = 1,
    depth: int = DEPTH,
    epochs: int | None = None,
    fixed: Collection[str] = (),
    code: Code | None = None,
) -> Loader:
    """The loader of a rank: `ports` are the model's inputs, `batch` the records of all ranks together in one step.

    Inputs that are `fixed` hold no records, and have one value in every batch. Every rank opens the same spec with the same numbers.
    `code` has the files of Python that have run for this rank.
    UsageError, the same on all ranks, with all that does not go together; UserCodeError where the user's own code fails.
    """
    try:
        data = open_data(spec, fixed, code)
        own = constants(spec, ports, fixed, rank)
        ports = [port for port in ports if port.name not in fixed]
        order = Order(data.records, batch, seed, shuffle, drop_last, interleave, data.buckets())
        return Loader(Reader(data, ports, rank, order), order, depth, epochs, own)
    except UserCodeError as error:
        raise error.when(f"on rank {rank}") from error.__cause__
