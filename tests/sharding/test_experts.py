"""Products with matrices that a router picks: rows are multiplied by expert, on one rank and in any cut, as the model's own nodes do it."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest
from dealt import dealt
from equivalence import compiled, counted, same_as_whole
from onnx import numpy_helper
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.rewrite.routed import _Routing
from partc.runtime import load_local
from rows import first_and_of_today
from sharded_models import with_weights
from training_equivalence import run_whole, same_training


def normal(*shape: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


ROUTER = """<ir_version: 10, opset_import: ["" : 21]>
main (float[tokens, 6] x) => (float[tokens, 6] y)
    <int64[2] flat = {-1, 1}, int64[1] k = {2}, int64[1] one = {1}, int64[1] all = {-1}, int64[3] twice = {1, 2, 1},
     int64[2] rows = {-1, 6}, int64[3] apart = {-1, 2, 6}, int64[1] first = {0}, int64[1] half = {12}, int64[1] end = {24}> {
    [route] logits = MatMul(x, router)
    [choose] top, chosen = TopK(logits, k)
    [share] share = Softmax <axis = 1> (top)
    [apart] x3 = Unsqueeze(x, one)
    [twice] x2 = Tile(x3, twice)
    [spread] xs = Reshape(x2, rows)
    [flatten] ids = Reshape(chosen, all)
"""
END = """
    [flat] s = Reshape(share, flat)
    [weigh] m = Mul(d, s)
    [experts] e = Reshape(m, apart)
    [total] t = ReduceSum <keepdims = 0> (e, one)
    [end] y = Tanh(t)
}"""
COLUMNS = (
    ROUTER
    + """
    [pairs] index = Unsqueeze(ids, all)
    [pick_up] ups = GatherND(up_weight, index)
    [column] x4 = Unsqueeze(xs, all)
    [up] u4 = MatMul(ups, x4)
    [flat_up] both = Squeeze(u4, all)
    [gate] gate = Slice(both, first, half, one)
    [lift] lift = Slice(both, half, end, one)
    [bend] bent = Tanh(gate)
    [gated] h = Mul(bent, lift)
    [pick_down] downs = GatherND(down_weight, index)
    [column_down] h4 = Unsqueeze(h, all)
    [down] d4 = MatMul(downs, h4)
    [flat_down] d = Squeeze(d4, all)
"""
    + END
)
"""As Mixtral is exported: weights [experts, columns, rows], the gate and the other half in one."""
ROWS = (
    ROUTER
    + """
    [narrow] small = Cast <to = 6> (ids)
    [pick_up] ups = Gather(up_weight, small)
    [row] x4 = Unsqueeze(xs, one)
    [up] u4 = MatMul(x4, ups)
    [flat_up] u = Squeeze(u4, one)
    [pick_bias] c = Gather(bias, ids)
    [biased] both = Add(u, c)
    [gate] gate = Slice(both, first, end, one, k)
    [lift] lift = Slice(both, one, end, one, k)
    [bend] bent = Tanh(gate)
    [gated] h = Mul(bent, lift)
    [pick_down] downs = Gather(down_weight, ids)
    [swapped] downs_of = Transpose <perm = [0, 2, 1]> (downs)
    [row_down] h4 = Unsqueeze(h, one)
    [down] d4 = MatMul(h4, downs_of)
    [flat_down] d = Squeeze(d4, one)
