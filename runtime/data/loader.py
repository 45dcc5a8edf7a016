"""Reads the batches for the steps of one rank ahead of their use, in an order that all ranks share.

loader = open_loader(Spec.parse("digits.npz"), manifest.inputs, rank, batch=32, seed=7)
with loader:
    for inputs in loader:                   without end, or for `epochs`
        program(**inputs)
        loader.position()                   of the next batch: a checkpoint stores it, and `seek` takes it

If the length of an epoch is not known and some ranks read nothing, only the ranks that read notice its last batch: then `next` is
collective. The plan's settings for a stream are checked against the abilities of streams before anything is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from threading import Condition, Thread
from types import TracebackType
from typing import Generic, TypeVar

from partc.runtime.artifact.training.data_spec import Spec
from pydantic import JsonValue

from ..artifact.format import Port
from ..errors import UsageError
from ..user_code import UserCodeError
from .batches import Batches, OrderedBatches, Read
from .code import Batch, Code, Transform
from .constants import constants
from .dataset import open_data
from .rank_inputs import RankInputs, uneven_batch, uneven_rest
from .reader import Reader
from .sampler import Order, Position
from .sources.naming import Naming, quoted
from .sources.user_source import STREAMS, Kind, UserSource, user_source
from .streams.batches import StreamBatches
from .streams.child_signals import WithoutTorch
from .streams.loader_stream import LoaderStream, RecordStream
from .streams.reader import StreamReader
from .streams.stream import Stream

Item = TypeVar("Item")

PATIENCE = 1.0
"""Seconds for a thread to end after an error: it may hang in the user's code or in a file system."""


