"""Checks of the sizes that layers take: one int for all spatial axes, or one for each."""

from __future__ import annotations

from collections.abc import Sequence


def positive(value: int, name: str) -> int:
    """`value`, or an error that names the argument."""
    return checked_int(value, name, least=1)


def checked_int(value: int, name: str, least: int) -> int:
    """`value` if it is an int of at least `least`; raises TypeError or ValueError with the argument's name."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is an int, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} is at least {least}, got {value}")
    return value


def each(value: int | Sequence[int], axes: int, name: str, least: int = 1) -> tuple[int, ...]:
    """`value` for each of so many axes: an int is repeated, a sequence must have one entry an axis."""
    sizes = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(sizes) != axes:
        raise ValueError(f"{name} has one entry for each of {axes} axes, got {len(sizes)}: {list(sizes)}")
    return tuple(checked_int(size, name, least) for size in sizes)
