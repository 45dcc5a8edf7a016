"""Converts a user's values to arrays: a tensor's memory is used without a copy, and torch is never imported for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ..fields import Ragged

_WIDE = {"torch.bfloat16": ml_dtypes.bfloat16, "torch.float8_e4m3fn": ml_dtypes.float8_e4m3fn}
_SAME_BYTES = {1: "uint8", 2: "int16"}


def is_tensor(value: object) -> bool:
    """Whether a value has the methods of a torch tensor."""
    return hasattr(value, "detach") and hasattr(value, "numpy")


def as_array(value: Any) -> Array:
    """Converts a value to an array; a tensor on the CPU is not copied."""
    if isinstance(value, np.ndarray):
        return value
    if not is_tensor(value):
        return np.asarray(value)
    tensor = value.detach().cpu()
    wide = _WIDE.get(str(tensor.dtype))
    if wide is None:
        plain: Array = tensor.numpy()
        return plain
    same = getattr(sys.modules["torch"], _SAME_BYTES[tensor.element_size()])
    array: Array = tensor.contiguous().view(same).numpy().view(wide)
    return array


def stacked(values: Sequence[Any]) -> Array | Ragged:
    """Stacks one field of several records to one array, or to a ragged field if the records are arrays of unequal lengths."""
    if any(isinstance(value, str | bytes) for value in values[:1]):
        return np.array(values, object)
    records = [as_array(value) for value in values]
    if len({record.shape for record in records}) > 1:
        return Ragged.of(records)
    return np.stack(records)


def field_values(given: Any) -> Array | Ragged:
    """Converts a field of a batch from the user's code: an array, a tensor, or a list with the value of each record."""
    if isinstance(given, list) or (isinstance(given, np.ndarray) and given.dtype == object and given.ndim == 1):
        return stacked([*given])
    return as_array(given)
