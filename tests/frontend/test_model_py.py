"""What a model.py may define, and the graph that loading it gives."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from model_py import NET, WHOLE, load
from partc.compiler import place
from partc.compiler.errors import CompileError
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.python import load_python
from partc.compiler.frontend.source import Source
from partc.compiler.ir.declared import Placement

SAMPLE = Path(__file__).parents[2] / "samples" / "lenet"


def run(model: ir.Model, **inputs: np.ndarray) -> list[np.ndarray]:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def ports(values: list[ir.Value]) -> dict[str, str]:
    return {str(value.name): f"{value.dtype} {value.shape}" for value in values}


def test_a_module_with_its_inputs(tmp_path: Path) -> None:
    source = load(tmp_path, WHOLE)
    graph = source.model.graph
    assert list(node_paths(source.model).values()) == ["fc1.Gemm", "Relu", "fc2.Gemm"]
    assert [node.name for node in graph] == ["fc1.Gemm", "Relu", "fc2.Gemm"]
    assert [value.name for node in graph for value in node.outputs] == ["fc1.Gemm", "Relu", "output"]
    assert list(graph.initializers) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert ports(graph.inputs) == {"x": "FLOAT [batch,5]"}
    assert graph.name == "Net"
    x = np.ones((2, 5), np.float32)
    w = {name: value.const_value.numpy() for name, value in graph.initializers.items() if value.const_value}
    expected = np.maximum(x @ w["fc1.weight"].T + w["fc1.bias"], 0) @ w["fc2.weight"].T + w["fc2.bias"]
    np.testing.assert_allclose(run(source.model, x=x)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        f'{NET}\ndef build():\n    return Net(), {{"x": Input(["batch", 5])}}',
        f'{NET}\ndef build(width=5):\n    return Net()\ninputs = [["batch", 5]]',
        f'{NET}\nimport numpy as np\nmodel = Net()\ninputs = {{"x": np.zeros((2, 5), np.float32)}}',
    ],
)
def test_other_ways_to_say_the_same(tmp_path: Path, text: str) -> None:
    source = load(tmp_path, text)
    assert list(node_paths(source.model).values()) == ["fc1.Gemm", "Relu", "fc2.Gemm"]


GRAPH = """
import onnx
from onnx import helper as h
inputs = [h.make_tensor_value_info("x", 1, ["batch", 5])]
nodes = [h.make_node("Relu", ["x"], ["a"]), h.make_node("Relu", ["a"], ["y"], name="last")]
graph = h.make_graph(nodes, "g", inputs, [h.make_tensor_value_info("y", 1, ["batch", 5])])
model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)
"""


@pytest.mark.parametrize("text", [GRAPH, GRAPH + "import onnx_ir\nmodel = onnx_ir.from_proto(model)\n"])
def test_finished_graphs_keep_their_names(tmp_path: Path, text: str) -> None:
    source = load(tmp_path, text + "batch = Symbol(divisor=4)\n")
    assert list(node_paths(source.model).values()) == ["Relu_0", "last"]
    assert [node.name or "" for node in source.model.graph] == ["", "last"]
    assert {name: symbol.divisor for name, symbol in source.declared.symbols.items()} == {"batch": 4}


RETURNS = """
class Net(nn.Module):
    def forward(self, op, x):
        a = op.Neg(x)
        return RETURNED

