"""Replaces patterns of plain ops by the standard's single op: a step of one token is short, so each node counts.

    Mul(weight, Mul(x, Reciprocal(Sqrt(Add(ReduceMean(Pow(x, 2)), epsilon)))))       ->  RMSNormalization(x, weight)
    Add(Mul(x, cos), Mul(Concat(Neg(second half of x), first half of x), sin))       ->  RotaryEmbedding(x, half of cos, half of sin)
    Reshape(x) of the shape that x has                                               ->  x

A pattern is replaced only where the shapes in the file prove that the op is the same: a norm over the last dim, halves of the last dim,
angles that repeat one half. The sum of squares of a product's columns stays, since a plan may shard these columns: each rank then sums its
own, and the standard's op would gather them.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from partc.compiler.frontend.names import module_of
from partc.compiler.ir.graph import add_initializer, drop_unread
from partc.compiler.ops.node import axes_of, axis_of, constant_ints, dims, operand, rank_of, same

_PRODUCTS = ("MatMul", "MatMulNBits", "Gemm")


def use_standard_ops(model: ir.Model) -> None:
    """Replaces every such norm, rotation and Reshape in a model of opset 23 or later, whose values have shapes."""
    halves = dict[ir.Value, ir.Value]()
    for node in list(model.graph):
        if node.device_configurations or node.outputs[0].is_graph_output():
            continue  # annotations are for these nodes
        if node.op_type == "Mul":
            _use_norm(node)
        elif node.op_type == "Add":
            _use_rotation(node, halves)
        elif node.op_type == "Reshape" and node.inputs[0] is not None and _alike(node.inputs[0], node.outputs[0]):
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
    drop_unread(model.graph)


def _use_norm(node: ir.Node) -> None:
    for normal, weight in _either_way(node):
        scaled = _producer(normal, "Mul")
        for source, inverse in () if scaled is None else _either_way(scaled):
            root = _producer(_input(_producer(inverse, "Reciprocal")), "Sqrt")
            shifted = _producer(_input(root), "Add")
            for mean, epsilon in () if shifted is None else _either_way(shifted):
                number = _number(epsilon)
                if number is None or not _is_mean_square(mean, source) or not _fits(source, weight):
                    continue
                assert scaled is not None
                _put(node, "RMSNormalization", [source, weight], ir.AttrFloat32("epsilon", number))
                return


def _is_mean_square(mean: ir.Value, source: ir.Value) -> bool:
    """Whether `mean` is the mean of the squares of `source` along its last dim."""
    node, rank = _producer(mean, "ReduceMean"), rank_of(source)
    if node is None or not rank or axes_of(node, rank) != (rank - 1,) or not node.attributes.get_int("keepdims", 1):
        return False
    square = _producer(node.inputs[0], "Pow", "Mul")
    if square is None or square.inputs[0] is not source:
        return False
    return square.inputs[1] is source if square.op_type == "Mul" else _number(square.inputs[1]) == 2


def _fits(source: ir.Value, weight: ir.Value) -> bool:
    """Whether the weight has one element for each element of the last dim of `source`, and no plan shards that dim."""
    sizes, scale = dims(source), dims(weight)
    if (
        sizes is None
        or scale is None
        or len(scale) != 1
        or not same(sizes[-1], scale[0])
        or source.dtype != weight.dtype
    ):
        return False
    producer = source.producer()
    if producer is not None and producer.op_type == "Add":  # a bias
        makers = [value.producer() for value in producer.inputs if value is not None and value.const_value is None]
        producer = makers[0] if len(makers) == 1 else None
    return producer is None or producer.op_type not in _PRODUCTS


def _use_rotation(node: ir.Node, halves: dict[ir.Value, ir.Value]) -> None:
    for plain, turned in _either_way(node):
        products = _producer(plain, "Mul"), _producer(turned, "Mul")
        if products[0] is None or products[1] is None:
            return
        for source, cosines in _either_way(products[0]):
            for swapped, sines in _either_way(products[1]):
                size, shape = _swapped_half(swapped, source), dims(source)
                angles = [_of_half(value, shape, size) for value in (cosines, sines)] if shape and size else []
                if len(angles) == 2 and all(angles):
                    tables = [_half(value, size, halves) for value in angles if value is not None]
                    _put(node, "RotaryEmbedding", [source, *tables])
                    return


def _swapped_half(swapped: ir.Value, source: ir.Value) -> int:
    """Returns half the size of heads whose halves are exchanged, the second one negated; 0 for any other value."""
    joined, shape = _producer(swapped, "Concat"), dims(source)
    if joined is None or shape is None or len(shape) != 4 or not isinstance(shape[3], int) or shape[3] % 2:
        return 0
    if len(joined.inputs) != 2 or axis_of(joined, 4, -1) != 3:
        return 0
    size, second = shape[3] // 2, _input(_producer(joined.inputs[0], "Neg"))
    right = _is_slice(second, source, size, 2 * size) and _is_slice(joined.inputs[1], source, 0, size)
    return size if right else 0


def _is_slice(value: ir.Value | None, source: ir.Value, begin: int, end: int) -> bool:
    """Whether a value is the elements `begin` to `end` of the last of four dims of `source`."""
    node = _producer(value, "Slice")
    if node is None or node.inputs[0] is not source or axes_of(node, 4, 3) != (3,):
        return False
    starts, ends, steps = (constant_ints(node, k) for k in (1, 2, 4))
    known = dims(node.outputs[0])
    is_whole = known is not None and known[3] == end - begin
    return starts == (begin,) and ends is not None and ends[0] >= end and steps in (None, (1,)) and is_whole


def _of_half(value: ir.Value, shape: tuple[int | ir.SymbolicDim, ...], size: int) -> ir.Value | None:
    """Returns the table of angles [rows, tokens, 2 * size] that heads of `shape` are multiplied by, if it is one half twice; else None."""
    node = _producer(value, "Unsqueeze")
    if node is None or axes_of(node, 4) != (1,):
        return None
    table = node.inputs[0]
    known = dims(table)
    if known is None or len(known) != 3 or known[2] != 2 * size or not same(known[1], shape[2]):
        return None
    if not same(known[0], shape[0]) and known[0] != 1:
        return None
    begin = table
    while begin is not None and (maker := begin.producer()) is not None:
        if maker.op_type == "Concat":
            twice = len(maker.inputs) == 2 and maker.inputs[0] is maker.inputs[1] and axis_of(maker, 3, -1) == 2
            return table if twice else None
        scalar = maker.op_type == "Mul" and _number(maker.inputs[1]) is not None
        begin = maker.inputs[0] if scalar or maker.op_type in ("Cos", "Sin", "Cast", "Identity") else None
    return None


def _half(table: ir.Value, size: int, halves: dict[ir.Value, ir.Value]) -> ir.Value:
    """Returns the first half of angles, computed once for all layers."""
    if table not in halves:
        node = table.producer()
        assert node is not None
        assert node.graph is not None
        bounds = [
            _constant(node.graph, f"{table.name}.{word}", n) for word, n in (("first", 0), ("half", size), ("dim", 2))
        ]
        made = _like(node, "Slice", [table, *bounds])
        known = dims(table)
        assert known is not None
        made.outputs[0].type, made.outputs[0].shape = table.type, ir.Shape([*known[:2], size])
        node.graph.insert_after(node, made)
        halves[table] = made.outputs[0]
    return halves[table]


def _constant(graph: ir.Graph, name: str, number: int) -> ir.Value:
    return add_initializer(graph, name, ir.tensor([number], dtype=ir.DataType.INT64, name=name))


def _put(node: ir.Node, kind: str, inputs: list[ir.Value], *attributes: ir.Attr) -> None:
    """Replaces a node by an op."""
    made, old = _like(node, kind, inputs, *attributes), node.outputs[0]
    new = made.outputs[0]
    new.name, old.name = old.name, None
    new.type, new.shape = old.type, old.shape
    assert node.graph is not None
    node.graph.insert_before(node, made)
    ir.convenience.replace_all_uses_with(old, new)


def _like(node: ir.Node, kind: str, inputs: list[ir.Value], *attributes: ir.Attr) -> ir.Node:
    """Returns a new node in the module of another node."""
    scope = module_of(node)
    name = f"{node.name}.{kind}" if scope is None else f"{scope}.{kind}"
    value = ir.Value(name=f"{node.outputs[0].name}.{kind}")
    return ir.Node("", kind, inputs, attributes, outputs=[value], name=name, metadata_props=dict(node.metadata_props))


def _producer(value: ir.Value | None, *kinds: str) -> ir.Node | None:
    """Returns the node that makes a value, if its op is one of `kinds`; else None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type in kinds and node.domain in ("", "ai.onnx") else None


def _input(node: ir.Node | None) -> ir.Value | None:
    return None if node is None else operand(node, 0)


def _either_way(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """The two operands of a node, in both orders."""
    first, second = node.inputs
    if first is not None and second is not None:
        yield first, second
        yield second, first


def _number(value: ir.Value | None) -> float | None:
    """Returns the number in a constant of one element; None for any other value."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def _alike(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values certainly have the same shape."""
    first, second = dims(a), dims(b)
    return first is not None and second is not None and len(first) == len(second) and all(map(same, first, second))
