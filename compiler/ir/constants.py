"""Constants of the rank programs: arrays, and constants that differ by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from partc.compiler.ir.value_info import Array


@dataclass(frozen=True)
class RankConstant:
    """A constant that differs by rank: each item an expression over `place`, the rank's place in its list of `group`."""

    group: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    items: tuple[str, ...]

    @staticmethod
    def of(group: str, items: Sequence[str], dtype: npt.DTypeLike = np.int64) -> RankConstant:
        """Returns a vector constant with these expressions as its items."""
        return RankConstant(group, np.dtype(dtype), (len(items),), tuple(items))

    @staticmethod
    def first(group: str, dtype: npt.DTypeLike) -> RankConstant:
        """Returns the constant that is 1 on the first rank of each list of `group` and 0 on the other ranks."""
        return RankConstant(group, np.dtype(dtype), (), ("Max(1 - place, 0)",))


Constant: TypeAlias = Array | RankConstant
