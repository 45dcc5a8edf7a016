"""Finds the kind of the `source` of a user's file by its methods, without an import of torch or datasets.

| `source` | how it is read |
|---|---|
| an object with `__len__` and `__getitem__`, a `Dataset` of torch | by indices, in the order of the plan |
| a dict of arrays, a `TensorDataset`; a `datasets.Dataset` | by indices, by columns |
| a `DataLoader` | its batches, which are the global batches |
| an `IterableDataset` of torch or datasets, any other iterable of records | in its own order, `batch` at a time |

A function or a class is called first, with those of `batch`, `seed` and `epoch` for which it has parameters: a generator function is called
again for each epoch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from typing import Any, cast

from ...errors import UsageError
from ...spellings import nearest
from ...user_code import user_code
from .naming import quoted

_CALLED_WITH = ("batch", "seed", "epoch")


class Kind(Enum):
    """The way in which a source is read."""

    RECORDS = "records"
    ONE_BY_ONE = "one by one"
    COLUMNS = "columns"
    ARROW = "arrow"
    LOADER = "loader"
    STREAM = "stream"


STREAMS = (Kind.LOADER, Kind.STREAM)


@dataclass(frozen=True)
class UserSource:
    """A source, and the function that returns a new one for an epoch, if the source came from a function."""

    kind: Kind
    value: Any
    where: str
    again: Callable[[int], object] | None = None


def user_source(value: object, where: str, batch: int | None, seed: int) -> UserSource:
    """Returns the source that `value` is or, if called, returns; UsageError where its kind is not supported."""
    with user_code(where, "making its `source`"):
        again = _maker(value, where, batch, seed)
        value = value if again is None else again(0)
        return UserSource(_kind(value, where), value, where, again)


def _maker(value: object, where: str, batch: int | None, seed: int) -> Callable[[int], object] | None:
    """Returns a function that creates the source of an epoch; None where `value` is the source itself."""
    is_source = hasattr(value, "__iter__") or (hasattr(value, "__len__") and hasattr(value, "__getitem__"))
    if not (inspect.isclass(value) or (callable(value) and not is_source)):
        return None
    known = {"batch": batch, "seed": seed}
    try:
        parameters = inspect.signature(value).parameters.values()
    except (ValueError, TypeError):  # a function written in C may have no signature
        parameters = {}.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one.name for one in parameters if one.default is inspect.Parameter.empty and one.kind not in variadic]
    if unknown := [name for name in needed if name not in _CALLED_WITH]:
        near = nearest(unknown[0], _CALLED_WITH, 1)
        help = f"did you mean '{near[0]}'? " if near else ""
        raise UsageError(
            f"{where}: its `source` takes {quoted(unknown)}, and is called with {quoted(_CALLED_WITH)} alone\n"
            f"  help: {help}give what else it needs a default"
        )
    names = [one.name for one in parameters if one.name in _CALLED_WITH and (one.name in needed or one.name == "epoch")]
    if "batch" in names and batch is None:
        raise UsageError(
            f"{where}: its `source` takes the global batch size, which is not known\n"
            "  help: use --batch, or `batch:` in the plan's `train:`"
        )
    return lambda epoch: cast("Callable[..., object]", value)(
        **{name: {**known, "epoch": epoch}[name] for name in names}
    )


def _kind(value: object, where: str) -> Kind:
    classes = {f"{one.__module__.partition('.')[0]}.{one.__qualname__}" for one in type(value).__mro__}
    by_index = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    match value:
        case str() | bytes() | PathLike():
            raise UsageError(
                f"{where}: its `source` is a path\n  help: name a file in `data:`, or make `source` what reads it: an object with "
                "`__len__` and `__getitem__`"
            )
        case Mapping() if value and all(hasattr(one, "column_names") for one in value.values()):
            raise UsageError(
                f"{where}: its `source` has the splits {quoted([*map(str, value)])}\n"
                f"  help: take one of them, such as source = dataset['{next(iter(value))}']"
            )
        case Mapping():
            return Kind.COLUMNS
    if hasattr(value, "__iter__") and all(hasattr(value, name) for name in ("dataset", "batch_sampler", "collate_fn")):
        return Kind.LOADER
    if by_index and all(hasattr(value, name) for name in ("column_names", "with_format", "features")):
        return Kind.ARROW
    if "torch.TensorDataset" in classes:
        return Kind.COLUMNS
    if "torch.IterableDataset" in classes:
        return Kind.STREAM
    if by_index:
        return Kind.ONE_BY_ONE if "torch.Dataset" in classes else Kind.RECORDS
    if "torch.Dataset" in classes:
        raise UsageError(f"{where}: its `source` is a {type(value).__name__} without `__len__`\n  help: define it")
    if hasattr(value, "__iter__"):
        return Kind.STREAM
    raise UsageError(
        f"{where}: its `source` is a {type(value).__name__}, which has neither `__len__` and `__getitem__` nor `__iter__`\n"
        "  help: define `__len__` and `__getitem__`, which takes an array of indices and returns a dict of arrays; "
        "or give a DataLoader, a Dataset, or an iterable of records"
    )
