"""Facts about values and dynamic dims: types, global shapes, bytes, and promises about the inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import onnx_ir as ir
import sympy
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.normal import as_dim, normal
from partc.compiler.dims.reading import read

Dim = int | str
Shape = tuple[Dim, ...]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SymbolInfo:
    """A dynamic dim of the inputs: its promised facts, and where they are promised (`plan.yaml:3`, or the input that names it).

    `parts`: the number of equal parts of the dim; the facts are those of one part. `because`: why smaller sizes are not
    legal, where the model needs larger sizes than `where` promises.
    """

    facts: Facts
    where: str
    unique: bool = False
    parts: int = 1
    because: str = ""


@dataclass(frozen=True)
class ValueInfo:
    """Facts about a value: its type as onnxruntime writes it, and its global shape; None where it is known only at run time."""

    type: str
    shape: Shape | None
    item_bytes: int | None

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("tensor(")


def bytes_of(info: ValueInfo, shape: Shape | None) -> int | ir.SymbolicDim | None:
    """The bytes of a value, or of a shard of it, of this shape; None where they are known only at run time or items are not whole bytes."""
    if shape is None or info.item_bytes is None or not info.is_tensor:
        return None
    fixed = math.prod(dim for dim in shape if isinstance(dim, int)) * info.item_bytes
    open_dims = [read(dim) for dim in shape if isinstance(dim, str)]
    if not open_dims:
        return fixed
    if any(dim is None for dim in open_dims):
        return None
    return as_dim(normal(sympy.Mul(fixed, *open_dims), {}))


def whole_bytes(info: ValueInfo) -> int | ir.SymbolicDim | None:
    """The bytes of a whole (unsharded) value."""
    return bytes_of(info, info.shape)


def bytes_text(info: ValueInfo, shape: Shape | None) -> str:
    """The bytes of a value, or of a shard of it, as text."""
    found = bytes_of(info, shape)
    return "unknown" if found is None else str(found) if isinstance(found, int) else str(found.value)
