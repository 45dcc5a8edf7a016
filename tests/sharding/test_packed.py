"""Packed weights: each rank has its part of every one of them, without a message; and what is kept of them is the whole's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from equivalence import compiled, counted, same_as_whole
from exported import Exported, steps
from partc.cli.commands.compile import trained_line
from partc.cli.output.training_stats import trained_tensors
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from training_equivalence import put, run, same_training, tensors

FUSED = "sharding: {c_attn: colwise, o_proj: rowwise}\n"


def split_by(g: Exported, y: str, how: str, sizes: list[int]) -> list[str]:
    """Takes y (batch, seq, sum of sizes) apart in one of the ways of exporters."""
    if how == "split":
        return list(g.add("Split", [y, g.ints(*sizes)], "parts", len(sizes), axis=-1))
    if how == "slice":
        ends = np.cumsum([0, *sizes]).tolist()
        bounds = zip(ends, [*ends[1:-1], 2**63 - 1], strict=False)
        return [str(g.add("Slice", [y, g.ints(a), g.ints(b), g.ints(2), g.ints(1)], f"slice{a}")) for a, b in bounds]
    b, s = g.dim("x", 0), g.dim("x", 1)
    y = g.reshape(y, [b, s, len(sizes), sizes[0]], "apart")
    if how == "stack":
        y, axis = g.add("Transpose", [y], "front", perm=[2, 0, 1, 3]), 0
    else:
        axis = 2
    return [str(g.add("Gather", [y, g.ints(k, scalar=True)], f"take{k}", axis=axis)) for k in range(len(sizes))]


def fused(how: str, heads: int, key_heads: int, product: str = "MatMul") -> onnx.ModelProto:
    """Attention whose queries, keys and values are one product."""
    g, sizes = Exported(), [heads * 6, key_heads * 6, key_heads * 6]
    if product == "Gemm":  # as GPT-2: records and positions are one dim meanwhile, and the target is read at run time
        flat = g.add("Reshape", ["x", g.ints(-1, 24)], "rows")
        y = g.add(
            "Gemm", [flat, g.weight("c_attn.weight", 24, sum(sizes)), g.weight("c_attn.bias", sum(sizes))], "c_attn"
        )
        y = g.reshape(y, [g.dim("x", 0), g.dim("x", 1), sum(sizes)], "again")
    elif product == "Transpose":
        turned = g.add("Transpose", [g.weight("c_attn.weight", sum(sizes), 24)], "turned", perm=[1, 0])
        y = g.add("MatMul", ["x", turned], "c_attn")
        y = g.add("Mul", [y, g.weight("c_attn.scale", 1)], "scaled")
    else:
        y = g.linear("x", 24, sum(sizes), "c_attn", bias=True)
    q, k, v = split_by(g, y, how, sizes)
    g.linear(g.attend(q, k, v, heads, key_heads, 6), heads * 6, 24, "o_proj", bias=True)
    return g.model(24, "o_proj.add")


@pytest.mark.parametrize(
    ("how", "heads", "key_heads", "product"),
    [
        *(("split", 4, 4, product) for product in ("MatMul", "Gemm", "Transpose")),
        ("split", 8, 2, "MatMul"),
        ("slice", 6, 2, "Gemm"),
        ("gather", 4, 4, "Transpose"),
        ("stack", 4, 4, "Gemm"),
    ],
)
def test_a_packed_weight_is_cut_in_every_part(how: str, heads: int, key_heads: int, product: str) -> None:
    """By itself where the graph takes the product apart; fewer keys than queries, too."""
    program = same_as_whole(
        fused(how, heads, key_heads, product), "ranks: 2\n" + FUSED, *steps(24), rtol=1e-5, atol=1e-6
    )
    assert counted(program) == {"AllReduce": 1}


@pytest.mark.parametrize(
    "how", ["{style: colwise, packed: 3}", "{style: colwise, packed: [24, 24, 24]}", "packed_colwise"]
)
def test_packed_is_said(how: str) -> None:
    plan = f"ranks: 4\nmesh: {{dp: 2, tp: 2}}\nsharding: {{c_attn: {how}, o_proj: rowwise}}\n"
    program = same_as_whole(fused("split", 4, 4), plan, *steps(24), rtol=1e-5, atol=1e-6)
    assert counted(program) == {"AllReduce": 1}


def test_parts_that_nobody_asks_for_are_joined() -> None:
    """A reader that takes the product as one has it whole, and what is said stays right."""
    g = Exported()
    y = g.linear("x", 24, 24, "up", bias=True)
    g.linear(g.add("Softmax", [y], "soft", axis=-1), 24, 24, "down")
    plan = "ranks: 2\nsharding: {up: {style: colwise, packed: 3}, down: rowwise}\n"
    same_as_whole(g.model(24, "down"), plan, *steps(24), rtol=1e-5, atol=1e-6)


def test_a_gate_beside_an_up_projection_and_an_output_that_is_a_part() -> None:
    g = Exported()
    gate, up = g.add("Split", [g.linear("x", 24, 40, "gate_up")], "halves", 2, axis=-1, num_outputs=2)
    g.linear(g.add("Mul", [g.add("Sigmoid", [gate], "s"), up], "m"), 20, 24, "down")
    proto = g.model(24, "down")
    proto.graph.output.append(onnx.helper.make_tensor_value_info(gate, 1, ["batch", "seq", 20]))
    plan = f"ranks: 2\nsharding: {{gate_up: colwise, down: rowwise}}\noutputs: {{'{gate}': cut}}\n"
    program = same_as_whole(proto, plan, *steps(24), rtol=1e-5, atol=1e-6)
    assert counted(program) == {"AllReduce": 1}


@pytest.mark.parametrize(
    "rules", ["first: colwise, second: rowwise", "gate_up: packed_colwise, down: rowwise, router: replicated"]
)
def test_rows_of_a_packed_weight_that_are_looked_up(rules: str) -> None:
    """The experts of a mixture: their matrices are rows of one weight, and each is packed; by the products or the weights."""
    g = Exported()
    rows = g.add("Reshape", ["x", g.ints(-1, 24)], "rows")
    chosen = g.add("ArgMax", [g.linear(rows, 24, 3, "router")], "chosen", axis=1, keepdims=0)
    up = g.add("Gather", [g.weight("gate_up", 3, 40, 24), chosen], "gate_up_of")
    y = g.add("MatMul", [up, g.add("Unsqueeze", [rows, g.ints(-1)], "column")], "first")
    gate, up = g.add("Split", [g.add("Squeeze", [y, g.ints(-1)], "flat")], "halves", 2, axis=-1, num_outputs=2)
    m = g.add("Unsqueeze", [g.add("Mul", [g.add("Sigmoid", [gate], "s"), up], "m"), g.ints(-1)], "m_column")
    y = g.add("MatMul", [g.add("Gather", [g.weight("down", 3, 24, 20), chosen], "down_of"), m], "second")
    g.reshape(g.add("Squeeze", [y, g.ints(-1)], "done"), [g.dim("x", 0), g.dim("x", 1), 24], "y")
    plan = f"ranks: 2\nsharding: {{{rules}}}\n"
    program = same_as_whole(g.model(24, "y"), plan, *steps(24), rtol=1e-5, atol=1e-6)
    assert counted(program) == {"AllReduce": 1}


TRAIN = """train:
  loss: {type: mean_squared, prediction: o_proj.add, target: target}
  optimizer: {type: momentum, lr: 0.5, momentum: 0.9}
