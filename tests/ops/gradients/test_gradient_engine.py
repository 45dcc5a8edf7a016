"""The engine of gradients: terms are added, broadcasting is undone at the edge, and nothing is made or kept that nobody needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from gradient_case import cut_faults, evaluate, faults, proof
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.autodiff.engine import Backward, differentiate_nodes
from partc.compiler.ops import registry
from partc.compiler.ops.registry import GradientRule

FLOAT = ir.TensorType(ir.DataType.FLOAT)


def value(name: str, *dims: int | str) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(dims), type=FLOAT)


def node(op_type: str, inputs: list[ir.Value | None], output: str, **attributes: object) -> ir.Node:
    made = [ir.Value(name=output)]
    return ir.Node("", op_type, inputs, ir.convenience.convert_attributes(attributes), outputs=made)


def emitted(backward: Backward) -> list[str]:
    return [one.op_type for one in backward.nodes]


def test_cotangents_of_a_value_read_twice_are_added() -> None:
    x = value("x", 3)
    square = node("Mul", [x, x], "s")
    total = node("Add", [square.outputs[0], x], "y")
    backward = differentiate_nodes([square, total], {"y": "dy"}, ["x"])
    assert backward.gradients == {"x": "x.grad"}
    feeds = {"x": np.array([1.0, -2.0, 3.0], np.float32), "dy": np.array([1.0, 2.0, 0.5], np.float32)}
    nodes = [*backward.forward, *backward.nodes]
    made = evaluate(nodes, feeds, backward.constants, ["x.grad"])["x.grad"]
    assert made.tolist() == [3.0, -6.0, 3.5]


def test_only_what_is_wanted_is_made() -> None:
    a, b = value("a", 4, 3), value("b", 3, 5)
    backward = differentiate_nodes([node("MatMul", [a, b], "y")], {"y": "dy"}, ["b"])
    assert emitted(backward) == ["Gemm"]
    assert list(backward.gradients) == ["b"]


def test_what_no_wanted_value_reaches_is_left_alone() -> None:
    x, w = value("x", 3), value("w", 3)
    before = node("Exp", [x], "h")
    backward = differentiate_nodes([before, node("Mul", [before.outputs[0], w], "y")], {"y": "dy"}, ["w"])
    assert emitted(backward) == ["Mul"]


def test_names_come_from_the_node() -> None:
    a, b = value("a", 2, 4, 3), value("b", 2, 3, 5)
    backward = differentiate_nodes([node("MatMul", [a, b], "h")], {"h": "dh"}, ["a", "b"])
    assert [one.outputs[0].name for one in backward.nodes] == [
        "h.grad.Transpose",
        "h.grad.MatMul",
        "h.grad.Transpose2",
        "h.grad.MatMul2",
    ]


@pytest.mark.parametrize(
    ("x", "y", "ops"),
    [
        ((3,), (3,), []),
        ((1, 3), (5, 3), ["ReduceSum"]),
        ((3,), (5, 3), ["ReduceSum"]),
        ((1, 3), (2, 5, 3), ["ReduceSum", "ReduceSum"]),
        (("b", 3), ("b", 3), []),
        ((1, 3), ("b", 3), ["ReduceSum"]),
        ((), ("b", 3), ["ReduceSum"]),
    ],
    ids=str,
)
def test_broadcasting_is_undone_by_shapes_alone(
    x: tuple[int | str, ...], y: tuple[int | str, ...], ops: list[str]
) -> None:
    backward = differentiate_nodes([node("Add", [value("x", *x), value("o", *y)], "y")], {"y": "dy"}, ["x"])
    assert emitted(backward) == ops
    assert backward.early == []


@pytest.mark.parametrize("x", [(1, 3), (5, 3), (1, 1), (3,)], ids=str)
def test_broadcasting_is_undone_by_a_run_where_shapes_do_not_tell(x: tuple[int, ...]) -> None:
    dims = [f"d{k}" for k in range(len(x))]
    add = node("Add", [value("x", *dims), value("o", "m", "n")], "y")
    backward = differentiate_nodes([add], {"y": "dy"}, ["x"])
    assert [one.outputs[0].name for one in backward.early] == ["x.shape"]
    assert not any(one.name == "x" for each in backward.nodes for one in each.inputs if one is not None)
    dy = np.arange(15, dtype=np.float32).reshape(5, 3)
    feeds = {"x": np.zeros(x, np.float32), "o": np.zeros((5, 3), np.float32), "dy": dy}
    nodes = [*backward.forward, *backward.early, *backward.nodes]
    name = backward.gradients["x"]
    made = evaluate(nodes, feeds, backward.constants, [name])[name]
    padded = (1,) * (2 - len(x)) + x
    axes = tuple(k for k in (0, 1) if padded[k] == 1)
    assert made.shape == x
    assert made.tolist() == dy.sum(axis=axes, keepdims=True).reshape(x).tolist()


def test_an_output_that_a_rule_needs_is_added_to_the_forward_node() -> None:
    pool = node("MaxPool", [value("x", 1, 2, 6, 9)], "y", kernel_shape=[3, 3], strides=[3, 3])
    backward = differentiate_nodes([pool], {"y": "dy"}, ["x"])
    assert [one.name for one in backward.forward[0].outputs] == ["y", "y.output1"]
    assert emitted(backward) == ["MaxUnpool"]


def test_nothing_flows_through_a_comparison() -> None:
    x = value("x", 3)
    mask = node("Greater", [x, value("o", 3)], "m")
    backward = differentiate_nodes([mask, node("Cast", [mask.outputs[0]], "y", to=1)], {"y": "dy"}, ["x"])
    assert backward.gradients == {}


def test_an_op_without_a_rule_is_refused() -> None:
    with pytest.raises(NoGradient, match="Det has no gradient"):
        differentiate_nodes([node("Det", [value("x", 3, 3)], "y")], {"y": "dy"}, ["x"])


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"kernel_shape": [3], "strides": [2], "dilations": [2]}, "SAME_UPPER with dilation 2"),
        ({"kernel_shape": [1], "strides": [3]}, "SAME_UPPER with kernel 1 and stride 3 over 12"),
    ],
)
def test_automatic_padding_that_onnxruntime_has_otherwise_is_refused(attributes: dict[str, object], why: str) -> None:
    pool = node("AveragePool", [value("x", 2, 3, 12)], "y", auto_pad="SAME_UPPER", **attributes)
    with pytest.raises(NoGradient, match=why):
        differentiate_nodes([pool], {"y": "dy"}, ["x"])


FORMS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, object], str]] = [
    ((2, 9, 8, 8), (4, 9, 1, 1), {}, "MatMul"),
    ((2, 6, 14, 14), (16, 6, 5, 5), {}, "Conv"),
    ((2, 3, 14, 14), (16, 3, 3, 3), {}, "Conv MatMul"),
    ((2, 32, 14, 14), (32, 32, 3, 3), {}, "Gemm"),
    ((2, 32, 56, 56), (32, 32, 3, 3), {}, "MatMul"),
    ((2, 9, 8, 8), (9, 1, 3, 3), {"group": 9}, "Mul"),
    ((2, 8, 8, 8), (6, 4, 3, 3), {"group": 2}, "Conv MatMul"),
]


@pytest.mark.parametrize(("x", "w", "attributes", "ops"), FORMS, ids=str)
def test_the_form_of_a_weight_gradient_follows_its_shape(
    x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, object], ops: str
) -> None:
    backward = differentiate_nodes(
        [node("Conv", [value("x", *x), value("w", *w)], "y", **attributes)], {"y": "dy"}, ["w"]
    )
    found = {"Conv", "Gemm", "MatMul", "Mul"} & set(emitted(backward))
    assert found == set(ops.split())


WRONG = {
    "a sign lost": ("Sub", [(6, 12), (12,)], lambda g, dy, a, b: (dy, dy)),
    "operands exchanged": (
        "MatMul",
        [(6, 6), (6, 6)],
        lambda g, dy, a, b: (g.MatMul(dy, g.mT(a)), g.MatMul(g.mT(b), dy)),
    ),
    "a term forgotten": ("Softmax", [(6, 12)], lambda g, dy, x: g.Mul(dy, g.output(0))),
}


def with_gradient(monkeypatch: pytest.MonkeyPatch, op_type: str, rule: GradientRule) -> None:
    """The op table with another gradient of an op."""
    registry.load()
    monkeypatch.setitem(
        registry.TABLE, ("", op_type), replace(registry.TABLE["", op_type], gradients=registry.Gradients(rule))
    )


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op_type, shapes, rule = WRONG[name]
    with_gradient(monkeypatch, op_type, rule)
    assert faults(proof(op_type, shapes), dynamic=False) != []


def test_a_gradient_that_is_wrong_on_shards_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_the_whole(g: GradientBuilder, dy: str, x: str) -> str:
        return g.Expand(g.Div(dy, g.constant(24, dy)), g.shape_of(x))

    with_gradient(monkeypatch, "GlobalAveragePool", over_the_whole)
    this = proof("GlobalAveragePool", [(2, 6, 4, 6)])
    assert faults(this, dynamic=False) == []
    assert cut_faults(this) != []
