"""Streams of global batches, from a `DataLoader` of torch or an object with the same interface, or from an iterable of records.

`LoaderStream` yields the batches of a `DataLoader`; torch is imported by the code that created it, not here. Epoch e is drawn from the seed
s + e, where s is the initial seed of the loader's own generator, else the plan's `seed`: the same records as from a loop over the loader
after `torch.manual_seed(seed + e)`. So all ranks draw the same order, and no epoch depends on the one before.

If torch itself collates batches from the indices of its batch sampler, a rank makes it load only the records of the rank's own shard, and
seeks to a position inside of an epoch without loading the records before it. From a `TensorDataset` the rank reads rows of full tensors,
without torch's workers. Otherwise each rank loads full batches.

`of_process` reports an error in a worker process of a `DataLoader` as if it had happened in this process. torch sends an exception of a
worker as text; a worker that has died has sent nothing.

    records.py:6: KeyError: 'images'
      while reading batch 3 of epoch 0 of its DataLoader, in worker process 1
      File "/home/me/records.py", line 6, in __getitem__
        return self.arrays["images"][at]

`RecordStream` yields the records of an iterable as batches: `batch` consecutive records are a global batch. Each epoch starts the iterable
again: a generator function is called again, an object is iterated again; its `set_epoch` is called if it has one. A position inside of an
epoch is reached by the source's state (`state_dict`, `load_state_dict`), else by reading the epoch again up to there.

Converts the state of a source to JSON for a checkpoint, and back. A checkpoint has only data, so that nothing in it can run.

In addition to JSON's own types there are tuples, bytes, arrays, tensors, and mappings whose keys are numbers. Each is stored as a mapping
with one key that begins with a colon: `{":tuple": [1, 2]}`.
"""

from __future__ import annotations

import base64
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from threading import Lock
from traceback import clear_frames
from typing import Any, TypeAlias, cast

import numpy as np
from pydantic import JsonValue

from ...errors import UsageError
from ...user_code import UserCodeError, fact, is_of_user, user_code
from ..fields import Rows
from ..sources.user_source import UserSource
from ..sources.values import as_array, is_tensor
from .child_signals import WithoutTorch
from .stream import StreamBatch

_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in (.*)$')
_CAUGHT = re.compile(r"^Caught \w+ in DataLoader worker process (\d+)\.$")


def of_process(error: UserCodeError, where: str, doing: str, workers: int) -> UserCodeError:
    """Returns the error in a worker process for which `error`, raised by a loader with `workers`, stands; else `error` itself."""
    cause, text = error.__cause__, str(error.__cause__)
    if cause is not None and workers:
        # torch's frames and its exception refer to each other, and the frames to the workers: these would end when the garbage
        # collector runs, inside of any other code, where torch waits 5 seconds for each worker.
        clear_frames(cause.__traceback__)
    first, _, trace = text.partition("\n")
    is_gone = isinstance(cause, RuntimeError) and "DataLoader worker" in text and "exited unexpectedly" in text
    if cause is not None and workers and (is_gone or isinstance(cause, ConnectionError | EOFError)):
        help = (
            "  help: a worker ends like this where it is killed, for want of memory or of /dev/shm, or by os._exit; "
            "num_workers=0 shows what its code does"
        )
        return UserCodeError(
            f"{where}: a worker process of its DataLoader has ended: {fact(cause)}", (f"while {doing}",), (help,)
        )
    caught = _CAUGHT.match(first)
    if caught is None or not trace:
        return error
    lines = trace.rstrip().splitlines()
    frames = [*_frames(lines)]
    place = f"{frames[-1][0]}:{frames[-1][1]}" if frames else where
    shown = [
        line for file, number, name, code in frames for line in (f'  File "{file}", line {number}, in {name}', code)
    ]
    return UserCodeError(
        f"{place}: {lines[-1]}",
        (f"while {doing}, in worker process {caught[1]}",),
        tuple(line for line in shown if line),
    )


