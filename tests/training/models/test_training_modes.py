"""Modes of training: normalizations by the statistics of the whole batch, on one rank and cut; what is refused, and what keeps its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from equivalence import same, whole_outputs
from gradient_case import evaluate
from partc.compiler.autodiff.engine import differentiate_nodes
from partc.compiler.errors import CompileError
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.rewrite.train_mode import Modes, to_evaluation, to_training
from partc.runtime import load_local

Arrays = Mapping[str, np.ndarray]
NORM = """<ir_version: 10, opset_import: ["" : 21]>
main (float[{x}] x) => (float[{x}] y)
<float[5] weight = {{1, 2, -1, 0.5, 3}}, float[5] bias = {{0, 1, 2, 3, -4}},
 float[5] running_mean = {{0.5, 0, -1, 2, 0}}, float[5] running_var = {{1, 2, 0.5, 1, 4}}> {{
    [bn] y = BatchNormalization <epsilon = 0.001, momentum = 0.8> (x, weight, bias, running_mean, running_var)
}}"""
WEIGHTS = ("weight", "bias", "running_mean", "running_var")
STATISTICS = ("running_mean", "running_var")


def norm(x: str) -> ir.Model:
    return model_of(NORM.format(x=x))


def model_of(text: str) -> ir.Model:
    return from_proto(onnx.parser.parse_model(text), Path("model.onnx"))


def trained(model: ir.Model, *, cut: bool, frozen: tuple[str, ...] = ()) -> Modes:
    """In training, the new statistics among the outputs."""
    modes = to_training(model, cut=cut, seed=7, frozen=lambda name: name in frozen)
    model.graph.outputs.extend(new for _, new in modes.statistics)
    return modes


def by_hand(x: np.ndarray, weights: Arrays) -> dict[str, np.ndarray]:
    """The definition in float64; epsilon and momentum as in NORM."""
    wide = (slice(None), *[None] * (x.ndim - 2))
    over = (0, *range(2, x.ndim))
    mean, variance = x.mean(over), x.var(over)
    y = (x - mean[wide]) / np.sqrt(variance[wide] + 0.001) * weights["weight"][wide] + weights["bias"][wide]
    moved = {name: weights[name] * 0.8 + new * 0.2 for name, new in zip(STATISTICS, (mean, variance), strict=True)}
    return {"y": y, **{f"{name}.next": new for name, new in moved.items()}}


def weights_of(model: ir.Model) -> dict[str, np.ndarray]:
    return {n: v.const_value.numpy() for n, v in model.graph.initializers.items() if v.const_value is not None}


def normal(*shape: int, mean: float = 3.0) -> np.ndarray:
    return np.random.default_rng(5).normal(mean, 2, shape).astype(np.float32)


SHAPES = {"b, 5": (12, 5), "b, 5, h, 7": (6, 5, 3, 7), "6, 5, 3": (6, 5, 3), "b, 5, 4, 3, 2": (3, 5, 4, 3, 2)}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dims", SHAPES)
def test_a_batch_is_normalized_by_its_own_statistics(dims: str, cut: bool) -> None:
    model = norm(dims)
    weights = weights_of(model)
    modes = trained(model, cut=cut)
    assert [(old.name, new.name) for old, new in modes.statistics] == [(n, f"{n}.next") for n in STATISTICS]
    assert not modes.needs_step
    ops = {node.op_type for node in model.graph}
    assert ("BatchNormalization" in ops) is not cut
    x = normal(*SHAPES[dims])
    have = whole_outputs(ir.to_proto(model), {"x": x})
    for name, want in by_hand(x.astype(float), weights).items():
        np.testing.assert_allclose(have[name], want, rtol=2e-5, atol=2e-5, err_msg=name)


def gradients(model: ir.Model, x: np.ndarray, dy: np.ndarray) -> dict[str, np.ndarray]:
    nodes, weights = list(model.graph), weights_of(model)
    wanted = ["x", "weight", "bias"]
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    backward = differentiate_nodes(nodes, {"y": "y.dy"}, wanted, values=values)
    every = [*backward.forward, *backward.early, *backward.nodes]
    constants = {**weights, **backward.constants}
    made = evaluate(every, {"x": x, "y.dy": dy}, constants, list(backward.gradients.values()), fallback=False)
    return {name: made[dx] for name, dx in backward.gradients.items()}


@pytest.mark.parametrize("dims", SHAPES)
def test_both_forms_have_one_gradient(dims: str) -> None:
    x, dy = normal(*SHAPES[dims]), normal(*SHAPES[dims], mean=0)
    found = []
    for cut in (False, True):
        model = norm(dims)
        to_training(model, cut=cut, seed=7, frozen=lambda name: False)
        found.append(gradients(model, x, dy))
    for name, want in found[0].items():
        np.testing.assert_allclose(found[1][name], want, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("cut", [False, True])
def test_it_is_the_layer_of_torch(cut: bool) -> None:
    torch = pytest.importorskip("torch")
    model, x, dy = norm("b, 5, h, w"), normal(6, 5, 3, 7), normal(6, 5, 3, 7, mean=0)
    weights = weights_of(model)
    layer = torch.nn.BatchNorm2d(5, eps=0.001, momentum=0.2).train()
    layer.load_state_dict({name: torch.tensor(weights[name]) for name in WEIGHTS}, strict=False)
    leaf = torch.tensor(x, requires_grad=True)
    y = layer(leaf)
    y.backward(torch.tensor(dy))
    want = {"x": leaf.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    trained(model, cut=cut)
    have = whole_outputs(ir.to_proto(model), {"x": x})
    np.testing.assert_allclose(have["y"], y.detach().numpy(), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(have["running_mean.next"], layer.running_mean.numpy(), rtol=1e-5, atol=1e-5)
    count = x.size // 5
    unbiased = weights["running_var"] * 0.8 + (have["running_var.next"] - weights["running_var"] * 0.8) * count / (
        count - 1
    )
    np.testing.assert_allclose(unbiased, layer.running_var.numpy(), rtol=1e-5, atol=1e-5)
    for name, dx in gradients(model, x, dy).items():
        np.testing.assert_allclose(dx, want[name].numpy(), rtol=1e-4, atol=1e-4, err_msg=name)


def on_ranks(model: ir.Model, plan: str, feeds: Arrays, out: Path) -> tuple[Complete, dict[str, np.ndarray]]:
    program = compile_source(Source(model), parse_plan(plan, "plan.yaml"), out).program
    with load_local(out) as ranks:
        return program, ranks(feeds)


PLANS = {
    "batch in 2": ("b, 5, h, 7", "ranks: 2\nsymbols: {b: {divisor: 2}}\ndataset: data_parallel\n", 1),
    "batch in 3": ("b, 5", "ranks: 3\nsymbols: {b: {divisor: 3}}\ndataset: data_parallel\n", 1),
    "batch in 3, static": ("6, 5, 3", "ranks: 3\ndataset: data_parallel\n", 1),
    "positions in 2": ("b, 5, 4, 3, 2", "ranks: 2\ndataset: {x: [1, 1, 2, 1, 1]}\n", 2),
    "channels in 5": ("b, 5, h, 7", "ranks: 5\ndataset: {x: [1, 5, 1, 1]}\n", 0),
    "batch and channels": ("b, 5", "ranks: 15\nsymbols: {b: {divisor: 3}}\ndataset: {x: [3, 5]}\n", 1),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_cut_batch_has_the_statistics_of_the_whole(name: str, tmp_path: Path) -> None:
    dims, plan, reductions = PLANS[name]
    x = normal(*SHAPES[dims])
    whole, cut = norm(dims), norm(dims)
    trained(whole, cut=False)
    trained(cut, cut=True)
    program, have = on_ranks(cut, plan, {"x": x}, tmp_path / "build")
    for output, want in whole_outputs(ir.to_proto(whole), {"x": x}).items():
        same(have[output], want, output, 1e-5, 2e-5)
    assert sum(event.op_type == "AllReduce" for event in program.events) == reductions


def test_a_far_mean_costs_nothing_once_the_running_mean_is_there() -> None:
    x = normal(24, 5, mean=3000)
    model = norm("b, 5")
    model.graph.initializers["running_mean"].const_value = ir.tensor(np.full(5, 2990, np.float32))
    weights = weights_of(model)
    trained(model, cut=True)
    have = whole_outputs(ir.to_proto(model), {"x": x})
    for name, want in by_hand(x.astype(float), weights).items():
        np.testing.assert_allclose(have[name], want, rtol=1e-4, atol=1e-4, err_msg=name)


def test_a_constant_channel_gives_its_bias() -> None:
    model = norm("b, 5")
    trained(model, cut=True)
    have = whole_outputs(ir.to_proto(model), {"x": np.full((7, 5), 1000.3, np.float32)})
    np.testing.assert_allclose(have["y"], np.tile([0, 1, 2, 3, -4], (7, 1)), atol=1e-2)


def test_halves_are_computed_in_float32() -> None:
    text = NORM.format(x="b, 5, 8, 8").replace("float[b", "float16[b")
    model = model_of(text)
    x = normal(6, 5, 8, 8, mean=30).astype(np.float16)
    weights = weights_of(model)
    trained(model, cut=True)
    have = whole_outputs(ir.to_proto(model), {"x": x})
    want = by_hand(x.astype(float), weights)
    assert have["y"].dtype == np.float16
    np.testing.assert_allclose(have["y"], want["y"], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(have["running_var.next"], want["running_var.next"], rtol=1e-4)


@pytest.mark.parametrize("frozen", [("running_mean",), ("running_var",), ("weight", "bias")])
@pytest.mark.parametrize("cut", [False, True])
def test_a_frozen_normalization_stays_in_inference_form(frozen: tuple[str, ...], cut: bool) -> None:
    model = norm("b, 5")
    assert trained(model, cut=cut, frozen=frozen) == Modes()
    (node,) = model.graph
    assert (node.op_type, len(node.outputs), "training_mode" in node.attributes) == ("BatchNormalization", 1, False)


def test_one_that_is_in_training_already_and_frozen_goes_back() -> None:
    model = norm("b, 5")
    to_training(model, cut=False, seed=7, frozen=lambda name: False)
    assert to_training(model, cut=False, seed=7, frozen=lambda name: True) == Modes()
    (node,) = model.graph
    assert len(node.outputs) == 1


@pytest.mark.parametrize("cut", [False, True])
def test_one_that_is_in_training_already_is_trained(cut: bool) -> None:
    model = norm("b, 5")
    to_training(model, cut=False, seed=7, frozen=lambda name: False)
    modes = trained(model, cut=cut)
    assert [new.name for _, new in modes.statistics] == ["running_mean.next", "running_var.next"]
    assert set(whole_outputs(ir.to_proto(model), {"x": normal(4, 5)})) == {"y", "running_mean.next", "running_var.next"}


TWICE = """<ir_version: 10, opset_import: ["" : 21]>
main (float[b, 5] x) => (float[b, 5] y)
<float[5] weight = {1, 2, 1, 1, 3}, float[5] bias = {0, 1, 2, 3, 4},
 float[5] running_mean = {0, 0, 0, 0, 0}, float[5] running_var = {1, 1, 1, 1, 1}> {
    h = BatchNormalization (x, weight, bias, running_mean, running_var)
    r = Relu(h)
    y = BatchNormalization (r, weight, bias, running_mean, running_var)
}"""


@pytest.mark.parametrize("cut", [False, True])
def test_statistics_that_two_calls_share_move_twice(cut: bool) -> None:
    model = model_of(TWICE)
    modes = trained(model, cut=cut)
    assert [new.name for _, new in modes.statistics] == ["running_mean.next", "running_var.next"]
    x = normal(6, 5)
    have = whole_outputs(ir.to_proto(model), {"x": x})
    h = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * np.array([1, 2, 1, 1, 3]) + np.arange(5)
    want = 0.9 * 0.1 * x.mean(0) + 0.1 * np.maximum(h, 0).mean(0)
    np.testing.assert_allclose(have["running_mean.next"], want, rtol=1e-4, atol=1e-5)


def test_new_nodes_are_inside_of_the_old_one() -> None:
    model = model_of(TWICE)
    before = set(node_paths(model).values())
    trained(model, cut=True)
    after = set(node_paths(model).values())
    assert {path.rsplit(".", 1)[0] if "." in path else path for path in after} == before
    assert all(node.name == path for node, path in node_paths(model).items())


@pytest.mark.parametrize(
    ("key", "scopes", "name"),
    [
        ("pkg.onnxscript.name_scopes", ["net", "stage", "bn1"], "BatchNormalization_node_3"),
        ("pkg.torch.onnx.name_scopes", ["", "stage", "stage.bn1", "batch_norm"], "node_batch_norm_3"),
    ],
)
def test_modules_of_builders_stay(key: str, scopes: list[str], name: str) -> None:
    model = norm("b, 5")
    (node,) = model.graph
    node.name = name
    node.metadata_props[key] = str(scopes)
    trained(model, cut=True)
    assert all(path.startswith("stage.bn1.BatchNormalization.") for path in node_paths(model).values())


def test_a_plan_cuts_by_the_module_of_the_normalization(tmp_path: Path) -> None:
    model = norm("b, 5")
    trained(model, cut=True)
    x = normal(12, 5)
    plan = "ranks: 4\nsymbols: {b: {divisor: 2}}\nplacement: {bn: [2, 3]}\nsharding: {bn: {in: [[2, 1]]}}\n"
    program, have = on_ranks(model, plan, {"x": x}, tmp_path / "build")
    assert {placed.groups for placed in program.placement.values()} == {((2, 3),)}
    assert [event.name for event in program.events if event.op_type == "AllReduce"] == ["bn.moments"]
    want = by_hand(x.astype(float), weights_of(norm("b, 5")))
    np.testing.assert_allclose(have["y"], want["y"], rtol=2e-5, atol=2e-5)


def test_evaluation_takes_running_statistics_and_drops_nothing() -> None:
    model = model_of(
        """<ir_version: 10, opset_import: ["" : 21]>
        main (float[b, 2] x) => (float[b, 2] y)
        <float[2] weight = {1, 2}, float[2] bias = {0, 1}, float[2] mean = {0, 0}, float[2] variance = {1, 1},
         float ratio = {0.5}, bool training = {1}> {
            h, m, v = BatchNormalization <training_mode = 1, epsilon = 0.0> (x, weight, bias, mean, variance)
            y = Dropout (h, ratio, training)
        }"""
    )
    to_evaluation(model)
    x = normal(3, 2)
    np.testing.assert_allclose(whole_outputs(ir.to_proto(model), {"x": x})["y"], x * [1, 2] + [0, 1], rtol=1e-6)
    assert "training" not in model.graph.initializers


def refused(text: str, cut: bool = False) -> str:
    with pytest.raises(CompileError) as caught:
        to_training(model_of(text), cut=cut, seed=7, frozen=lambda name: False)
    return str(caught.value)


def test_everything_that_cannot_train_is_said_at_once() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[b, 2] x, float share, bool c, float[2] step) => (float[b, 2] y)
    <float one = {1.0}> {
        [computed] h = Dropout (x, share)
        [all] g = Dropout (h, one)
        [branch] y = If (c) <
            then_branch = then () => (float[b, 2] t) { [inner] t = Dropout (g) },
            else_branch = other () => (float[b, 2] e) { e = Identity (g) }>
    }"""
    assert refused(text).splitlines() == [
        "branch: has a Dropout ('inner') in a body",
        "  a body of If can neither keep statistics nor draw masks",
        "  help: unroll it",
        "computed: the ratio 'share' is computed",
        "  a mask's ratio is known when it is compiled",
        "  help: make the ratio a constant",
        "all: the ratio is 1",
        "  a ratio is at least 0 and below 1",
        "  help: use another ratio",
        "'step': names a value of the model",
        "  with a Dropout, 'step' is the input by which masks change from step to step",
        "  help: rename the model's value",
    ]


