"""Items made ahead of their use by one background thread, at most `depth` of them; an error comes to the consumer as it was raised.

with Ahead(batches, depth=2) as ahead:
    first = ahead.next()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from threading import Condition, Thread
from types import TracebackType
from typing import Generic, TypeVar

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
