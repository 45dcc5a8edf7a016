"""Models that are no sound ONNX: whatever a pass stumbles over, the message says that it is the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from equivalence import model
from onnx import ModelProto, TensorProto, helper
from partc.compiler.errors import CompileError, Problem
from partc.compiler.pipeline import compile_model

TEXT = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 400] x, bool c) => (float[n, 400] y) {
    [choice] h = If (c) <then_branch = t () => (float[n, 400] p) { p = Relu(x) }, else_branch = e () => (float[n, 400] q) { q = Tanh(x) }>
    [last] y = Relu(h) }"""


def _calls_itself(model: ModelProto) -> None:
    body = [helper.make_node("f", ["a"], ["b"], domain="own")]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    model.functions.append(helper.make_function("own", "f", ["a"], ["b"], body, opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node[1].domain, model.graph.node[1].op_type = "own", "f"


def _call_with_too_much(model: ModelProto) -> None:
    body = [helper.make_node("Relu", ["a"], ["b"])]
    model.functions.append(helper.make_function("own", "f", ["a"], ["b"], body, [helper.make_opsetid("", 21)]))
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node[1].domain, model.graph.node[1].op_type = "own", "f"
    model.graph.node[1].input.append("x")


def _body_that_is_none(model: ModelProto) -> None:
    model.graph.node[0].CopyFrom(helper.make_node("Loop", ["", "c"], ["h"], name="choice", body=3))


def _loops_in_loops(model: ModelProto) -> None:
    node = helper.make_node("Relu", ["x"], ["v"])
    for _ in range(12):
        body = helper.make_graph([node], "b", [], [helper.make_tensor_value_info("v", 1, None)])
        node = helper.make_node("Loop", ["", "c"], ["v"], body=body)
    model.graph.node.insert(0, node)


def _data_of_another_length(model: ModelProto) -> None:
    model.graph.initializer.add(name="w", data_type=1, dims=[400], raw_data=bytes(1599))
    model.graph.node[1].op_type = "Add"
    model.graph.node[1].input.append("w")


def _data_of_no_type(model: ModelProto) -> None:
    model.graph.initializer.add(name="w", data_type=0, dims=[4]).data_location = TensorProto.EXTERNAL
    model.graph.initializer[-1].external_data.add(key="location", value="w.bin")
    model.graph.node[1].op_type = "Add"
    model.graph.node[1].input.append("w")


def _branch_missing(model: ModelProto) -> None:
    del model.graph.node[0].attribute[0]


def _negative_dim(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = -7


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_branch_missing, "If 'choice' has no attribute 'then_branch', which it needs"),
        (_negative_dim, "dim 1 of input 'x' is -7"),
        (_data_of_no_type, "is not a valid ONNX model: "),
        (_calls_itself, "its functions cannot be written out: the function 'f' of 'own' calls itself"),
        (_call_with_too_much, "its functions cannot be written out where they are called"),
        (_body_that_is_none, "is not a valid ONNX model: "),
        (_loops_in_loops, "its bodies of If, Loop and Scan lie more than 60 deep in each other, or 6 loops"),
        (_data_of_another_length, "is not a valid ONNX model: "),
    ],
)
def test_the_model_is_named(tmp_path: Path, change: Callable[[ModelProto], None], expected: str) -> None:
    proto = model(TEXT)
    change(proto)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "w.bin").write_bytes(bytes(64))
    with pytest.raises(CompileError, match=r"^model\.onnx: ") as raised:
        compile_model(tmp_path / "model.onnx", None, tmp_path / "build")
    assert expected in str(raised.value)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(model(TEXT).SerializeToString().replace(b"last", b"la\xfft"))
    with pytest.raises(CompileError, match="has a name or a text that is not UTF-8"):
        compile_model(tmp_path / "model.onnx", None, tmp_path / "build")


def test_a_problem_is_told_once(tmp_path: Path) -> None:
    proto = model(TEXT)
    for attribute in proto.graph.node[0].attribute:
        attribute.g.node[0].input[0] = "ghost"
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(CompileError) as raised:
        compile_model(tmp_path / "model.onnx", None, tmp_path / "build")
    assert str(raised.value).count("'ghost', read by Relu") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\0", "model.py:1: SyntaxError: source code string cannot contain null bytes"),
        ("raise GeneratorExit", "model.py:1: GeneratorExit"),
        (
            "from partc.compiler import nn\nclass Net(nn.Module):\n    pass\nmodel = Net()\ninputs = {}",
            "model.py:4: Net has no method forward\n  help: write def forward(self, op, x)",
        ),
        ("class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd", "model.py:3: Odd"),
    ],
)
def test_a_script_that_fails_in_an_odd_way(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(CompileError) as raised:
        compile_model(tmp_path / "model.py", None, tmp_path / "build")
    assert str(raised.value).startswith(expected)


def test_of_many_problems_the_first_are_told() -> None:
    problems = [Problem("plan.yaml:1", f"unknown key 'k{at}'") for at in range(1234)]
    lines = str(CompileError(problems)).splitlines()
    assert (len(lines), lines[0], lines[-1]) == (101, "plan.yaml:1: unknown key 'k0'", "and 1,134 more problems")