class Prefetcher(Generic[Item]):
    """Reads items ahead in a thread, which pauses while `depth` items wait, and ends with the last item, an error or `close`."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._items = items
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._changed = Condition()
        self._closed = False
        self._ended = False
        self._error: BaseException | None = None
        self._thread = Thread(target=self._work, name="partc data", daemon=True)
        self._thread.start()

    def next(self) -> Item:
        """Returns the next item. After the last one it raises the thread's error, once, or StopIteration."""
        with self._changed:
            while not (self._ready or self._ended):
                self._changed.wait()
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        self.close()
        error, self._error = self._error, None
        try:
            raise StopIteration if error is None else error
        finally:
            del error  # it refers to this frame: without the frame's reference to it both are freed once the caller has handled it

    def peek(self) -> Item | None:
        """Returns the next item without removing it; None where it is not ready."""
        with self._changed:
            return self._ready[0] if self._ready else None

    def close(self, patience: float | None = None) -> None:
        """Ends the thread and drops items that are ready; returns when the thread has ended, at the latest after `patience` seconds."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(patience)

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if error is None else PATIENCE)

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: Item) -> bool:
        """Adds an item and waits for room; returns whether more items are needed. So never more than `depth` items are read ahead."""
        with self._changed:
            self._ready.append(item)
            self._changed.notify_all()
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait()
            return not self._closed


def open_stream(
    source: UserSource,
    spec: Spec,
    ports: Sequence[Port],
    rank: int,
    batch: int | None,
    seed: int,
    drop_last: bool,
    interleave: int,
    code: Code,
    lenient: bool = False,
) -> StreamBatches:
    """Opens the batches that a rank reads from a `DataLoader` or an iterable; UsageError, the same on all ranks, lists all problems."""
    problems = list(_need_an_index(source, spec, interleave))
    transform = None
    try:
        transform = Transform.load(spec.transform, code) if spec.transform else None
    except UsageError as error:
        problems.append(f"transform: {error}")
    inputs = RankInputs(ports, rank)
    naming = Naming(spec.fields, () if spec.transform else tuple(port.name for port in ports))
    reader = StreamReader(spec, source.where, inputs, naming, transform, seed)
    if not problems:
        stream: Stream
        if source.kind is Kind.LOADER:
            stream = LoaderStream(source, batch, seed, drop_last, reader.span if inputs.ports else None)
        elif batch is None:
            raise UsageError(
                "the global batch size is not known\n  help: use --batch, or `batch:` in the plan's `train:`"
            )
        else:
            stream = RecordStream(source, batch)
        problems += uneven_batch(inputs, stream.batch)
        rest = stream.records % stream.batch if stream.records is not None and not drop_last else 0
        for law, _ in uneven_rest(inputs, stream.batch, rest) if rest else ():
            problems.append(
                f"{stream.records} records in batches of {stream.batch} leave {rest} for the last batch, and {law}\n"
                "  help: write drop_last: true, or choose a batch size that leaves none"
            )
    if problems:
        raise UsageError("\n".join(f"{spec.where}: {problem}" for problem in problems))
    return StreamBatches(stream, reader, drop_last, lenient)


def _need_an_index(source: UserSource, spec: Spec, interleave: int) -> Iterator[str]:
    """Yields a problem for each setting of the data that only records with an index can have."""
    what = (
        f"{source.where}: its `source` is a {type(source.value).__name__}, whose records come in an order of their own"
    )
    options = [name for name, said in (("length", spec.length), ("interleave", interleave > 1)) if said]
    if options:
        yield (
            f"{what}: {quoted(options)} cannot be had\n"
            "  help: give an object with `__len__` and `__getitem__`, or order the records in the stream"
        )
    if spec.files:
        yield f"{what}: {quoted(spec.files)} cannot be files beside it\n  help: give them as fields of its records"
    if spec.pad and source.kind is Kind.LOADER:
        yield f"{source.where}: `pad` is for records, and a DataLoader gives batches\n  help: fill them up in its `collate_fn`"


DEPTH = 2
STREAM_PATIENCE = 5.0
"""Seconds for a stream to return its current item after the last one that is needed: it may wait for an item that never comes."""


class Loader:
    """An iterator over batches. A thread reads `depth` of them ahead; with 0 each is read when it is requested.

    `largest` returns the maximum of a number over all ranks, and is collective; None in a job of one rank.
    """

    def __init__(
        self,
        batches: Batches,
        depth: int = DEPTH,
        epochs: int | None = None,
        fixed: Batch | None = None,
        largest: Callable[[int], int] | None = None,
    ) -> None:
        if depth < 0:
            raise UsageError(f"{depth} batches cannot be read ahead\n  help: take 0 or more")
        self.source = batches
        self.size = 0
        """The number of records of the last batch on all ranks together."""
        self._depth = depth
        self._epochs = epochs
        self._fixed = fixed or {}
        self._largest = largest if batches.batches is None else None
        self._position = Position()
        self._state: JsonValue = None
        self._ahead: Prefetcher[Read] | None = None
        self._direct: Iterator[Read] | None = None
        self._signals = WithoutTorch()

    @property
    def batch(self) -> int:
        """The number of records of a batch on all ranks together."""
        return self.source.batch

    @property
    def batches(self) -> int | None:
        """The number of batches of an epoch; None where it is not known."""
        return self.source.batches

    @property
    def records(self) -> int | None:
        """The number of records of an epoch; None where it is not known."""
        return self.source.records

    def position(self) -> Position:
        """Returns the position of the next batch."""
        return self._position

    def seek(self, position: Position, state: JsonValue = None) -> None:
        """Continues with the batch at this position, and drops batches that were read ahead. UsageError where the position does not exist.

        `state`: the source's state at this position, if the source gives one.
        """
        self.source.check(position)
        self.close()
        self._position, self._state = position, state

    def saved(self, all_gather_text: Callable[[str], Sequence[str]]) -> dict[str, JsonValue]:
        """Returns the position in the data as a checkpoint stores it; collective if the source gives a state."""
        import json

        at: dict[str, JsonValue] = {"position": [self._position.epoch, self._position.batch], "batch": self.batch}
        if self.source.stateful:
            texts = all_gather_text(json.dumps(self._state) if self.source.reads else "")
            at["stream"] = next((json.loads(text) for text in texts if text), None)
        return at

    def restore(self, saved: Mapping[str, JsonValue], steps: int) -> str:
        """Continues at a checkpoint's position, even with another batch size; returns how it is reached if that takes time, else ''.

        `steps`: the number of steps before the checkpoint, for one that stores no position. UsageError where no batch begins there.
        """
        match saved.get("position"):
            case [int(epoch), int(batch)]:
                position = Position(epoch, batch)
            case _:
                position = Position(*divmod(steps, max(self.batches or steps + 1, 1)))
        before = saved.get("batch", self.batch)
        if isinstance(before, int) and before != self.batch and position.batch:
            place = self.source.at(position.batch * before, position.epoch)
            if place is None:
                raise UsageError(
                    f"the checkpoint was saved after {position.batch * before} records of epoch {position.epoch}, in batches of "
                    f"{before}, and no batch of {self.batch} begins there\n"
                    f"  help: resume with batches of {before}, or from a checkpoint at the end of an epoch"
                )
            position = place
        state = saved.get("stream") if position.batch else None
        self.seek(position, state)
        if not position.batch or state is not None or not self.source.again:
            return ""
        return self.source.again.format(records=f"{position.batch * self.batch:,}", epoch=position.epoch)

    def close(self, patience: float | None = None) -> None:
        """Stops reading ahead; waits at most `patience` seconds for the thread. If another batch is requested, reading resumes with it."""
        if self._ahead is not None:
            self._ahead.close(patience)
        self._ahead = self._direct = None
        self._signals.end()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """Returns the next batch: maps each input to this rank's shard, in arrays that belong to the caller."""
        try:
            if self._epochs is not None and self._position.epoch >= self._epochs:
                raise StopIteration
            read = self._next()
            following = read.following
            if self._largest is not None:
                following = self._agreed(read, self._largest)
        except BaseException:
            self.close(PATIENCE)
            raise
        assert following is not None
        self._position, self._state = following, read.state
        return {**read.batch, **self._fixed}

    def peek(self) -> Batch | None:
        """Returns the next batch if it has been read ahead, else None; does not wait."""
        read = self._ahead.peek() if self._ahead is not None else None
        return None if read is None else {**read.batch, **self._fixed}

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends = isinstance(self.source, OrderedBatches)
        self.close(PATIENCE if error is not None else None if ends else STREAM_PATIENCE)

    def _next(self) -> Read:
        if self._ahead is None and self._direct is None:
            self._signals.begin()
        if not self._depth or not self.source.reads:
            self._direct = self._direct or self.source.read(self._position, self._state, self._epochs)
            read = next(self._direct)
        else:
            if self._ahead is None:
                self._ahead = Prefetcher(self.source.read(self._position, self._state, self._epochs), self._depth)
            read = self._ahead.next()
        self.size = read.size
        return read

    def _agreed(self, read: Read, largest: Callable[[int], int]) -> Position:
        """Returns the position of the next batch, as the ranks that have read this batch know it; collective."""
        here, following = self._position, read.following
        known = 0 if following is None else 2 * read.size + (following.epoch != here.epoch)
        self.size, ended = divmod(largest(known), 2)
        return Position(here.epoch + 1) if ended else Position(here.epoch, here.batch + 1)