"""
    + END
)
"""As gpt-oss is exported: weights [experts, rows, columns], with biases; the second ones are swapped where they are read."""
FORMS = {
    "columns": (COLUMNS, {"router": (6, 6), "up_weight": (6, 24, 6), "down_weight": (6, 6, 12)}),
    "rows": (ROWS, {"router": (6, 6), "up_weight": (6, 6, 24), "bias": (6, 24), "down_weight": (6, 6, 12)}),
}
PLANS = {
    "one rank": ("ranks: 1\n", {}),
    "two ranks have halves of each matrix": ("ranks: 2\nsharding: {up: colwise, down: rowwise}\n", {"AllReduce": 1}),
    "three ranks have thirds of each matrix": ("ranks: 3\nsharding: {up: colwise, down: rowwise}\n", {"AllReduce": 1}),
    "two ranks have half of the tokens": (
        "ranks: 2\nsymbols: {tokens: {divisor: 2}}\ndataset: {x: [2, 1]}\n",
        {"Exchange": 1},
    ),
    "three ranks have two experts each": (
        "ranks: 3\nsharding: {'{up,down}': {in: [[1, 1], [3, 1, 1], [1]]}}\n",
        {"AllReduce": 2},
    ),
}
TRAIN = "train: {loss: {type: mean_squared, prediction: y, target: wanted}, optimizer: {type: momentum, lr: 0.05, momentum: 0.9}}\n"


def model(form: str) -> onnx.ModelProto:
    text, weights = FORMS[form]
    return with_weights(text, weights)


def tokens(count: int) -> list[dict[str, np.ndarray]]:
    """Tokens of all kinds: mixed; all alike, so that most experts have none; zeros, whose logits are equal."""
    alike = np.tile(normal(1, 6, seed=8), (count, 1))
    return [{"x": x} for x in (normal(count, 6), alike, np.zeros((count, 6), np.float32))]


@pytest.mark.parametrize(("plan", "form"), first_and_of_today(dealt([*PLANS], [*FORMS]), lambda case: case[1]))
def test_rows_are_multiplied_by_expert(form: str, plan: str) -> None:
    text, collectives = PLANS[plan]
    program = same_as_whole(model(form), text, *tokens(4), *tokens(2), rtol=1e-5, atol=1e-5, checked=True)
    assert not any(node.op_type == "GatherND" for node in program.model.graph)
    assert counted(program) == collectives
    assert not program.warnings


def test_columns_of_routed_rows_are_split() -> None:
    """As transformers exports Mixtral: the gate and the other half by one Split, which is none by expert."""
    gate, lift = "[gate] gate = Slice(both, first, half, one)", "[lift] lift = Slice(both, half, end, one)"
    text = COLUMNS.replace(gate, "[gate] gate, lift = Split <axis = 1, num_outputs = 2> (both)").replace(lift, "")
    plan = "ranks: 2\nmesh: {dp: 2}\nsymbols: {tokens: {divisor: 2}}\ndataset: {x: [dp, null]}\nexperts: {axis: dp}\n"
    proto = with_weights(text, FORMS["columns"][1])
    program = same_as_whole(proto, plan, *tokens(4), rtol=1e-5, atol=1e-5, checked=True)
    assert counted(program) == {"Route": 1, "Return": 1, "Exchange": 1}


@pytest.mark.parametrize(("plan", "form"), first_and_of_today(dealt([*PLANS], [*FORMS][::-1]), lambda case: case[1]))
def test_experts_learn(form: str, plan: str, tmp_path: Path) -> None:
    """As the picked matrices do; experts without a row have a gradient of zeros."""
    text, _ = PLANS[plan]
    steps = [{**step, "wanted": normal(4, 6, seed=9)} for step in tokens(4)]

    def source() -> Source:
        return Source(from_proto(model(form), Path("model.onnx")))

    with mock.patch.object(_Routing, "route"):  # compiles the model's own nodes
        picked = run_whole(source(), f"ranks: 1\n# {form}\n{TRAIN}", steps)
    assert not any(node.op_type == "ExpertMatMul" for node in picked.program.model.graph)
    same_training(source, text + TRAIN, tmp_path, steps, rtol=1e-5, atol=1e-4, whole=picked)


def wide(form: str) -> onnx.ModelProto:
    """The model in larger sizes, with weights of experts that blocks of four bits hold exactly."""
    text, weights = FORMS[form]
    for old, new in {"6]": "32]", "1, 6}": "1, 32}", "2, 6}": "2, 32}", "= {24}": "= {64}", "= {12}": "= {32}"}.items():
        text = text.replace(old, new)
    sizes = {6: 32, 12: 32, 24: 64}
    shapes = {name: (6, *(sizes[size] for size in shape[1:])) for name, shape in weights.items()}
    proto = with_weights(text, {**shapes, "router": (32, 6)})
    for one in proto.graph.initializer:
        if one.name in ("up_weight", "down_weight"):
            array = np.clip(np.round(numpy_helper.to_array(one) * 20), -7, 7)
            blocked = array.swapaxes(1, 2) if (form, one.name) == ("rows", "up_weight") else array
            blocked[..., ::16] = -8  # of a block the extreme, which is a whole number of scales
            one.CopyFrom(numpy_helper.from_array((array / 64).astype(np.float32), one.name))
    return proto


FOUR_BITS = "quantize: {{'{{up,down}}': {{bits: 4, block: 16, accuracy_level: {}}}}}\n"


@pytest.mark.parametrize(("form", "ranks"), dealt([*FORMS], [1, 2]))
def test_experts_of_four_bits(form: str, ranks: int) -> None:
    plan = f"ranks: {ranks}\n{FOUR_BITS.format(1)}sharding: {{up: colwise, down: rowwise}}\n"
    program = same_as_whole(wide(form), plan, {"x": normal(5, 32)}, rtol=1e-5, atol=1e-5, checked=True)
    assert {node.op_type for node in program.model.graph if "Expert" in node.op_type} == {"ExpertMatMulNBits"}
    assert counted(program) == ({"AllReduce": 1} if ranks > 1 else {})


@pytest.mark.parametrize("quantize", ["", FOUR_BITS.format(1)])
def test_a_row_has_the_same_bits_in_any_company(quantize: str, tmp_path: Path) -> None:
    compiled(wide("columns"), f"ranks: 1\n{quantize}", tmp_path)
    x = normal(9, 32)
    with load_local(tmp_path) as ranks:
        among = ranks({"x": x})["y"]
        assert all(np.array_equal(ranks({"x": x[k : k + n]})["y"], among[k : k + n]) for k in range(6) for n in (1, 3))


STAGES = "ranks: 2\nsymbols: {tokens: {divisor: 2}}\nplacement: {end: 1, '*': 0}\npipeline: {microbatches: 2}\n"


def test_microbatches_have_experts() -> None:
    program = same_as_whole(model("columns"), STAGES, *tokens(4), rtol=1e-5, atol=1e-5, checked=True)
    assert [node.op_type for node in program.model.graph].count("ExpertMatMul") == 2


def test_experts_compute_in_16_bits(tmp_path: Path) -> None:
    plan = f"ranks: 2\nprecision: {{compute: bfloat16}}\nsharding: {{up: colwise, down: rowwise}}\n{TRAIN}"
    program = compiled(model("columns"), plan, tmp_path)
    products = [node for node in program.model.graph if node.op_type == "ExpertMatMul"]
    assert {str(value.dtype) for node in products for value in (*node.inputs[:2], *node.outputs)} == {"BFLOAT16"}


MOE = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
main (float[tokens, 6] x) => (float[tokens, 6] y) {
    [route] logits = MatMul(x, router)
    [moe] m = com.microsoft.MoE <k = 2, HOW> (x, logits, up_weight, up_bias, down_weight, down_bias)
    [end] y = Tanh(m)
}"""
QMOE = (
    'QMoE <k = 2, activation_type = "swiglu", SWIGLU, block_size = 16, expert_weight_bits = 4, normalize_routing_weights = 1> '
    "(x, logits, up_weight, up_scales, up_bias, down_weight, down_scales, down_bias)"
)
SWIGLU = "swiglu_fusion = 1, activation_alpha = 1.702, activation_beta = 1.0, swiglu_limit = 0.5"


