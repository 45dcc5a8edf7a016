"""Records of similar length brought together, so that little of a batch is padding.

The shuffled order is cut into windows of some batches. Within a window records are put in the order of their buckets, then cut
into batches, and these are shuffled: every record comes once an epoch, an epoch keeps its number of batches, and a smaller last
batch stays the last. A wider window pads less and shuffles less.

    Buckets.of(lengths)                       eight buckets that have about as many records each
    Buckets.of(lengths, boundaries=[32, 64])  up to 32, up to 64, longer
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
    """The bucket of each record, and the number of batches of a window."""

    of_record: Index
    window: int = WINDOW

    @staticmethod
    def of(lengths: Index, boundaries: Sequence[int] = (), window: int = WINDOW) -> Buckets:
        """Buckets between these lengths, each with its upper boundary; without boundaries, between quantiles."""
        if window < 1:
            raise UsageError(f"window is {window} batches; it must be at least 1")
        if any(upper <= lower for lower, upper in pairwise(boundaries)):
            raise UsageError(f"buckets are {list(boundaries)}\n  help: write lengths that rise, such as [32, 64, 128]")
        edges = np.asarray(boundaries, np.float64)
        if not len(edges) and len(lengths):
            edges = np.unique(np.quantile(lengths, np.arange(1, QUANTILES) / QUANTILES))
        return Buckets(np.searchsorted(edges, lengths, side="left").astype(np.int64), window)

    def arranged(self, order: Index, batch: int, generator: np.random.Generator | None) -> Index:
        """The same records, bucket by bucket within each window; batches are shuffled where there is a generator."""
        places = np.arange(len(order)) // (batch * self.window)
        sorted_order = order[np.lexsort((self.of_record[order], places))]
        if generator is None:
            return sorted_order
        whole = len(order) // batch
        windows = np.arange(whole) // self.window
        batches = np.lexsort((generator.permutation(whole), windows))
        first = sorted_order[: whole * batch].reshape(whole, batch)[batches].reshape(-1)
        return np.concatenate([first, sorted_order[whole * batch :]])
