"""The global batches of a stream, each as the user's code made it, or as the records that make it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue


@dataclass(frozen=True)
class StreamBatch:
    """A batch of `size` records on all ranks together; what has come are `rows` of them, beginning with record `first`.

    `records`: whether the value is a list of records, and not fields of a batch. `state`: where the source is behind it.
    """

    value: object
    size: int
    rows: int
    first: int = 0
    records: bool = False
    state: JsonValue = None


class Stream(Protocol):
    """A source of global batches, which is begun anew for each epoch."""

    batch: int
    batches: int | None
    records: int | None
    again: str
    stateful: bool

    def epoch(self, epoch: int, skip: int, state: JsonValue) -> Iterator[StreamBatch]:
        """The batches of an epoch but for the first `skip`, which `state`, where there is one, has behind it already."""
        ...
