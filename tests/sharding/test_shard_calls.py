"""`shard` in a model.py: the origin's forms, what becomes of them, and what is said of mistakes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from partc.compiler.directives.shard_calls import shard
from partc.compiler.errors import CompileError
from partc.compiler.frontend.names import node_paths
from partc.compiler.plan.rules import RegionCall, ShardingRule
from shard_call_models import DENSE_RELU, INPUTS, NET, line, load


def test_net1_shards_a_module_by_its_method(tmp_path: Path) -> None:
    text = """
class Net1(Net):
    def __init__(self):
        super().__init__()
        self.block1.shard(in_strategy=((1, 8),),
                          parameter_plan={'self.block1.dense2.weight': (8, 1)})

    def forward(self, op, x):
        x = self.block1(op, x)
        x = self.block2(op, x)
        x = self.block3(op, x)
        return x

model = Net1()
"""
    source = load(tmp_path, NET + text + INPUTS)
    assert source.declared.sharding == (
        ShardingRule(
            "block1",
            None,
            ((1, 8),),
            None,
            {"dense2.weight": (8, 1)},
            f"model.py:{line(tmp_path, 'self.block1.shard')}",
            calls=(RegionCall(("x",), ("block1.dense2.Gemm",)),),
        ),
    )
    assert list(node_paths(source.model).values()) == [
        f"block{k}.{node}" for k in (1, 2, 3) for node in ("dense1.Gemm", "gelu.Gelu", "dense2.Gemm")
    ]


def test_net2_shards_by_the_function_under_another_name(tmp_path: Path) -> None:
    text = """
class Net2(Net):
    def __init__(self):
        super().__init__()
        self.block1_graph = shard(self.block1, in_strategy=((8, 1),),
                                  parameter_plan={'self.block1.dense2.weight': (8, 1)})
        self.block2.shard(in_strategy=((1, 8),))

    def forward(self, op, x):
        x = self.block1_graph(op, x)
        x = self.block2(op, x)
        x = self.block3(op, x)
        return x

model = Net2()
"""
    source = load(tmp_path, NET + text + INPUTS)
    first, second = source.declared.sharding
    assert (first.pattern, first.inputs, first.parameters) == ("block1", ((8, 1),), {"dense2.weight": (8, 1)})
    assert (second.pattern, second.inputs, second.parameters) == ("block2", ((1, 8),), {})
    assert second.calls == (RegionCall(("block1.dense2.Gemm",), ("block2.dense2.Gemm",)),)
    assert len(source.model.graph) == 9
    assert next(iter(node_paths(source.model).values())) == "block1.dense1.Gemm"
    assert [name for name in source.model.graph.initializers if name.startswith("block1_graph")] == []


def test_the_same_name_works_here_too(tmp_path: Path) -> None:
    text = """
class Net3(Net):
    def __init__(self):
        super().__init__()
        self.block1 = shard(self.block1, in_strategy=((8, 1),), parameter_plan={'dense2.weight': (8, 1)})

model = Net3()
"""
    (rule,) = load(tmp_path, NET + text + INPUTS).declared.sharding
    assert (rule.pattern, rule.parameters) == ("block1", {"dense2.weight": (8, 1)})


def test_dense_relu_is_a_region_of_its_name(tmp_path: Path) -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter([128, 10], init=nn.init.normal(1.0))
        self.bias = nn.Parameter([10], init=nn.init.normal(1.0))

    def forward(self, op, x):
        result = shard(dense_relu, in_strategy=((4, 2), None, None))(op, x, self.weight, self.bias)
        return op.Neg(result)

model = Net()
inputs = {"x": [32, 128]}
"""
    source = load(tmp_path, DENSE_RELU + text)
    assert list(node_paths(source.model).values()) == ["dense_relu.MatMul", "dense_relu.Add", "dense_relu.Relu", "Neg"]
    where = f"model.py:{line(tmp_path, 'result = shard')}"
    call = RegionCall(("x", "weight", "bias"), ("dense_relu.Relu",))
    rule = ShardingRule("dense_relu", None, ((4, 2), None, None), None, {}, where, calls=(call,))
    assert source.declared.sharding == (rule,)
    x = np.linspace(-1, 1, 32 * 128, dtype=np.float32).reshape(32, 128)
    w = {
        name: value.const_value.numpy() for name, value in source.model.graph.initializers.items() if value.const_value
    }
    session = ort.InferenceSession(ir.to_proto(source.model).SerializeToString(), providers=["CPUExecutionProvider"])
    expected = -np.maximum(x @ w["weight"] + w["bias"], 0)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)


