"""What functions of optimizers promise: few passes, element by element, in place, and the same bits for any shard of a flat buffer."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from optimizer_case import Tensors, begun, drawn, fed, model_of, operands, session_of, slot_shape
from partc.compiler.emit.run_list import plan_groups
from partc.compiler.plan.training.optimizer_table import OPTIMIZERS
from partc.compiler.training.optimizer_functions import FAMILIES, PARTS, function, functions, variant
from partc.compiler.training.optimizers import ShardSum, update_steps
from partc.runtime.artifact.graph.optimizer_function import is_elementwise, is_in_place
from partc.runtime.artifact.graph.row_function import is_rowwise
from partc.runtime.artifact.training.scalars import SCALARS
from partc.runtime.updates.updater import flat_model
from plan_values import optimizer

NUMBERS = {"momentum": 0.9, "beta1": 0.9, "one_minus_beta1": 0.1, "beta2": 0.999, "one_minus_beta2": 0.001, "eps": 1e-8}
NUMBERS |= {"alpha": 0.9, "one_minus_alpha": 0.1, "minus_lr_power": 0.75, "l1": 0.01, "l2": 0.1, "rate": 0.1}
NUMBERS |= {"trust_coefficient": 0.01, "eps1": 1e-7, "beta2_decay": -0.8}
NUMBERS |= {"lr_multiplier": 0.5, "weight_decay": 0.1, "clip_value": 0.7, "max_ratio": 10}

OPTIONS = {key for kind in OPTIMIZERS.values() for key in kind.options} | {"beta1", "beta2"}
KNOWN = {*OPTIONS, *(f"{word}{key}" for key in OPTIONS for word in ("one_minus_", "minus_"))}
KNOWN |= {"eps1", "eps2", "elements", "rows", "columns", "row", "lr_multiplier", "rate", "clip_value", "max_norm"}

# Nodes over tensors, each a pass over memory.
PASSES = {
    "Sgd": 2,
    "SgdScaled": 2,
    "SgdScaledDecayed": 3,
    "Momentum": 4,
    "MomentumScaledDecayed": 7,
    "Nesterov": 6,
    "Adagrad": 7,
    "RmsProp": 9,
    "RmsPropCenteredMomentum": 17,
    "Ftrl": 16,
    "FtrlPower": 16,
    "Adam": 12,
    "AdamScaled": 12,
    "AdamDecayed": 14,
    "AdamWScaledDecayed": 13,
    "AdamWeightDecayDecayed": 13,
    "LambDirectionScaledDecayed": 13,
    "LambApply": 2,
}


def written(body: str) -> onnx.FunctionProto:
    return onnx.parser.parse_function(f'<domain: "d", opset_import: ["": 21]> f (x, y) => (x_next) {{ {body} }}')


def test_a_function_reads_as_its_formula() -> None:
    text = onnx.printer.to_text(function("MomentumDecayed"))
    body = [line.strip() for line in text[text.index("{") + 1 : text.rindex("}")].strip().splitlines()]
    assert [line for line in body if "Constant" not in line] == [
        "decay = Mul (parameter, weight_decay_constant)",
        "decayed = Add (gradient, decay)",
        "rate = Mul (lr, lr_multiplier_constant)",
        "old = Mul (momentum, momentum_constant)",
        "momentum_next = Add (old, decayed)",
        "change = Mul (momentum_next, rate)",
        "parameter_next = Sub (parameter, change)",
    ]
    assert body[0] == "weight_decay_constant = Constant <value_float: float = @weight_decay> ()"


@pytest.mark.parametrize("opset", [18, 26])
@pytest.mark.parametrize("type", OPTIMIZERS)
def test_functions_are_of_the_models_opset(type: str, opset: int) -> None:
    chosen = optimizer(type, {"lr": 0.1, "weight_decay": 0.2})
    shapes = {"w": (3, 5), "w.grad": (3, 5)}
    shapes |= {f"w.{slot}": slot_shape((3, 5), ones) for slot, ones in chosen.slots_of(2).items()}
    feeds = {each: np.abs(drawn(shape, 1)) for each, shape in shapes.items()}
    feeds |= fed(chosen.scalars, 2, {**chosen.hyper, "lr": 0.1})
    found, wanted = (
        session_of(model_of(chosen, (3, 5), opset=version).SerializeToString()).run(None, feeds)
        for version in (opset, 21)
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_functions_come_once_and_by_name() -> None:
    assert [each.name for each in functions(["Sgd", "AdamW", "Sgd"])] == ["AdamW", "Sgd"]
    with pytest.raises(KeyError):
        function("Nothing")


@pytest.mark.parametrize(("name", "passes"), PASSES.items())
def test_passes_over_memory(name: str, passes: int) -> None:
    called = function(name)
    tensors = {each for each in called.input if each not in SCALARS and each != "ratio"}
    count = 0
    for node in called.node:
        if tensors.intersection(node.input):
            tensors.update(node.output)
            count += 1
    assert count == passes


SUMS = {name for name in PARTS if name.endswith(("Squares", "Ratio", "Means", "Total"))}
SUMS |= {"AdafactorDirection", "RowAdagradDirection"}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_is_elementwise_and_in_place(family: str) -> None:
    has_gradient, by_rows = not {"gradient", "rows"}.isdisjoint(FAMILIES[family].inputs), bool(FAMILIES[family].tables)
    some, decays = (False, True) if has_gradient else (False,), (False, True) if FAMILIES[family].decays else (False,)
    if family == "RowAdagradRows":
        decays = (False,)  # a decay changes all rows
    for scaled, clipped, decayed, double in itertools.product(some, some, decays, (False, True)):
        made = function(variant(family, scaled=scaled, clipped=clipped, decayed=decayed, double=double))
        onnx.checker.check_function(made)
        assert is_elementwise(made) is (family not in SUMS and not by_rows)
        assert is_rowwise(made) is by_rows
        assert is_in_place(made)
        assert set(made.attribute) <= KNOWN
        assert ("scale" in made.input, "clip_value" in made.attribute) == (scaled, clipped)
        assert ("weight_decay" in made.attribute) is decayed


def test_what_is_not_elementwise_or_not_in_place_is_found() -> None:
    assert not is_elementwise(written("s = ReduceSum (y) x_next = Add (x, s)"))
    assert not is_elementwise(written("s = Constant <value_floats: floats = [1.0, 2.0]> () x_next = Add (x, s)"))
    assert is_in_place(written("s = Mul (x, y) x_next = Add (x, s)"))
    assert not is_in_place(written("x_next = Add (x, y) z = Mul (x, y)"))
    assert not is_in_place(written("x_next = Transpose (x)"))


IN_SHARDS = (
    "SgdScaledDecayed",
    "MomentumClippedDecayed",
    "Nesterov",
    "Adagrad",
    "RmsPropCenteredMomentum",
    "FtrlPowerScaled",
    "AdamDecayed",
    "AdamWScaledDecayed",
)


@pytest.mark.parametrize("name", [*IN_SHARDS, "AdamWeightDecay", "LambDirectionDecayed", "AdafactorVectorScaled"])
def test_shards_of_flat_buffers_in_place_are_the_whole_bit_by_bit(name: str) -> None:
    called = function(name)
    count, chunk = 10_007, 1_024
    session = session_of(flat_model(called, NUMBERS))
    names = tuple(each for each in called.input if each in SCALARS)
    step = fed(names, 4, {**NUMBERS, "lr": 0.01, "scale": 0.3})
    buffers = {each: np.abs(drawn((count,), k)) for k, each in enumerate(called.input) if each not in names}
    whole = session.run(None, {**buffers, **step})
    # LAMB's direction may lie where the gradient did.
    targets = [each.removesuffix("_next") if each != "direction" else "gradient" for each in called.output]
    for begin in range(0, count, chunk):
        binding = session.io_binding()
        parts = {each: buffer[begin : begin + chunk] for each, buffer in buffers.items()}
        for each, array in {**parts, **step}.items():
            binding.bind_input(each, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        for each, target in zip(called.output, targets, strict=True):
            binding.bind_output(each, "cpu", 0, np.float32, parts[target].shape, parts[target].ctypes.data)
        session.run_with_iobinding(binding)
    for target, value in zip(targets, whole, strict=True):
        np.testing.assert_array_equal(buffers[target], value)


@pytest.mark.parametrize("type", ["sgd", "momentum", "adam", "lamb"])
def test_a_scale_of_zero_stops_a_gradient_whose_square_overflows(type: str) -> None:
    chosen = optimizer(type, {"lr": 0.1})
    node = update_steps(chosen, *operands(chosen, scaled=True))[0]
    assert isinstance(node, ir.Node)
    called = function(node.op_type)
    names = tuple(name for name in called.input if name in SCALARS)
    state = {name: np.ones(3, np.float32) for name in called.input if name not in names}
    state["gradient"] = np.full(3, 1e30, np.float32)
    step = fed(names, 3, {**chosen.hyper, "lr": 0.1, "scale": 0.0})
    assert all(np.isfinite(value).all() for value in session_of(flat(node)).run(None, {**state, **step}))


def test_the_reference_evaluator_agrees() -> None:
    chosen = optimizer("lamb", {"lr": 0.1, "weight_decay": 0.2})
    model = model_of(chosen, (3, 5))
    feeds = {"w": drawn((3, 5), 1), "w.grad": drawn((3, 5), 2), "w.exp_avg": drawn((3, 5), 3)}
    feeds |= {"w.exp_avg_sq": np.abs(drawn((3, 5), 4)), **fed(chosen.scalars, 2, {**chosen.hyper, "lr": 0.1})}
    wanted = session_of(model.SerializeToString()).run(None, feeds)
    for found, value in zip(ReferenceEvaluator(model).run(None, feeds), wanted, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-7)


def flat(node: ir.Node) -> bytes:
    """A node's function as a model; what LAMB keeps of norms has shapes of its own."""
    numbers = {name: attribute.as_float() for name, attribute in node.attributes.items()}
    model = onnx.load_from_string(flat_model(function(node.op_type), numbers))
    if node.op_type in SUMS:
        model.graph.output[0].type.tensor_type.ClearField("shape")
    return model.SerializeToString()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("type", ["lamb", "lars", "adafactor"])
