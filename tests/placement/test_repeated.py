"""Masks and tables made of inputs are computed where they are read: what is sent, what is not, and that results stay the same."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from equivalence import model, same_as_whole
from training_equivalence import from_text, same_training

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\nmain '
LAYER = """
    [{0}_t] {0}t = Transpose <perm = [0, 2, 1]> ({1})
    [{0}_s] {0}s = MatMul({1}, {0}t)
    [{0}_m] {0}m = Add({0}s, mask)
    [{0}_p] {0}p = Softmax({0}m)
    [{0}_o] {2} = MatMul({0}p, {1})
"""
LAYERS = "".join(LAYER.format(*names) for names in (("a", "x", "ay"), ("b", "ay", "by"), ("c", "by", "y")))
PADDING = f"""{HEAD}(float[batch, seq, 6] x, int64[batch, seq] keep) => (float[batch, seq, 6] y)
<int64[1] one = {{1}}, int64[1] two = {{2}}, float big = {{-10000.0}}, float unit = {{1.0}}> {{
    [k_cast] kept = Cast <to = 1> (keep)
    [k_sub] left = Sub(unit, kept)
    [k_mul] away = Mul(left, big)
    [k_row] row = Unsqueeze(away, one)
    [k_column] column = Unsqueeze(away, two)
    [k_add] mask = Add(row, column)
    {LAYERS}
}}"""
STAGES = 'ranks: 3\nplacement: {"a*": 0, "b*": 1, "c*": 2}\n'
GROUPS = 'ranks: 4\nplacement: {"a*": [0, 1], "b*": [2, 3], "c*": [0, 1]}\nsymbols: {batch: {divisor: 2}}\n'


def padded(batch: int, seq: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seq)
    x = draw.standard_normal((batch, seq, 6), dtype=np.float32)
    return {"x": x, "keep": draw.integers(0, 2, (batch, seq))}


def moved(program) -> list[str]:
    return sorted({event.value.name for event in program.events})


@pytest.mark.parametrize(
    ("plan", "want"),
    [
        (STAGES, ["ay", "by", "y"]),
        (GROUPS, ["ay", "by"]),
        (GROUPS + "dataset: data_parallel\n", ["ay", "by", "y"]),
        (STAGES.replace('"c*": 2', '"c*": 2, "k*": 1'), ["ay", "by", "mask", "y"]),
    ],
    ids=["stages", "groups", "data parallel", "a line of the plan counts"],
)
def test_a_mask_of_an_input_is_made_on_every_stage(plan: str, want: Sequence[str]) -> None:
    program = same_as_whole(model(PADDING), plan, padded(4, 5), padded(2, 3), rtol=1e-5, atol=1e-5)
    assert moved(program) == want


@pytest.mark.parametrize("arriving", ["", "dataset: {keep: [2, 1]}\n"])
def test_a_mask_is_made_in_a_layout_of_which_all_its_readers_take_slices(arriving: str) -> None:
    plan = f"""ranks: 2
symbols: {{batch: {{divisor: 2}}, seq: {{divisor: 2}}}}
{arriving}sharding:
  a_m: {{in: [[2, 1, 1], [2, 1, 1]]}}
  b_m: {{in: [[1, 2, 1], [1, 2, 1]]}}
  "c*": replicate
