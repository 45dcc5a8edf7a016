"""What ranks that share a batch give collectives for a model's gradients: the buckets that the compiler fills, without compiling it.

    AllReduce       parameters of which each rank updates all, until they fill a bucket
    ReduceScatter   of a sharded optimizer those whose dim 0 is divided, together; one that is divided along another dim by itself
    AllGather       the updated shards of these

Parameters are reduced in the order in which a backward pass comes to them, the last first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TypeAlias

import onnx_ir as ir
from partc.compiler.cost.machine import Link
from partc.compiler.tasks.buckets import Filling
from partc.compiler.tasks.reduce_gradients import divided_dim
from partc.compiler.training.trainable import trainable_names
from partc.runtime.artifact.format import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

_Kind: TypeAlias = tuple[int | None, tuple[int, ...], float]
"""The dim of a parameter that is sharded, its shape and the bytes of an element."""
Calls = Counter[tuple[str, float]]
"""How many collectives there are of an op and the bytes that a rank gives."""


class Reductions:
    """The collectives for the gradients of a model's trainable weights; `limit`: the bytes that fill a bucket."""

    def __init__(self, model: ir.Model, limit: int) -> None:
        self.limit = limit
        read = (value for node in model.graph for value in node.inputs if value is not None and value.is_initializer())
        names = frozenset(trainable_names(model))
        tensors = {value: value.const_value for value in read if value.const_value is not None}
        self.parameters = [
            (value, tuple(tensor.shape.numpy()), float(tensor.dtype.itemsize))
            for value, tensor in reversed(tensors.items())
            if value.name in names
        ]
        self._calls: dict[Hashable, Calls] = {}

    @cached_property
    def mean(self) -> float:
        """The bytes of a bucket in the mean."""
        calls = self.calls((), 1, 1, False)
        return max(1.0, sum(bytes * many for (_, bytes), many in calls.items()) / max(1, calls.total()))

    def calls(self, places: Sequence[tuple[ir.Value, int]], tp: int, dp: int, zero: bool) -> Calls:
        """All of a step, where the dims at these places are sharded over `tp`, and the optimizer over `dp` if it is `zero`."""
        cut, over = tuple(places) if tp > 1 else (), dp if zero else 1
        if (key := (cut, tp, over)) not in self._calls:
            at = dict(cut)
            self._calls[key] = self._counted(
                [(at.get(value), shape, item) for value, shape, item in self.parameters], tp, over
            )
        return self._calls[key]

    def _counted(self, kinds: Sequence[_Kind], tp: int, over: int) -> Calls:
        found, filling = Calls(), Filling[str](self.limit)

        def fill(op: str, bytes: float) -> None:
            if (full := filling.add(op, bytes)) is not None:
                found[op, full] += 1

        for at, shape, item in kinds:
            bytes = item * math.prod(shape) / (1 if at is None else tp)
            dim = divided_dim(shape, [tp if dim == at else 1 for dim in range(len(shape))], over)
            if dim is None:
                fill(ALL_REDUCE, bytes)
            elif dim == 0:
                fill(REDUCE_SCATTER, bytes)
                fill(ALL_GATHER, bytes / over)
            else:
                found[REDUCE_SCATTER, bytes] += 1
                found[ALL_GATHER, bytes / over] += 1
        found.update(filling.open.items())
        return found


def seconds_of(calls: Calls, link: Link, ranks: int) -> float:
    """The seconds of these collectives, one behind another."""
    return sum(many * link.collective(op, ranks, bytes) for (op, bytes), many in calls.items())
