"""Inputs without records: one value for all records, given as a number, a list of numbers, or a file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array, dense
from partc.runtime.artifact.training.data_spec import Spec

from ..artifact.format import Port
from ..errors import UsageError
from .convert import described
from .files import open_value
from .memory import Memory


def constants(spec: Spec, ports: Iterable[Port], fixed: Collection[str], rank: int) -> dict[str, Array]:
    """Maps each of these inputs to the value that a rank reads in every batch; UsageError, the same on all ranks, lists all problems."""
    values: dict[str, Array] = {}
    problems = []
    for port in ports:
        if port.name not in fixed or not port.ranks:
            continue
        try:
            value = as_input(port, _value_of(spec, port.name))
        except ValueError as error:
            problems.append(f"input '{port.name}': {error}")
            continue
        if rank in port.ranks:
            values[port.name] = value
    for name in spec.values:
        if name not in fixed:
            known = ", ".join(f"'{one}'" for one in fixed) or "none"
            problems.append(f"'{name}' is not an input with one value for all records; they are {known}")
    if problems:
        raise UsageError("\n".join(f"{spec.where}: {problem}" for problem in problems))
    return values


def as_input(port: Port, given: object) -> Array:
    """Converts a value to the type and shape of an input; ValueError where it does not fit."""
    dtype = dense(port.type)
    array = np.asarray(given)
    dims = port.shape or []
    if array.size == 1 and all(dim == 1 for dim in dims):
        array = array.reshape([1] * len(dims))
    fits = len(dims) == array.ndim and all(
        not isinstance(a, int) or a == b for a, b in zip(dims, array.shape, strict=False)
    )
    if dtype is None or array.dtype.kind not in "biuf" or not fits:
        raise ValueError(f"{array.dtype} {list(array.shape)} is given, and the model takes {described(port)}")
    made: Array = array.astype(dtype.numpy)
    if array.dtype.kind == "f" and made.dtype.kind in "biu" and not (made == array).all():
        raise ValueError(f"{array.tolist()} is given, and the model takes {described(port)}")
    return np.ascontiguousarray(made).reshape(array.shape)


def _value_of(spec: Spec, name: str) -> object:
    values: Mapping[str, object] = spec.values
    if name in values:
        return values[name]
    places: list[Path] = [path for path in (spec.files.get(name), spec.source) if path is not None]
    for path in places:
        if path.suffix != ".py" and (found := open_value(path, name, Memory(spec.max_bytes))) is not None:
            return found
    raise ValueError(
        f"it holds no records but one value for all, and none is given\n  help: write data: {{{name}: 0.5}}, "
        f"or --data {name}=0.5"
    )
