"""Packing and reducing in memory: the work of a collective on bytes before they are sent and after they arrive.

Ranks exchange packed shards, one contiguous block for each rank. A value that is sharded along its first axis, or along one whose preceding
dims are all 1, consists of such blocks already; along another axis it is copied once, with numpy. An element is moved as an unsigned
integer of its width, so that all types are moved in the same way; an element narrower than a byte takes one byte.

Where the transport does not reduce a type, the shards of all ranks are reduced here, in the order of the ranks, with the same bits on every
rank. Floats narrower than 32 bits are added in float32 and rounded once. A maximum or minimum of which any term is NaN is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from partc.runtime.artifact.comm.collective_node import Shape
from partc.runtime.artifact.tensors.dtypes import Array, Bytes, Dtype
from partc.runtime.artifact.tensors.tensor import Tensor

from ..artifact.format import MAX, SUM

_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def moved_bytes(dtype: Dtype, shape: Shape) -> int:
    """Returns the bytes of a value in a collective's messages."""
    return math.prod(shape) * max(dtype.bits // 8, 1)


def as_moved(tensor: Tensor) -> Array:
    """Returns a tensor's elements as they are moved: a view, or a copy where elements are narrower than a byte."""
    if tensor.dtype.bits < 8:
        return np.ascontiguousarray(tensor.array()).view(np.uint8).reshape(tensor.shape)
    return view_as(tensor.data, tensor.dtype, tensor.shape)


def view_as(data: Bytes, dtype: Dtype, shape: Shape) -> Array:
    """Returns a view of moved bytes as unsigned integers of the type's width, in `shape`."""
    found: Array = data.view(_CARRIERS[max(dtype.bits // 8, 1)]).reshape(shape)
    return found


def store(array: Array, tensor: Tensor) -> None:
    """Writes elements, as they are moved, to a tensor."""
    if tensor.dtype.bits < 8:
        elements = np.ascontiguousarray(array).view(tensor.dtype.numpy)
        tensor.data[:] = Tensor.of(elements, tensor.dtype).data
    else:
        np.copyto(as_moved(tensor), array)


def is_front(shape: Shape, axis: int) -> bool:
    """Whether shards along an axis are contiguous blocks."""
    return math.prod(shape[:axis]) == 1


def split(array: Array, axis: int, ranks: int) -> Array:
    """Returns a view with a new first axis that counts the equal shards along `axis`; its other axes are those of a shard."""
    shape = array.shape
    apart = array.reshape(*shape[:axis], ranks, shape[axis] // ranks, *shape[axis + 1 :])
    return np.moveaxis(apart, axis, 0)


@np.errstate(over="ignore", invalid="ignore")
def reduced(pieces: Sequence[Array], dtype: Dtype, reduce: str) -> Array:
    """Reduces shards, as they are moved, element by element and in their order. Like MPI it gives no warning of infinities and NaN."""
    terms = (piece.view(dtype.numpy) for piece in pieces)
    if reduce == SUM and dtype.bits < 32 and dtype.shown.startswith(("float", "bfloat")):
        total = _folded((term.astype(np.float32) for term in terms), np.add)
        return _moved_like(total.astype(dtype.numpy), pieces[0])
    if dtype.wide:
        total = _folded((term.astype(dtype.wide) for term in terms), _ufunc(reduce))
        return _moved_like(total.astype(dtype.numpy), pieces[0])
    return _moved_like(_folded(terms, _ufunc(reduce)), pieces[0])


def _ufunc(reduce: str) -> np.ufunc:
    return np.add if reduce == SUM else np.maximum if reduce == MAX else np.minimum


def _folded(terms: Iterable[Array], ufunc: np.ufunc) -> Array:
    rest = iter(terms)
    total = np.array(next(rest))  # a copy as an array also for a value without dims, whose items are not arrays
    for term in rest:
        ufunc(total, term, out=total)
    return total


def _moved_like(array: Array, like: Array) -> Array:
    return np.ascontiguousarray(array).view(like.dtype).reshape(like.shape)
