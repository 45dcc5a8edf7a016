"""Converts the state of a source to JSON for a checkpoint, and back. A checkpoint has only data, so that nothing in it can run.

In addition to JSON's own types there are tuples, bytes, arrays, tensors, and mappings whose keys are numbers. Each is stored as a mapping
with one key that begins with a colon: `{":tuple": [1, 2]}`.
"""

from __future__ import annotations

import base64
import sys
from typing import Any, cast

import numpy as np
from pydantic import JsonValue

from ...errors import UsageError
from ..sources.values import as_array, is_tensor


class _NoState(UsageError):
    """A state contains a value that a checkpoint cannot store."""


def says_its_place(source: Any) -> bool:
    """Whether a source can give its state, and resume from it at exactly the next record.

    A stream of `datasets` with a shuffle buffer cannot: its state has the position of its reading, but not the records in the buffer.
    """
    if not all(hasattr(source, name) for name in ("state_dict", "load_state_dict")):
        return False
    return not any(
        _has_buffer(getattr(one, "_ex_iterable", None)) for one in (source, getattr(source, "dataset", None))
    )


def _has_buffer(examples: Any) -> bool:
    within = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return type(examples).__name__.startswith("BufferShuffled") or any(_has_buffer(one) for one in within if one)


def stored(state: object) -> JsonValue:
    """Converts a state to JSON; None where a value in it cannot be stored: the position is then found as for a source without a state."""
    try:
        return _stored(state)
    except _NoState:
        return None


def _stored(state: object) -> JsonValue:
    match state:
        case None | bool() | int() | float() | str():
            return state
        case np.generic():
            return cast(JsonValue, state.item())
        case bytes():
            return {":bytes": base64.b64encode(state).decode()}
        case list():
            return [_stored(one) for one in state]
        case tuple():
            return {":tuple": [_stored(one) for one in state]}
        case dict() if all(isinstance(key, str) and not key.startswith(":") for key in state):
            return {key: _stored(one) for key, one in state.items()}
        case dict():
            return {":pairs": [[_stored(key), _stored(one)] for key, one in state.items()]}
        case np.ndarray():
            return {":array": _array(state)}
    if is_tensor(state):
        return {":tensor": _array(as_array(state))}
    raise _NoState(f"a {type(state).__name__}")


def _array(array: np.ndarray[Any, Any]) -> JsonValue:
    if array.dtype.hasobject:
        raise _NoState("an array of objects")
    return [array.dtype.str, [*array.shape], base64.b64encode(array.tobytes()).decode()]


def restored(state: JsonValue) -> Any:
    """Converts JSON from `stored` back to the state."""
    if isinstance(state, list):
        return [restored(one) for one in state]
    if not isinstance(state, dict):
        return state
    match state:
        case {":bytes": str(text)}:
            return base64.b64decode(text)
        case {":tuple": list(values)}:
            return tuple(restored(one) for one in values)
        case {":pairs": list(pairs)}:
            return {restored(key): restored(value) for key, value in cast("list[list[JsonValue]]", pairs)}
        case {":array": list(parts)}:
            return _restored_array(parts)
        case {":tensor": list(parts)}:
            return sys.modules["torch"].from_numpy(_restored_array(parts))
    return {key: restored(value) for key, value in state.items()}


def _restored_array(parts: Any) -> np.ndarray[Any, Any]:
    dtype, shape, text = parts
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype).reshape(shape)
