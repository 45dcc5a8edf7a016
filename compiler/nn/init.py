"""Initializers: the distributions from which a parameter's values are drawn.

    nn.Linear(784, 10, init=nn.init.truncated_normal(0.02), bias_init=nn.init.zeros())

Fans are those of a weight `[out, in, *kernel]`: `fan_in = in * kernel`, `fan_out = out * kernel`. He: K. He et al., "Delving Deep into
Rectifiers", 2015; Xavier: X. Glorot and Y. Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010.
Defaults follow `torch.nn.init`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from partc.runtime.artifact.format import Law
from partc.runtime.artifact.tensors.law import full_tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Initializer:
    """Gives the law of a parameter's values, by the name of its stream and its shape. `text` is how it prints."""

    text: str
    law: Callable[[str, Shape], Law]

    def values(self, stream: str, shape: Shape, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        """An array of this shape and dtype, rounded from double precision."""
        return full_tensor(self.law(stream, shape), shape, dtype)

    def __repr__(self) -> str:
        return self.text


def constant(value: float) -> Initializer:
    """Every element is `value`."""
    return Initializer(f"constant({value})", lambda _, shape: Law(draw="constant", offset=value))


def zeros() -> Initializer:
    """Every element is 0."""
    return constant(0.0)


def ones() -> Initializer:
    """Every element is 1."""
    return constant(1.0)


def normal(std: float = 1.0, mean: float = 0.0) -> Initializer:
    """The normal distribution."""
    return _scaled(f"normal({std}, {mean})", "normal", lambda _: (mean, std))


def truncated_normal(std: float = 1.0, mean: float = 0.0) -> Initializer:
    """The normal distribution, cut off at two standard deviations from the mean."""
    return _scaled(f"truncated_normal({std}, {mean})", "truncated_normal", lambda _: (mean, std))


def uniform(low: float = 0.0, high: float = 1.0) -> Initializer:
    """Evenly between `low` and `high`."""
    return _scaled(f"uniform({low}, {high})", "uniform", lambda _: (low, high - low))


def he_normal(a: float = 0.0, mode: Literal["fan_in", "fan_out"] = "fan_in") -> Initializer:
    """Normal of std `sqrt(2 / ((1 + a^2) * fan))`; `a` is the negative slope of the activation that follows."""
    return _scaled(f"he_normal({a}, {mode!r})", "normal", lambda shape: (0.0, _he_std(shape, a, mode)))


def he_uniform(a: float = 0.0, mode: Literal["fan_in", "fan_out"] = "fan_in") -> Initializer:
    """Uniform within `sqrt(6 / ((1 + a^2) * fan))` of zero; `a` is as in `he_normal`."""
    return _within(f"he_uniform({a}, {mode!r})", lambda shape: math.sqrt(3.0) * _he_std(shape, a, mode))


def xavier_normal(gain: float = 1.0) -> Initializer:
    """Normal of std `gain * sqrt(2 / (fan_in + fan_out))`."""
    return _scaled(f"xavier_normal({gain})", "normal", lambda shape: (0.0, gain * math.sqrt(2.0 / sum(fans(shape)))))


def xavier_uniform(gain: float = 1.0) -> Initializer:
    """Uniform within `gain * sqrt(6 / (fan_in + fan_out))` of zero."""
    return _within(f"xavier_uniform({gain})", lambda shape: gain * math.sqrt(6.0 / sum(fans(shape))))


def within(bound: float) -> Initializer:
    """Evenly within `bound` of zero."""
    return _within(f"within({bound})", lambda _: bound)


def zero_row(init: Initializer, row: int) -> Initializer:
    """As `init`, with zeros in one row of the first axis: the padding row of an embedding."""

    def law(stream: str, shape: Shape) -> Law:
        found = init.law(stream, shape)
        return found.model_copy(update={"zero_rows": (*found.zero_rows, row)})

    return Initializer(f"zero_row({init}, {row})", law)


def fans(shape: Shape) -> tuple[int, int]:
    """(fan_in, fan_out) of a weight `[out, in, *kernel]`. Raises ValueError below two dims."""
    if len(shape) < 2:
        raise ValueError(f"fan_in and fan_out need a weight of at least two dims, not {list(shape)}")
    kernel = math.prod(shape[2:])
    return shape[1] * kernel, shape[0] * kernel


def _he_std(shape: Shape, a: float, mode: Literal["fan_in", "fan_out"]) -> float:
    fan = fans(shape)[("fan_in", "fan_out").index(mode)]
    return math.sqrt(2.0 / ((1.0 + a * a) * fan))


def _within(text: str, bound: Callable[[Shape], float]) -> Initializer:
    return _scaled(text, "uniform", lambda shape: (-bound(shape), 2.0 * bound(shape)))


def _scaled(
    text: str, source: Literal["uniform", "normal", "truncated_normal"], line: Callable[[Shape], tuple[float, float]]
) -> Initializer:
    """`offset + factor * drawn`, where `line` gives both for a shape."""

    def law(stream: str, shape: Shape) -> Law:
        offset, factor = line(shape) if math.prod(shape) else (0.0, 1.0)
        return Law(draw=source, stream=stream, offset=offset, factor=factor)

    return Initializer(text, law)