def _frames(lines: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yields the frames of the user's code in a traceback: file, line number, function and source line."""
    for number, line in enumerate(lines):
        found = _FRAME.match(line)
        if found is not None and is_of_user(found[1]):
            code = lines[number + 1].strip() if number + 1 < len(lines) else ""
            yield found[1], found[2], found[3], f"    {code}" if code and not _FRAME.match(lines[number + 1]) else ""


Span: TypeAlias = Callable[[int], tuple[int, int]]

AGAIN = "reads epoch {epoch} again from its beginning, and skips its first {records} records: the data cannot go on elsewhere"
_DRAWING = Lock()
"""Ranks that are threads share torch's generator, so only one at a time draws the order of its epoch."""
_COPIED = (
    *("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "in_order"),
)


class LoaderStream:
    """The batches of a loader.

    `span` maps a batch size to the range of records that this rank needs; None where it reads none, or needs full batches.
    """

    def __init__(self, source: UserSource, batch: int | None, seed: int, drop_last: bool, span: Span | None) -> None:
        self._where, self._seed_of_plan = source.where, seed
        loader = self._loader = source.value
        sampler = loader.batch_sampler
        refuse_own_shards(loader, source.where)
        with user_code(source.where, "asking for the size and the number of batches"):
            own = loader.batch_size or getattr(sampler, "batch_size", None)
            indexed = sampler is not None and not _is_of(loader.dataset, "IterableDataset")
            plain = indexed and _is_of(sampler, "BatchSampler", exact=True)
            self.records = len(sampler.sampler) if plain and hasattr(sampler.sampler, "__len__") else None
        if isinstance(own, int) and batch not in (None, own):
            raise UsageError(
                f"{source.where}: its DataLoader has batches of {own}, and the global batch is {batch}\n"
                f"  help: the batch of the loader is that of all ranks together: leave `batch` out, or write batch: {own}"
            )
        size = own if isinstance(own, int) else batch
        if size is None:
            raise UsageError(
                f"{source.where}: the batch size of its DataLoader is not known\n"
                "  help: use --batch, or `batch:` in the plan's `train:`"
            )
        self.batch = size
        self.batches = None
        if self.records is not None:
            dropped = drop_last or sampler.drop_last
            self.batches = self.records // size + (bool(self.records % size) and not dropped)
            if not self.batches:
                raise UsageError(
                    f"{source.where}: {self.records} records do not fill one batch of {size}\n"
                    f"  help: take batches of at most {self.records}"
                )
        self._rows: _RankRows | None = None
        if indexed and _is_of(loader, "DataLoader", exact=True):
            self._rows = _RankRows(sampler, size, self.batches, span if _puts_together(loader) else None)
            self._loader = _with_sampler(loader, self._rows, source.where)
        self._columns: list[Rows] = []
        if self._rows is not None and _puts_together(loader) and _is_of(loader.dataset, "TensorDataset", exact=True):
            self._columns = [Rows(as_array(tensor)) for tensor in loader.dataset.tensors]
        self.stateful = says_its_place(loader)
        self.again = "" if self._rows is not None else AGAIN
        self._has_own = getattr(loader, "generator", None) is not None
        drawn = not self._has_own and type(getattr(sampler, "sampler", None)).__module__.startswith("torchdata.")
        # the samplers of torchdata seed a generator randomly themselves, differently on each rank
        self._seeds = [(one, seed if drawn else one.initial_seed()) for one in _generators(loader)]
        self._told_epochs = (loader.sampler, sampler, getattr(sampler, "sampler", None), loader.dataset)

    def epoch(self, epoch: int, skip: int, state: JsonValue) -> Iterator[StreamBatch]:
        """Yields the batches of an epoch after the first `skip`."""
        if self._rows is None:
            yield from self._epoch(epoch, skip, skip, state)
            return
        self._rows.begin(skip, partial(self._seed, epoch, 1))
        try:
            yield from self._epoch(epoch, skip, 0, state)
        finally:
            # The sampler no longer refers to this stream, so that the loader is freed with its last reader: if the garbage collector
            # has to free it as a part of a cycle, torch waits 5 seconds for each persistent worker.
            self._rows.begin(0, _nothing)

    def _epoch(self, epoch: int, skip: int, left: int, state: JsonValue) -> Iterator[StreamBatch]:
        """Yields the batches of an epoch after the first `skip`; the loader still yields `left` of the skipped ones."""
        batches: Iterator[object] = iter(())
        try:
            with _DRAWING:
                self._begin(epoch)
                if state is not None:
                    with user_code(self._where, f"going on with epoch {epoch} of its DataLoader"):
                        self._loader.load_state_dict(restored(state))
                    left = 0
                with WithoutTorch(), user_code(self._where, f"reading epoch {epoch} of its DataLoader"):
                    batches = self._by_columns(self._rows) if self._columns and self._rows else iter(self._loader)
                value = self._next(batches, skip - left, epoch)
            number = skip - left
            while value is not _END:
                if left:
                    left -= 1
                else:
                    yield self._given(value)
                number += 1
                value = self._next(batches, number, epoch)
        finally:
            del batches  # an exception refers to this frame, and must not keep workers alive by it

    def _by_columns(self, rows: _RankRows) -> Iterator[object]:
        """Yields the batches of a dataset of tensors, each by one indexing of full tensors; the values are those that torch stacks."""
        for indices in rows:
            yield tuple(column.take(np.asarray(indices, np.int64)) for column in self._columns)

    def _next(self, batches: Iterator[object], number: int, epoch: int) -> object:
        """Returns the next batch of the loader, or `_END` after the last."""
        doing = f"reading batch {number} of epoch {epoch} of its DataLoader"
        try:
            with user_code(self._where, doing):
                return next(batches, _END)
        except UserCodeError as error:
            del batches  # as above
            raise of_process(error, self._where, doing, getattr(self._loader, "num_workers", 0)) from error.__cause__

    def _given(self, value: object) -> StreamBatch:
        state: JsonValue = None
        if self.stateful:
            with user_code(self._where, "asking for the state of its DataLoader"):
                state = stored(self._loader.state_dict())
        if self._rows is not None:
            return StreamBatch(value, *self._rows.sizes.popleft(), state=state)
        size = _length(value)
        return StreamBatch(value, size, size, state=state)

    def _seed(self, epoch: int, drawn: int = 0) -> None:
        """Seeds all generators of an epoch by its number alone, and then draws the `drawn` numbers that torch has drawn before.

        torch draws one for its workers before the order, but not again if workers persist from epoch to epoch.
        """
        torch = sys.modules.get("torch")
        if torch is not None and not self._has_own:
            torch.manual_seed(self._seed_of_plan + epoch)
        for generator, seed in self._seeds:
            generator.manual_seed(seed + epoch)
        if torch is not None and drawn:
            torch.empty(drawn, dtype=torch.int64).random_(generator=getattr(self._loader, "generator", None))

    def _begin(self, epoch: int) -> None:
        self._seed(epoch)
        for one in self._told_epochs:
            if one is not None and hasattr(one, "set_epoch"):
                with user_code(self._where, f"beginning epoch {epoch}"):
                    one.set_epoch(epoch)


_END = object()


def _nothing() -> None:
    """Does nothing: before an epoch has begun there is nothing to seed."""


class _RankRows:
    """A batch sampler that omits the skipped batches, and yields of the others only the indices of the records that a rank needs."""

    def __init__(self, sampler: Any, batch: int, batches: int | None, span: Span | None) -> None:
        self.sampler, self._span = sampler, span
        self._batch, self._batches = batch, batches
        self._skip, self._seed = 0, _nothing
        self.sizes: deque[tuple[int, int, int]] = deque()
        """For each batch being loaded: its number of records, the number of those that are loaded, and the first of these."""

    def begin(self, skip: int, seed: Callable[[], None]) -> None:
        """Sets the number of batches that the next iteration skips, and the function that it calls before the order is drawn."""
        self._skip, self._seed = skip, seed
        self.sizes.clear()

    def __iter__(self) -> Iterator[Sequence[int]]:
        self._seed()
        for number, indices in enumerate(islice(self.sampler, self._batches)):
            if number < self._skip:
                continue
            whole = 0, len(indices)
            first, last = whole if self._span is None or whole[1] != self._batch else self._span(self._batch)
            self.sizes.append((len(indices), last - first, first))
            yield indices[first:last]

    def __len__(self) -> int:
        return max((len(self.sampler) if self._batches is None else self._batches) - self._skip, 0)


def refuse_own_shards(loader: Any, where: str) -> None:
    """Raises UsageError where a loader's own sampler divides the records among ranks."""
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if sampler is not None and hasattr(sampler, "num_replicas") and sampler.num_replicas > 1:
            raise UsageError(
                f"{where}: its DataLoader has a {type(sampler).__name__}, which deals records to {sampler.num_replicas} ranks\n"
                "  help: leave the sampler out: the loader's batch is that of all ranks together, and each takes its part"
            )


def _is_of(value: object, name: str, exact: bool = False) -> bool:
    """Whether a value is an instance of a torch class with this name; with `exact`, not of a derived class."""
    classes = type(value).__mro__[: 1 if exact else None]
    return any(one.__name__ == name and one.__module__.partition(".")[0] == "torch" for one in classes)


def _puts_together(loader: Any) -> bool:
    """Whether torch's default function collates the records of a batch, whose shape then does not depend on which records it has."""
    module = getattr(loader.collate_fn, "__module__", "")
    stacks = loader.collate_fn.__name__ == "default_collate" if hasattr(loader.collate_fn, "__name__") else False
    return stacks and module.startswith("torch.") and getattr(loader, "in_order", True)


def _with_sampler(loader: Any, sampler: _RankRows, where: str) -> Any:
    """Returns the same loader with another batch sampler."""
    options: Mapping[str, Any] = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
    if not loader.num_workers:
        options = {name: one for name, one in options.items() if name != "prefetch_factor"}
    with user_code(where, "opening its DataLoader"):
        return type(loader)(batch_sampler=sampler, **options)


def _generators(loader: Any) -> list[Any]:
    """Returns the loader's own generators, from which it draws."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    found = [getattr(one, "generator", None) for one in (loader, loader.sampler, sampler)]
    return [*{id(one): one for one in found if hasattr(one, "initial_seed")}.values()]


def _length(value: object) -> int:
    """Returns the number of records of a batch, which is the length of its first field."""
    if isinstance(value, Mapping) and value:
        value = next(iter(value.values()))
    elif isinstance(value, tuple | list) and value:
        value = value[0]
    return len(value) if hasattr(value, "__len__") else 0


class RecordStream:
    """The records of an iterable, in batches of `batch`; their total number is not known."""

    batches: int | None = None
    records: int | None = None
    again = AGAIN

    def __init__(self, found: UserSource, batch: int) -> None:
        self.batch = batch
        self._found, self._where = found, found.where
        self._first: Any = found.value
        self._used = False
        self.stateful = says_its_place(found.value)

    def epoch(self, epoch: int, skip: int, state: JsonValue) -> Iterator[StreamBatch]:
        """Yields the batches of an epoch after the first `skip`."""
        with user_code(self._where, f"beginning epoch {epoch}"):
            source = self._fresh(epoch)
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)
            if state is not None:
                source.load_state_dict(restored(state))
            records = iter(source)
        number, once = skip, records is source
        left = 0 if state is not None else skip * self.batch
        while True:
            begin = number * self.batch - left
            with user_code(self._where, f"reading records {begin} to {begin + self.batch - 1} of epoch {epoch}"):
                if left:
                    passed = sum(1 for _ in islice(records, min(left, self.batch)))
                    left -= passed
                    if not passed:
                        return
                    continue
                given = list(islice(records, self.batch))
                after = stored(source.state_dict()) if self.stateful and given else None
            if not given:
                break
            yield StreamBatch(given, len(given), len(given), records=True, state=after)
            number += 1
        if number == skip and not skip and epoch and once and self._found.again is None:
            raise UsageError(
                f"{self._where}: its `source` is a {type(source).__name__}, which has ended and cannot start again for epoch {epoch}\n"
                "  help: make `source` a function that returns a new one, or train for one epoch"
            )

    def _fresh(self, epoch: int) -> Any:
        """Returns the iterable of an epoch: a new one if a function creates it."""
        again, used = self._found.again, self._used
        self._used = True
        if again is None or (not used and not epoch):
            return self._first
        return again(epoch)


class _NoState(UsageError):
    """A state contains a value that a checkpoint cannot store."""


def says_its_place(source: Any) -> bool:
    """Whether a source can give its state, and resume from it at exactly the next record.

    A stream of `datasets` with a shuffle buffer cannot: its state has the position of its reading, but not the records in the buffer.
    """
    if not all(hasattr(source, name) for name in ("state_dict", "load_state_dict")):
        return False
    return not any(
        _has_buffer(getattr(one, "_ex_iterable", None)) for one in (source, getattr(source, "dataset", None))
    )


def _has_buffer(examples: Any) -> bool:
    within = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return type(examples).__name__.startswith("BufferShuffled") or any(_has_buffer(one) for one in within if one)


def stored(state: object) -> JsonValue:
    """Converts a state to JSON; None where a value in it cannot be stored: the position is then found as for a source without a state."""
    try:
        return _stored(state)
    except _NoState:
        return None


def _stored(state: object) -> JsonValue:
    match state:
        case None | bool() | int() | float() | str():
            return state
        case np.generic():
            return cast(JsonValue, state.item())
        case bytes():
            return {":bytes": base64.b64encode(state).decode()}
        case list():
            return [_stored(one) for one in state]
        case tuple():
            return {":tuple": [_stored(one) for one in state]}
        case dict() if all(isinstance(key, str) and not key.startswith(":") for key in state):
            return {key: _stored(one) for key, one in state.items()}
        case dict():
            return {":pairs": [[_stored(key), _stored(one)] for key, one in state.items()]}
        case np.ndarray():
            return {":array": _array(state)}
    if is_tensor(state):
        return {":tensor": _array(as_array(state))}
    raise _NoState(f"a {type(state).__name__}")


def _array(array: np.ndarray[Any, Any]) -> JsonValue:
    if array.dtype.hasobject:
        raise _NoState("an array of objects")
    return [array.dtype.str, [*array.shape], base64.b64encode(array.tobytes()).decode()]


def restored(state: JsonValue) -> Any:
    """Converts JSON from `stored` back to the state."""
    if isinstance(state, list):
        return [restored(one) for one in state]
    if not isinstance(state, dict):
        return state
    match state:
        case {":bytes": str(text)}:
            return base64.b64decode(text)
        case {":tuple": list(values)}:
            return tuple(restored(one) for one in values)
        case {":pairs": list(pairs)}:
            return {restored(key): restored(value) for key, value in cast("list[list[JsonValue]]", pairs)}
        case {":array": list(parts)}:
            return _restored_array(parts)
        case {":tensor": list(parts)}:
            return sys.modules["torch"].from_numpy(_restored_array(parts))
    return {key: restored(value) for key, value in state.items()}


def _restored_array(parts: Any) -> np.ndarray[Any, Any]:
    dtype, shape, text = parts
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype).reshape(shape)
