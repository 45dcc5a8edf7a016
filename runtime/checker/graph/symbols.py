"""Compares dims as numbers, at a few legal sizes of the symbols, because equal expressions may be written in many ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from partc.runtime.artifact import dim_expression as expression
from partc.runtime.artifact.format import Box, Manifest, Shape
from partc.runtime.artifact.legal_sizes import smallest

Bindings: TypeAlias = dict[str, int]
"""Sizes of the symbols."""
_SAMPLES = 3
_LARGER = (3, 6, 12, 24, 48, 96)
"""The steps from the least size to the larger samples, which replace samples at which a value is empty."""


def samples(manifest: Manifest, larger: bool = False) -> list[Bindings]:
    """Returns a few samples of legal sizes of the symbols, different where the laws allow it; with `larger`, also larger ones."""
    all_sizes = []
    for number in (*range(_SAMPLES), *(_LARGER if larger else ())):
        sizes: Bindings = {}
        for place, (name, law) in enumerate(sorted(manifest.symbols.items())):
            least = smallest(law)
            size = least + law.divisor * number * (place + 1)
            sizes[name] = least if law.max is not None and size > law.max else size
        all_sizes.append(sizes)
    return all_sizes


def filled_samples(manifest: Manifest, dims: Iterable[str], count: int) -> list[Bindings]:
    """Returns `count` samples at which no dim is 0 that is larger at others; if there are too few, the first samples.

    A Reshape copies its input's dim where the computed target is 0, and onnx then infers another shape than at larger sizes.
    """
    texts: list[int | str] = [*dict.fromkeys(dims)]
    tried = samples(manifest, larger=True)
    sizes = [numbers(texts, manifest, sample) for sample in tried]
    often = {k for row in sizes for k, size in enumerate(row) if size is not None and size > 0}
    filled = [sample for sample, row in zip(tried, sizes, strict=True) if all((row[k] or 0) > 0 for k in often)]
    return (filled if len(filled) >= count else tried)[:count]


def numbers(shape: Shape, manifest: Manifest, sizes: Bindings) -> list[int | None]:
    """The dims at these sizes; None for dims that the symbols do not determine."""
    known_dims: list[int | None] = []
    for dim in shape or []:
        if isinstance(dim, int):
            known_dims.append(dim)
            continue
        try:
            known_dims.append(expression.parse(dim, manifest.symbols)(sizes))
        except ValueError:
            known_dims.append(None)
    return known_dims


def same_dims(shape: Shape, other: Shape, manifest: Manifest) -> bool:
    """Whether two shapes are equal at all sample sizes; a dim that the symbols do not determine is equal to any."""
    if shape is None or other is None or shape == other:
        return True
    if len(shape) != len(other):
        return False
    return all(
        first is None or second is None or first == second
        for sizes in samples(manifest)
        for first, second in zip(numbers(shape, manifest, sizes), numbers(other, manifest, sizes), strict=True)
    )


def local_shape(shape: Shape, box: Box | None) -> Shape:
    """The dims of a shard as expressions."""
    if shape is None or box is None:
        return shape
    return [
        dim if (begin, end) == (0, denominator) else f"({dim})*{end - begin}/{denominator}"
        for dim, (begin, end, denominator) in zip(shape, box, strict=True)
    ]