def test_every_call_of_a_function_is_a_region(tmp_path: Path) -> None:
    text = """
cut = shard(dense_relu, ((4, 2), (2, 1), None), out_strategy=((4, 1),))

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter([8, 8], init=nn.init.normal(1.0))
        self.bias = nn.Parameter([8], init=nn.init.normal(1.0))

    def forward(self, op, x):
        return cut(op, cut(op, x, self.weight, bias=self.bias), self.weight, self.bias)

class Net(nn.Module):
    def __init__(self):
        super().__init__("net")
        self.layers = nn.ModuleList([Inner(), Inner()])

    def forward(self, op, x):
        return self.layers[1](op, self.layers[0](op, x))

model = Net()
inputs = {"x": [16, 8]}
"""
    source = load(tmp_path, DENSE_RELU + text)
    rules = source.declared.sharding
    assert [rule.pattern for rule in rules] == [
        f"layers.{k}.{name}" for k in (0, 1) for name in ("dense_relu", "dense_relu_1")
    ]
    assert {rule.outputs for rule in rules} == {((4, 1),)}
    assert [rule.calls[0].arguments[0] for rule in rules] == [
        "x",
        "layers.0.dense_relu.Relu",
        "layers.0.dense_relu_1.Relu",
        "layers.1.dense_relu.Relu",
    ]
    assert rules[3].calls[0] == RegionCall(
        ("layers.1.dense_relu.Relu", "layers.1.weight", "layers.1.bias"), ("output",)
    )
    assert list(node_paths(source.model).values())[3:6] == [
        f"layers.0.dense_relu_1.{op}" for op in ("MatMul", "Add", "Relu")
    ]


def test_single_ops_methods_and_lambdas(tmp_path: Path) -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.weight = nn.Parameter([6, 8], init=nn.init.normal(1.0))

    def head(self, op, x):
        return self.fc(op, x)

    def forward(self, op, x):
        x = op.Neg(op.MatMul(shard(self.head, ((3, 1),))(op, x), self.weight))
        x = shard(op.Softmax, ((3, 1),), level=2)(x, axis=-1)
        x = shard(op.Add, (("dp", None), ((), "tp")))(x, x)
        return shard(lambda op, a: {"y": op.Relu(op.Neg(a))}, (None,))(op, x)

model = Net()
inputs = {"x": [3, 4]}
"""
    source = load(tmp_path, text)
    rules = source.declared.sharding
    assert [rule.pattern for rule in rules] == ["head", "Softmax", "Add", "function"]
    assert list(node_paths(source.model).values()) == [
        "head.fc.Gemm",
        "MatMul",
        "Neg",
        "Softmax",
        "Add",
        "function.Neg",
        "function.Relu",
    ]
    assert [rule.inputs for rule in rules] == [((3, 1),), ((3, 1),), ((("dp",), ()), ((), ("tp",))), (None,)]
    assert rules[1].level == 2
    assert rules[1].calls == (RegionCall(("Neg",), ("Softmax",)),)
    assert rules[3].calls == (RegionCall(("Add",), ("y",)),)


def test_a_module_called_twice_has_both_calls(tmp_path: Path) -> None:
    text = """
class Two(Net):
    def forward(self, op, x):
        return self.block1(op, self.block1(op, x))