"""
    program = same_as_whole(model(PADDING), plan, padded(4, 6), rtol=1e-5, atol=1e-5)
    assert "mask" not in moved(program)
    assert arriving or moved(program) == ["ay", "bs", "by"]


def test_what_is_made_of_a_small_value_is_repeated_from_there() -> None:
    """The input is larger than what is kept of it: that is sent, and the mask is made of it on every stage."""
    text = f"""{HEAD}(float[batch, seq, 6] x, float[batch, seq, 64] marks) => (float[batch, seq, 6] y)
    <int64[1] one = {{1}}, int64[1] last = {{2}}, int64[1] two = {{2}}> {{
        [k_max] kept = ReduceMax <keepdims = 0> (marks, last)
        [k_row] row = Unsqueeze(kept, one)
        [k_column] column = Unsqueeze(kept, two)
        [k_add] mask = Mul(row, column)
        {LAYERS}
    }}"""
    inputs = {"x": padded(2, 5)["x"], "marks": np.random.default_rng(1).standard_normal((2, 5, 64), dtype=np.float32)}
    program = same_as_whole(model(text), STAGES, inputs, rtol=1e-5, atol=1e-5)
    assert moved(program) == ["ay", "by", "kept", "y"]


@pytest.mark.parametrize(
    "made",
    [
        "[k_soft] mask = Softmax(wide)",
        "[k_a] back = Transpose <perm = [0, 2, 1]> (wide) [k_b] mask = MatMul(wide, back)",
        "".join(
            f"[k_{k}] {'mask' if k == 70 else f'w{k}'} = Sin({'wide' if k == 0 else f'w{k - 1}'})" for k in range(71)
        ),
    ],
    ids=["an op that is not cheap", "a sum over a long dim", "many operations"],
)
def test_what_costs_more_than_the_bound_is_sent(made: str) -> None:
    text = f"""{HEAD}(float[batch, 128, 6] x, float[batch, 128] keep) => (float[batch, 128, 6] y)
    <int64[1] one = {{1}}, int64[1] two = {{2}}> {{
        [k_row] row = Unsqueeze(keep, one)
        [k_column] column = Unsqueeze(keep, two)
        [k_wide] wide = Mul(row, column)
        {made}
        {LAYERS}
    }}"""
    draw = np.random.default_rng(2)
    inputs = {
        "x": draw.standard_normal((2, 128, 6), dtype=np.float32),
        "keep": draw.standard_normal((2, 128), dtype=np.float32),
    }
    program = same_as_whole(model(text), STAGES, inputs, rtol=1e-4, atol=1e-5)
    assert "mask" in moved(program)


def test_a_table_of_a_weight_is_repeated_where_the_weight_is_smaller() -> None:
    """Relative positions, as T5 has them: a table of 3 by 4 numbers, looked up for every pair of places."""
    text = f"""{HEAD}(float[batch, seq, 6] x, int64[seq, seq] places) => (float[batch, seq, 6] y)
    <float[4, 3] table = {{1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0}}, int64[1] last = {{2}}> {{
        [k_look] looked = Gather(table, places)
        [k_sum] mask = ReduceSum <keepdims = 0> (looked, last)
        {LAYERS}
    }}"""
    inputs = {"x": padded(2, 5)["x"], "places": np.random.default_rng(3).integers(0, 4, (5, 5))}
    program = same_as_whole(model(text), STAGES, inputs, rtol=1e-5, atol=1e-5)
    assert moved(program) == ["ay", "by", "y"]
    assert [len(part.weights) for part in program.parts] == [2, 2, 2]


@pytest.mark.parametrize(
    ("frozen", "sent", "plan"),
    [("true", False, GROUPS + "dataset: data_parallel\n"), ("false", True, STAGES), ("true", False, STAGES)],
    ids=["frozen, data parallel", "learned, stages", "frozen, stages"],
)
def test_training_repeats_what_nothing_is_learned_of(plan: str, frozen: str, sent: bool, tmp_path: Path) -> None:
    """A mask with a learned shift is made once, since its gradient is one: it is sent, and its gradients come back."""
    text = PADDING.replace("mask = Add(row, column)", "base = Add(row, column)\n    [k_shift] mask = Add(base, shift)")
    for name, read in (("a", "x"), ("b", "ay"), ("c", "by")):
        text = text.replace(f"[{name}_t]", f"[{name}_w] {name}w = MatMul({read}, {name}v)\n    [{name}_t]")
        text = text.replace(f"perm = [0, 2, 1]> ({read})", f"perm = [0, 2, 1]> ({name}w)")
    train = f"""train:
  loss: {{type: mean_squared, prediction: y, target: t}}
  optimizer: {{type: sgd, lr: 0.1}}
  parameters: {{shift: {{frozen: {frozen}}}}}
"""
    weights = {"shift": (1, 1, 3), "av": (6, 6), "bv": (6, 6), "cv": (6, 6)}
    draw = np.random.default_rng(5).standard_normal
    steps = [{**padded(4, 3), "t": draw((4, 3, 6), np.float32)} for _ in range(2)]
    fixed = plan.replace("ranks:", "inputs: {x: [batch, 3, 6], keep: [batch, 3]}\nranks:", 1)
    program = same_training(lambda: from_text(text, weights), fixed + train, tmp_path, steps, rtol=1e-4, atol=1e-3)
    assert ("mask" in moved(program)) == sent