def test_shards_with_sums_between_are_the_whole(type: str, dim: int) -> None:
    """Every node runs by itself on two shards; a `ShardSum` is the sum of what both have."""
    chosen = optimizer(type, {"lr": 0.1, "weight_decay": 0.2})
    shape, numbers = (6, 4), fed((*chosen.scalars, "scale"), 2, {**chosen.hyper, "lr": 0.1, "scale": 0.5})
    slots = {f"w.{slot}": np.abs(drawn(value.shape, 4)) for slot, value in begun(chosen, shape).items()}
    state = {"w": drawn(shape, 1), "w.grad": drawn(shape, 2), **slots}
    whole = session_of(model_of(chosen, shape, scaled=True).SerializeToString()).run(None, {**state, **numbers})
    given = operands(chosen, shape, scaled=True)
    halves = [{name: half(value, dim, k) for name, value in state.items()} | numbers for k in range(2)]
    for step in update_steps(chosen, *given, shape=shape, cut=[dim]):
        if isinstance(step, ShardSum):
            if step.total is not step.terms:
                assert dim in step.dims
                total = sum(each[str(step.terms.name)] for each in halves)
                halves = [{**each, str(step.total.name): np.asarray(total)} for each in halves]
            continue
        halves = [each | results(step, each) for each in halves]
    for value, wanted in zip(given[-1], whole, strict=True):
        one, other = (each[str(value.name)] for each in halves)
        found = one if one.shape == wanted.shape else np.concatenate([one, other], dim)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7, err_msg=str(value.name))


