"""Functions of `partc.optimizer` over the looked-up rows of a table, and the merging of rows with the same id.

The gradient of a looked-up table is `ids` and `rows`: `rows[i]` is for the table's row `ids[i]`. A function over rows takes both and
updates those rows of the parameter and its slots in place, so its time grows with the rows, not with the table. Its body proves:

    is_rowwise    every output `x_next` is `ScatterND` into the input `x` at `ids`, and `x` is read by `Gather` at `ids` alone
    adds_up       no tensor is read, and the values added to its rows are linear in `rows`: an id may occur several times in `ids`

All other functions need each id once, as `MergeRows` returns them:

    MergeRows(ids [5 3 5], rows [a b c])     ->     ids [3 5], rows [b a+c]

Equal ids become neighbours by a stable sort, and their rows are added in the order in which they come.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from partc.runtime.artifact.format import OPTIMIZER
from partc.runtime.artifact.graph.onnx_graph import text_of

if TYPE_CHECKING:
    from onnx import FunctionProto, ModelProto, NodeProto

MERGE = "MergeRows"
IDS, ROWS = "ids", "rows"
"""The inputs of a function over rows, besides the tensors that it updates and the scalars."""
NEXT = "_next"
SCATTER = "ScatterND"
_PLACED = frozenset(("Constant", "ReduceMean", "Unsqueeze"))
_MERGE = """
    count = Shape (ids)
    sorted, order = TopK <axis: int = 0, largest: int = 0, sorted: int = 1> (ids, count)
    axis = Constant <value_int: int = 0> ()
    first = Constant <value_ints: ints = [0]> ()
    one = Constant <value_ints: ints = [1]> ()
    last = Constant <value_ints: ints = [-1]> ()
    none = Constant <value_ints: ints = [-9223372036854775807]> ()
    but_last = Slice (sorted, first, last)
    before = Concat <axis: int = 0> (none, but_last)
    again = Equal (sorted, before)
    new = Not (again)
    counted = Cast <to: int = 7> (new)
    number = CumSum (counted, axis)
    place = Sub (number, one)
    merged_ids = Compress <axis: int = 0> (sorted, new)
    ids_left = Shape (merged_ids)
    width = Shape <start: int = 1> (rows)
    shape = Concat <axis: int = 0> (ids_left, width)
    zeros = ConstantOfShape (shape)
    cast_zeros = CastLike (zeros, rows)
    places = ScatterElements <axis: int = 0> (order, order, place)
    at = Unsqueeze (places, one)
    merged_rows = ScatterND <reduction: string = "add"> (cast_zeros, at, rows)
"""


def gradient_operands(model: ModelProto) -> dict[str, int]:
    """Maps each optimizer function of a model to the place of the gradient, or of its rows, among the inputs."""
    functions = (one for one in model.functions if one.domain == OPTIMIZER)
    return {one.name: at for one in functions for at, name in enumerate(one.input) if name in ("gradient", ROWS)}


@functools.cache
def merge_function(opset: int) -> FunctionProto:
    """Returns the function `MergeRows`: each id once, in rising order, with the sum of its rows."""
    import onnx.parser

    text = f'<domain: "{OPTIMIZER}", opset_import: ["" : {opset}]>\n{MERGE} (ids, rows) => (merged_ids, merged_rows) {{{_MERGE}}}'
    function = onnx.parser.parse_function(text)
    function.doc_string = "each of the ids once, rising, with the sum of its rows in the order in which they come"
    return function


def is_merge(function: FunctionProto) -> bool:
    """Whether a function is exactly `MergeRows` as written here, so that the ids that it returns are distinct."""
    if function.name != MERGE or function.domain != OPTIMIZER or len(function.opset_import) != 1:
        return False
    return function == merge_function(function.opset_import[0].version)


def is_rowwise(function: FunctionProto) -> bool:
    """Whether a function updates rows of its tensors at `ids`, in place, and reads no other rows of them."""
    if not {IDS, ROWS} <= {*function.input} or not function.output:
        return False
    tables = {name.removesuffix(NEXT) for name in function.output}
    makers = {name: node for node in function.node for name in node.output}
    if not all(name.endswith(NEXT) for name in function.output) or not tables <= {*function.input}:
        return False
    writers = [makers.get(name) for name in function.output]
    if not all(node is not None and _writes(node, makers) for node in writers):
        return False
    return all(_is_allowed(node, tables, writers) for node in function.node)


def adds_up(function: FunctionProto) -> bool:
    """Whether a function over rows only adds to its tensors, and only values linear in `rows`, so that ids may occur several times."""
    tables = {name.removesuffix(NEXT) for name in function.output}
    linear = {ROWS}
    for node in function.node:
        names = [name for name in node.input if name in linear]
        if node.op_type == SCATTER:
            if text_of(node, "reduction") != "add" or node.input[2] not in linear:
                return False
        elif not tables.isdisjoint(node.input):
            return False
        elif names:
            if node.op_type not in ("Neg", "Cast") and not (node.op_type == "Mul" and len(names) == 1):
                return False
            linear.update(node.output)
    return True


def _writes(node: NodeProto, makers: dict[str, NodeProto]) -> bool:
    """Whether a node writes rows of a tensor at `ids`."""
    if node.op_type != SCATTER or len(node.input) != 3 or text_of(node, "reduction", "none") not in ("none", "add"):
        return False
    at = makers.get(node.input[1])
    axes = makers.get(at.input[1]) if at is not None and at.op_type == "Unsqueeze" and len(at.input) == 2 else None
    ints = [list(one.ints) for one in axes.attribute if one.name == "value_ints"] if axes is not None else []
    return at is not None and at.input[0] == IDS and ints == [[1]] and node.output[0] == f"{node.input[0]}{NEXT}"


def _is_allowed(node: NodeProto, tables: set[str], writers: list[NodeProto | None]) -> bool:
    """Whether a function over rows may have a node: one of `writers`, a Gather of a tensor at `ids`, or a plain op that reads no tensor.

    Plain ops are the element-wise ones, and those in `_PLACED`.
    """
    from partc.runtime.artifact.graph.optimizer_function import ELEMENTWISE

    if node.domain not in ("", "ai.onnx"):
        return False
    if any(node is one for one in writers):
        return tables.isdisjoint(node.input[1:])
    if node.op_type == "Gather":
        return node.input[0] in tables and list(node.input[1:]) == [IDS] and not any(one.i for one in node.attribute)
    return tables.isdisjoint(node.input) and node.op_type in ELEMENTWISE | _PLACED


def merged_by(nodes: Iterator[NodeProto], ids: str, rows: str, merges: set[str]) -> bool:
    """Whether one of the nodes calls a function in `merges` with `ids` and `rows` as its outputs."""
    return any(
        node.domain == OPTIMIZER and node.op_type in merges and list(node.output) == [ids, rows] for node in nodes
    )
