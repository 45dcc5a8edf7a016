"""Compares the outputs of two runs element by element and finds where they differ most.

An element passes where |compiled - unsharded| <= atol + rtol * |unsharded|, or where both are NaN; integers, booleans
and strings must be equal. Each dtype has tolerances that the order of floating-point sums needs and that a wrong
program exceeds.

Where that does not pass, `noise` may state for each element how far rounding moves the unsharded model itself (`rounding.py`). Then
noise must explain the excess over the tolerance in two ways: no element exceeds it by more than 4 times the tensor's largest noise, and
the root mean square of the excess is at most 3 times that of the noise. So a quantized value may be off by a step where
noise moves one in a hundred, but not everywhere. For integers, the number of differing elements is limited, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from partc.runtime.artifact.tensors.dtypes import Array

Wide: TypeAlias = npt.NDArray[np.float64 | np.complex128]

WIDEST, TOGETHER = 4.0, 3.0

_TOLERANCES = {
    "float64": (1e-9, 1e-11),
    "float32": (1e-4, 1e-5),
    "float16": (1e-2, 1e-3),
    "complex64": (1e-4, 1e-5),
    "complex128": (1e-9, 1e-11),
}


@dataclass(frozen=True)
class Compared:
    """The difference of an output: the largest errors, their indices, and whether it passes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    absolute: float
    absolute_at: tuple[int, ...]
    relative: float
    relative_at: tuple[int, ...]
    tolerance: str
    result: str
    reference: str = "unsharded model"
    """The name of the run that the output is compared with."""

    @property
    def passed(self) -> bool:
        """Whether every element is within the tolerance."""
        return self.result == "ok"

    def cells(self) -> tuple[str, ...]:
        """Returns the row of a table."""
        return (
            self.name,
            self.dtype,
            _index(self.shape),
            f"{self.absolute:.3g}",
            _index(self.absolute_at) if self.absolute else "",
            f"{self.relative:.3g}",
            _index(self.relative_at) if self.relative else "",
            self.tolerance,
            self.reference,
            self.result,
        )


def compare(
    whole: Mapping[str, Array],
    compiled: Mapping[str, Array],
    rtol: float | None,
    atol: float | None,
    noise: Mapping[str, Array] | None = None,
) -> list[Compared]:
    """Returns a record for each output of either run, in the unsharded model's order.

    `noise` maps outputs to arrays of their shape, where it is known.
    """
    return [
        _compare(name, whole.get(name), compiled.get(name), rtol, atol, (noise or {}).get(name))
        for name in dict.fromkeys([*whole, *compiled])
    ]


def spread(whole: Mapping[str, Array], others: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Maps each value to its elements' largest differences in the other runs; values of another shape in one of them are left out."""
    differences: dict[str, Array] = {}
    for name, array in whole.items():
        there = [other[name] for other in others if name in other and other[name].shape == array.shape]
        if len(there) == len(others) and there and array.dtype.kind in "fciub":
            wide = [_wide(one) for one in (array, *there)]
            with np.errstate(all="ignore"):
                deltas = [np.where(_same(wide[0], one), 0.0, np.abs(one - wide[0])) for one in wide[1:]]
            differences[name] = np.max([np.where(np.isfinite(one), one, 0.0) for one in deltas], axis=0)
    return differences


def _compare(
    name: str, whole: Array | None, compiled: Array | None, rtol: float | None, atol: float | None, noise: Array | None
) -> Compared:
    if whole is None or compiled is None:
        there = whole if compiled is None else compiled
        assert there is not None
        side = "compiled" if compiled is None else "unsharded"
        return _unlike(name, there, f"absent in the {side} model")
    if whole.shape != compiled.shape:
        return _unlike(name, whole, f"shape {_index(compiled.shape)} when compiled")
    if whole.dtype != compiled.dtype and whole.dtype.kind != "U":
        return _unlike(name, whole, f"{compiled.dtype.name} when compiled")
    rule = _TOLERANCES.get(whole.dtype.name)
    if rule is None:
        return _exact(name, whole, compiled, noise)
    relative, absolute = (given if given is not None else own for given, own in zip((rtol, atol), rule, strict=True))
    return _close(name, whole, compiled, relative, absolute, noise)


def _close(name: str, whole: Array, compiled: Array, rtol: float, atol: float, noise: Array | None) -> Compared:
    left, right = _wide(whole), _wide(compiled)
    with np.errstate(all="ignore"):
        error = np.where(_same(left, right), 0.0, np.abs(right - left))
        error = np.where(np.isnan(error), np.inf, error)
        scale = np.abs(left)
        ratio = np.where(error == 0, 0.0, error / np.where(scale == 0, np.finfo(np.float64).tiny, scale))
        over = np.maximum(error - (atol + rtol * np.where(np.isfinite(scale), scale, 0.0)), 0.0)
    passed = not over.any()
    tolerance = f"atol {atol:.3g}, rtol {rtol:g}"
    if not passed and noise is not None and noise.any():
        passed = bool(
            over.max() <= WIDEST * noise.max() and _root_mean_square(over) <= TOGETHER * _root_mean_square(noise)
        )
        tolerance += f", noise {noise.max():.3g}"
    most, worst = _largest(error), _largest(ratio)
    result = "ok" if passed else "NOT EQUAL"
    return Compared(name, whole.dtype.name, whole.shape, *most, *worst, tolerance, result)


def _exact(name: str, whole: Array, compiled: Array, noise: Array | None) -> Compared:
    differ = np.asarray(whole != compiled)
    error = differ.astype(np.float64)
    if whole.dtype.kind in "iu":
        error = np.abs(np.where(differ, compiled.astype(np.float64) - whole.astype(np.float64), 0.0))
    most = _largest(error)
    passed, tolerance = not differ.any(), "exact"
    if not passed and noise is not None and noise.any():
        share = np.count_nonzero(noise) / noise.size
        few = np.count_nonzero(differ) <= TOGETHER * np.count_nonzero(noise)
        passed = bool(few and (whole.dtype.itemsize > 1 or error.max() <= WIDEST * noise.max()))
        tolerance = f"exact, but {share:.2g} of all by noise"
    return Compared(name, whole.dtype.name, whole.shape, *most, *most, tolerance, "ok" if passed else "NOT EQUAL")


def _wide(array: Array) -> Wide:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _same(one: Array, other: Array) -> Array:
    """Returns where two arrays are equal; NaN equals NaN."""
    same: Array = (one == other) | (np.isnan(one) & np.isnan(other))
    return same


def _root_mean_square(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array))))


def _unlike(name: str, array: Array, result: str) -> Compared:
    nowhere: tuple[int, ...] = ()
    return Compared(name, array.dtype.name, array.shape, np.inf, nowhere, np.inf, nowhere, "", result)


def _largest(error: Array) -> tuple[float, tuple[int, ...]]:
    if error.size == 0:
        return 0.0, ()
    at = np.unravel_index(int(np.argmax(error)), error.shape)
    return float(error[at]), tuple(int(axis) for axis in at)


def _index(numbers: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, numbers))}]"
