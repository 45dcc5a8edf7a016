"""A weight that is a law: its numbers follow from a seed, and any part of it can be drawn by itself.

Large ones are never drawn by the compiler: the artifact has the law, and each rank draws its own shard (`runtime/artifact/tensors/law.py`).
Smaller ones are written as bytes, as all other weights, so that the rank file of a small model runs in any onnxruntime.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
from partc.runtime.artifact.format import Law
from partc.runtime.artifact.tensors.law import full_tensor

LAW_BYTES = 64 << 20
"""Drawn weights of more bytes are laws in the artifact."""


class DrawnTensor(ir.LazyTensor):
    """A tensor of the numbers that a law gives, drawn when they are asked for, each time anew where it is large.

    `law` is called when it is needed. `always`: whether the artifact has the law, whatever the size.
    """

    def __init__(
        self, law: Callable[[], Law], dtype: ir.DataType, shape: tuple[int, ...], *, always: bool = False
    ) -> None:
        self.law = law
        self.always = always

        def drawn() -> ir.TensorProtocol:
            return ir.Tensor(full_tensor(law(), shape, dtype.numpy()), dtype=dtype)

        self._drawn_shape = shape
        super().__init__(drawn, dtype, ir.Shape(shape), cache=math.prod(shape) * dtype.bitwidth // 8 <= LAW_BYTES)

    @property
    def is_law(self) -> bool:
        """Whether the artifact has the law in place of the numbers."""
        return self.always or self.nbytes > LAW_BYTES

    def cast(self, kind: ir.DataType) -> DrawnTensor:
        """The same numbers, rounded to another type."""
        return DrawnTensor(self.law, kind, self._drawn_shape, always=self.always)


def law_of(value: ir.Value) -> Law | None:
    """The law of a weight whose numbers the artifact does not have; None of any other."""
    tensor = value.const_value
    if not isinstance(tensor, DrawnTensor) or not tensor.is_law:
        return None
    law = tensor.law()
    return law if math.isfinite(law.offset) and math.isfinite(law.factor) else None