def half(value: np.ndarray, dim: int, k: int) -> np.ndarray:
    """One of two shards; a slot of one element along the dim is the same for both."""
    return value if value.shape[dim] == 1 else np.split(value, 2, dim)[k]


def results(node: ir.Node, given: Tensors) -> Tensors:
    """What a node makes of arrays by name."""
    inputs = [
        ir.Value(name=value.name, type=ir.TensorType(ir.DataType.FLOAT)) for value in node.inputs if value is not None
    ]
    outputs = [ir.Value(name=value.name, type=ir.TensorType(ir.DataType.FLOAT)) for value in node.outputs]
    copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs)
    graph = ir.Graph(inputs, outputs, nodes=[copy], opset_imports={"": 21, node.domain: 1}, name="one")
    proto = ir.serde.serialize_model(ir.Model(graph, ir_version=10))
    proto.functions.append(function(node.op_type))
    names = [str(value.name) for value in outputs]
    return dict(
        zip(
            names,
            session_of(proto.SerializeToString()).run(None, {str(v.name): given[str(v.name)] for v in inputs}),
            strict=True,
        )
    )


@pytest.mark.parametrize(
    ("squares", "ratio"),
    [((4, 16), 0.5), ((0, 1), 1), ((1, 0), 1), ((0, 0), 1), ((1e4, 1e-8), 10), ((1e-37, 1e-35), 0.1)],
)
def test_lamb_does_not_adapt_to_zeros(squares: tuple[float, float], ratio: float) -> None:
    chosen = optimizer("lamb", {"lr": 1})
    (node,) = (
        one
        for one in update_steps(chosen, *operands(chosen))
        if isinstance(one, ir.Node) and one.op_type == "LambRatio"
    )
    (found,) = session_of(flat(node)).run(None, {"squares": np.asarray(squares, np.float32)})
    assert found.shape == ()
    assert found == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize(("name", "groups"), [("Sgd", 1), ("AdafactorMoment", 2)])
