"""Records that an iterable gives, one after the other, as a stream of batches: `batch` consecutive records are a global batch.

Each epoch begins the iterable anew: a generator function is called again, an object is iterated again; `set_epoch` is called where there is
one. A place inside an epoch is found by the state that the source said of it (`state_dict`, `load_state_dict`), else by reading the epoch
again up to there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from pydantic import JsonValue

from ...errors import UsageError
from ...user_code import user_code
from ..sources.user_source import UserSource
from .loader_stream import AGAIN
from .state import restored, says_its_place, stored
from .stream import StreamBatch


class RecordStream:
    """The records of an iterable, `batch` at a time; how many there are is not known."""

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
        """The batches of an epoch but for the first `skip`."""
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
        """The iterable of an epoch: another one where a function makes it."""
        again, used = self._found.again, self._used
        self._used = True
        if again is None or (not used and not epoch):
            return self._first
        return again(epoch)
