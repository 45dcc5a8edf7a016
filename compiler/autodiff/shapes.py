"""Extents that gradients need, as vectors of int64: constants where they are known, else read from shapes at run time.

What is known of a vector is looked up by the builder, so that vectors joined of constants are constants again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient


def numbers(g: GradientBuilder, x: str | None, attribute: str = "") -> tuple[int, ...] | None:
    """The integers that the node is given by an attribute or by a constant operand; None where they are not known."""
    given = g.attribute(attribute) if attribute else None
    if given is not None:
        return tuple(given)
    known = g.known(x)
    return None if known is None else tuple(int(number) for number in known.ravel())


def vector(g: GradientBuilder, x: str) -> str:
    """An operand of one dim as integers of 64 bits."""
    return x if g.dtype(x) == ir.DataType.INT64 else str(g.Cast(x, to=ir.DataType.INT64))


def extents(g: GradientBuilder, x: str, axes: Sequence[int]) -> str:
    """The dims of a value along axes."""
    shape = g.shape(x)
    if shape is None:
        raise NoGradient(f"the rank of {x!r} is not known")
    taken = [shape[axis] for axis in axes]
    if all(isinstance(dim, int) for dim in taken):
        return g.constant(np.array(taken, np.int64))
    places = g.constant(np.array([axis % len(shape) for axis in axes], np.int64))
    return str(g.Gather(g.shape_of(x), places))


def joined(g: GradientBuilder, *parts: str | Sequence[int]) -> str:
    """Vectors one after the other."""
    names = [one if isinstance(one, str) else g.constant(np.array(one, np.int64)) for one in parts]
    known = [found for found in map(g.known, names) if found is not None]
    if len(known) == len(names):
        return g.constant(np.concatenate([one.astype(np.int64) for one in known]))
    return names[0] if len(names) == 1 else str(g.Concat(*names, axis=0))


def all_pads(g: GradientBuilder, before: str, after: str, axes: Sequence[int], rank: int) -> str:
    """Pads of some axes, as pads of all axes.

    onnxruntime moves a Transpose behind a Pad as if pads were those of all axes, where the Pad names axes.
    """

    def spread(some: str) -> list[str | Sequence[int]]:
        if len(axes) == 1:
            return [[0] * axes[0], some, [0] * (rank - axes[0] - 1)]
        at = {axis: k for k, axis in enumerate(axes)}
        return [
            g.Gather(some, g.constant(np.array([at[axis]], np.int64))) if axis in at else [0] for axis in range(rank)
        ]

    return joined(g, *(part for part in (*spread(before), *spread(after)) if part))


def shaped(g: GradientBuilder, dy: str, x: str) -> str:
    """The elements of `dy` in the shape of `x`."""
    shape = g.shape(x)
    dynamic = None if shape is None else sum(not isinstance(dim, int) for dim in shape)
    if shape is None or dynamic is None or dynamic > 1 or 0 in shape:
        return str(g.Reshape(dy, g.shape_of(x), allowzero=1))
    return g.reshape(dy, [dim if isinstance(dim, int) else -1 for dim in shape])


def once(g: GradientBuilder, dy: str, x: str, times: Sequence[int], *, major: bool) -> str:
    """`dy` summed over the repetitions of `x`, which are the major or the minor part of each dim."""
    shape, repeated = g.shape(x) or (), [axis for axis, count in enumerate(times) if count != 1]
    if not repeated:
        return dy
    inferred = sum(not isinstance(dim, int) for dim in shape) == 1 and 0 not in shape
    parts: list[str | Sequence[int]] = []
    summed: list[int] = []
    for axis, (count, dim) in enumerate(zip(times, shape, strict=True)):
        own = [dim] if isinstance(dim, int) else [-1] if inferred else extents(g, x, [axis])
        if axis in repeated:
            summed.append(len(parts) if major else len(parts) + 1)
        parts += [own] if axis not in repeated else [[count], own] if major else [own, [count]]
    return like(g, g.sum(g.Reshape(dy, joined(g, *parts), allowzero=1), summed), x)


def filled(g: GradientBuilder, shape: str, like: str) -> str:
    """Zeros of a shape, in the type of `like`."""
    return str(g.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, g.dtype(like).numpy()))))


def moved(g: GradientBuilder, x: str, order: Sequence[int]) -> str:
    """The value with its dims in another order; itself where they stay."""
    return x if list(order) == list(range(len(order))) else str(g.Transpose(x, perm=list(order)))


def inverse(order: Sequence[int]) -> list[int]:
    """The order that undoes a permutation."""
    return [list(order).index(k) for k in range(len(order))]


def added_along(g: GradientBuilder, indices: str, updates: str, axis: int, x: str) -> str:
    """Zeros with as many rows along an axis as `x` has, to which updates are added where indices say.

    The dims of the indices stand in the updates where the rows come.
    """
    count, rank = g.rank(indices), g.rank(updates)
    order = [*range(axis, axis + count), *range(axis), *range(axis + count, rank)]
    first = moved(g, updates, order)
    shape = joined(g, extents(g, x, [axis]), extents(g, first, range(count, rank)))
    places = g.unsqueeze(vector(g, indices), -1)
    # Onnxruntime adds in one thread, and writes in several.
    reduction = None if _are_distinct(g, indices, x, axis) else "add"
    made = str(g.ScatterND(filled(g, shape, updates), places, first, reduction=reduction))
    rows, rest = g.shape(x), g.shape(first)
    if rows is not None and rest is not None:
        g.scope.value(made).shape = ir.Shape([rows[axis], *rest[count:]])
    return moved(g, made, [*range(1, axis + 1), 0, *range(axis + 1, rank - count + 1)])


def _are_distinct(g: GradientBuilder, indices: str, x: str, axis: int) -> bool:
    """Whether indices are constants of which no two mean the same place along an axis of `x`."""
    known, shape = g.known(indices), g.shape(x)
    if known is None or shape is None:
        return False
    flat, size = known.ravel(), shape[axis]
    counted = flat % size if isinstance(size, int) and size else flat
    return len(np.unique(counted)) == flat.size and (isinstance(size, int) or bool((flat >= 0).all()))


def like(g: GradientBuilder, dx: str, x: str) -> str:
    """`dx`, of which the rule knows that it has the shape of `x`."""
    g.scope.value(dx).shape = g.scope.value(x).shape
    return dx