def test_neighbours_with_results_of_their_own_run_by_themselves(name: str, groups: int) -> None:
    """Memory is laid out for gradients and for what is kept, so several that make something else are not one over flat memory."""
    called = function(name)
    kept, other = (called.input[0], called.input[1])
    numbers = [each for each in called.input if each in SCALARS]
    nodes = [
        onnx.helper.make_node(
            name, [f"{k}.{kept}", f"{k}.{other}", *numbers], [f"{k}.{each}" for each in called.output]
        )
        for k in "ab"
    ]
    names = [f"{k}.{each}" for k in "ab" for each in (kept, other, *called.output)]
    states = {f"{k}.{kept}" for k in "ab"}
    plan = plan_groups([nodes], {name: called}, dict.fromkeys(names, "tensor(float)"), states, {})
    assert [len(found) for found in plan.groups.values()] == [groups]


def test_gradients_apart_in_their_buffer_are_no_run() -> None:
    """Another one may lie between two neighbours: that of a parameter which another device updates."""
    called = function("Sgd")
    names = [f"{k}{word}" for k in "abc" for word in ("", ".grad", ".next")]
    types = dict.fromkeys([*names, "lr"], "tensor(float)")
    one, two, three = (onnx.helper.make_node("Sgd", [k, f"{k}.grad", "lr"], [f"{k}.next"]) for k in "abc")
    laid = {"a.grad": ("bucket", 0), "b.grad": ("bucket", 1), "c.grad": ("bucket", 2)}
    for nodes, count in (([one, two, three], 1), ([one, three], 2), ([two, one], 2)):
        plan = plan_groups([nodes], {"Sgd": called}, types, set("abc"), laid)
        assert [len(found) for found in plan.groups.values()] == [count]


def test_a_gradient_of_several_updates_lies_in_no_buffer_of_gradients() -> None:
    """Two versions of a parameter may be updated by one value, in steps of their own."""
    called = function("Sgd")
    names = ["a", "b", "g", "h", "lr", "a.next", "b.next"]
    types = dict.fromkeys(names, "tensor(float)")
    one, two = (onnx.helper.make_node("Sgd", [k, "g", "lr"], [f"{k}.next"]) for k in "ab")
    other = onnx.helper.make_node("Sgd", ["b", "h", "lr"], ["b.next"])
    for steps, laid in (([one], [two]), []), (([one, two],), []), (([one], [other]), ["g", "h"]):
        plan = plan_groups(steps, {"Sgd": called}, types, {"a", "b"}, {})
        assert [name for buffer in plan.gradients for name in buffer] == laid


def test_memory_that_is_kept_has_what_is_kept_alone() -> None:
    """A shard that is cut out of a parameter in each step, with a late gradient that is kept, stands beside a kept parameter."""
    called = function("Sgd")
    names = ["a", "a.grad", "b.share", "b.pending", "lr", "a.next", "b.share.next"]
    types = dict.fromkeys(names, "tensor(float)")
    nodes = [
        onnx.helper.make_node("Sgd", ["a", "a.grad", "lr"], ["a.next"]),
        onnx.helper.make_node("Sgd", ["b.share", "b.pending", "lr"], ["b.share.next"]),
    ]
    for order in (nodes, nodes[::-1]):
        plan = plan_groups([order], {"Sgd": called}, types, {"a", "b.pending"}, {})
        assert {name for buffer in plan.state for name in buffer} == {"a", "b.pending"}


def test_a_shard_with_a_late_gradient_runs_by_itself() -> None:
    """It is the one operand that is not kept; its new value lies where nothing says that it follows another one's."""
    called = function("Momentum")
    numbers = [each for each in called.input if each in SCALARS]
    of = {"parameter": "share", "gradient": "pending", "momentum": "momentum"}
    nodes = [
        onnx.helper.make_node(
            "Momentum",
            [each if each in numbers else f"{k}.{of[each]}" for each in called.input],
            [f"{k}.{of[each.removesuffix('_next')]}.next" for each in called.output],
        )
        for k in "ab"
    ]
    names = [name for node in nodes for name in (*node.input, *node.output)]
    kept = {f"{k}.{name}" for k in "ab" for name in ("pending", "momentum")}
    plan = plan_groups(
        [nodes],
        {"Momentum": called},
        dict.fromkeys(names, "tensor(float)"),
        kept,
        {},
    )
    assert [len(found) for found in plan.groups.values()] == [2]
    assert not plan.gradients


def test_a_sum_of_squares_says_its_dims() -> None:
    """onnxruntime adds all elements of a tensor at once into a few float32 sums, which is 2.7e-3 off for 25 million."""
    sums = [line for family in PARTS.values() for line in family.body.splitlines() if "ReduceSumSquare" in line]
    assert sums
    assert [line for line in sums if "," not in line.rpartition("(")[2]] == []
