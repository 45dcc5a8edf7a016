"""Packing and reducing in memory: the work of a collective on bytes before they are sent and after they arrive.

Ranks exchange packed pieces, one contiguous block for each rank. Along the first axis, or where all dims before are 1, a value is
such blocks already; along another axis it is copied once, with numpy. An element moves as an unsigned integer of its width, so
that every type moves alike; a type narrower than a byte moves unpacked, one element a byte.

Where the transport itself does not reduce a type, the shards of all ranks are reduced here, in the order of the ranks: the same
bits on every rank. Floats narrower than 32 bits are added in float32 and rounded once. A maximum or minimum of which any term is
NaN is NaN.
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
    """The bytes of a value on its way through a collective."""
    return math.prod(shape) * max(dtype.bits // 8, 1)


def as_moved(tensor: Tensor) -> Array:
    """A tensor's elements as they move: a view, a copy where elements are narrower than a byte."""
    if tensor.dtype.bits < 8:
        return np.ascontiguousarray(tensor.array()).view(np.uint8).reshape(tensor.shape)
    return view_as(tensor.data, tensor.dtype, tensor.shape)


def view_as(data: Bytes, dtype: Dtype, shape: Shape) -> Array:
    """Moved bytes as elements of the type's width, in `shape`."""
    found: Array = data.view(_CARRIERS[max(dtype.bits // 8, 1)]).reshape(shape)
    return found


def store(array: Array, tensor: Tensor) -> None:
    """Put elements as they move into a tensor."""
    if tensor.dtype.bits < 8:
        elements = np.ascontiguousarray(array).view(tensor.dtype.numpy)
        tensor.data[:] = Tensor.of(elements, tensor.dtype).data
    else:
        np.copyto(as_moved(tensor), array)


def is_front(shape: Shape, axis: int) -> bool:
    """Whether shards along an axis are contiguous blocks."""
    return math.prod(shape[:axis]) == 1


def split(array: Array, axis: int, ranks: int) -> Array:
    """A view whose first axis counts the equal shards along `axis`, and whose others are a shard's."""
    shape = array.shape
    apart = array.reshape(*shape[:axis], ranks, shape[axis] // ranks, *shape[axis + 1 :])
    return np.moveaxis(apart, axis, 0)


@np.errstate(over="ignore", invalid="ignore")
def reduced(pieces: Sequence[Array], dtype: Dtype, reduce: str) -> Array:
    """The element-wise reduction of shards as they move, in their order; infinities and NaN are made without a warning, as by MPI."""
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
    total = np.array(next(rest))  # a number without dims too: its items are not arrays
    for term in rest:
        ufunc(total, term, out=total)
    return total


def _moved_like(array: Array, like: Array) -> Array:
    return np.ascontiguousarray(array).view(like.dtype).reshape(like.shape)