model = Two()
shard(model.block1, ((8, 1),), ((8, 1),))
model.block1.shard(((4, 1),))
"""
    first, second = load(tmp_path, NET + text + INPUTS).declared.sharding
    calls = (RegionCall(("x",), ("block1.dense2.Gemm",)), RegionCall(("block1.dense2.Gemm",), ("output",)))
    assert (first.inputs, first.outputs, first.calls) == (((8, 1),), ((8, 1),), calls)
    assert (second.inputs, second.outputs, second.calls) == (((4, 1),), None, calls)


def test_parameters_by_the_names_that_the_caller_and_the_module_know(tmp_path: Path) -> None:
    text = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 6)
        self.shard((None,), parameter_plan={"self.block.bias": (2,)})

    def forward(self, op, x):
        return self.block(op, x)

class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Inner()
        self.block.shard((None,), parameter_plan={"self.block.block.weight": (2, 1), "block.bias": (3,)})

    def forward(self, op, x):
        return self.block(op, x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Middle()

    def forward(self, op, x):
        return self.block(op, x)

model = Net()
inputs = {"x": [3, 4]}
"""
    rules = load(tmp_path, text).declared.sharding
    assert [(rule.pattern, rule.parameters) for rule in rules] == [
        ("block.block", {"block.bias": (2,)}),
        ("block.block", {"block.weight": (2, 1), "block.bias": (3,)}),
    ]


def test_outside_of_a_load_it_changes_nothing() -> None:
    def double(op: object, x: int) -> int:
        return 2 * x

    wrapped = shard(double, ((2,),))
    assert wrapped.__name__ == "double"
    with pytest.raises(CompileError, match=r"^test_shard_calls\.py:\d+: 'double' is called without the op builder"):
        wrapped(None, 3)
    with pytest.raises(CompileError, match=r"^test_shard_calls\.py:\d+: in_strategy is 3"):
        shard(double, 3)  # type: ignore[arg-type]


def test_a_torch_module_and_its_functions(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs partc[torch]")
    text = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 12)
        self.down = torch.nn.Linear(12, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block1 = Block()
        self.block2 = shard(Block(), ((2, 1),))
        self.block1_graph = shard(self.block1, in_strategy=((1, 4),), parameter_plan={"self.block1.up.weight": (4, 1)})

    def forward(self, x):
        return FORWARD

model = Net()
inputs = {"x": Input(["batch", 8])}
"""
    source = load(tmp_path, text.replace("FORWARD", "self.block2(self.block1_graph(x))"))
    rules = source.declared.sharding
    assert [(rule.pattern, rule.inputs, rule.parameters, rule.calls) for rule in rules] == [
        ("block2", ((2, 1),), {}, ()),
        ("block1_graph", ((1, 4),), {"up.weight": (4, 1)}, ()),
    ]
    assert "block1_graph.up.weight" in source.model.graph.initializers
    assert {path.partition(".")[0] for path in node_paths(source.model).values()} == {"block1_graph", "block2"}
    text = text.replace(
        "self.block1_graph = shard(self.block1, ", "self.block1_graph = (lambda *_, **__: None)(self.block1, "
    )
    source = load(
        tmp_path,
        text.replace("FORWARD", "shard(torch.relu, ((2, 1),))(self.block1(x))").replace(
            "shard(Block(), ((2, 1),))", "None"
        ),
    )
    assert [(rule.pattern, rule.inputs) for rule in source.declared.sharding] == [("relu", ((2, 1),))]


def test_the_default_of_mindspores_device_is_the_jobs_device(tmp_path: Path) -> None:
    call = "model = Net()\nmodel.block1.shard(((1, 8),), device={})\nmodel.block2.place(0, device='ascend')\n"
    source = load(tmp_path, NET + call.format("'Ascend'") + INPUTS)
    assert source.declared.targets == ()
    (one,) = load(tmp_path, NET + call.format("'GPU'") + INPUTS).declared.targets
    assert one.target == "cuda"
