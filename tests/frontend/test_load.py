"""Reading `.onnx` files: what is taken, and what is refused with which words."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import model, same_as_whole
from onnx import TensorProto, helper, numpy_helper
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.onnx_file import from_proto


def saved(proto: onnx.ModelProto, folder: Path, **external: object) -> Path:
    path = folder / "model.onnx"
    onnx.save(proto, path, **external)
    return path


def linear(opset: int = 21, ir_version: int = 10) -> onnx.ModelProto:
    weight = np.arange(15, dtype=np.float32).reshape(5, 3)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")],
        "g",
        [helper.make_tensor_value_info("x", 1, ["batch", 5])],
        [helper.make_tensor_value_info("y", 1, ["batch", 3])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, ir_version=ir_version, opset_imports=[helper.make_opsetid("", opset)])


def refused(path: Path) -> str:
    with pytest.raises(CompileError) as error:
        load(path)
    return str(error.value)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "model.onnx")
    (tmp_path / "model.onnx").write_bytes(b"not a protobuf at all")
    assert "is not an ONNX model" in refused(tmp_path / "model.onnx")
    (tmp_path / "model.onnx").write_bytes(b"")
    assert "is not an ONNX model" in refused(tmp_path / "model.onnx")
    whole = linear().SerializeToString()
    (tmp_path / "model.onnx").write_bytes(whole[: len(whole) // 2])
    assert "model.onnx" in refused(tmp_path / "model.onnx")
    assert "ends in .onnx or .py" in refused(tmp_path / "model.txt")


@pytest.mark.parametrize("opset", [1, 5, 27, 28])
def test_opsets_that_are_refused(opset: int, tmp_path: Path) -> None:
    assert f"opset {opset} is outside of 6 to 26" in refused(saved(linear(opset), tmp_path))


@pytest.mark.parametrize("opset", [6, 7, 9, 13, 18, 23, 26])
def test_opsets_that_run_as_they_are(opset: int) -> None:
    x = np.random.default_rng(0).standard_normal((4, 5), dtype=np.float32)
    same_as_whole(linear(opset), "ranks: 2\nplacement: {mm: 1}\n", {"x": x}, rtol=0, atol=0)


def test_unknown_ops_are_all_named_at_once(tmp_path: Path) -> None:
    proto = linear()
    proto.graph.node.append(helper.make_node("Frobnicate", ["y"], ["a"], name="one"))
    proto.graph.node.append(helper.make_node("Frobnicate", ["a"], ["b"], name="two"))
    proto.graph.node.append(helper.make_node("Thing", ["b"], ["c"], name="three", domain="com.example"))
    proto.opset_import.append(helper.make_opsetid("com.example", 1))
    text = refused(saved(proto, tmp_path))
    assert "does not know the op Frobnicate (2 times, first 'one')" in text
    assert "com.example::Thing" in text
    assert "it knows no domain 'com.example'" in text


def test_undefined_and_doubly_defined_values(tmp_path: Path) -> None:
    proto = linear()
    proto.graph.node.append(helper.make_node("Add", ["y", "ghost"], ["z"], name="add"))
    assert "'ghost', read by Add 'add', is defined nowhere" in refused(saved(proto, tmp_path))


def test_external_weights_missing_truncated_or_outside(tmp_path: Path) -> None:
    path = saved(linear(), tmp_path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    load(path)
    data = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(data[:-1])
    assert "'weights.bin' is truncated: the weight 'w' ends at byte 60 of 59" in refused(path)
    (tmp_path / "weights.bin").unlink()
    assert "is missing" in refused(path)
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = "../weights.bin"
    (tmp_path.parent / "weights.bin").write_bytes(data)
    path.write_bytes(proto.SerializeToString())
    assert "points outside of the model's folder" in refused(path)


def test_external_weights_are_placed_and_run(tmp_path: Path) -> None:
    path = saved(linear(), tmp_path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    source = load(path)
    assert type(source.model.graph.initializers["w"].const_value).__name__ == "ExternalTensor"


def test_weights_listed_as_inputs_are_weights() -> None:
    proto = linear(9, 3)
    proto.graph.input.append(helper.make_tensor_value_info("w", 1, [5, 3]))
    x = np.random.default_rng(0).standard_normal((4, 5), dtype=np.float32)
    program = same_as_whole(proto, "ranks: 2\nplacement: {mm: 1}\n", {"x": x}, rtol=0, atol=0)
    assert [value.name for value in program.model.graph.inputs] == ["x"]


@pytest.mark.parametrize("inner", [21, 18])
def test_functions_are_inlined_whatever_their_opset(inner: int) -> None:
    function = helper.make_function(
        "local",
        "Twice",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["t"], name="add"), helper.make_node("Relu", ["t"], ["b"], name="relu")],
        [helper.make_opsetid("", inner)],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Twice", ["x"], ["h"], name="f", domain="local"),
            helper.make_node("Twice", ["h"], ["y"], name="g", domain="local"),
        ],
        "g",
        [helper.make_tensor_value_info("x", 1, ["batch", 5])],
        [helper.make_tensor_value_info("y", 1, ["batch", 5])],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    proto = helper.make_model(graph, ir_version=10, functions=[function], opset_imports=imports)
    x = np.random.default_rng(0).standard_normal((4, 5), dtype=np.float32)
    program = same_as_whole(proto, "ranks: 2\n", {"x": x}, rtol=0, atol=0)
    assert [node.op_type for node in program.model.graph] == ["Add", "Relu", "Add", "Relu"]
    assert len(set(program.paths.values())) == 4


def test_contrib_ops_run() -> None:
    graph = helper.make_graph(
        [
            helper.make_node(
                "FusedMatMul", ["x", "x"], ["h"], name="fused", domain="com.microsoft", transB=1, alpha=0.5
            ),
            helper.make_node("Gelu", ["h"], ["y"], name="gelu", domain="com.microsoft"),
        ],
        "g",
        [helper.make_tensor_value_info("x", 1, ["batch", 5])],
        [helper.make_tensor_value_info("y", 1, ["batch", "batch"])],
    )
    proto = helper.make_model(
        graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    )
    x = np.random.default_rng(0).standard_normal((4, 5), dtype=np.float32)
    same_as_whole(proto, "ranks: 2\nplacement: {fused: 1, gelu: 0}\n", {"x": x}, rtol=1e-6, atol=1e-6)


def test_nodes_out_of_order_are_sorted() -> None:
    proto = model("""<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 5] x) => (float[batch, 5] y) {
        [a] h = Relu(x)
        [b] y = Neg(h)
    }""")
    first, second = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend([second, first])
    program = same_as_whole(proto, "ranks: 2\nplacement: {a: 1}\n", {"x": np.ones((2, 5), np.float32)}, rtol=0, atol=0)
    assert [node.name for node in program.model.graph] == ["a", "b"]


@pytest.mark.parametrize(
    "dtype",
    [
        TensorProto.FLOAT16,
        TensorProto.BFLOAT16,
        TensorProto.INT8,
        TensorProto.BOOL,
        TensorProto.FLOAT8E4M3FN,
        TensorProto.INT4,
    ],
)
def test_weights_of_any_type_keep_their_bits(dtype: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0).integers(0, 2, (33, 17)).astype(np.float32)
    weight = helper.make_tensor("w", dtype, random.shape, random.ravel())
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["w"], ["c"], name="cast", to=1),
            helper.make_node("Mul", ["x", "c"], ["y"], name="mul"),
        ],
        "g",
        [helper.make_tensor_value_info("x", 1, [33, 17])],
        [helper.make_tensor_value_info("y", 1, [33, 17])],
        [weight],
    )
    proto = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    x = np.random.default_rng(1).standard_normal((33, 17), dtype=np.float32)
    same_as_whole(proto, "ranks: 2\nplacement: {mul: 1}\n", {"x": x}, rtol=0, atol=0)


def test_a_call_of_a_function_is_a_module() -> None:
    """Its name is the node's, also after it is inlined, within calls of calls, and where two functions name nodes alike."""
    opset, local = helper.make_opsetid("", 21), helper.make_opsetid("local", 1)
    inner = helper.make_function(
        "local",
        "Inner",
        ["a"],
        ["b"],
        [helper.make_node("Neg", ["a"], ["t"], "op"), helper.make_node("Relu", ["t"], ["b"])],
        [opset],
    )
    calls = [
        helper.make_node("Inner", ["a"], ["m"], "deep", domain="local"),
        helper.make_node("Inner", ["m"], ["n"], domain="local"),
    ]
    outer = helper.make_function(
        "local", "Outer", ["a"], ["b"], [*calls, helper.make_node("Abs", ["n"], ["b"], "op")], [opset, local]
    )
    graph = helper.make_graph(
        [
            helper.make_node("Outer", ["x"], ["h"], "block1", domain="local"),
            helper.make_node("Outer", ["h"], ["i"], "block2", domain="local"),
            helper.make_node("Inner", ["i"], ["j"], domain="local"),
            helper.make_node("Sqrt", ["j"], ["y"], "op"),
        ],
        "g",
        [helper.make_tensor_value_info("x", 1, ["batch", 5])],
        [helper.make_tensor_value_info("y", 1, ["batch", 5])],
    )
    proto = helper.make_model(graph, ir_version=10, functions=[inner, outer], opset_imports=[opset, local])
    x = np.random.default_rng(0).standard_normal((4, 5), dtype=np.float32)
    plan = "ranks: 3\nplacement: {block2: 1, '*.deep': 2, Inner_0: 2}\n"
    program = same_as_whole(proto, plan, {"x": x}, rtol=0, atol=0)
    assert {path: program.placement[node].ranks for node, path in program.paths.items()} == {
        "block1.deep.op": (2,),
        "block1.deep.Relu": (2,),
        "block1.Inner_0.op": (2,),
        "block1.Inner_0.Relu": (2,),
        "block1.op": (2,),
        "block2.deep.op": (2,),
        "block2.deep.Relu": (2,),
        "block2.Inner_0.op": (1,),
        "block2.Inner_0.Relu": (1,),
        "block2.op": (1,),
        "Inner_0.op": (2,),
        "Inner_0.Relu": (2,),
        "op": (2,),
    }


def test_a_split_of_more_outputs_than_it_says_ends_in_a_message(tmp_path: Path) -> None:
    """onnx's inference of shapes ends the process at one, also in a body."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (bool c, float[4, 6] x) => (float[2, 6] y) { y = If (c) <
        then_branch = t () => (float[2, 6] a) { a, b = Split <axis = 0, num_outputs = 1> (x) },
        else_branch = e () => (float[2, 6] d) { d, f = Split <axis = 0, num_outputs = 2> (x) }> }"""
    with pytest.raises(CompileError, match="Split 'a': its num_outputs is 1, and it has 2 outputs"):
        from_proto(onnx.parser.parse_model(text), tmp_path / "m.onnx")
