"""Groups records of similar length into batches, so that little of a batch is padding.

The shuffled order is divided into windows of some batches. Within a window records are sorted by their buckets and divided into batches,
and these batches are shuffled: every record comes once in an epoch, the number of batches is unchanged, and a smaller last batch stays the
last. A wider window pads less and shuffles less.

    Buckets.of(lengths)                              eight buckets with about equal numbers of records
    Buckets.of(lengths, boundaries=[32, 64])         up to 32, up to 64, longer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from partc.runtime.artifact.training.data_spec import WINDOW

from ..errors import UsageError
from .fields import Index

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
