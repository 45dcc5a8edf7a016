"""Lifetimes of values and the bytes in memory at the same time: for a session's ops, a row's tasks, or a program before it is written.

A program is a list of uses in execution order, one for each op or task: the values that it reads, and the values that it makes. A value
is in memory from the op that makes it to the last op that reads it. A view shares the memory of its source. The result of an op that may
overwrite its operand takes the operand's memory, if this op is the last to read the operand and both have the same number of bytes.

    a = MatMul(x, w); b = Reshape(a); c = Relu(b); d = Add(c, c)        spans: a from 0 to 3 (with b and c), d from 3 to 3
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .byte_count import ByteCount
from .graph.kernels import OVERWRITING, VIEWS

Name = TypeVar("Name", bound=Hashable)
Bytes = TypeVar("Bytes")
Sum = TypeVar("Sum", int, ByteCount)
"""Bytes at fixed sizes of the symbols, or a `ByteCount` in the symbols."""


@dataclass(frozen=True)
class Use(Generic[Name]):
    """The values that an op or a task reads and makes, as names or other objects. `op` is the op type of an op of the default domain."""

    reads: Sequence[Name]
    makes: Sequence[Name]
    op: str = ""


@dataclass(frozen=True)
class Span(Generic[Name, Bytes]):
    """A place in memory: the value that uses it first, the first and the last use that need it, all uses that touch it, and its bytes.

    `first`, `last` and `uses` are indices of uses. `bytes` is None where the size is known only at run time.
    """

    value: Name
    first: int
    last: int
    uses: tuple[int, ...]
    bytes: Bytes | None


def spans(
    uses: Sequence[Use[Name]],
    bytes_of: Callable[[Name], Bytes | None],
    apart: Collection[Name] = (),
    outputs: Collection[Name] = (),
) -> list[Span[Name, Bytes]]:
    """Returns the places in memory that a program's values need, in the order in which they begin.

    A value that no use makes begins at the first use that reads it; `outputs` are needed to the end. Values in `apart`, and views of them,
    have memory elsewhere and get no place.
    """
    touching: dict[Name, list[int]] = {}
    for at, use in enumerate(uses):
        for name in (*use.reads, *use.makes):
            if name:
                touching.setdefault(name, []).append(at)
    for name in outputs:
        touching.setdefault(name, []).append(len(uses))
    sizes = {name: bytes_of(name) for name in touching}
    home: dict[Name, Name] = {}
    for at, use in enumerate(uses):
        if not use.reads or not use.makes or use.makes[0] in home or use.makes[0] in apart:
            continue
        made, source = use.makes[0], home.get(use.reads[0], use.reads[0])
        over = use.op in OVERWRITING and source not in apart and max(touching[source]) == at
        if use.op in VIEWS or (over and sizes[made] is not None and sizes[made] == sizes[source]):
            home[made] = source
            touching.setdefault(source, []).extend(touching[made])
    return [
        Span(name, min(places), max(places), tuple(sorted(set(places))), sizes[name])
        for name, places in touching.items()
        if name not in home and name not in apart
    ]


def alive(found: Sequence[Span[Name, Sum]], zero: Sum) -> Iterator[tuple[int, Sum]]:
    """Yields each use at which places begin or end, in order, with the bytes in use then; places of unknown size are left out."""
    changes: dict[int, Sum] = {}
    for span in found:
        if span.bytes is not None:
            changes[span.first] = changes.get(span.first, zero) + span.bytes
            changes[span.last + 1] = changes.get(span.last + 1, zero) - span.bytes
    total = zero
    for at in sorted(changes):
        total += changes[at]
        yield at, total


def peak(found: Sequence[Span[Name, int]]) -> tuple[int, list[Span[Name, int]]]:
    """Returns the largest number of bytes in memory at the same time, and the places that are in memory then."""
    at, most = max(alive(found, 0), key=lambda one: one[1], default=(0, 0))
    return most, [span for span in found if span.first <= at <= span.last and span.bytes]
