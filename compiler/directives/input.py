"""`Input`: the shape and dtype of one input of a `model.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partc.compiler.dims.symbol import Symbol


@dataclass(frozen=True)
class Input:
    """A model's input: each dim an int, a name or a Symbol; the dtype as numpy and ml_dtypes write it, or "string"."""

    shape: Sequence[int | str | Symbol]
    dtype: str = "float32"
