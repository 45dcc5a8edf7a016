"""The starting plan: modules, nodes outside of them, and names that are no plain YAML."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.symbol import Symbol
from partc.compiler.plan.pattern import compile_pattern
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.starting_plan import starting_plan


def value(name: str, dims: list[int | str | None] | None, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=None if dims is None else ir.Shape(dims), type=ir.TensorType(dtype))


def weight(name: str, *dims: int, dtype: type[np.generic] = np.float32) -> ir.Value:
    tensor = ir.tensor(np.zeros(dims, dtype))
    return ir.Value(name=name, const_value=tensor, shape=ir.Shape(dims), type=ir.TensorType(tensor.dtype))


def model(inputs: list[ir.Value], nodes: list[ir.Node], weights: list[ir.Value]) -> ir.Model:
    graph = ir.Graph(inputs, nodes[-1].outputs, nodes=nodes, initializers=weights, opset_imports={"": 20}, name="g")
    graph.outputs[0].name = "out"
    return ir.Model(graph, ir_version=10)


def small_model() -> tuple[ir.Model, Mapping[ir.Node, str]]:
    """Modules, a node outside of them, a parameter that only a body uses, an unused one, and one that is listed as an input."""
    x, mask = value("x:0", ["batch", 1, 28, None]), value("mask", ["batch", "2*h", "a.b"], ir.DataType.BOOL)
    kernel, bias, shape = weight("conv1.weight", 6, 1, 5, 5), weight("net.bias", 6), weight("s", 2, dtype=np.int64)
    unused, listed, inner = weight("unused", 3), weight("listed", 7), weight("block.0.scale", 9)
    conv = ir.node("Conv", [x, kernel, bias])
    reshape = ir.node("Reshape", [conv.outputs[0], shape])
    mul = ir.node("Mul", [reshape.outputs[0], inner])
    branch = ir.Graph([], mul.outputs, nodes=[mul], name="branch")
    choose = ir.node("If", [mask], attributes={"then_branch": branch})
    late = ir.node("Mul", [choose.outputs[0], mask, kernel])
    nodes = [conv, reshape, choose, late]
    paths = dict(zip(nodes, ["conv1.Conv_0", "block.0.Reshape", "block.0.act.If", "odd*na[me]"], strict=True))
    return model([x, mask, listed], nodes, [kernel, bias, shape, unused, listed, inner]), paths


def test_the_starting_plan_of_modules() -> None:
    text = starting_plan(*small_model(), "net.onnx")
    plan = parse_plan(text, "p")
    assert (plan.ranks, plan.placement, plan.outputs) == (1, (), ())
    assert {name: rule.symbol for name, rule in plan.dims.symbols.items()} == {
        "batch": Symbol(unique=True),
        "x_0_dim_3": Symbol(),
    }
    assert {name: rule.dims for name, rule in plan.dims.inputs.items()} == {
        "x:0": ("batch", 1, 28, "x_0_dim_3"),
        "mask": ("batch", None, "a.b"),
    }
    squeezed = [" ".join(line.split()) for line in text.splitlines()]
    for line in [
        "# A plan for net.onnx: 4 nodes, 4 parameters of 315 elements, 716 B.",
        '"x:0": [batch, 1, 28, x_0_dim_3] # float32 [batch, 1, 28, ?]',
        "mask: [batch, null, a.b] # bool [batch, 2*h, a.b]",
        "# conv1 1 node 624 B 87.2 % Conv",
        "# . weight float32 [6, 1, 5, 5] 600 B",
        "# . net.bias float32 [6] 24 B",
        "# block 2 nodes 52 B 7.3 % Reshape, If",
        "# block.0 2 nodes 52 B 7.3 % Reshape, If",
        "# block.0.act 1 node 36 B 5.0 % If",
        "# . block.0.scale float32 [9] 36 B",
        r'# "odd\\*na\\[me\\]" Mul',
        "# No node uses 2 weights of the model, not listed here.",
    ]:
        assert line in squeezed, line
    assert not any(line.startswith("# . s ") for line in squeezed)


def test_a_starting_plan_keeps_what_the_model_promises() -> None:
    built, paths, name = (*small_model(), "net.onnx")
    dims = [dim.value for value in built.graph.inputs for dim in value.shape or () if not isinstance(dim, int)]
    text = starting_plan(built, paths, name, {str(dims[0]): Symbol(divisor=8, max=512)})
    assert parse_plan(text, "plan.yaml").dims.symbols[str(dims[0])].symbol.max == 512
    assert "divisor: 8" in text


def test_the_names_of_a_starting_plan_place_what_they_name() -> None:
    built, paths = small_model()
    _, _, tree = starting_plan(built, paths, "net.onnx").partition("# The modules")
    lines = [line[4:].strip() for line in tree.splitlines() if line.startswith("#   ")]
    names = [line.split("  ")[0] for line in lines if not line.startswith(". ")]
    plan = parse_plan("ranks: 2\nplacement:\n" + "".join(f"  {name}: 1\n" for name in names), "p")
    taken = [
        [path for path in paths.values() if compile_pattern(rule.pattern).matches(path)] for rule in plan.placement
    ]
    inside = ["block.0.Reshape", "block.0.act.If"]
    assert taken == [["conv1.Conv_0"], inside, inside, ["block.0.act.If"], ["odd*na[me]"]]


def chain(length: int, names: str) -> tuple[ir.Model, Mapping[ir.Node, str]]:
    first = last = value("x", ["n", 3])
    nodes, weights, paths = [], [], {}
    for i in range(length):
        weights.append(weight(f"w{i}", 3, 3))
        node = ir.node("MatMul" if i % 3 else "Gemm", [last, weights[-1]])
        last = node.outputs[0]
        nodes.append(node)
        paths[node] = names.format(i)
    return model([first], nodes, weights), paths


def test_the_starting_plan_of_a_model_without_modules() -> None:
    text = starting_plan(*chain(5, "MatMul_{}"), "m")
    squeezed = [" ".join(line.split()) for line in text.splitlines()]
    assert "# MatMul_4 36 B 20.0 % MatMul" in squeezed
    assert "# . w4 float32 [3, 3] 36 B" in squeezed
    assert parse_plan(text, "p").dims.symbols["n"].symbol.facts() == Facts(1, 0, 1)


def test_the_starting_plan_of_many_nodes_is_in_runs() -> None:
    text = starting_plan(*chain(205, "n{}"), "m")
    squeezed = [" ".join(line.split()) for line in text.splitlines()]
    assert "# The nodes outside of modules, 205 of them, in runs of 3 in the order of the graph:" in squeezed
    assert "# n3 .. n5 3 nodes 108 B 1.5 % MatMul 2, Gemm" in squeezed
    assert "# n204 36 B 0.5 % Gemm" in squeezed
    assert len(squeezed) < 106


@pytest.mark.parametrize(
    "name", ["a: b", "# c", "null", "é\u2028\x85\U0001f600", "a\nb", '"', "-", "a#b", "..", "x.", "\\"]
)
def test_names_of_any_kind_stay_yaml(name: str) -> None:
    x = value(name, [name, 5])
    node = ir.node("Relu", [x])
    built = model([x], [node], [])
    text = starting_plan(built, {node: name}, name)
    assert list(parse_plan(text, "p").dims.inputs) == [name]
    uncommented = text.replace("  # a name or a pattern", "  #").replace("\n  # ", "\n  ")
    lines = [line for line in uncommented.splitlines() if not line.startswith("  from below")]
    (rule,) = parse_plan("\n".join(lines), "p").placement
    assert compile_pattern(rule.pattern).matches(name)
