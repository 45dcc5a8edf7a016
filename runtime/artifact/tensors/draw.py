"""Random numbers that depend only on a name and a place in its stream: the same bytes on every machine and with every numpy.

The bits come from Philox, a counter-based generator whose stream numpy never changes, keyed by the SHA-256 of the name.
They become numbers through additions, multiplications, divisions and square roots alone, which IEEE 754 rounds in one
way; the library's `log` is not among them, since it differs between processors in the last bit. Any part of a stream can be drawn
without the numbers before it.

    normal("7/fc1.weight", 3)          the same three numbers, whatever other names exist
    normal("7/fc1.weight", 2, 1)       the last two of them
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCK = 1 << 13
"""The size of the blocks in which numbers are drawn, which fit in the cache."""
_PER_COUNT = 8
"""The numbers from one count of the generator, which gives four words of 64 bits, each for two numbers."""

# Wichura, "Algorithm AS 241: the percentage points of the normal distribution", PPND16: relative accuracy 1e-16.
# Coefficients from the constant term upwards; denominators begin with 1.
_CENTRE = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
_SHOULDER = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
_TAIL = (
    (
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)
_LN2 = 0.693147180559945309417
# The probability of a normal variable below -2: truncated values have none below it, nor above 1 minus it.
_BELOW_MINUS_2 = 0.022750131948179207200


def uniform(name: str, count: int, start: int = 0) -> Iterator[Floats]:
    """Yields `count` numbers in (0, 1), in blocks, from place `start` on: multiples of 2**-32 shifted by half of that."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    counts, skipped = divmod(start, _PER_COUNT)
    source = np.random.Philox(key=key, counter=counts)
    at, end = -skipped, count
    while at < end:
        size = min(BLOCK, end - at)
        # Each 64-bit draw gives two numbers, its low half first.
        raw = np.asarray(source.random_raw((size + 1) // 2)).astype("<u8", copy=False).view("<u4")[max(0, -at) : size]
        block = raw.astype(np.float64)
        block += 0.5
        block *= 2.0**-32
        at += size
        yield block


def normal(name: str, count: int, start: int = 0) -> Iterator[Floats]:
    """Yields `count` numbers of mean 0 and standard deviation 1, in blocks, from place `start` on."""
    return map(normal_quantile, uniform(name, count, start))


def truncated_normal(name: str, count: int, start: int = 0) -> Iterator[Floats]:
    """Yields `count` numbers of the standard normal distribution between -2 and 2, in blocks, from place `start` on."""
    for block in uniform(name, count, start):
        block *= 1.0 - 2.0 * _BELOW_MINUS_2
        block += _BELOW_MINUS_2
        yield normal_quantile(block)


def zeros(name: str, count: int, start: int = 0) -> Iterator[Floats]:
    """Yields `count` zeros, in blocks."""
    for at in range(0, count, BLOCK):
        yield np.zeros(min(BLOCK, count - at))


def normal_quantile(probability: Floats) -> Floats:
    """The x below which a standard normal variable lies with this probability, for probabilities in (0, 1)."""
    values = probability - 0.5
    outer = np.flatnonzero(np.abs(values) > 0.425)
    tail, is_low = probability[outer], values[outer] < 0
    # The formula of the centre is evaluated everywhere, which costs less than picking the places where it holds.
    r = values * values
    np.subtract(0.180625, r, out=r)
    values *= _ratio(_CENTRE, r)
    np.subtract(1.0, tail, out=tail, where=~is_low)
    r = np.sqrt(-_log(tail))
    far = np.flatnonzero(r > 5.0)
    magnitude = _ratio(_SHOULDER, r - 1.6)
    magnitude[far] = _ratio(_TAIL, r[far] - 5.0)
    np.negative(magnitude, out=magnitude, where=is_low)
    values[outer] = magnitude
    return values


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Floats) -> Floats:
    above, below = (_horner(side, x) for side in coefficients)
    above /= below
    return above


def _horner(coefficients: tuple[float, ...], x: Floats) -> Floats:
    total = np.multiply(x, coefficients[-1])
    for coefficient in coefficients[-2:0:-1]:
        total += coefficient
        total *= x
    total += coefficients[0]
    return total


def _log(x: Floats) -> Floats:
    """log x = exponent * log 2 + 2 atanh((m - 1) / (m + 1)), the mantissa m in [1/2, 1) doubled below sqrt(1/2)."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.70710678118654752440
    np.multiply(mantissa, 2.0, out=mantissa, where=low)
    exponent -= low
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _horner(tuple(1.0 / (2 * k + 1) for k in range(14)), s * s)
    series *= s
    series *= 2.0
    result: Floats = exponent * _LN2
    result += series
    return result