@pytest.mark.parametrize(
    ("how", "width"),
    [
        ('activation_type = "silu", normalize_routing_weights = 1', 12),
        ('activation_type = "relu"', 12),
        (f'activation_type = "swiglu", {SWIGLU}', 24),
    ],
)
def test_the_kernel_of_a_layer_is_written_out_where_it_is_cut(how: str, width: int) -> None:
    shapes = {
        "router": (6, 4),
        "up_weight": (4, width, 6),
        "up_bias": (4, width),
        "down_weight": (4, 6, 12),
        "down_bias": (4, 6),
    }
    plan = "ranks: 2\nsharding: {moe.first: colwise, moe.second: rowwise}\n"
    program = same_as_whole(
        with_weights(MOE.replace("HOW", how), shapes), plan, {"x": normal(5, 6)}, rtol=1e-5, atol=1e-5
    )
    assert counted(program) == {"AllReduce": 1}
    assert [node.op_type for node in program.model.graph].count("ExpertMatMul") == 2


def test_the_kernel_with_weights_of_four_bits_is_written_out_where_it_is_cut() -> None:
    kernel = "MoE <k = 2, HOW> (x, logits, up_weight, up_bias, down_weight, down_bias)"
    text = MOE.replace(kernel, QMOE.replace("SWIGLU", SWIGLU)).replace("6]", "32]")
    proto = with_weights(text, {"router": (32, 4), "up_bias": (4, 64), "down_bias": (4, 32)})
    random = np.random.default_rng(3)
    for name, columns in (("up", 64), ("down", 32)):
        numbers = random.integers(0, 256, (4, columns, 16), np.uint8)
        scales = random.random((4, columns, 2), np.float32) / 20
        proto.graph.initializer.append(numpy_helper.from_array(numbers, f"{name}_weight"))
        proto.graph.initializer.append(numpy_helper.from_array(scales, f"{name}_scales"))
    plan = "ranks: 2\nsharding: {moe.first: colwise, moe.second: rowwise}\n"
    program = same_as_whole(proto, plan, {"x": normal(5, 32)}, rtol=1e-5, atol=1e-5, checked=True)
    assert counted(program) == {"AllReduce": 1}
    assert [node.op_type for node in program.model.graph].count("ExpertMatMulNBits") == 2
