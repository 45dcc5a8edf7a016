"""Log probabilities of tokens by the model's own logits, from shards of the vocabulary.

    shard     sends its first candidates, the sum of its weights, and the token's logit, if it has the token     an agreement of all ranks
    score     logit - (largest + log(sum of all shards' weights)), of the token and of the likeliest tokens

Temperature, penalties and other changes do not affect a score. It is computed from its row alone, so it does not depend on other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ..communication.transport import Vector
from .draw import NONE, Scratch, candidates, logit_of, token_of
from .request import MOST_LOGPROBS, Request, TokenScore
from .sampling import LogitShards, Shard

_AS_IT_IS = Request(temperature=1.0)
_WORDS = 2 + MOST_LOGPROBS
"""The numbers that a shard sends for a row: the sum of weights, the token's logit, and keys."""


def scores_of(
    shards: LogitShards,
    scored: Mapping[int, tuple[int, int]],
    logits: Mapping[int, Array],
    scratch: Scratch,
    agree: Callable[[Vector], Vector] | None,
) -> dict[int, TokenScore]:
    """Maps each row to the score of its token. `scored` maps each row to its token and the number of likeliest tokens to score as well.

    `logits` maps each rank of this process to its logits. `agree` returns the maxima of the numbers of all ranks, which must score the same
    rows; None if all logits are in this process.
    """
    agreed = np.full((1 << (len(scored) - 1).bit_length(), shards.count, _WORDS), NONE, np.int64)
    for part, (row, (token, _)) in zip(agreed, scored.items(), strict=False):
        for words, shard in zip(part, shards.of_row[row], strict=True):
            if shard.rank in logits:
                _write(words, logits[shard.rank][row - shard.row], shard, token, scratch)
    if agree is not None:
        agreed = agree(agreed.reshape(-1)).reshape(agreed.shape)
    return {row: _score(part, count) for part, (row, (_, count)) in zip(agreed, scored.items(), strict=False)}


def _write(words: Vector, logits: Array, shard: Shard, token: int, scratch: Scratch) -> None:
    """Writes a shard's message about a row into `words`."""
    one = candidates(logits, shard.begin, min(MOST_LOGPROBS, shard.size), _AS_IT_IS, scratch)
    numbers = words[:2].view(np.float64)
    numbers[0] = one.weight
    if 0 <= token - shard.begin < shard.size:
        numbers[1] = logits[token - shard.begin]
    words[2 : 2 + one.keys.size] = one.keys


def _score(part: Vector, count: int) -> TokenScore:
    """Computes the score of a row from the messages of its shards."""
    numbers = part[:, :2].copy().view(np.float64)
    tops = [logit_of(key) for key in part[:, 2]]
    largest = max(tops)
    weights = sum(weight * float(np.exp(top - largest)) for weight, top in zip(numbers[:, 0], tops, strict=True))
    norm = largest + float(np.log(weights))
    keys = np.sort(part[:, 2:], axis=None)[::-1][:count]
    top = tuple((token_of(key), logit_of(key) - norm) for key in keys if key != NONE)
    (logit,) = (number for number, word in zip(numbers[:, 1], part[:, 1], strict=True) if word != NONE)
    return TokenScore(float(logit) - norm, top)
