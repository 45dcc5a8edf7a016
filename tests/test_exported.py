"""Patterns of exported models under tensor parallel: one AllReduce an attention, and nothing else."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest
from exported import Exported, steps
from partc.compiler.program import Program
from whole import same_as_whole

ATTENTION = "sharding: {'{q,k,v}_proj': colwise, o_proj: rowwise}\n"


def counted(program: Program) -> dict[str, int]:
    return dict(Counter(event.op_type for event in program.events))


def attention(heads: int, key_heads: int, flat: bool, opset: int = 21) -> onnx.ModelProto:
    g = Exported()
    q, k, v = (
        g.linear("x", 24, n * 6, f"{name}_proj") for name, n in zip("qkv", (heads, key_heads, key_heads), strict=True)
    )
    g.linear(g.attend(q, k, v, heads, key_heads, 6, flat=flat), heads * 6, 24, "o_proj")
    return g.model(24, "o_proj", opset=opset)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (8, 4), (6, 2)])
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
