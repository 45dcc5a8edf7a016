"""Inference by microbatches: what streams through the stages and is joined again is what the unsharded model gives of the whole batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from equivalence import compiled, same_as_whole
from partc.compiler.errors import CompileError
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check_artifact
from sharded_models import with_weights

WEIGHTS = {"w": (6, 8), "v": (8, 5), "b": (5,)}
NET = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 5] y) <float[6, 8] w, float[8, 5] v, float[5] b> {
    [up] a = MatMul (x, w)
    [bend] h = Tanh (a)
    [down] c = MatMul (h, v)
    [add] y = Add (c, b)
}"""
EIGHT = "symbols: {batch: {divisor: 8}}\n"
STAGED = f"ranks: 2\n{EIGHT}placement: {{up: 0, bend: 0, down: 1, add: 1}}\n"
THREE = f"ranks: 3\n{EIGHT}placement: {{up: 0, bend: 1, down: 2, add: 2}}\n"
LOOP = f"ranks: 2\n{EIGHT}placement: {{up: 0, bend: 1, down: 0, add: 1}}\n"
VEE = f"ranks: 2\n{EIGHT}placement: {{up: 0, bend: 1, down: 1, add: 0}}\n"
GROUPS = (
    f"ranks: 4\nmesh: {{pp: 2, AXIS: 2}}\n{EIGHT}placement: {{up: {{pp: 0}}, bend: {{pp: 0}}, "
    "down: {pp: 1}, add: {pp: 1}}\n"
)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def pipeline(count: int, schedule: str = "") -> str:
    return f"pipeline: {{microbatches: {count}{f', schedule: {schedule}' if schedule else ''}}}\n"


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("plan", "count", "schedule", "row"),
    [
        (STAGED, 1, "", ""),
        (STAGED, 8, "", "rank 1: 1F0 1F1 1F2 1F3 1F4 1F5 1F6 1F7"),
        (STAGED, 4, "gpipe", "rank 0: 0F0 0F1 0F2 0F3"),
        (STAGED, 2, "['0F1 0F0', '1F1 1F0']", "rank 0: 0F1 0F0"),
        (THREE, 2, "zb_h1", "rank 2: 2F0 2F1"),
        (LOOP, 4, "interleaved", "rank 1: 1F0 1F1"),
        (LOOP, 2, "auto", "rank 0: 0F0 0F1 2F0 2F1"),
        (VEE, 4, "zbv", "3F0"),
        (VEE, 2, "", "2F0"),
        (GROUPS.replace("AXIS", "tp") + "sharding: {up: colwise, down: rowwise}\n", 4, "1f1b", "ranks 2,3: 1F0 1F1"),
        (GROUPS.replace("AXIS", "dp") + "dataset: {x: [dp, null]}\n", 4, "", ""),
        (GROUPS.replace("AXIS", "dp") + "dataset: {x: [dp, null]}\noutputs: sharded\n", 2, "", ""),
        (GROUPS.replace("AXIS", "dp") + "sharding: {up: {in: [[2, 1], [1, 1]]}}\noutputs: {y: 0}\n", 2, "", ""),
    ],
)
def test_what_streams_is_as_the_whole(plan: str, count: int, schedule: str, row: str) -> None:
    text = plan + pipeline(count, schedule)
    net = with_weights(NET, WEIGHTS)
    program = same_as_whole(net, text, {"x": numbers(8, 6)}, {"x": numbers(24, 6)}, **CLOSE)
    assert row in str(program.tasks and program.tasks.schedule)


TOKENS = NET.replace("batch, 6", "batch, seq, 6").replace("batch, 5", "batch, seq, 5")
TURNED = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, seq, 6] x, float[seq, batch, 8] z) => (float[seq, batch, 5] y) <float[6, 8] w, float[8, 5] v, float[5] b> {
    [up] a = MatMul (x, w)
    [turn] t = Transpose <perm = [1, 0, 2]> (a)
    [bend] h = Mul (t, z)
    [down] c = MatMul (h, v)
    [add] y = Add (c, b)
}"""


@pytest.mark.parametrize("net", [TOKENS, TURNED])
@pytest.mark.parametrize("plan", [STAGED, GROUPS.replace("AXIS", "dp") + "dataset: {x: [dp, null, null]}\n"])
def test_sequences_without_tokens_stream_too(net: str, plan: str) -> None:
    steps = [{"x": numbers(8, length, 6), "z": numbers(length, 8, 8)} for length in (0, 3, 0)]
    given = steps if net is TURNED else [{"x": step["x"]} for step in steps]
    same_as_whole(with_weights(net, WEIGHTS), plan + pipeline(2), *given, **CLOSE)


SIZES = """<ir_version: 10, opset_import: ["" : 21]>
m (float[seq, batch, 4] x, float[1, batch, 4] h) =>
    (float[batch, 4] y, int64[3] shape, float[seq, batch, 4] z, float[batch, 3] k, int64[batch] order)
