"""Paths of nodes and the names that follow from them, for every kind of builder."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from partc.compiler.frontend.names import ONNXSCRIPT_SCOPES, TORCH_SCOPES, derive_names, node_paths
from partc.compiler.rewrite.opset import converted


def chain(*nodes: tuple[str, str | None, dict[str, str]]) -> ir.Model:
    """A model whose nodes (op, name, metadata) each read the one before."""
    x = ir.val("x", ir.DataType.FLOAT, ["n"])
    made: list[ir.Node] = []
    for op, name, metadata in nodes:
        made.append(ir.node(op, [made[-1].outputs[0] if made else x], name=name or "", metadata_props=metadata))
    graph = ir.Graph([x], [made[-1].outputs[0]], nodes=made, opset_imports={"": 21}, name="g")
    graph.outputs[0].name = "y"
    return ir.Model(graph, ir_version=10)


def paths(model: ir.Model) -> list[str]:
    return list(node_paths(model).values())


def script(*scopes: str) -> dict[str, str]:
    return {ONNXSCRIPT_SCOPES: repr(list(scopes))}


def torch(*scopes: str) -> dict[str, str]:
    return {TORCH_SCOPES: repr(list(scopes))}


def test_plain_names_stand_and_missing_ones_are_counted_by_type() -> None:
    model = chain(
        ("Relu", None, {}), ("Relu", "Relu_1", {}), ("Neg", "", {}), ("Relu", None, {}), ("Abs", "/a/b.c", {})
    )
    assert paths(model) == ["Relu_0", "Relu_1", "Neg_0", "Relu_2", "/a/b.c"]


def test_plain_names_that_come_again_get_a_number() -> None:
    model = chain(*(("Relu", name, {}) for name in ("a", "a", "a_1", "a", "b")))
    assert paths(model) == ["a", "a_1", "a_1_1", "a_2", "b"]


def test_onnxscript_scopes_without_the_root_and_without_counters() -> None:
    model = chain(
        ("MatMul", "net/fc1/MatMul_node_0", script("net", "fc1")),
        ("Relu", "net/fc1/MatMul_node_1", script("net", "fc1")),
        ("MatMul", "net/fc1/MatMul_node_2", script("net", "fc1")),
        ("Add", "residual", script("net", "fc1")),
        ("Add", "layers.0/0/Add_node_4", script("", "layers.0", "", "0")),
        ("Neg", "Neg_node_5", script("net")),
        ("Neg", None, script("net", "fc2")),
        ("Neg", "fc1/inlined_node_7/Neg_node_0", {}),
    )
    assert paths(model) == [
        "fc1.MatMul",
        "fc1.MatMul_1",
        "fc1.MatMul_2",
        "fc1.residual",
        "layers.0.0.Add",
        "Neg",
        "fc2.Neg",
        "fc1.inlined.Neg",
    ]


def test_a_given_name_keeps_it_before_derived_ones() -> None:
    model = chain(("Relu", "m/Relu_node_0", script("", "m")), ("Neg", "Relu", script("", "m")))
    assert paths(model) == ["m.Relu_1", "m.Relu"]


def test_torch_scopes_end_in_the_nodes_own_name() -> None:
    model = chain(
        ("Conv", "node_conv2d", torch("", "conv1", "conv2d")),
        ("Gemm", "node_linear", torch("", "layers.0", "layers.0.fc", "linear")),
        ("Split", "node_Split_47", {}),
        ("Neg", "n0", torch("", "layers.0", "getitem")),
        ("Relu", "node_relu", torch("", "relu", "relu")),
        ("Relu", "node_relu_1", torch("", "relu@1", "relu_1")),
        ("Add", "node_add_9", torch("", "add_9")),
        ("Add", "node_add_10", torch("", "add_10")),
    )
    assert paths(model) == [
        "conv1.Conv",
        "layers.0.fc.Gemm",
        "layers.0.Split",
        "layers.0.Neg",
        "relu.Relu",
        "relu.Relu_1",
        "Add",
        "Add_1",
    ]


def test_nodes_that_lost_their_scope_join_what_their_neighbours_share() -> None:
    lost = torch("_empty_nn_module_stack_from_metadata_hook", "sym_size")
    model = chain(
        ("Neg", "node_a", torch("", "body.0", "body.0.up", "a")),
        ("Shape", "node_Shape_0", lost),
        ("Squeeze", "node_Squeeze_1", {}),
        ("Neg", "node_b", torch("", "body.0", "body.0.down", "b")),
        ("Shape", "node_Shape_2", {}),
        ("Neg", "node_c", torch("", "head", "c")),
    )
    assert paths(model) == ["body.0.up.Neg", "body.0.Shape", "body.0.Squeeze", "body.0.down.Neg", "Shape", "head.Neg"]


@pytest.mark.parametrize("scopes", ["[]", "not a list", "['']", "[3"])
def test_broken_metadata_is_no_error(scopes: str) -> None:
    assert len(paths(chain(("Neg", "a", {ONNXSCRIPT_SCOPES: scopes}), ("Neg", "b", {TORCH_SCOPES: scopes})))) == 2
    assert len(paths(chain(("Neg", "a", {ONNXSCRIPT_SCOPES: scopes}), ("Neg", "b", script("", "m"))))) == 2


@pytest.mark.parametrize("scopes", [script, lambda *parts: torch(*parts, "fx")])
def test_derived_names_give_the_same_paths_again(scopes) -> None:  # type: ignore[no-untyped-def]
    model = chain(
        *(
            (op, f"{op}_node_{k}", scopes("", *module))
            for k, (op, module) in enumerate([("Neg", ["m"]), ("Neg", ["m"]), ("Abs", []), ("Abs", []), ("Neg", ["m"])])
        )
    )
    derive_names(model)
    assert [node.name for node in model.graph] == ["m.Neg", "m.Neg_1", "Abs", "Abs_1", "m.Neg_2"]
    assert paths(model) == [node.name for node in model.graph]


def test_derived_value_names_leave_the_ports_alone_and_never_clash() -> None:
    x = ir.val("Neg", ir.DataType.FLOAT, [4])
    weight = ir.val("Split.0", ir.DataType.FLOAT, [4], const_value=ir.tensor([1.0, 2.0, 3.0, 4.0]))
    axes = ir.val("const_7", ir.DataType.INT64, [1], const_value=ir.tensor([0]))
    one = ir.node("Neg", [x], metadata_props=script(""), name="Neg_node_0")
    two = ir.node(
        "Split", [one.outputs[0]], {"num_outputs": 2}, num_outputs=2, metadata_props=script(""), name="Split_node_1"
    )
    three = ir.node("Add", [two.outputs[0], weight], metadata_props=script(""), name="Add_node_2")
    four = ir.node("Unsqueeze", [three.outputs[0], axes], metadata_props=script("", "m"), name="m/Unsqueeze_node_3")
    four.outputs[0].name = "y"
    graph = ir.Graph(
        [x], [four.outputs[0]], nodes=[one, two, three, four], initializers=[weight, axes], opset_imports={"": 21}
    )
    derive_names(ir.Model(graph, ir_version=10), [axes])
    assert [value.name for node in graph for value in node.outputs] == ["Neg_1", "Split.0_1", "Split.1", "Add", "y"]
    assert list(graph.initializers) == ["Split.0", "m.Unsqueeze.axes"]
    assert x.name == "Neg"


@pytest.mark.parametrize(
    ("opset", "text"),
    [
        (18, "[one] a = GroupNormalization <num_groups = 2> (x, s, s)  [last] y = Relu (a)"),
        (9, "[one] a = Upsample (x, sizes)  [last] y = Relu (a)"),
    ],
)
def test_a_node_that_an_opset_makes_another_op_keeps_its_name(opset: int, text: str) -> None:
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[2, 4, 3] x) => (float[2, 4, m] y) <float[2] s = {{1, 2}}, float[3] sizes = {{1, 1, 2}}> {{ {text} }}""")
    assert {"one", "last"} <= {*paths(converted(ir.from_proto(proto), "m.onnx", 21))}
