"""The global batches of a stream, each as the user's code created it, or as a list of its records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue


@dataclass(frozen=True)
class StreamBatch:
    """A batch of `size` records on all ranks together; `value` has `rows` of them, beginning with record `first`.

    `records`: whether `value` is a list of records instead of the fields of a batch. `state`: the source's state after this batch.
    """

    value: object
    size: int
    rows: int
    first: int = 0
    records: bool = False
    state: JsonValue = None


class Stream(Protocol):
    """A source of global batches, which starts again for each epoch."""

    batch: int
    batches: int | None
    records: int | None
    again: str
    stateful: bool

    def epoch(self, epoch: int, skip: int, state: JsonValue) -> Iterator[StreamBatch]:
        """Yields the batches of an epoch after the first `skip`; `state`, if not None, is the source's state at that position."""
        ...
