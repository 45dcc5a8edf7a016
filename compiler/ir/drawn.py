"""A weight that is a law: its numbers follow from a seed, and any part of it can be drawn without the rest.

The compiler never draws large weights: the artifact stores the law, and each rank draws its own shard (`runtime/artifact/tensors/law.py`).
Smaller weights are written as bytes, like all other weights, so that the rank file of a small model runs in any onnxruntime.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
from partc.runtime.artifact.format import Law
from partc.runtime.artifact.tensors.law import full_tensor

LAW_BYTES = 64 << 20
"""Drawn weights with more bytes than this are stored in the artifact as laws."""


class DrawnTensor(ir.LazyTensor):
    """A tensor of the numbers that a law generates; they are drawn when they are read, and a large tensor is drawn again on each read.

    `law` is called only when it is needed. `always`: whether the artifact stores the law whatever the size.
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
        """Whether the artifact stores the law instead of the numbers."""
        return self.always or self.nbytes > LAW_BYTES

    def cast(self, kind: ir.DataType) -> DrawnTensor:
        """Returns the tensor with the same numbers, rounded to another type."""
        return DrawnTensor(self.law, kind, self._drawn_shape, always=self.always)


def law_of(value: ir.Value) -> Law | None:
    """Returns the law of a weight that the artifact stores as a law; None for any other value, and for a law that is not finite."""
    tensor = value.const_value
    if not isinstance(tensor, DrawnTensor) or not tensor.is_law:
        return None
    law = tensor.law()
    return law if math.isfinite(law.offset) and math.isfinite(law.factor) else None
