"""What an update of the unsharded program has to do: gradients that ranks of a batch reduce, functions with operands, parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from partc.cli.simulation.actions import updated
from partc.cli.simulation.sizes import FileSizes
from partc.compiler.cost.price import Operand
from partc.runtime.artifact.graph.row_function import ROWS
from partc.runtime.program.steps import Update

if TYPE_CHECKING:
    from onnx import FunctionProto


def reduced(update: Update, sizes: FileSizes) -> float:
    """The bytes of gradients that ranks of a batch reduce before an update; of rows none."""
    total = 0.0
    for _, operands in functions_of(update, sizes):
        most = max(math.prod(one.sizes or ()) for one in operands)
        total += min(one.bytes for one in operands if math.prod(one.sizes or ()) == most)
    return total


def functions_of(update: Update, sizes: FileSizes) -> Iterator[tuple[FunctionProto, list[Operand]]]:
    """The functions that update parameters, with their operands, those of all that are updated alike as one; of rows none."""
    functions = {one.name: one for one in sizes.file.model.functions}
    for name, operands in updated(update, functions, sizes):
        if ROWS not in functions[name].input:
            yield functions[name], operands


def parameters_of(update: Update, sizes: FileSizes) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The elements of each parameter that is updated, and the values that are read then; of rows none."""
    functions = {one.name: one for one in sizes.file.model.functions}
    for node in update.nodes:
        if node.op_type in functions and ROWS not in functions[node.op_type].input:
            yield max(math.prod(sizes.operand(name).sizes or ()) for name in node.input), tuple(node.input)
