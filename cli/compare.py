"""Compares two runs' outputs element by element and says where they differ most.

An element passes where |compiled - whole| <= atol + rtol * |whole|, or where both are NaN; whole numbers, truth
values and text must be equal. Each dtype has tolerances that the order of floating-point sums needs and that a wrong
program exceeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from partc.runtime.dtypes import Array

_TOLERANCES = {
    "float64": (1e-9, 1e-11),
    "float32": (1e-4, 1e-5),
    "float16": (1e-2, 1e-3),
    "complex64": (1e-4, 1e-5),
    "complex128": (1e-9, 1e-11),
}


@dataclass(frozen=True)
class Compared:
    """How far an output is off: the largest errors, where they are, and whether it passes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    absolute: float
    absolute_at: tuple[int, ...]
    relative: float
    relative_at: tuple[int, ...]
    tolerance: str
    result: str

    @property
    def passed(self) -> bool:
        """Whether every element is within the tolerance."""
        return self.result == "ok"

    def cells(self) -> tuple[str, ...]:
        """The row of a table."""
        return (
            self.name,
            self.dtype,
            _index(self.shape),
            f"{self.absolute:.3g}",
            _index(self.absolute_at) if self.absolute else "",
            f"{self.relative:.3g}",
            _index(self.relative_at) if self.relative else "",
            self.tolerance,
            self.result,
        )


def compare(
    whole: Mapping[str, Array], compiled: Mapping[str, Array], rtol: float | None, atol: float | None
) -> list[Compared]:
    """A record per output of either run, in the whole model's order."""
    return [
        _compare(name, whole.get(name), compiled.get(name), rtol, atol) for name in dict.fromkeys([*whole, *compiled])
    ]


def _compare(
    name: str, whole: Array | None, compiled: Array | None, rtol: float | None, atol: float | None
) -> Compared:
    if whole is None or compiled is None:
        there = whole if compiled is None else compiled
        assert there is not None
        side = "compiled" if compiled is None else "whole"
        return _unlike(name, there, f"absent in the {side} model")
    if whole.shape != compiled.shape:
        return _unlike(name, whole, f"shape {_index(compiled.shape)} when compiled")
    if whole.dtype != compiled.dtype and whole.dtype.kind != "U":
        return _unlike(name, whole, f"{compiled.dtype.name} when compiled")
    rule = _TOLERANCES.get(whole.dtype.name)
    if rule is None:
        return _exact(name, whole, compiled)
    relative, absolute = (given if given is not None else own for given, own in zip((rtol, atol), rule, strict=True))
    return _close(name, whole, compiled, relative, absolute)


def _close(name: str, whole: Array, compiled: Array, rtol: float, atol: float) -> Compared:
    wide = np.complex128 if whole.dtype.kind == "c" else np.float64
    left, right = whole.astype(wide), compiled.astype(wide)
    with np.errstate(all="ignore"):
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        error = np.where(same, 0.0, np.abs(right - left))
        error = np.where(np.isnan(error), np.inf, error)
        scale = np.abs(left)
        ratio = np.where(error == 0, 0.0, error / np.where(scale == 0, np.finfo(np.float64).tiny, scale))
        passed = bool(np.all(error <= atol + rtol * np.where(np.isfinite(scale), scale, 0.0)))
    tolerance = f"atol {atol:.3g}, rtol {rtol:g}"
    most, worst = _largest(error), _largest(ratio)
    result = "ok" if passed else "NOT EQUAL"
    return Compared(name, whole.dtype.name, whole.shape, *most, *worst, tolerance, result)


def _exact(name: str, whole: Array, compiled: Array) -> Compared:
    differ = np.asarray(whole != compiled)
    error = differ.astype(np.float64)
    if whole.dtype.kind in "iu":
        error = np.abs(np.where(differ, compiled.astype(np.float64) - whole.astype(np.float64), 0.0))
    most = _largest(error)
    result = "NOT EQUAL" if differ.any() else "ok"
    return Compared(name, whole.dtype.name, whole.shape, *most, *most, "exact", result)


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
