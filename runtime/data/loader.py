"""Batches for the steps of one rank, in the order that all ranks share, read ahead of them.

loader = open_loader(Spec.parse("digits.npz"), manifest.inputs, rank, batch=32, seed=7)
with loader:
    for inputs in loader:                   without end, or for `epochs`
        program(**inputs)
        loader.position()                   of the next batch: what a checkpoint keeps, and `seek` takes

Where the length of an epoch is not known, and some ranks read nothing, only those that read know its last batch: then `next` is collective.
What the plan says of a stream is checked against what a stream can do, before anything is read.

Items made ahead of their use by one background thread, at most `depth` of them; an error comes to the consumer as it was raised.

with Ahead(batches, depth=2) as ahead:
    first = ahead.next()
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
"""Seconds that a thread has to end where something has failed: it may hang in code of the user's, or in a file system."""


class Prefetcher(Generic[Item]):
    """The consumer's end. The thread sleeps where `depth` items wait, and ends with the items, an error or `close`."""

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
        """The next item; StopIteration after the last, once the thread's own error where it failed."""
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
            del error  # which refers to this frame: so it goes with whoever has caught it, and all that it refers to

    def peek(self) -> Item | None:
        """The next item, which stays the next, where it is ready."""
        with self._changed:
            return self._ready[0] if self._ready else None

    def close(self, patience: float | None = None) -> None:
        """Ends the thread; returns when it has ended, or has not in `patience` seconds. What was made and not taken is gone."""
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
        """Whether the item was still wanted; waits for room, so that one more than `depth` is never made."""
        with self._changed:
            self._ready.append(item)
            self._changed.notify_all()
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait()
            return not self._closed


def open_stream(
    found: UserSource,
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
    """The batches that a rank reads of a `DataLoader` or an iterable; UsageError, the same on all ranks, with all that is wrong."""
    problems = list(_need_an_index(found, spec, interleave))
    transform = None
    try:
        transform = Transform.load(spec.transform, code) if spec.transform else None
    except UsageError as error:
        problems.append(f"transform: {error}")
    inputs = RankInputs(ports, rank)
    naming = Naming(spec.fields, () if spec.transform else tuple(port.name for port in ports))
    reader = StreamReader(spec, found.where, inputs, naming, transform, seed)
    if not problems:
        stream: Stream
        if found.kind is Kind.LOADER:
            stream = LoaderStream(found, batch, seed, drop_last, reader.span if inputs.ports else None)
        elif batch is None:
            raise UsageError(
                "the global batch size is not known\n  help: use --batch, or `batch:` in the plan's `train:`"
            )
        else:
            stream = RecordStream(found, batch)
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


def _need_an_index(found: UserSource, spec: Spec, interleave: int) -> Iterator[str]:
    """What is said of the data that only records with an index can have."""
    what = f"{found.where}: its `source` is a {type(found.value).__name__}, whose records come in an order of their own"
    options = [name for name, said in (("length", spec.length), ("interleave", interleave > 1)) if said]
    if options:
        yield (
            f"{what}: {quoted(options)} cannot be had\n"
            "  help: give an object with `__len__` and `__getitem__`, or order the records in the stream"
        )
    if spec.files:
        yield f"{what}: {quoted(spec.files)} cannot be files beside it\n  help: give them as fields of its records"
    if spec.pad and found.kind is Kind.LOADER:
        yield f"{found.where}: `pad` is for records, and a DataLoader gives batches\n  help: fill them up in its `collate_fn`"


DEPTH = 2
STREAM_PATIENCE = 5.0
"""Seconds that a stream has, once no more of it is needed, to give what it has been asked for: it may wait for what never comes."""


class Loader:
    """An iterator over batches. `depth` of them are read ahead by a thread; 0: each is read when it is asked for.

    `largest` gives the largest of a number on all ranks, and is collective; None: this is the only one.
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
        """The records of the last batch on all ranks together."""
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
        """The records of a batch on all ranks together."""
        return self.source.batch

    @property
    def batches(self) -> int | None:
        """The batches of an epoch; None where that is not known."""
        return self.source.batches

    @property
    def records(self) -> int | None:
        """The records of an epoch; None where that is not known."""
        return self.source.records

    def position(self) -> Position:
        """Where the next batch is."""
        return self._position

    def seek(self, position: Position, state: JsonValue = None) -> None:
        """Go on with the batch at this position; what was read ahead is dropped. UsageError where there is none.

        `state`: what the source said of this place, where it says its state.
        """
        self.source.check(position)
        self.close()
        self._position, self._state = position, state

    def saved(self, all_gather_text: Callable[[str], Sequence[str]]) -> dict[str, JsonValue]:
        """What a checkpoint keeps of the place in the data; collective where the source says its state."""
        import json

        at: dict[str, JsonValue] = {"position": [self._position.epoch, self._position.batch], "batch": self.batch}
        if self.source.stateful:
            texts = all_gather_text(json.dumps(self._state) if self.source.reads else "")
            at["stream"] = next((json.loads(text) for text in texts if text), None)
        return at

    def restore(self, saved: Mapping[str, JsonValue], steps: int) -> str:
        """Goes on where a checkpoint was saved, also with batches of another size; how the place is found, where that takes time.

        `steps`: the number of steps until then, for a checkpoint that says no position. UsageError where no batch begins there.
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
        """Ends the reading ahead, in `patience` seconds or not at all. Reading goes on with the next batch where one is asked for."""
        if self._ahead is not None:
            self._ahead.close(patience)
        self._ahead = self._direct = None
        self._signals.end()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """Maps each input to this rank's shard of the next batch: arrays that belong to the caller."""
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
        """What the next batch will be, where it has been read ahead; does not wait."""
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
        """Where the next batch is, by those ranks that read this one."""
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
    """The loader of a rank: `ports` are the model's inputs, `batch` the records of all ranks together in one step.

    Inputs that are `fixed` hold no records, and have one value in every batch. Every rank opens the same spec with the same numbers.
    `code` has the files of Python that have run for this rank; `source` is an object that stands for what a file defines. `batch` may
    be None where a `DataLoader` says it. `lenient`: a last, smaller batch of a stream that ranks cannot share is left out.
    UsageError, the same on all ranks, with all that does not go together; UserCodeError where the user's own code fails.
    """
    try:
        own = constants(spec, ports, fixed, rank)
        ports = [port for port in ports if port.name not in fixed]
        code = code or Code()
        found: UserSource | None = None
        if source is not None:
            found = user_source(source, spec.where, batch, seed)
        elif spec.source is not None and spec.source.suffix == ".py":
            found = user_source(code.value(spec.source, "source"), str(spec.source), batch, seed)
        if found is not None and found.kind in STREAMS:
            stream = open_stream(found, spec, ports, rank, batch, seed, drop_last, interleave, code, lenient)
            return Loader(stream, depth, epochs, own, largest)
        if batch is None:
            raise UsageError(
                "the global batch size is not known\n  help: use --batch, or `batch:` in the plan's `train:`"
            )
        data = open_data(spec, fixed, code, found, [port.name for port in ports])
        order = Order(data.records, batch, seed, shuffle, drop_last, interleave, data.buckets())
        return Loader(OrderedBatches(Reader(data, ports, rank, order), order), depth, epochs, own)
    except UserCodeError as error:
        raise error.when(f"on rank {rank}") from error.__cause__
