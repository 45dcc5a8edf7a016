"""Tensors whose elements are computed shard by shard when they are read: a converted or quantized shard of a memory-mapped weight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.value_info import Array
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
