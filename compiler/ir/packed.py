"""Weights that are packed in the model's file, several in one tensor, and that are separate values in the program."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir
from partc.compiler.ir.graph import name_of

PART = "partc.part_of"
"""Key of `ir.Value.meta`: the `PackedBox` of a weight that is part of a packed one."""


@dataclass(frozen=True)
class PackedBox:
    """The position of a weight in a packed weight: the packed weight's name and shape, and per dim the begin and end."""

    tensor: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    def within(self, dim: int, begin: int, size: int) -> PackedBox:
        """The box of a slice of this part: `size` elements of `dim` from `begin`."""
        start = self.box[dim][0] + begin
        return replace(self, box=(*self.box[:dim], (start, start + size), *self.box[dim + 1 :]))


def tensor_of(parameter: ir.Value) -> str:
    """The global name of a parameter's state: a part of a packed weight has that weight's name."""
    part: PackedBox | None = parameter.meta.get(PART)
    return name_of(parameter) if part is None else part.tensor
