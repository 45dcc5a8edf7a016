"""Draws a token from its likeliest candidates: the result depends on the seed and the token's number, not on the slot or its neighbours.

The law: tokens are sorted by falling logits, those with equal logits by rising number, and have the weights exp((logit - largest) /
temperature). The first `top_k` remain; of these the shortest prefix whose weights sum to at least `top_p` of the total; of these the
tokens with a weight of at least `min_p`. A random number u in [0, 1) draws the first token at which the running sum of weights is above
u times the sum of the remaining weights. Temperature 0 takes the first token.

A draw needs only the first tokens of that order: as many as the nucleus, or u, reaches. So each shard of the logits sends its first
candidates, each as an integer key, and the sum of its weights:

    key    upper half: the bits of the logit as a float32, as an integer of the same order; lower half: 2**32 - 1 - token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from partc.runtime.artifact.tensors.dtypes import Array

from ..communication.transport import Vector
from .request import Request

FIRST, FURTHER = 64, 32
"""The number of candidates of a shard that a draw reads first, and the factor for their number each time they are too few."""
NO_TOKEN = (1 << 32) - 1
"""The result of a draw where no logit is finite."""
NONE = np.iinfo(np.int64).min
"""A value below every key, which marks a place without a candidate."""
_LOWER = (1 << 32) - 1
T = TypeVar("T", bound=np.generic)


@dataclass
class Scratch:
    """Memory that is reused between draws, one array for each use; a new array has room for at least `least` elements."""

    least: int = 0
    known: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def of(self, use: str, size: int, kind: type[T]) -> npt.NDArray[T]:
        """Returns an array of `size` elements for a use; it overwrites the array that the use had before."""
        there = self.known.get(use)
        if there is None or there.size < size:
            there = self.known[use] = np.empty(max(size, self.least), kind)
        return there[:size]


@dataclass(frozen=True)
class Candidates:
    """The first tokens of a shard of the vocabulary.

    `keys`: their keys, falling. `weight`: the sum of the weights of all tokens of the shard, if its largest logit has the weight 1.
    `all`: whether the shard has no other tokens.
    """

    keys: Vector
    weight: float
    all: bool


def candidate_count(request: Request, further: int, size: int) -> int:
    """Returns the number of candidates that a draw reads of a shard of `size` tokens, after they were too few `further` times."""
    many: int = max(FIRST, request.top_k) * FURTHER**further if request.temperature else 1
    return min(many, size)


def candidates(logits: Array, begin: int, count: int, request: Request, scratch: Scratch) -> Candidates:
    """Returns the first `count` tokens of a shard with the `logits` of the tokens from `begin` on.

    The keys are valid until the next call for this shard. The sum of weights is 0 where the draw does not need it.
    """
    size = len(logits)
    keys, weights = scratch.of(f"keys from {begin}", size, np.int64), scratch.of("weights", size, np.float64)
    bits, signs = weights.view(np.int32)[:size], weights.view(np.int32)[size:]
    np.copyto(bits.view(np.float32), logits, casting="same_kind")
    np.right_shift(bits, 31, out=signs)  # 0, or -1 of what is negative
    np.bitwise_and(bits, 0x7FFFFFFF, out=bits)
    np.bitwise_xor(bits, signs, out=bits)
    np.subtract(bits, signs, out=bits)
    np.copyto(keys, bits)
    np.left_shift(keys, 32, out=keys)
    np.add(keys, _behind(begin, size, scratch), out=keys)
    if count < size:
        keys.partition(size - count)
    first = keys[-count:]
    first.sort()
    weight = 0.0
    if request.temperature and not request.top_k:
        np.copyto(weights, logits)
        np.divide(weights, request.temperature, out=weights)
        if (top := float(weights.max())) != -np.inf:
            np.subtract(weights, top, out=weights)
            weight = float(np.exp(weights, out=weights).sum())
    return Candidates(first[::-1], weight, count >= size)


def draw(shards: Sequence[Candidates], request: Request, number: int, scratch: Scratch) -> int | None:
    """Draws the `number`-th token of a request from the candidates of all shards of the vocabulary; None where they are too few.

    Philox keyed by the seed, with the token's number as its counter, gives the one random number that a token takes.
    """
    keys = scratch.of("drawn_keys", sum(one.keys.size for one in shards), np.int64)
    np.concatenate([one.keys for one in shards], out=keys)
    keys.sort()
    least = max((int(one.keys[-1]) for one in shards if not one.all), default=NONE)
    known = keys[np.searchsorted(keys, least) :][::-1]  # after these there may be tokens that no shard has sent
    if request.top_k:
        known = known[: request.top_k]
    scaled = _logits(known, scratch)
    if scaled[0] == -np.inf:
        return NO_TOKEN
    if not request.temperature:
        return token_of(known[0])
    np.divide(scaled, request.temperature, out=scaled)
    largest = float(scaled[0])
    np.subtract(scaled, largest, out=scaled)
    weights = np.exp(scaled, out=scaled)
    heavy = int(np.count_nonzero(weights >= request.min_p)) if request.min_p else known.size
    sums = np.cumsum(weights, out=scratch.of("sums", known.size, np.float64))
    every = least == NONE or 0 < request.top_k <= known.size
    total = float(sums[-1]) if every else _total(shards, largest, request.temperature, scratch)
    kept = known.size
    if request.top_p < 1:
        reached = int(np.searchsorted(sums, request.top_p * total)) + 1
        if reached > kept and not every:
            return None
        kept = min(reached, kept)
        total = float(sums[kept - 1])
    if request.min_p:
        if heavy == known.size and request.top_p == 1 and not every:
            return None
        kept = min(heavy, kept)
        total = float(sums[kept - 1])
    uniform = np.random.Generator(np.random.Philox(key=request.seed, counter=number)).random()
    place = int(np.searchsorted(sums[:kept], uniform * total, side="right"))
    if place >= kept and not every and request.top_p == 1 and not request.min_p:
        return None
    return token_of(known[min(place, kept - 1)])


def token_of(key: np.int64) -> int:
    """Returns the token of a key, from its lower half."""
    return _LOWER - (int(key) & _LOWER)


def logit_of(key: np.int64) -> float:
    """Returns the logit of a key, from its upper half."""
    return float(_logits(np.array([key]), Scratch())[0])


def _behind(begin: int, size: int, scratch: Scratch) -> Vector:
    """The lower halves of the keys of tokens from `begin` on."""
    known = scratch.known.get(use := f"lower halves from {begin}")
    if known is None or known.size != size:
        known = scratch.known[use] = _LOWER - np.arange(begin, begin + size, dtype=np.int64)
    return known


def _logits(keys: Vector, scratch: Scratch) -> Array:
    """The logits of keys. Casts are separate copies: within other operations they would allocate buffers."""
    size = keys.size
    upper, logits = scratch.of("upper", size, np.int64), scratch.of("logits", size, np.float64)
    bits, signs = scratch.of("bits", size, np.int32), scratch.of("signs", size, np.int32)
    np.right_shift(keys, 32, out=upper)
    np.copyto(bits, upper, casting="same_kind")
    np.right_shift(bits, 31, out=signs)
    np.bitwise_xor(bits, signs, out=bits)
    np.subtract(bits, signs, out=bits)
    np.left_shift(signs, 31, out=signs)
    np.bitwise_or(bits, signs, out=bits)
    np.copyto(logits, bits.view(np.float32))
    return logits


def _total(shards: Sequence[Candidates], largest: float, temperature: float, scratch: Scratch) -> float:
    """The sum of all weights of all shards; `largest` is the largest logit of all, divided by the temperature."""
    tops = [float(_logits(one.keys[:1], scratch)[0]) / temperature for one in shards]
    return sum(one.weight * float(np.exp(top - largest)) for one, top in zip(shards, tops, strict=True))
