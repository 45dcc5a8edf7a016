"""What `level` of a sharding rule changes: bytes, shards that a rank has, work that it does; what comes out is the same."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import compiled, same_as_whole
from onnx import numpy_helper
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from training_equivalence import run, run_whole, same_tensors, train_whole

BLOCKS = """<ir_version: 10, opset_import: ["": 21]> g (float[b, s, 6] x) => (float[b, s, 6] y)
    <float[6, 12] w1, float[12, 6] w2, float[6, 12] w3, float[12, 6] w4, float[6] scale> {
    [norm1] a = LayerNormalization(x, scale) [up1] h = MatMul(a, w1) [relu1] i = Relu(h) [down1] j = MatMul(i, w2) [add1] k = Add(x, j)
    [norm2] l = LayerNormalization(k, scale) [up2] m = MatMul(l, w3) [relu2] n = Relu(m) [down2] o = MatMul(n, w4) [add2] y = Add(k, o) }"""
SHAPES = {"w1": (6, 12), "w2": (12, 6), "w3": (6, 12), "w4": (12, 6), "scale": (6,)}
APART = """<ir_version: 10, opset_import: ["": 21]> g (float[b, 6] x) => (float[b, 5] y) <float[6, 12] w1, float[12, 5] w2> {
    [net__first] h = MatMul(x, w1) [net__soft] i = Softmax(h) [net__second] y = MatMul(i, w2) }"""


def blocks(text: str = BLOCKS) -> onnx.ModelProto:
    proto, random = onnx.parser.parse_model(text), np.random.default_rng(3)
    for name, shape in {**SHAPES, **({"w2": (12, 5)} if text is APART else {})}.items():
        if re.search(rf"\b{name}\b", text):
            proto.graph.initializer.append(numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name))
    for node in proto.graph.node:
        node.name = node.name.replace("__", ".")
    return proto


def plan(level: int, ranks: int = 2, more: str = "") -> str:
    down = f"{{style: rowwise, level: {level}}}"
    return f'ranks: {ranks}\nsymbols: {{s: {{divisor: 6}}}}\n{more}sharding: {{"up*": colwise, "down*": {down}}}\noutputs: {{y: cut}}\n'


def dump(proto: onnx.ModelProto, text: str, folder: Path) -> str:
    compiled(proto, text, folder)
    return (folder / "ir" / "step_parallel_end.ir").read_text()


def collectives(text: str) -> list[str]:
    return re.findall(r"^#   \d+: %.*? ([A-Z]\w+) ", text, re.MULTILINE)


def coefficient(text: str) -> int:
    """The bytes of all transfers, as a multiple of b*s."""
    return sum(int(count) for count in re.findall(r"(\d+)\*b\*s bytes   ", text))


@pytest.mark.parametrize("ranks", [2, 3])
def test_less_memory_leaves_sums_scattered(ranks: int, tmp_path: Path) -> None:
    fewest, scattered = (dump(blocks(), plan(level, ranks), tmp_path / str(level)) for level in (0, 1))
    assert collectives(fewest) == ["AllReduce", "AllReduce"]
    assert collectives(scattered) == ["ReduceScatter", "AllGather", "ReduceScatter"]
    assert coefficient(scattered) <= coefficient(fewest)
    for name in ("k", "y"):
        assert re.search(rf"%{name} = Add.*\n.*-> \(<tensor\(float\), \(b, s, 6\)>\)", fewest)
        assert re.search(rf"%{name} = Add.*\n.*-> \(<tensor\(float\), \(b, s/{ranks}, 6\)>\)", scattered)
    assert f"# Sharded: b in {ranks} by plan.yaml:3 'down*' level 1" in scattered
    x = np.random.default_rng(1).normal(size=(5, 6, 6)).astype(np.float32)
    same_as_whole(blocks(), plan(1, ranks), {"x": x}, rtol=1e-5, atol=1e-5)


def test_less_memory_in_training_beside_data_parallel_ranks(tmp_path: Path) -> None:
    text = "mesh: {dp: 2, tp: 2}\ndataset: {x: [dp, null, null], t: [dp, null, null]}\n"
    text = (
        plan(1, 4, text)
        .replace("{s: {divisor: 6}}", "{s: {divisor: 6}, b: {divisor: 2}}")
        .replace("outputs: {y: cut}\n", "")
    )
    text += "train: {loss: {type: mse, prediction: y, target: t}, optimizer: {type: momentum, lr: 0.05}}\n"
    random = np.random.default_rng(2)
    steps = [{name: random.normal(size=(4, 6, 6)).astype(np.float32) for name in ("x", "t")} for _ in range(3)]
    have = run(Source(from_proto(blocks(), Path("model.onnx"))), text, tmp_path / "cut", steps)
    want = run_whole(Source(from_proto(blocks(), Path("model.onnx"))), train_whole(text), steps)
    assert "ReduceScatter" in collectives((tmp_path / "cut" / "ir" / "step_parallel_end.ir").read_text())
    same_tensors(have.after, want.after, want.before, 1e-5)


def test_faster_shares_out_what_every_rank_would_do_alike(tmp_path: Path) -> None:
    text = "ranks: 2\nsymbols: {b: {divisor: 2}}\nsharding: {net: {parameters: {w1: [1, 2]}, level: LEVEL}}\n"
    alike, shared = (dump(blocks(APART), text.replace("LEVEL", level), tmp_path / level) for level in "02")
    assert re.search(r"MatMul\(%i.*\n\s+: \(<tensor\(float\), \(b, 12\)>", alike)
    assert re.search(r"MatMul\(%i.*\n\s+: \(<tensor\(float\), \(b/2, 12\)>", shared)
    assert collectives(alike) == ["AllGather"]
    assert collectives(shared) == ["AllToAll", "Exchange"]
    x = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
    same_as_whole(blocks(APART), text.replace("LEVEL", "2"), {"x": x}, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("level", "words"),
    [(1, "no op of it makes a sum of which a reader takes shards"), (2, "every product of it is shared out already")],
)
def test_a_level_that_changes_nothing_is_told(level: int, words: str, tmp_path: Path) -> None:
    text = plan(level).replace("s: {divisor: 6}", "s: {divisor: 1}")
    (told,) = compiled(blocks(), text, tmp_path / "build").warnings
    assert told.startswith(f"plan.yaml:3: level {level} changes nothing: {words}")