model = Net()
inputs = {"x": [2, 3]}
"""


def test_outputs_are_named_by_the_file_by_dict_keys_or_by_number(tmp_path: Path) -> None:
    def outputs(returned: str, extra: str = "") -> list[str | None]:
        text = RETURNS.replace("RETURNED", returned)
        return [value.name for value in load(tmp_path, text + extra).model.graph.outputs]

    assert outputs("a") == ["output"]
    assert outputs("a, op.Abs(a)") == ["output_0", "output_1"]
    assert outputs("{'p': a, 'q': op.Abs(a)}") == ["p", "q"]
    assert outputs("[a, op.Abs(a)]", 'outputs = ["u", "v"]') == ["u", "v"]
    assert outputs("x, a, a") == ["output_0", "output_1", "output_2"]


def test_an_input_and_a_value_twice_leave_through_an_identity(tmp_path: Path) -> None:
    text = RETURNS.replace("RETURNED", "x, a, a")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for actual, expected in zip(run(load(tmp_path, text).model, x=x), (x, -x, -x), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_paths_of_lists_reused_modules_named_nodes_and_containers(tmp_path: Path) -> None:
    text = """
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(5, 5)
            self.act = nn.ReLU()

        def forward(self, op, x):
            return op.Add(x, self.act(op, self.up(op, x)), _name="residual")

    class Net(nn.Module):
        def __init__(self):
            super().__init__("net")
            self.layers = nn.ModuleList([Block(), nn.Sequential(Block(), nn.Tanh())])
            self.grid = nn.ModuleList([nn.ModuleList([nn.Tanh()])])

        def forward(self, op, x):
            for layer in self.layers:
                x = layer(op, x)
            x = self.layers[0](op, x)
            x = self.grid[0][0](op, x)
            return op.Mul(op.Add(x, 1.0), [0.5, 1.0, 2.0, 4.0, 8.0])

    model = Net()
    inputs = {"x": [3, 5]}
    for module in (model.layers[0], model.layers[1], model.layers[1][0].act, model.grid[0][0], model):
        place(module, 1)
    """
    source = load(tmp_path, text)
    assert list(node_paths(source.model).values()) == [
        "layers.0.up.Gemm",
        "layers.0.act.Relu",
        "layers.0.residual",
        "layers.1.0.up.Gemm",
        "layers.1.0.act.Relu",
        "layers.1.0.residual",
        "layers.1.1.Tanh",
        "layers.0.up.Gemm_1",
        "layers.0.act.Relu_1",
        "layers.0.residual_1",
        "grid.0.0.Tanh",
        "Add",
        "Mul",
    ]
    assert list(source.model.graph.initializers)[-4:] == [
        "layers.1.0.up.weight",
        "layers.1.0.up.bias",
        "Add.B",
        "Mul.B",
    ]
    placed = ["layers.0", "layers.1", "layers.1.0.act", "grid.0.0", "**"]
    assert [placement.pattern for placement in source.declared.placements] == placed


def test_tied_weights_are_one_and_unused_ones_none(tmp_path: Path) -> None:
    text = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 5)
            self.head = nn.Linear(5, 11, bias=False)
            self.head.weight = self.embed.weight
            self.unused = nn.Linear(5, 5)

        def forward(self, op, tokens):
            return self.head(op, self.embed(op, tokens))

    model = Net()
    inputs = {"tokens": Input(["batch", "seq"], "int64")}
    """
    assert list(load(tmp_path, text).model.graph.initializers) == ["embed.weight"]


def test_bodies_are_named_below_their_node(tmp_path: Path) -> None:
    text = """
    import onnx_ir as ir

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 5)

        def forward(self, op, x):
            yes = op.builder.subgraph(lambda o: self.fc(o, o.Neg(o.Neg(x))), [], [ir.Value(name="yes")])
            no = op.builder.subgraph(lambda o: o.Abs(x), [], [ir.Value(name="no")])
            return op.If(op.Greater(op.ReduceSum(x, keepdims=0), 0.0), then_branch=yes, else_branch=no)

    model = Net()
    inputs = {"x": [3, 5]}
    """
    model = load(tmp_path, text).model
    inner = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if node.graph is not model.graph]
    names = ["If.then_branch.Neg", "If.then_branch.Neg_1", "If.then_branch.fc.Gemm", "If.else_branch.Abs"]
    assert sorted(str(node.name) for node in inner) == sorted(names)
    assert {value.name for node in inner for value in node.outputs} == set(names)
    assert list(node_paths(model).values()) == ["ReduceSum", "Greater", "If"]
    x = -np.ones((3, 5), np.float32)
    np.testing.assert_array_equal(run(model, x=x)[0], -x)


def test_names_do_not_ripple(tmp_path: Path) -> None:
    before = {str(node.name) for node in load(tmp_path, WHOLE).model.graph}
    after = {
        str(node.name)
        for node in load(tmp_path, WHOLE.replace("self.fc1(op, x)", "self.fc1(op, op.Add(x, 0.5))")).model.graph
    }
    assert after - before == {"Add"}


def test_place_and_seed(tmp_path: Path) -> None:
    text = NET.replace("self.fc1 = nn.Linear(5, 7)", "self.fc1 = place(nn.Linear(5, 7), 2)")
    text += 'nn.seed(7)\nplace("fc*", 1)\nmodel = place(Net(), 0)\ninputs = {"x": [3, 5]}\n'
    source = load(tmp_path, text)
    assert source.declared.placements == (
        Placement("fc*", 1, "model.py:12"),
        Placement("fc1", 2, "model.py:6"),
        Placement("**", 0, "model.py:13"),
    )

    def weight(source: Source) -> np.ndarray:
        value = source.model.graph.initializers["fc1.weight"].const_value
        assert value is not None
        return value.numpy()

    np.testing.assert_array_equal(weight(source), weight(load(tmp_path, text)))
    assert not np.array_equal(weight(source), weight(load(tmp_path, text.replace("seed(7)", "seed(8)"))))
    unseeded = weight(load(tmp_path, text.replace("nn.seed(7)", "")))
    np.testing.assert_array_equal(unseeded, weight(load(tmp_path, text.replace("seed(7)", "seed(0)"))))


