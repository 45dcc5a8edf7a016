"""The interface with which a loss or a metric of the plan appends nodes to the model; their names begin with its path
(`training/graph_appender.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import onnx_ir as ir
from partc.compiler.errors import CompileError

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
INTEGERS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.INT16, ir.DataType.INT8, ir.DataType.UINT8)
MOST_AT_ONCE = 1 << 16
"""The most elements that one sum adds; of more, sums of rows are added. onnxruntime adds all elements of a tensor into a few float32 sums,
which is 8e-6 off for so many, and 2.7e-3 for 25 million (1.32)."""
Dims: TypeAlias = tuple[int | ir.SymbolicDim, ...]


class GraphNodes(Protocol):
    """Appends the nodes of one loss or metric to the model, and looks up the model's inputs and outputs."""

    path: str
    graph: ir.Graph

    def error(self, fact: str, law: str = "", help: str = "") -> CompileError:
        """Returns the error with this fact."""

    def op(self, word: str, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Appends a node with the output `<path>.<word>`, or `<path>` itself where the word is empty."""

    def constant(self, word: str, array: Any, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """Appends a constant; int64 by default."""

    def scalar(self, op_type: str, *inputs: ir.Value, dtype: ir.DataType, **attributes: Any) -> ir.Value:
        """Appends the node that computes `<path>`: a float32 scalar, which becomes an output of the graph."""

    def sums(self, size: int, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Appends the node that computes `<path>`: `size` float32 sums, which become an output of the graph."""

    def divided(self, number: ir.Value, denominator: ir.Value) -> ir.Value:
        """Registers the denominator of `number`, a mean, so that the means of several batches can be combined."""

    def counted(self, number: ir.Value, each: ir.Value, dims: Dims) -> ir.Value:
        """Returns `number`, the mean of all of `each` with dims `dims`; registers the count where it may differ by record."""

    def by_shard(self, shards: int, x: ir.Value, word: str) -> ir.Value:
        """The sums of x over the records of each shard of the batch."""

    def own_scalar(self, name: str) -> ir.Value:
        """Returns the model's output of this name, which must be a single float."""

    def prediction(self, name: str) -> tuple[ir.Value, Dims]:
        """Returns an output of floats, in float32 unless it is float64, and its dims in names of the inputs' dims."""

    def graph_input(self, name: str, dims: Dims, kinds: Sequence[ir.DataType]) -> ir.Value:
        """Returns the graph's input of this name, in the first of the types `kinds`; adds one with these dims where there is none."""


def float_type(x: ir.Value) -> ir.DataType:
    """The type of a prediction; float32 where the model does not declare one."""
    return x.dtype or ir.DataType.FLOAT


def class_axis(to: GraphNodes, name: str, dims: Dims, axis: int | None) -> int:
    """Returns the axis of the classes as a number from 0."""
    rank = len(dims)
    if rank == 0:
        raise to.error(f"the output '{name}' is a scalar", "logits have a number for each class")
    chosen = axis if axis is not None else 1 if rank > 3 else rank - 1
    if not -rank <= chosen < rank:
        raise to.error(f"'{name}' has no axis {chosen}", f"it has {rank} dims", f"say an axis of {-rank} to {rank - 1}")
    return chosen % rank
