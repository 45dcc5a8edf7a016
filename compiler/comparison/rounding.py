"""Measures the effect of rounding on a model: its operands are changed by units in the last place, and it runs again.

A compiled model sums in another order, rounds to float16 where the unsharded model's kernels do not, and rounds a quantized value to
another step where the unsharded model narrowly does not. The size of the effect depends on the model and its data, so it is measured and
not assumed. In a copy of the unsharded model, operands of sums and transcendental functions are multiplied by 1 + d, |d| at most 4 units
in the last place, and every computed float16 or bfloat16 value by 1 + d, |d| at most one unit. Values that are only moved, compared or
selected stay unchanged, and so do values computed from weights alone: both have the same bits on every rank. Zeros stay zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from partc.compiler.ops.registry import entry_of_op
from partc.runtime.artifact.format import DOMAIN, OPTIMIZER
from partc.runtime.artifact.graph.onnx_graph import reads

_UNITS: dict[int, float] = {
    TensorProto.DOUBLE: 4 * 2.0**-52,
    TensorProto.FLOAT: 4 * 2.0**-23,
    TensorProto.FLOAT16: 2.0**-10,
    TensorProto.BFLOAT16: 2.0**-7,
}
_OLDEST = 10
_LENGTH, _STARTS = 8191, 61
_TABLE = "partc.near_one"
_LOW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def perturb(model: ModelProto, seed: int) -> int:
    """Changes the operands of a model by a few units in the last place, differently for each seed; returns the number of these operands.

    Types are those that the model declares; a value without a declared type is not changed.
    """
    graph = model.graph
    opset = next((entry.version for entry in model.opset_import if not entry.domain), 0)
    if opset < _OLDEST:
        return 0
    ports = (*graph.value_info, *graph.input, *graph.output)
    found = {port.name: port.type.tensor_type.elem_type for port in ports if port.type.HasField("tensor_type")}
    types = found | {tensor.name: tensor.data_type for tensor in graph.initializer}
    fixed = {tensor.name for tensor in graph.initializer}
    nodes: list[NodeProto] = []
    noisy: dict[str, str] = {}
    count = 0
    for node in graph.node:
        mine = NodeProto()
        mine.CopyFrom(node)
        draws = node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial")
        if not set(reads(node)) - fixed and not draws:
            fixed.update(node.output)
            nodes.append(mine)
            continue
        for place in _operands(node):
            name = node.input[place]
            if not name or name in fixed or types.get(name) not in (TensorProto.FLOAT, TensorProto.DOUBLE):
                continue
            if name not in noisy:
                noisy[name] = f"{name}.perturbed"
                nodes += _noise(name, noisy[name], types[name], -1 - count % _STARTS, opset)
                count += 1
            mine.input[place] = noisy[name]
        nodes.append(mine)
        for place, name in enumerate(node.output):
            if types.get(name) in _LOW and not _is_exact(node) and node.domain not in (DOMAIN, OPTIMIZER):
                mine.output[place] = f"{name}.exact"
                nodes += _noise(mine.output[place], name, types[name], -1 - count % _STARTS, opset)
                count += 1
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(_table(seed))
    return count


def _is_exact(node: NodeProto) -> bool:
    """Whether a node only moves or selects numbers."""
    entry = entry_of_op(node.domain, node.op_type)
    return entry is not None and entry.rounding == "exact"


def _operands(node: NodeProto) -> Sequence[int]:
    """Returns the indices of the operands whose rounding counts: all operands for an op that is not in the standard."""
    if node.domain in (DOMAIN, OPTIMIZER):
        return ()
    if node.domain:
        return range(len(node.input))
    entry = entry_of_op(node.domain, node.op_type)
    return () if entry is None else [place for place in entry.rounded(len(node.input)) if place < len(node.input)]


def _noise(name: str, out: str, kind: int, start: int, opset: int) -> Iterator[NodeProto]:
    """Yields nodes that multiply a value by numbers of the table, from index `start` on.

    No op of random numbers is used: onnxruntime has none for some opsets.
    """

    own = f"{_TABLE}.{out}"  # a program may have its own value `h.shape`

    def node(op: str, inputs: Sequence[str], word: str) -> NodeProto:
        return helper.make_node(op, inputs, [f"{own}.{word}"], name=f"{own}.{word}")

    wide = TensorProto.DOUBLE if kind == TensorProto.DOUBLE else TensorProto.FLOAT
    source, product = (name, out) if kind == wide else (f"{own}.wide", f"{own}.changed")
    if kind != wide:
        yield helper.make_node("Cast", [name], [source], name=source, to=wide)
    begin, table = f"{_TABLE}.{start}", f"{_TABLE}.{kind}"
    yield node("Size", [source], "size")
    yield node("Add", [f"{own}.size", begin], "end")
    yield node("Div", [f"{own}.end", f"{_TABLE}.length"], "full")
    yield node("Add", [f"{own}.full", f"{_TABLE}.one"], "times")
    yield node("Tile", [table, f"{own}.times"], "tiled")
    yield node("Slice", [f"{own}.tiled", begin, f"{own}.end"], "numbers")
    yield node("Shape", [source], "shape")
    shaped = node("Reshape", [f"{own}.numbers", f"{own}.shape"], "near_one")
    if opset >= 14:
        shaped.attribute.append(helper.make_attribute("allowzero", 1))
    yield shaped
    yield helper.make_node("Mul", [source, f"{own}.near_one"], [product], name=product)
    if kind != wide:
        yield helper.make_node("Cast", [product], [out], name=f"{own}.rounded", to=kind)


def _table(seed: int) -> Iterator[TensorProto]:
    """Yields tables of numbers near 1 for each type, and the indices at which values begin to use them."""
    numbers = np.random.default_rng(seed).uniform(-1, 1, _LENGTH)
    for kind, unit in _UNITS.items():
        wide = np.float64 if kind == TensorProto.DOUBLE else np.float32
        yield numpy_helper.from_array((1 + unit * numbers).astype(wide), f"{_TABLE}.{kind}")
    yield numpy_helper.from_array(np.array([_LENGTH], np.int64), f"{_TABLE}.length")
    yield numpy_helper.from_array(np.array([1], np.int64), f"{_TABLE}.one")
    for start in range(_STARTS):
        yield numpy_helper.from_array(np.array([start * (_LENGTH // _STARTS)], np.int64), f"{_TABLE}.{-start - 1}")