OWN_INPUTS = {
    "part, of the batch": ("int64 part", "t", "part"),
    "lr, of the model": ("float lr", "t", "lr"),
    "bias1, of the labels": ("float other", "bias1", "bias1"),
    "step, of the labels": ("float other", "step", "step"),
}


@pytest.mark.parametrize("case", OWN_INPUTS)
def test_an_input_called_as_one_of_the_training_is_refused(case: str, tmp_path: Path) -> None:
    """One of the same type would have had the training's numbers instead of the user's."""
    given, labels, name = OWN_INPUTS[case]
    model = model_of(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        main (float[b, 2] x, {given}) => (float[b, 2] y) <float half = {{0.5}}, float[2] w = {{1, 2}}> {{
            scaled = Mul (x, w)
            dropped = Dropout (scaled, half)
            number = Cast <to = 1> ({given.split()[1]})
            y = Mul (dropped, number) }}"""
    )
    loss = f"loss: {{type: mean_squared, prediction: y, target: {labels}}}"
    plan = parse_plan(
        f"ranks: 1\ntrain:\n  {loss}\n  optimizer: {{type: adam, lr: 0.1}}\n  accumulate: 2\n", "plan.yaml"
    )
    with pytest.raises(CompileError, match=f"'{name}': names an input of the training\n.*\n.*another name"):
        compile_source(Source(model), plan, tmp_path)


def test_an_op_that_drops_inside_of_itself_is_refused() -> None:
    model = model_of(
        """<ir_version: 10, opset_import: ["" : 21]>
        main (float[b, 2] x) => (float[b, 2] y) { [attention] y = Identity (x) }"""
    )
    (node,) = model.graph
    node.domain, node.op_type = "com.microsoft", "Attention"
    node.attributes["dropout_p"] = ir.AttrFloat32("dropout_p", 0.1)
    with pytest.raises(CompileError, match=r"attention: Attention drops inside of the op \(dropout_p = 0.1\)"):
        to_training(model, cut=False, seed=7, frozen=lambda name: False)
    node.attributes["dropout_p"] = ir.AttrFloat32("dropout_p", 0.0)
    assert to_training(model, cut=False, seed=7, frozen=lambda name: False) == Modes()