def test_place_outside_of_a_load_hands_back_its_target() -> None:
    assert place("layers.*", 3) == "layers.*"
    with pytest.raises(CompileError, match=r"^test_model_py\.py:\d+: place is given -1"):
        place("a", -1)


def test_place_is_the_function_whatever_was_imported_before(tmp_path: Path) -> None:
    import partc.compiler.pipeline  # noqa: F401

    assert load(tmp_path, WHOLE + "place('fc1', 1)\n").declared.placements[0].pattern == "fc1"


def test_symbols_name_dims(tmp_path: Path) -> None:
    text = """
    batch = Symbol(divisor=8, max=64)
    seq = Symbol(max=9, unique=True)
    width = Symbol(min=2)

    class Net(nn.Module):
        def forward(self, op, a, b, c):
            return a, b, c

    model = Net()
    inputs = {"a": Input([batch, seq, 3, Symbol(min=5)]), "b": Input([batch, seq], "int64"), "c": ["width", None, seq]}
    """
    source = load(tmp_path, text)
    assert ports(source.model.graph.inputs) == {
        "a": "FLOAT [batch,seq,3,a_dim_3]",
        "b": "INT64 [batch_1,seq]",
        "c": "FLOAT [width,c_dim_1,seq]",
    }
    found = {name: (s.min, s.max, s.divisor) for name, s in source.declared.symbols.items()}
    eight = (1, 64, 8)
    assert found == {"batch": eight, "batch_1": eight, "seq": (1, 9, 1), "a_dim_3": (5, 0, 1), "width": (2, 0, 1)}


def test_siblings_are_imported_and_forgotten(tmp_path: Path) -> None:
    path, modules = list(sys.path), set(sys.modules)
    text = "from layers import width\nimport sub.inner\n"
    text += RETURNS.replace("RETURNED", "a").replace("[2, 3]", "[width]")
    for width in (3, 5):
        folder = tmp_path / str(width)
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "__init__.py").write_text("")
        (folder / "sub" / "inner.py").write_text("")
        source = load(folder, text, layers=f"width = {width}")
        assert ports(source.model.graph.inputs) == {"x": f"FLOAT [{width}]"}
    assert sys.path == path
    left = {name for name in set(sys.modules) - modules if name.split(".")[0] in ("layers", "sub", "__partc_model__")}
    assert not left


def test_a_clashing_module_of_the_caller_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = type(sys)("layers")
    monkeypatch.setitem(sys.modules, "layers", mine)
    load(tmp_path, "from layers import width\n" + WHOLE, layers="width = 3")
    assert sys.modules["layers"] is mine


def test_prints_of_the_file_go_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(tmp_path, 'print("hello")\n' + WHOLE)
    assert capsys.readouterr().out == "hello\n"


def test_lenet_says_the_same_by_plan_and_by_calls() -> None:
    by_plan, by_calls = load_python(SAMPLE / "model.py"), load_python(SAMPLE / "place_calls.py")
    assert ports(by_plan.model.graph.inputs) == {"x": "FLOAT [batch,1,32,32]"}
    assert ports(by_plan.model.graph.outputs) == {"logits": "FLOAT [batch,10]"}
    assert list(node_paths(by_plan.model).values()) == list(node_paths(by_calls.model).values())
    placed = {placement.pattern: placement.on for placement in by_calls.declared.placements}
    assert placed == {"fc1": 0, "fc2": 1, "fc3": 2, "conv1": 3, "conv2": 4}
    assert not by_plan.declared.placements
    for file, count in (("digits.npz", 32), ("digits_7.npz", 7)):
        with np.load(SAMPLE / file) as data:
            assert list(data) == ["x"]
            first, second = (run(source.model, x=data["x"])[0] for source in (by_plan, by_calls))
        assert first.shape == (count, 10)
        np.testing.assert_array_equal(first, second)
        assert first.std(0).all()


def test_options_of_mindspores_contexts_are_told(tmp_path: Path) -> None:
    source = load(
        tmp_path,
        f"{WHOLE}\nparallel_mode = 'auto_parallel'\ndevice_num = 8\nfull_batch = True\ndef save_graphs(): ...\n",
    )
    first, second = source.declared.warnings
    assert (
        " parallel_mode = 'auto_parallel' is not followed: shards are given by `sharding` of the plan or by `shard`"
        in first
    )
    line = (tmp_path / "model.py").read_text().splitlines().index("device_num = 8") + 1
    assert (
        second == f"model.py:{line}: device_num = 8 is not followed: `ranks` of the plan says how many ranks there are"
    )
