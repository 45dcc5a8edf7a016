"""The program of a step while its row of tasks is written, and the values that depend on a microbatch.

The copy of a value of one microbatch's program in the program of a step: one object on all ranks, since both ends of a message refer to
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.part_symbols import BatchDims
from partc.compiler.ir.programs import Body, Compute, Op, Value, added, with_values
from partc.compiler.pipelines.phases import Label, Unit
from partc.compiler.pipelines.tree_sums import TreeSums


class Clones:
    """Values of a step made of those of one microbatch's program, in the dims of the whole batch."""

    def __init__(self, dims: BatchDims) -> None:
        self.dims, self.count = dims, dims.count
        self._of_batch: dict[Value, Value] = {}
        self._micro: dict[tuple[Value, int], Value] = {}

    def of_batch(self, value: Value) -> Value:
        """The value where no microbatch has one of its own, and in bodies."""
        clone = self._of_batch.get(value)
        if clone is None:
            shape = self.dims.shape(value.shape)
            if value.constant is not None:  # its items are its type
                clone = Value(value.hint, value.base, constant=value.constant)
            else:
                clone = value if shape == value.shape else replace(value, shape=shape)
            self._of_batch[value] = clone
        return clone

    def in_microbatch(self, value: Value, k: int) -> Value:
        """The value of a microbatch: `h.3`."""
        found = self._micro.get((value, k))
        if found is None:
            found = self._micro[value, k] = self.of_batch(value).derived(f".{k}")
        return found


@dataclass
class Row:
    """The program of a step on a unit's ranks while it is written.

    `micro`: for each microbatch, maps values of one microbatch's program to their values in the step.
    """

    unit: Unit
    clones: Clones
    steps: list[Op] = field(default_factory=list)
    micro: list[dict[Value, Value]] = field(default_factory=list)
    bodies: dict[Label, Body] = field(default_factory=dict)
    sums: dict[Value, tuple[Value, Value]] = field(default_factory=dict)
    """Maps the sum of a gradient in a body to the sum so far and to the value to which the body adds."""
    calls: dict[Label, int] = field(default_factory=dict)
    """The number of calls of each label's body so far."""
    tree_sums: TreeSums | None = None
    """The sums over parts, if they have one order for all numbers of ranks."""

    def emit(
        self, op_type: str, inputs: Sequence[Value], outputs: Sequence[Value], **attributes: int | ir.Attr
    ) -> None:
        """Writes an op."""
        self.steps.append(added(op_type, inputs, outputs, attributes))

    def put_together(self, parts: Sequence[Value], result: Value, summed: bool) -> None:
        """Writes the sum of the microbatches' values, or their mean: as Sum and Div, since Mean has a kernel for float32 only."""
        if summed:
            self.emit("Sum", parts, [result])
            return
        total = result.derived(".sum")
        self.emit("Sum", parts, [total])
        self.emit("Div", [total, result.derived_untyped(".count", np.array(len(parts), _numpy(result)))], [result])

    def begin_sums(self, steps: Iterable[Op]) -> None:
        """Writes the zeros to which the first microbatch adds each gradient; `steps` are the ops of bodies."""
        for step in steps:
            if isinstance(step, Compute) and self.unit.adds_up(step):
                (made,) = step.makes
                self.sums[made] = self._zeros(kept := self._sum_of(step)), kept

    def add_alike(self, step: Compute) -> None:
        """Writes the sum of a gradient that is the same in every microbatch, such as that of a weight decay in the loss."""
        (made,), kept = step.makes, self._sum_of(step)
        total = self.clones.of_batch(made)
        one = total.derived(".of_one")
        values = {value: self.clones.of_batch(value) for value in step.reads}
        self.steps.append(with_values(step, {**values, kept: self._zeros(kept), made: one}))
        self.emit("Mul", [one, total.derived_untyped(".times", np.array(self.clones.count, _numpy(made)))], [total])

    def append_all(self, step: Compute) -> None:
        """Writes an op with the operands of all microbatches, one after the other."""
        ((given,), (made,)) = step.reads, step.makes
        parts = tuple(values.get(given) or self.clones.of_batch(given) for values in self.micro)
        whole = self.clones.of_batch(made)
        self.steps.append(replace(step, inputs=parts, outputs=(whole,), label=whole))

    def _sum_of(self, step: Compute) -> Value:
        """Returns the state to which an op adds."""
        (kept,) = [one for one in step.reads if one in self.unit.sums]
        return kept

    def _zeros(self, kept: Value) -> Value:
        kept = self.clones.of_batch(kept)
        zeros = kept.derived(".zeros")
        tensor = ir.AttrTensor("value", ir.tensor(np.zeros(1, _numpy(kept))))
        self.emit(
            "ConstantOfShape", [kept.derived_untyped(".shape", np.array(kept.shape, np.int64))], [zeros], value=tensor
        )
        return zeros


def _numpy(value: Value) -> np.dtype[np.generic]:
    """Returns the numpy type of a value's items."""
    assert value.of is not None
    assert value.of.dtype is not None
    return value.of.dtype.numpy()
