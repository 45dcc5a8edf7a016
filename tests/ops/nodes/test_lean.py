"""Backward passes made lean: no zeros to add to and nothing expanded, and the numbers are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnx_shape_inference
import pytest
from gradient_case import evaluate
from partc.compiler.autodiff.engine import Backward, differentiate_nodes
from partc.compiler.ir.local_form import over_values
from partc.compiler.ir.programs import Compute, Value
from partc.compiler.ops.node import node_key
from partc.compiler.rewrite.simplify import simplify
from partc.compiler.training.add_training import add_loss
from plan_values import loss

RANDOM = np.random.default_rng(17)
TABLE = """<ir_version: 10, opset_import: ["" : 21]>
main (int64[b] t, float[9, 4] w) => (float[b, 9] y) {
    rows = Gather(w, t)
    wt = Transpose<perm = [1, 0]>(w)
    y = MatMul(rows, wt)
}"""
TWICE = """<ir_version: 10, opset_import: ["" : 21]>
main (int64[b] t, int64[b] u, float[9, 4] w) => (float[b, 4] y) {
    one = Gather(w, t)
    other = Gather(w, u)
    y = Add(one, other)
}"""


def leaned(made: Backward, kept: Sequence[str]) -> list[ir.Node]:
    """The whole program, forward and backward, after `simplify`."""
    return simplified(
        [*made.forward, *made.early, *made.nodes], kept, {n: v.shape for n, v in made.scope.values.items()}
    )


def simplified(nodes: Sequence[ir.Node], kept: Sequence[str], shapes: Mapping[str, ir.Shape | None]) -> list[ir.Node]:
    """What `simplify` leaves of nodes: those that it has changed are others."""
    names = [one.name for node in nodes for one in (*node.inputs, *node.outputs) if one is not None and one.name]
    values = {name: Value(name) for name in (*names, *kept)}
    for name, value in values.items():
        shape = shapes.get(name)
        known = shape is not None and not any(dim is None for dim in shape)
        value.shape = (
            tuple(str(dim) if isinstance(dim, ir.SymbolicDim) else dim for dim in shape or ()) if known else None
        )
    found = simplify(over_values(nodes, None, values), [values[name] for name in kept])
    return [_node(one) for one in found if isinstance(one, Compute)]


def _node(op: Compute) -> ir.Node:
    inputs, outputs = ([ir.Value(name=str(one or "")) for one in some] for some in (op.inputs, op.outputs))
    return ir.Node(op.node.domain, op.node.op_type, inputs, list(op.node.attributes.values()), outputs=outputs)


def backward(text: str, cotangent: str, wanted: Sequence[str]) -> Backward:
    model = ir.from_onnx_text(text)
    onnx_shape_inference.infer_symbolic_shapes(model, warn_on_missing=False)
    return differentiate_nodes(list(model.graph), {cotangent: "seed"}, wanted)


def cross_entropy(batch: int | str, classes: int, **options: object) -> Backward:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [batch, classes])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "x"], ["y"])], "m", [x], [y])
    model = ir.from_proto(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    )
    add_loss(model, loss({"type": "softmax_cross_entropy", "logits": "y", "labels": "t", **options}))
    onnx_shape_inference.infer_symbolic_shapes(model, warn_on_missing=False)
    return differentiate_nodes(list(model.graph), {"loss": "seed"}, ["y"])


@pytest.mark.parametrize("batch", [6, "n"])
@pytest.mark.parametrize(
    ("options", "more"),
    [({}, []), ({"label_smoothing": 0.1}, ["Add"]), ({"weights": [1.0, 2.0, 0.5]}, [])],
    ids=["plain", "smoothed", "weighted"],
)
def test_a_cross_entropy_goes_over_the_logits_twice(
    batch: int | str, options: dict[str, object], more: list[str]
) -> None:
    made = cross_entropy(batch, 3, **options)
    nodes = leaned(made, ["loss", made.gradients["y"]])
    back = nodes[[node.outputs[0].name for node in nodes].index("loss") + 1 :]
    large = [node.op_type for node in back if len(made.scope.value(node.outputs[0].name or "").shape or ()) == 2]
    wide = [node.op_type for node in back if _is_wide(made, node, 3)]
    assert sorted(wide) == sorted(["Mul", "ScatterElements", *more]), large
    assert "ConstantOfShape" not in [node.op_type for node in back]
    feeds = {
        "x": RANDOM.normal(size=(6, 3)).astype(np.float32),
        "t": RANDOM.integers(0, 3, 6),
        "seed": np.array(1.5, np.float32),
    }
    _same(made, nodes, feeds, ["loss", made.gradients["y"]])


def _is_wide(made: Backward, node: ir.Node, classes: int) -> bool:
    shape = made.scope.value(node.outputs[0].name or "").shape
    return shape is not None and len(shape) == 2 and shape[1] == classes


def _same(made: Backward, nodes: Sequence[ir.Node], feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> None:
    whole = [*made.forward, *made.early, *made.nodes]
    want = evaluate(whole, feeds, made.constants, outputs, False)
    have = evaluate(nodes, feeds, made.constants, outputs, False)
    for name in outputs:
        np.testing.assert_allclose(have[name], want[name], rtol=1e-5, atol=1e-6)


def test_a_table_that_is_multiplied_with_too_has_its_rows_added_in() -> None:
    made = backward(TABLE, "y", ["w"])
    nodes = leaned(made, [made.gradients["w"]])
    assert [node.op_type for node in nodes].count("ScatterND") == 1
    assert not {"ConstantOfShape", "Add"} & {node.op_type for node in nodes}
    feeds = {
        "t": np.array([1, 8, 1, 3]),
        "w": RANDOM.normal(size=(9, 4)).astype(np.float32),
        "seed": RANDOM.normal(size=(4, 9)).astype(np.float32),
    }
    _same(made, nodes, feeds, [made.gradients["w"]])


def test_rows_looked_up_twice_are_added_to_one_set_of_zeros() -> None:
    made = backward(TWICE, "y", ["w"])
    nodes = leaned(made, [made.gradients["w"]])
    assert [node.op_type for node in nodes].count("ConstantOfShape") == 1
    feeds = {
        "t": np.array([1, 8, 1]),
        "u": np.array([1, 0, 2]),
        "w": RANDOM.normal(size=(9, 4)).astype(np.float32),
        "seed": RANDOM.normal(size=(3, 4)).astype(np.float32),
    }
    _same(made, nodes, feeds, [made.gradients["w"]])


def nodes_of(text: str) -> tuple[list[ir.Node], dict[str, ir.Shape | None]]:
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    onnx_shape_inference.infer_symbolic_shapes(model, warn_on_missing=False)
    values = [*model.graph.inputs, *(out for node in model.graph for out in node.outputs)]
    return list(model.graph), {value.name or "": value.shape for value in values}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (
            "m (float[1] v, float[3] x) => (float[3] y) <int64[1] s = {3}> { e = Expand(v, s) \n y = Mul(e, x) }",
            ["y", "e"],
        ),
        ("m (float[1] v, float[1] x) => (float[3] y) <int64[1] s = {3}> { e = Expand(v, s) \n y = Mul(e, x) }", ["y"]),
        ("m (float[1] v, float[3] x) => (float[3] y) <int64[1] s = {3}> { e = Expand(v, s) \n y = Max(e, x) }", ["y"]),
        ("m (float[1] v) => (float[3] y) <int64[1] s = {3}> { e = Expand(v, s) \n y = Mul(e, e) }", ["y"]),
        (
            "m (int64[2] i, float[2] u, float[1] x) => (float[3] y) <int64[1] s = {3}> "
            '{ z = ConstantOfShape(s) \n d = ScatterElements<reduction = "add">(z, i, u) \n y = Add(d, x) }',
            ["y"],
        ),
        (
            "m (int64[2] i, float[2] u, float[3] x) => (float[3] y) <int64[1] s = {3}> "
            "{ z = ConstantOfShape(s) \n d = ScatterElements(z, i, u) \n y = Add(d, x) }",
            ["y"],
        ),
        (
            "m (int64[2] i, float[2] u, float[3] x) => (float[3] y) <int64[1] s = {3}> "
            '{ z = ConstantOfShape<value = float[1] {1.0}>(s) \n d = ScatterElements<reduction = "add">(z, i, u) \n y = Add(d, x) }',
            ["y"],
        ),
    ],
    ids=["read elsewhere", "nothing as large", "another op", "twice", "smaller sum", "last one wins", "no zeros"],
)
def test_what_would_change_numbers_is_left(text: str, kept: list[str]) -> None:
    nodes, shapes = nodes_of(text)
    assert [node_key(one) for one in simplified(nodes, kept, shapes)] == [node_key(one) for one in nodes]
