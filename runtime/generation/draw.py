"""Drawing a token from logits: what is drawn follows from the seed and the number of the token, not from the slot or its neighbours."""

from __future__ import annotations

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from .request import Request


def draw(logits: Array, request: Request, number: int) -> int:
    """The `number`-th token of a request, of the logits [vocabulary] of all tokens there.

    Philox keyed by the seed, with the token's number as its counter, gives the one random number that a token takes.
    """
    scaled = logits.astype(np.float64) / request.temperature
    order = np.argsort(-scaled, kind="stable")  # of equal ones the lowest number first
    if request.top_k:
        order = order[: request.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    sums = np.cumsum(weights)
    if request.top_p < 1:
        kept = int(np.searchsorted(sums, request.top_p * sums[-1])) + 1
        order, sums = order[:kept], sums[:kept]
    uniform = np.random.Generator(np.random.Philox(key=request.seed, counter=number)).random()
    return int(order[min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(order) - 1)])