def open_loader(
    spec: Spec,
    ports: Sequence[Port],
    rank: int,
    batch: int | None,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = True,
    interleave: int = 1,
    depth: int = DEPTH,
    epochs: int | None = None,
    fixed: Collection[str] = (),
    code: Code | None = None,
    source: object = None,
    largest: Callable[[int], int] | None = None,
    lenient: bool = False,
) -> Loader:
    """Opens the loader of a rank: `ports` are the model's inputs, `batch` the number of records in a step on all ranks together.

    Inputs in `fixed` have no records, but one value for all batches. Every rank must pass the same spec and numbers. `code` has the Python
    files that have run for this rank; `source` is an object to use in place of the one that a data file defines. `batch` may be None if a
    `DataLoader` determines it. `lenient`: a smaller last batch of a stream that ranks cannot share is dropped.

    UsageError, the same on all ranks, lists all settings that do not fit together; UserCodeError where the user's own code fails.
    """
    try:
        own = constants(spec, ports, fixed, rank)
        ports = [port for port in ports if port.name not in fixed]
        code = code or Code()
        user: UserSource | None = None
        if source is not None:
            user = user_source(source, spec.where, batch, seed)
        elif spec.source is not None and spec.source.suffix == ".py":
            user = user_source(code.value(spec.source, "source"), str(spec.source), batch, seed)
        if user is not None and user.kind in STREAMS:
            stream = open_stream(user, spec, ports, rank, batch, seed, drop_last, interleave, code, lenient)
            return Loader(stream, depth, epochs, own, largest)
        if batch is None:
            raise UsageError(
                "the global batch size is not known\n  help: use --batch, or `batch:` in the plan's `train:`"
            )
        data = open_data(spec, fixed, code, user, [port.name for port in ports])
        order = Order(data.records, batch, seed, shuffle, drop_last, interleave, data.buckets())
        return Loader(OrderedBatches(Reader(data, ports, rank, order), order), depth, epochs, own)
    except UserCodeError as error:
        raise error.when(f"on rank {rank}") from error.__cause__
