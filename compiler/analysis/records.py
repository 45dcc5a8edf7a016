"""Which inputs hold records: a batch of them along the first dim; the others have one value for all records.

The batch is the first dim of the labels, or else of the first input that has one. An input holds records if its own first dim is that
dim, or one whose size varies by itself: a name that no input has at a later place, as it has the length of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

OF_PIECES = "partc.of_pieces"
"""Key of `ir.Node.meta`: the Reshape gives each part of a batch a row of its own, with its records in it."""


def records_of(graph: ir.Graph, labels: str = "") -> dict[ir.Value, None]:
    """The inputs that hold records."""
    dims = {value: tuple(value.shape.dims) for value in graph.inputs if value.shape is not None and len(value.shape)}
    unknown = [value for value in graph.inputs if value.shape is None]
    first = next((value for value in dims if value.name == labels), next(iter(dims), None))
    if first is None:
        return dict.fromkeys(unknown)
    batch = dims[first][0]
    later = {str(dim.value) for some in dims.values() for dim in some[1:] if isinstance(dim, ir.SymbolicDim)}

    def holds(dim: int | ir.SymbolicDim) -> bool:
        if isinstance(dim, int) or isinstance(batch, int):
            return dim == batch
        return dim.value == batch.value or str(dim.value) not in later

    return {value: None for value in graph.inputs if value in unknown or (value in dims and holds(dims[value][0]))}


def batch_symbols(records: Iterable[ir.Value]) -> set[str]:
    """The names of the first dims of inputs that hold records."""
    first = (value.shape[0] for value in records if value.shape is not None)
    return {str(dim.value) for dim in first if isinstance(dim, ir.SymbolicDim)}