<float[4, 4] w, int64[2] flat = {-1, 4}, int64[1] one1 = {1}, int64[1] three = {3}, int64 zero = {0}, int64 one = {1}> {
    [rows] r = Reshape (x, flat)
    [mix] p = MatMul (r, w)
    [size] shape = Shape (x)
    [back] q = Reshape (p, shape)
    [sum] s = Add (q, h)
    [real] n = Size (x)
    [float] f = Cast <to = 1> (n)
    [share] z = Div (s, f)
    [pick] b = Gather (shape, one1)
    [wide] e = Concat <axis = 0> (b, three)
    [ones] k0 = ConstantOfShape (e)
    [less] d = Sub (z, x)
    [last] y = ReduceSum <keepdims = 0> (d, zero1)
    [scale] k1 = ReduceMean <keepdims = 1> (y, one1)
    [made] k = Mul (k0, k1)
    [count] c = Squeeze (b)
    [number] order = Range (zero, c, one)
}""".replace("int64[1] one1 = {1}", "int64[1] one1 = {1}, int64[1] zero1 = {0}")


@pytest.mark.parametrize(
    ("cut", "count"), [("", 4), ("mesh: {pp: 2, dp: 2}\ndataset: {x: [null, dp, null], h: [null, dp, null]}\n", 2)]
)
def test_sizes_are_those_of_the_batch(cut: str, count: int) -> None:
    """Also where records stand apart, at every batch-th place, and what a node makes of sizes alone is cut for its reader."""
    net = with_weights(SIZES, {"w": (4, 4)})
    first, second = ("{pp: 0}", "{pp: 1}") if cut else ("0", "1")
    plan = f"ranks: {4 if cut else 2}\ninputs: {{x: [8, batch, 4]}}\nsymbols: {{batch: {{divisor: 4}}}}\n"
    plan += f"placement: {{'**': {first}, '{{back,sum,share,made,less}}': {second}}}\n"
    feeds = [{"x": numbers(8, n, 4), "h": numbers(1, n, 4)} for n in (4, 12)]
    same_as_whole(net, plan + cut + pipeline(count), *feeds, **CLOSE)


RESIZED = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 2, h, w] x) => (float[batch, 2, p, q] y) {
    [bend] a = Tanh (x)
    [size] all = Shape (a)
    [second] at = Constant <value = int64 {2}> ()
    [first] axis = Constant <value = int64[1] {0}> ()
    [until] until = Constant <value = int64[1] {2}> ()
    [side] side = Gather (all, at)
    [row] row = Unsqueeze (side, axis)
    [take] some = Slice (all, axis, until, axis)
    [sizes] sizes = Concat <axis = 0> (some, row, row)
    [resize] y = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (a, , , sizes)
}"""


def test_small_constants_are_constants_of_a_body() -> None:
    """onnxruntime infers the number of sizes by them, and refuses a Resize of which it is not told."""
    plan = f"ranks: 2\n{EIGHT}placement: {{bend: 0, resize: 1}}\n"
    same_as_whole(with_weights(RESIZED, {}), plan + pipeline(4), {"x": numbers(8, 2, 3, 5)}, **CLOSE)


WIDE = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 3, 4] x, float[1, batch, 4] h, int64[batch] ids, float on) =>
    (float[3, batch, 4] turned, float[batch, 1] one, float[4] same, int64[1] length, float[batch, 3, 4] x2, int64[batch, 2] at)
