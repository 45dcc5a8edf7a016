"""Chooses the records of a batch: computed from numbers that all ranks know, without communication.

The order of an epoch is a permutation drawn from (seed, epoch) alone, or the stored order. A batch is the next `batch` records; the
remainder at the end is dropped or is a smaller last batch. So a position in training is two numbers, and seeking to one costs a
permutation.

`interleave: n` deals the order to n ranks in turn, as MegEngine's samplers do: it is extended to a multiple of n by repeating its
beginning, rank r owns places r, r + n, r + 2n and so on, and batch b has, rank after rank, the rank's own places from b*m to (b + 1)*m,
with m = batch / n. If dim 0 is then sharded evenly over n ranks, each gets its own records.

    Order(records=10, batch=4, shuffle=False).epoch(0)                0 1 2 3 | 4 5 6 7              8 and 9 are dropped
    Order(records=10, batch=4, shuffle=False, interleave=2).epoch(0)  0 2 1 3 | 4 6 5 7              rank 0 has 0 2, rank 1 has 1 3

Groups records of similar length into batches, so that little of a batch is padding.

The shuffled order is divided into windows of some batches. Within a window records are sorted by their buckets and divided into batches,
and these batches are shuffled: every record comes once in an epoch, the number of batches is unchanged, and a smaller last batch stays the
last. A wider window pads less and shuffles less.

    Buckets.of(lengths)                              eight buckets with about equal numbers of records
    Buckets.of(lengths, boundaries=[32, 64])         up to 32, up to 64, longer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as entry
from itertools import pairwise

import numpy as np
from partc.runtime.artifact.training.data_spec import WINDOW

from ..errors import UsageError
from .fields import Index


@dataclass(frozen=True)
class Position:
    """A place in training: the next batch is number `batch` of `epoch`, both counted from 0."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Order:
    """The order of `records` records in batches of `batch`, counted on all ranks together; UsageError where the numbers are not valid."""

    records: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    interleave: int = 1
    buckets: Buckets | None = entry(default=None, compare=False)

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise UsageError("\n".join(problems))

    @property
    def places(self) -> int:
        """The number of records of an epoch, including those that interleaving repeats."""
        return -(-self.records // self.interleave) * self.interleave

    @property
    def rest(self) -> int:
        """The size of the smaller last batch; 0 where there is none."""
        return self.places % self.batch if not self.drop_last else 0

    @property
    def batches(self) -> int:
        """The number of batches of an epoch."""
        return self.places // self.batch + bool(self.rest)

    def size(self, position: Position) -> int:
        """Returns the number of records of a batch."""
        return self.rest if self.rest and position.batch + 1 == self.batches else self.batch

    def after(self, position: Position) -> Position:
        """Returns the position of the next batch."""
        if position.batch + 1 < self.batches:
            return Position(position.epoch, position.batch + 1)
        return Position(position.epoch + 1)

    def check(self, position: Position) -> None:
        """Raises UsageError where the position does not exist."""
        if position.epoch < 0 or not 0 <= position.batch < self.batches:
            raise UsageError(
                f"there is no batch {position.batch} of epoch {position.epoch}: an epoch has {self.batches} batches\n"
                f"  {self.records} records in batches of {self.batch}\n"
                "  help: continue with the data and the batch size that training began with"
            )

    def epoch(self, epoch: int) -> Index:
        """Returns the indices of an epoch's records in their order, without dropped ones: batch b is [b*batch:(b + 1)*batch]."""
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        order = generator.permutation(self.records) if self.shuffle else np.arange(self.records)
        if self.interleave > 1:
            order = self._dealt(order)
        order = order[: self.places - (0 if self.rest else self.places % self.batch)]
        if self.buckets is not None:
            order = self.buckets.arranged(order, self.batch, generator if self.shuffle else None)
        return order.astype(np.int64, copy=False)

    def indices(self, position: Position) -> Index:
        """Returns the indices of one batch; a caller that reads many batches should call `epoch` once instead."""
        self.check(position)
        return self.epoch(position.epoch)[self.batch * position.batch :][: self.batch]

    def _dealt(self, order: Index) -> Index:
        """Returns the interleaved order: batch after batch and, within each, rank after rank."""
        each, own = self.places // self.interleave, self.batch // self.interleave
        hands = np.resize(order, self.places).reshape(each, self.interleave)
        whole = each // own * own
        dealt = hands[:whole].reshape(-1, own, self.interleave).transpose(0, 2, 1).reshape(-1)
        return np.concatenate([dealt, hands[whole:].T.reshape(-1)])

    def _problems(self) -> list[str]:
        if self.batch < 1 or self.interleave < 1 or self.seed < 0:
            return [
                f"{name} is {value}; it must be at least {least}"
                for name, value, least in (
                    ("the batch size", self.batch, 1),
                    ("interleave", self.interleave, 1),
                    ("the seed", self.seed, 0),
                )
                if value < least
            ]
        problems = []
        if self.batch % self.interleave:
            problems.append(
                f"batches of {self.batch} cannot be dealt to {self.interleave} ranks\n  help: use a multiple of {self.interleave}"
            )
        small = self.places < self.batch and (self.drop_last or self.interleave > 1)
        if small or not self.records:
            help = f"take batches of at most {self.places}" if self.records else "give data with at least one record"
            problems.append(f"{self.records} records do not fill one batch of {self.batch}\n  help: {help}")
        if self.interleave > 1 and self.buckets is not None:
            problems.append(
                "`interleave` and `length` each say which records make a batch\n  help: leave one of them out"
            )
        return problems


QUANTILES = 8


@dataclass(frozen=True, eq=False)
class Buckets:
    """The bucket of each record, and the number of batches in a window."""

    of_record: Index
    window: int = WINDOW

    @staticmethod
    def of(lengths: Index, boundaries: Sequence[int] = (), window: int = WINDOW) -> Buckets:
        """Computes buckets between these boundaries, each including its upper one; without boundaries, between quantiles."""
        if window < 1:
            raise UsageError(f"window is {window} batches; it must be at least 1")
        if any(upper <= lower for lower, upper in pairwise(boundaries)):
            raise UsageError(f"buckets are {list(boundaries)}\n  help: write lengths that rise, such as [32, 64, 128]")
        edges = np.asarray(boundaries, np.float64)
        if not len(edges) and len(lengths):
            edges = np.unique(np.quantile(lengths, np.arange(1, QUANTILES) / QUANTILES))
        return Buckets(np.searchsorted(edges, lengths, side="left").astype(np.int64), window)

    def arranged(self, order: Index, batch: int, generator: np.random.Generator | None) -> Index:
        """Returns the same records sorted by bucket within each window; batches are shuffled if there is a generator."""
        places = np.arange(len(order)) // (batch * self.window)
        sorted_order = order[np.lexsort((self.of_record[order], places))]
        if generator is None:
            return sorted_order
        whole = len(order) // batch
        windows = np.arange(whole) // self.window
        batches = np.lexsort((generator.permutation(whole), windows))
        first = sorted_order[: whole * batch].reshape(whole, batch)[batches].reshape(-1)
        return np.concatenate([first, sorted_order[whole * batch :]])
