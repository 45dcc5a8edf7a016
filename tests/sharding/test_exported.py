"""Patterns of exported models under tensor parallel: one AllReduce an attention, and nothing else."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import compiled, counted, same_as_whole, whole_outputs
from exported import Exported, steps
from partc.runtime import load_local

ATTENTION = "sharding: {'{q,k,v}_proj': colwise, o_proj: rowwise}\n"


def attention(heads: int, key_heads: int, flat: bool, opset: int = 21) -> onnx.ModelProto:
    g = Exported()
    q, k, v = (
        g.linear("x", 24, n * 6, f"{name}_proj") for name, n in zip("qkv", (heads, key_heads, key_heads), strict=True)
    )
    g.linear(g.attend(q, k, v, heads, key_heads, 6, flat=flat), heads * 6, 24, "o_proj")
    return g.model(24, "o_proj", opset=opset)


@pytest.mark.parametrize(("heads", "key_heads", "flat"), [(4, 4, True), (4, 4, False), (8, 4, True), (6, 2, False)])
def test_attention_has_one_all_reduce(heads: int, key_heads: int, flat: bool) -> None:
    """Dynamic batch and sequence, heads counted by -1, repeated keys, and K turned with batch and heads merged."""
    model = attention(heads, key_heads, flat, 18 if flat else 21)
    program = same_as_whole(model, "ranks: 2\n" + ATTENTION, *steps(24), rtol=1e-5, atol=1e-6)
    assert counted(program) == {"AllReduce": 1}


def test_a_transpose_through_merged_dims_stays_where_nothing_is_cut() -> None:
    model = attention(4, 4, flat=True)
    program = same_as_whole(model, "ranks: 2\nplacement: {o_proj: 1}\n", *steps(24), rtol=0, atol=0)
    assert "k_merged" in program.paths.values()


@pytest.mark.parametrize(
    ("target", "made", "straight"),
    [
        ([2, 4, 6, -1], [2, 4, 6, 5], True),
        ([2, 2, 2, 6, 5], [2, 2, 2, 6, 5], True),
        ([0, 6, -1], [8, 6, 5], False),
        ([2, 4, 3, 10], [2, 4, 3, 10], False),
    ],
)
def test_a_turned_matrix_with_constant_targets(target: list[int], made: list[str | int], straight: bool) -> None:
    """An entry of -1, more dims than there were, one of 0, which copies the merged dim, and other dims at the end."""
    g = Exported()
    y = g.add("Reshape", [g.linear("x", 24, 24, "up"), g.ints(2, 5, 4, 6)], "viewed")
    y = g.add("Transpose", [y], "heads", perm=[0, 2, 1, 3])
    merged = g.add("Reshape", [y, g.ints(-1, 5, 6)], "merged")
    g.add("Reshape", [g.add("Transpose", [merged], "turned", perm=[0, 2, 1]), g.ints(*target)], "y")
    plan = "ranks: 2\nsharding: {up: colwise}\n"
    program = same_as_whole(g.model(24, "y", made), plan, *steps(24, (2, 5)), rtol=1e-6, atol=1e-6)
    assert ("merged" not in program.paths.values()) is straight


@pytest.mark.parametrize(
    ("words", "collectives"),
    [
        ({"up": "colwise", "down": "rowwise"}, {"AllReduce": 1}),
        ({"up": "colwise_gather_output"}, {"AllGather": 1}),
        ({"up": "colwise_rep"}, {"AllGather": 1}),
        ({"up": "local_colwise", "down": "rowwise_split_input"}, {"AllReduce": 1}),
        ({"down": "rowwise_rep", "up": "replicated"}, {"AllReduce": 1}),
        ({"embed": "embedding_rowwise"}, {"AllReduce": 1}),
        ({"embed": "embedding_colwise", "up": "rowwise"}, {"AllReduce": 1}),
        ({"up": "colwise", "scale": "replicated_with_grad_allreduce", "down": "rowwise"}, {"AllReduce": 1}),
    ],
)
def test_the_words_of_a_tp_plan(words: dict[str, str], collectives: dict[str, int]) -> None:
    g = Exported()
    ids = g.add("ArgMax", ["x"], "ids", axis=2, keepdims=0)
    y = g.linear(g.add("Gather", [g.weight("table", 24, 18), ids], "embed"), 18, 12, "up", bias=True)
    y = g.add("Mul", [g.add("Relu", [y], "relu"), g.weight("scale.weight", 12)], "scale")
    g.linear(y, 12, 24, "down", bias=True)
    sharding = ", ".join(f"{name}: {word}" for name, word in words.items())
    program = same_as_whole(
        g.model(24, "down.add"), f"ranks: 2\nsharding: {{{sharding}}}\n", *steps(24), rtol=1e-5, atol=1e-6
    )
    assert counted(program) == collectives


def test_a_dim_that_is_a_quotient_of_dims() -> None:
    """GPT-2's positions: as many as there are elements of the mask in a record."""
    g = Exported()
    b, s = (g.add("Squeeze", [g.dim("x", k)], name) for k, name in ((0, "b"), (1, "s")))
    length = g.add("Div", [g.add("Mul", [b, s], "count"), b], "length")
    length = g.add("Unsqueeze", [length, g.ints(0)], "length1")
    mask = g.add("Expand", [g.weight("one", 1, 1), g.add("Concat", [length, g.ints(1)], "shape", axis=0)], "mask")
    y = g.linear(g.add("Mul", ["x", mask], "masked"), 24, 12, "up")
    g.linear(y, 12, 24, "down")
    plan = "ranks: 2\nsharding: {up: colwise, down: rowwise}\n"
    program = same_as_whole(g.model(24, "down"), plan, *steps(24), rtol=1e-5, atol=1e-6)
    assert [
        program.values[out].shape for node in program.model.graph for out in node.outputs if out.name == "mask"
    ] == [("seq", 1)]


@pytest.mark.parametrize("batch", [1, 3])
def test_rotary_tables_of_one_record(batch: int) -> None:
    """As torch exports them at opset 23, which onnxruntime refuses for a larger batch: compared with one record at a time."""
    g = Exported()
    y = g.reshape(g.linear("x", 24, 32, "up"), [g.dim("x", 0), g.dim("x", 1), 4, 8], "viewed")
    y = g.add("Transpose", [y], "heads", perm=[0, 2, 1, 3])
    angles = g.add("Slice", [g.weight("angles", 1, 64, 4), g.ints(0), g.dim("x", 1), g.ints(1)], "angles_here")
    y = g.add("RotaryEmbedding", [y, g.add("Cos", [angles], "cos"), g.add("Sin", [angles], "sin")], "rotary")
    y = g.reshape(g.add("Transpose", [y], "back", perm=[0, 2, 1, 3]), [g.dim("x", 0), g.dim("x", 1), 32], "joined")
    g.linear(y, 32, 24, "down")
    proto = g.model(24, "down", opset=23)
    with tempfile.TemporaryDirectory() as folder:
        plan = "ranks: 2\nsymbols: {seq: {max: 64}}\nsharding: {up: colwise, down: rowwise}\n"
        program = compiled(proto, plan, Path(folder) / "build")
        x = np.random.default_rng(3).standard_normal((batch, 5, 24), dtype=np.float32)
        with load_local(Path(folder) / "build") as ranks:
            have = ranks({"x": x})["down"]
    assert counted(program) == {"AllReduce": 1}
    for k in range(batch):
        want = whole_outputs(proto, {"x": x[k : k + 1]})["down"]
        np.testing.assert_allclose(have[k : k + 1], want, rtol=1e-5, atol=1e-6)