<float[7, 4] table, float[4] gain, float[4] shift, float[4] mean, float[4] var = {1, 1, 1, 1}, int64[1] k = {2}> {
    [turn] t = Transpose <perm = [1, 0, 2]> (x)
    [add] turned = Add (t, h)
    [look] rows = Gather (table, ids)
    [norm] n = BatchNormalization (rows, gain, shift, mean, var)
    [size] all = Shape (x)
    [pick] length = Slice (all, one1, two2)
    [rows] flat = Mul (n, on)
    [sum] s = ReduceSum <keepdims = 1> (flat, one1)
    [narrow] sq = Squeeze (s)
    [widen] one = Unsqueeze (sq, one1)
    [weigh] same = Mul (gain, shift)
    [again] x2 = Identity (x)
    [top] best, at = TopK <axis = 1> (n, k)
}""".replace("int64[1] k = {2}", "int64[1] k = {2}, int64[1] one1 = {1}, int64[1] two2 = {2}")


@pytest.mark.parametrize("cut", ["", "dataset: {x: [dp, null, null], ids: [dp]}\n"])
def test_outputs_are_joined_along_their_own_dim(cut: str) -> None:
    """Records may lie along any dim; what is the same for all is given once; a batch of one record each loses no dim."""
    plan = "ranks: 4\nmesh: {pp: 2, dp: 2}\nsymbols: {batch: {divisor: 4}}\nplacement: {turn: {pp: 0}, look: {pp: 0}, "
    plan += "norm: {pp: 0}, '{add,rows,sum,narrow,widen,weigh,again,top}': {pp: 1}}\n"
    net = with_weights(WIDE, {"table": (7, 4), "gain": (4,), "shift": (4,), "mean": (4,)})
    feeds = [
        {"x": numbers(n, 3, 4), "h": numbers(1, n, 4), "ids": np.arange(n) % 7, "on": np.array(2, np.float32)}
        for n in (4, 12)
    ]
    same_as_whole(net, plan + cut + pipeline(2 if cut else 4), *feeds, **CLOSE)


FIXED = """<ir_version: 10, opset_import: ["" : 21]>
m (float[8, 6] x) => (float[8, 2, 4] y) <float[6, 8] w, int64[3] shape = {8, 2, 4}, int64[3] wide = {8, 2, 4}> {
    [up] a = MatMul (x, w)
    [split] b = Reshape (a, shape)
    [wide] y = Expand (b, wide)
}"""


def test_a_fixed_batch_is_that_of_the_step(tmp_path: Path) -> None:
    net = with_weights(FIXED, {"w": (6, 8)})
    plan = "ranks: 2\nplacement: {up: 0, split: 1, wide: 1}\n" + pipeline(4)
    same_as_whole(net, plan, {"x": numbers(8, 6)}, **CLOSE)
    compiled(net, plan, tmp_path / "build")
    manifest = open_artifact(tmp_path / "build").manifest
    assert [port.shape for port in (*manifest.inputs, *manifest.outputs)] == [[8, 6], [8, 2, 4]]
    assert [one.bytes for one in manifest.transfers if one.source == 0] == ["64"] * 4
    assert not check_artifact(tmp_path / "build")


def refused(net: str, plan: str, folder: Path) -> str:
    proto = with_weights(net, WEIGHTS)
    with pytest.raises(CompileError) as error:
        compiled(proto, plan, folder / "build")
    assert not (folder / "build").exists()
    return str(error.value)


def changed(*lines: str, made: str = "float[n] y") -> str:
    """The net with other last nodes."""
    text = NET.replace(
        "    [down] c = MatMul (h, v)\n    [add] y = Add (c, b)\n", "".join(f"    {one}\n" for one in lines)
    )
    return text.replace("float[batch, 5] y", made).replace("float[5] b>", "float[5] b, int64[1] zero = {0}>")


@pytest.mark.parametrize(
    ("net", "plan", "words"),
    [
        (NET, STAGED.replace("divisor: 8", "divisor: 6"), ["plan.yaml:2", "'batch'", "not always divisible by 4", "divisor: 4"]),
        (NET, STAGED.replace(EIGHT, ""), ["input 'x'", "batch: {divisor: 4}"]),
        (NET.replace("[batch", "[6"), STAGED.replace(EIGHT, ""), ["plan.yaml:3", "dim 0 of input 'x', 6", "dynamic batch"]),
        (changed("[down] y = ReduceMean <keepdims = 0> (h, zero)"), STAGED, ["down (ReduceMean) takes a sum over the records", "help:"]),
        (changed("[down] y = ReduceMax <keepdims = 0> (h, zero)"), STAGED, ["down (ReduceMax) takes the largest"]),
        (changed("[down] y = Softmax <axis = 0> (h)"), STAGED, ["down (Softmax) may bring records"]),
        (changed("[down] y = NonZero (h)", made="int64[2, n] y"), STAGED, ["down (NonZero) may bring records"]),
        (changed("[down] y = CumSum (h, zero)"), STAGED, ["down (CumSum) may bring records"]),
        (changed("[down] y = Trilu (h)"), STAGED, ["down (Trilu) needs to know which records"]),
    ],
)  # fmt: skip
def test_what_needs_the_whole_batch_is_refused(net: str, plan: str, words: list[str], tmp_path: Path) -> None:
    text = refused(net, plan + pipeline(4), tmp_path)
    for word in ("plan.yaml" if "help:" in words else "", *words):
        assert word in text, text


def test_messages_are_counted_and_checked(tmp_path: Path) -> None:
    compiled(with_weights(NET, WEIGHTS), STAGED + pipeline(4), tmp_path / "build")
    manifest = open_artifact(tmp_path / "build").manifest
    transfers = sorted((one.source, one.target, one.bytes) for one in manifest.transfers)
    assert transfers == [(0, 1, "8*batch")] * 4 + [(1, 0, "5*batch")] * 4
    assert [port.shape for port in (*manifest.inputs, *manifest.outputs)] == [["batch", 6], ["batch", 5]]
    assert not check_artifact(tmp_path / "build")
