"""Buckets: one collective for the gradients, or the updates, of several parameters, sent as soon as their bytes fill it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import onnx_ir as ir
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.programs import Value
from partc.compiler.ir.value_info import Shape
from partc.compiler.layout import moves as mv
from partc.compiler.lower.comm import CommLowering
from partc.compiler.plan.precision import GradientMessages
from partc.compiler.tasks.packed_sums import packed_sum, row_kind

Key = TypeVar("Key", bound=Hashable)
_Key: TypeAlias = tuple[str, str, str, tuple[tuple[int, str], ...], str]
Fused = mv.AllReduce | mv.ReduceScatter | mv.AllGather


def can_join(moves: tuple[mv.Move, ...]) -> bool:
    """Whether a reshard is one collective that several values may share: an AllReduce, or one that scatters or gathers dim 0."""
    if len(moves) != 1:
        return False
    match moves[0]:
        case mv.AllReduce(reduce=reduce):
            return reduce == "sum"
        case mv.ReduceScatter(reduce=reduce, dim=dim):
            return reduce == "sum" and dim == 0
        case mv.AllGather(dim=dim):
            return dim == 0
    return False


@dataclass
class Filling(Generic[Key]):
    """Maps the keys of open buckets to their bytes; a bucket is full once it has `limit` bytes."""

    limit: int
    open: dict[Key, float] = field(default_factory=dict)

    def add(self, key: Key, bytes: float) -> float | None:
        """Adds bytes to a bucket; returns the bucket's bytes if it is now full, and then closes it, else None."""
        self.open[key] = self.open.get(key, 0) + bytes
        return self.open.pop(key) if self.open[key] >= self.limit else None


@dataclass
class _Bucket:
    move: Fused
    values: list[ir.Value] = field(default_factory=list)
    terms: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    kinds: list[Hashable] = field(default_factory=list)
    elements: int = 0


class Buckets:
    """Collects values by kind of collective, ranks and type; a bucket of `limit` bytes is moved at once.

    `what` names it in the dumps: `gradients of 8 parameters`. `packed`: the settings of sums that are sent in fewer bits.
    """

    def __init__(self, comm: CommLowering, limit: int, what: str, packed: GradientMessages | None = None) -> None:
        self.comm, self.filling, self.what, self.packed = comm, Filling[_Key](limit), what, packed
        self._open: dict[_Key, _Bucket] = {}
        self._waiting: Sequence[Callable[[], None]] = ()
        """Functions that write the sums of the packed bucket that was sent last, and those to call afterwards."""

    def add(
        self,
        move: Fused,
        value: ir.Value,
        term: Value,
        shape: Shape,
        result: Value,
        then: Callable[[], None] = lambda: None,
        kind: Hashable = None,
        unit: str = "",
    ) -> None:
        """Adds `term`, of this shape, to its bucket, whose result for it is `result`; `then` is called when it is written.

        Values of one `kind`, which are processed in the same way afterwards, are adjacent in a bucket. Values of a `unit` have their own
        bucket, which is full once it is closed (`close`).
        """
        info = self.comm.values[value]
        kind_of_move = type(move).__name__ + (row_kind(move) if self.packed else "")
        groups = self.comm.subgroups(move.after.mesh, move.axes, move.group)[1]
        key = (
            kind_of_move,
            groups,
            info.type,
            tuple(move.after.partial),
            unit,
        )  # one layout says what is left to sum of all
        bucket = self._open.setdefault(key, _Bucket(move))
        bucket.values.append(value)
        bucket.terms.append(term)
        bucket.outputs.append(result)
        bucket.then.append(then)
        bucket.kinds.append(kind)
        elements = math.prod(dim for dim in shape if isinstance(dim, int))
        bucket.elements += elements
        if not unit and self.filling.add(key, elements * (info.item_bytes or 1)) is not None:
            self._move(key)

    def close(self, unit: str) -> None:
        """Writes the collectives of a unit."""
        while (key := next((key for key in self._open if key[-1] == unit), None)) is not None:
            self._move(key)

    def flush(self) -> None:
        """Writes the collectives of buckets that are not full."""
        self.filling.open.clear()
        while self._open or self._waiting:
            if self._open:
                self._move(next(iter(self._open)))
            else:
                self._finish()

    def _move(self, key: _Key) -> None:
        bucket = self._open.pop(key)
        count = len(bucket.outputs)
        name = name_of(bucket.values[0]).removesuffix(".bfloat16").removesuffix(".grad").removesuffix(".next")
        cause = f"{self.what}s of {count} parameters" if count > 1 else f"{self.what} of '{name}'"
        cause += f" of '{key[-1]}'" if key[-1] and count > 1 else ""
        first = {kind: place for place, kind in reversed([*enumerate(bucket.kinds)])}
        order = sorted(range(count), key=lambda place: first[bucket.kinds[place]])
        values = [bucket.values[k] for k in order]
        terms, outputs = [bucket.terms[k] for k in order], [bucket.outputs[k] for k in order]
        then = [bucket.then[k] for k in order]
        if self.packed:
            sums = packed_sum(self.comm, self.packed, bucket.move, terms, outputs, bucket.elements, cause)
            self._finish([sums, *then])
            return
        self.comm.fused(bucket.move, values, terms, outputs, bucket.elements, cause)
        for one in then:
            one()

    def _finish(self, following: Sequence[Callable[[], None]] = ()) -> None:
        """Writes the sums of a packed bucket whose messages have been sent; `following` are those of the one that was sent since."""
        waiting, self._waiting = self._waiting, following
        for one in waiting:
            one()