"""


def _targets(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    random = np.random.default_rng(6)
    return [{**one, "target": random.standard_normal(one["x"].shape, dtype=np.float32)} for one in steps(24, *sizes)]


def source() -> Source:
    return Source(from_proto(fused("split", 4, 2), Path("model.onnx")))


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ("ranks: 2\n", "  clip: {norm: 0.1}\n"),
        ("ranks: 4\nmesh: {dp: 2, tp: 2}\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n",
         "zero"),
    ],
)  # fmt: skip
def test_packed_weights_train(plan: str, more: str, tmp_path: Path) -> None:
    """Losses, weights and moments under their own names, as those of the whole; also shared out over ranks."""
    train = TRAIN.replace("0.9}", "0.9, shard: true}") if more == "zero" else TRAIN + more
    same_training(source, plan + FUSED + train, tmp_path, _targets((2, 5), (4, 3)), rtol=1e-5, atol=1e-4)
    assert check_artifact(tmp_path / "cut") == []


def test_a_weight_in_parts_is_one_parameter(tmp_path: Path) -> None:
    """The command says one number of parameters, whether they are computed in parts or not, and the training says the same."""
    said = set()
    for name, plan in {"whole": "ranks: 1\n", "cut": "ranks: 2\n" + FUSED}.items():
        report = compile_source(source(), parse_plan(plan + TRAIN, "plan.yaml"), tmp_path / name)
        said.add(trained_line(report))
        elements = trained_tensors(report.manifest)
        assert report.program.training is not None
        assert (len(report.program.training.parameters) > len(elements)) == (name == "cut")
        assert f"trains {len(elements)} parameters, " in trained_line(report)
    assert len(said) == 1


def test_state_of_a_packed_weight_is_the_whole_s(tmp_path: Path) -> None:
    """What was trained under one plan goes on under another."""
    batches = _targets((2, 5), (4, 3))
    cut = run(source(), "ranks: 2\n" + FUSED + TRAIN, tmp_path / "cut", batches[:1])
    assert cut.after["c_attn.weight"].shape == (24, 48)
    assert cut.after["c_attn.bias.momentum"].shape == (48,)
    other = run(source(), "ranks: 1\n" + TRAIN, tmp_path / "whole", batches[1:], start=cut.after)
    again = run(source(), "ranks: 2\n" + FUSED + TRAIN, tmp_path / "again", batches[1:], start=cut.after)
    for name, value in other.after.items():
        np.testing.assert_allclose(again.after[name], value, rtol=1e-4, atol=2e-5, err_msg=name)
    with load_local(tmp_path / "again") as ranks:
        put(ranks, other.after)
        for name, value in tensors(ranks).items():
            np.testing.assert_array_equal(value, other.after[name], err_msg=name)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{style: colwise, packed: 5}", "'c_attn.weight' dim 1 (48) cannot be packed as 5 equal parts"),
        (
            "{style: colwise, packed: [24, 12]}",
            "'c_attn.weight' dim 1 (48) cannot be packed as 24, 12\n  they add up to 36",
        ),
        ("{style: rowwise, packed: 3}", "'packed' without a colwise style"),
        ("{style: colwise, packed: 1}", "expected a number of parts, or the size of each, but got the number 1"),
    ],
)
def test_what_is_not_packed(rule: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(fused("split", 4, 2), f"ranks: 2\nsharding: {{c_attn: {rule}}}\n", tmp_path / "build")
    assert message in str(caught.value)


def test_norms_of_whole_parameters(tmp_path: Path) -> None:
    """LAMB scales a step by a parameter's norm: a packed weight stays one, and a rule that says otherwise is told."""
    lamb = TRAIN.replace("momentum, lr: 0.5, momentum: 0.9", "lamb, lr: 0.02")
    program = run(source(), "ranks: 2\n" + FUSED + lamb, tmp_path / "whole", []).program
    assert "c_attn" in program.paths.values()
    plan = "ranks: 2\nsharding: {c_attn: {style: colwise, packed: [24, 12, 12]}}\n" + lamb
    with pytest.raises(CompileError, match="the optimizer lamb takes the norm of a parameter, not of its parts"):
        run(source(), plan, tmp_path / "refused", [])
