"""Tensors whose elements are computed shard by shard when they are read: a converted or quantized shard of a memory-mapped weight.

Weights that are packed in the model's file, several in one tensor, and that are separate values in the program.

A weight that is a law: its numbers follow from a seed, and any part of it can be drawn without the rest.

The compiler never draws large weights: the artifact stores the law, and each rank draws its own shard (`runtime/artifact/tensors/law.py`).
Smaller weights are written as bytes, like all other weights, so that the rank file of a small model runs in any onnxruntime.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.value_info import Array
from partc.runtime.artifact.format import Law
from partc.runtime.artifact.tensors.law import full_tensor
from partc.runtime.files.regular import open_regular

Box: TypeAlias = "tuple[slice, ...]"
"""The slice of a tensor that a shard has: per dim its begin and end."""


_READING = threading.Lock()


class ComputedTensor(ir.LazyTensor):
    """A tensor whose elements within a box `compute` returns on each call; the elements do not stay in memory.

    `rows_of`: a tensor that has the same bytes in another shape; an artifact stores the bytes of the two once.
    """

    def __init__(
        self,
        compute: Callable[[Box], Array],
        dtype: ir.DataType,
        shape: Sequence[int],
        name: str,
        rows_of: ComputedTensor | None = None,
    ) -> None:
        def whole() -> ir.TensorProtocol:
            return ir.Tensor(np.ascontiguousarray(compute(full_box(shape))), dtype=dtype)

        self.compute, self.rows_of = compute, rows_of or self
        super().__init__(whole, dtype, ir.Shape(shape), name=name, cache=False)


class WidenedTensor(ComputedTensor):
    """A tensor with the elements of `source`, a tensor of 16-bit floats, in a wider type; the artifact stores those of `source`."""

    def __init__(self, source: ir.TensorProtocol, dtype: ir.DataType, name: str) -> None:
        self.source = source
        super().__init__(lambda box: shard_of(source, box).astype(dtype.numpy()), dtype, source.shape.numpy(), name)


class BoxTensor(ComputedTensor):
    """The elements of `source` within `box`, read from `source` on each access."""

    def __init__(self, source: ir.TensorProtocol, box: Box, name: str) -> None:
        def compute(inner: Box) -> Array:
            return shard_of(source, _within(box, inner))

        self.source, self.box = source, box
        super().__init__(compute, source.dtype, [one.stop - one.start for one in box], name)


def box_of(tensor: ir.TensorProtocol, box: Box, name: str) -> ir.TensorProtocol:
    """Returns a lazy tensor of a tensor's elements in a box: a box of a `BoxTensor` refers to its source, one of a widened tensor is
    widened.
    """
    if isinstance(tensor, WidenedTensor):
        return WidenedTensor(box_of(tensor.source, box, name), tensor.dtype, name)
    if isinstance(tensor, BoxTensor):
        return BoxTensor(tensor.source, _within(tensor.box, box), name)
    return BoxTensor(tensor, box, name)


def in_file(tensor: ir.TensorProtocol) -> tuple[ir.ExternalTensor, Box] | None:
    """Returns the tensor of a file, and the box in it, that hold a tensor's elements in its own type; None where they are not in a file."""
    source, box = (tensor.source, tensor.box) if isinstance(tensor, BoxTensor) else (tensor, None)
    if not isinstance(source, ir.ExternalTensor) or source.dtype.bitwidth < 8:
        return None
    return source, full_box(source.shape.numpy()) if box is None else box


def _within(outer: Box, inner: Box) -> Box:
    """Returns a box of a box (`inner` relative to `outer`) in the dims of the full tensor."""
    return tuple(
        slice(one.start + begin.start, one.stop + begin.start) for one, begin in zip(inner, outer, strict=True)
    )


def widens(source: ir.DataType, dtype: ir.DataType) -> bool:
    """Whether the artifact stores a tensor computed in `dtype` in the type `source`: true for a 16-bit float widened to float."""
    return dtype == ir.DataType.FLOAT and source in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class AbsentError(CompileError):
    """Raised where a pass needs the numbers of a weight of a model that is compiled without weights."""


class AbsentTensor(ComputedTensor):
    """A weight of which only name, type and shape are known; a read of its numbers raises AbsentError."""

    def __init__(self, dtype: ir.DataType, shape: Sequence[int], name: str) -> None:
        def compute(box: Box) -> Array:
            fact, law = "the graph depends on its numbers", "the model is compiled without weights"
            help_ = "compile with weights: leave out --no-weights, or name their folder with --weights"
            raise AbsentError(Problem(f"weight '{name}'", fact, law, help_))

        super().__init__(compute, dtype, shape, name)


def is_absent(tensor: object) -> bool:
    """Whether a tensor is a weight whose numbers are not known, widened or not."""
    return isinstance(tensor.source if isinstance(tensor, WidenedTensor) else tensor, AbsentTensor)


def full_box(shape: Sequence[int]) -> Box:
    """Returns the box that covers a full tensor of this shape."""
    return tuple(slice(0, size) for size in shape)


def shard_of(tensor: ir.TensorProtocol, box: Box) -> Array:
    """Returns the elements of a tensor within a box."""
    if isinstance(tensor, ComputedTensor):
        return tensor.compute(box)
    if isinstance(tensor, ir.ExternalTensor) and tensor.dtype.bitwidth >= 8 and box and tensor.nbytes:
        return _read(tensor, box)
    with _READING:  # a mapped tensor opens its file at the first read, and files are written side by side
        whole = tensor.numpy()
    return whole[box]


def _read(tensor: ir.ExternalTensor, box: Box) -> Array:
    """Reads a box of a tensor from its file. The pages are mapped only during the read, as mapped pages count as the process's memory."""
    rows, shape = box[0], tensor.shape.numpy()
    row = tensor.nbytes // shape[0]
    count = len(range(*rows.indices(shape[0])))
    if not count:
        return np.empty((0, *shape[1:]), tensor.dtype.numpy())[:, *box[1:]]
    with open_regular(tensor.path) as file:
        begin = (tensor.offset or 0) + rows.start * row
        mapped = np.memmap(file, tensor.dtype.numpy(), "r", begin, (count, *shape[1:]))
        return np.array(mapped[:, *box[1:]], order="C", subok=False)


def runs_of(tensor: ComputedTensor, most_bytes: int) -> Iterator[Array]:
    """Yields the tensor in runs of rows of its first dim, each run of at most `most_bytes` unless a single row has more."""
    shape = tensor.shape.numpy()
    rows = max(1, most_bytes * shape[0] // max(1, tensor.nbytes)) if shape else 1
    for begin in range(0, shape[0] if shape else 1, rows):
        box = (slice(begin, min(begin + rows, shape[0])), *full_box(shape[1:])) if shape else ()
        yield np.ascontiguousarray(tensor.compute(box))


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
