"""What `partc verify` calls equal: as far as rounding carries a model it is, and a fault in the artifact is told in each such case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mutated import change_file
from mutations import KINDS
from onnx import ModelProto, numpy_helper
from partc.cli.comparison.first_difference import Compiled, first_difference
from partc.cli.comparison.reference import compile_alone
from partc.cli.main import invoke
from partc.compiler.frontend import load
from partc.compiler.pipeline import compile_model

Fault = Callable[[ModelProto], None]


def normal(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A model with its weights, a plan, the sizes of its symbols, and what must stand in the verdict."""

    text: str
    weights: dict[str, np.ndarray]
    plan: str
    sizes: str
    told: str = ""


HALF = Case(
    """g (float[n, 40] x) => (float[n, 12] y) {
    [narrow] h = Cast <to = 10> (x)  [up] u = MatMul(h, v)  [act] a = Tanh(u)  [scale] s = Mul(a, a)  [down] d = MatMul(s, w)
    [wide] y = Cast <to = 1> (d) }""",
    {"v": normal(40, 96).astype(np.float16), "w": normal(96, 12, seed=4).astype(np.float16)},
    "ranks: 3\nsharding:\n  up: colwise\n  down: rowwise\n",
    "n=5",
    "rounding alone changes the unsharded model's 'y' by ",
)
STEPS = Case(
    """g (float[n, 24] x) => (float[n, 96] y) {
    [up] u = MatMul(x, v)  [quantize] q = QuantizeLinear(u, step, zero)  [back] y = DequantizeLinear(q, step, zero) }""",
    {"v": normal(24, 96), "step": np.float32(2.0**-10), "zero": np.int16(0)},
    "ranks: 2\nsharding:\n  up: rowwise\n",
    "n=64",
    "it is quantized, and a value halfway between two steps is rounded either way",
)
DEAD_BIAS = Case(
    """g (float[n, 2, 6, 6] x) => (float[n, 4] y) {
    [conv] c = Conv <pads = [1, 1, 1, 1]> (x, k, bias)
    [norm] b = BatchNormalization(c, scale, shift, mean, var)  [relu] r = Relu(b)
    [pool] p = GlobalAveragePool(r)  [flat] f = Flatten(p)  [head] y = MatMul(f, w) }""",
    {
        "k": normal(5, 2, 3, 3),
        "bias": normal(5),
        "scale": np.ones(5, np.float32),
        "shift": np.zeros(5, np.float32),
        "mean": np.zeros(5, np.float32),
        "var": np.ones(5, np.float32),
        "w": normal(5, 4),
    },
    """ranks: 2
symbols: {n: {divisor: 2}}
dataset: data_parallel
train: {loss: {type: softmax_cross_entropy, logits: y, labels: label}, optimizer: {type: adam, lr: 0.01}}
""",
    "n=8",
    "'bias'",
)
LINE = "g (float[n, 6] x) => (float[n, 4] y) { [mm] y = MatMul(x, w) }"
SUM = Case(
    LINE,
    {"w": normal(6, 4)},
    """ranks: 4
symbols: {n: {divisor: 4}}
dataset: data_parallel
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label, reduction: sum_over_ranks}
  optimizer: {type: sgd, lr: 1.0e-6}
""",
    "n=8",
)
SLOW = Case(
    LINE,
    {"w": normal(6, 4)},
    """ranks: 2
symbols: {n: {divisor: 2}}
dataset: data_parallel
train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: sgd, lr: 1.0e-5}}
""",
    "n=6",
)
RING = Case(
    """g (float[n, 24, 8] x) => (float[n, 24, 8] y) {
    a = MatMul(x, wq)  b = MatMul(x, wk)  c = MatMul(x, wv)
    [query] q = Unsqueeze(a, one)  [key] k = Unsqueeze(b, one)  [value] v = Unsqueeze(c, one)
    t = Transpose <perm = [0, 1, 3, 2]> (k)  [scores] s = MatMul(q, t)  [shares] p = Softmax <axis = -1> (s)
    [mixed] m = MatMul(p, v)  [out] y = Squeeze(m, one) }""",
    {"wq": normal(8, 8), "wk": normal(8, 8, seed=4), "wv": normal(8, 8, seed=5), "one": np.array([1])},
    "ranks: 3\nmesh: {cp: 3}\ncontext: {axis: cp, attention: ring}\n",
    "n=2",
)
CASES = {"half": HALF, "steps": STEPS, "dead bias": DEAD_BIAS, "sum over ranks": SUM, "slow": SLOW, "ring": RING}


def another_reduction(model: ModelProto) -> None:
    """The largest term in place of their sum."""
    node = next(node for node in model.graph.node if node.op_type == "AllReduce")
    next(one for one in node.attribute if one.name == "reduce").s = b"max"


def term_dropped(model: ModelProto) -> None:
    """What the last rank adds is nothing."""
    node = next(node for node in model.graph.node if node.op_type == "AllReduce")
    at = list(model.graph.node).index(node)
    lost = onnx.helper.make_node("Sub", [node.input[0], node.input[0]], ["lost"], name="lost")
    port = next(one for one in model.graph.value_info if one.name == node.input[0])
    node.input[0] = "lost"
    model.graph.node.insert(at, lost)
    declared = model.graph.value_info.add()
    declared.CopyFrom(port)
    declared.name = "lost"


def gradient_scaled(model: ModelProto) -> None:
    """Gradients by one in a hundred too large."""
    tensor = next(one for one in model.graph.initializer if one.name == "loss.seed")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.01), tensor.name))


def wrong_shard(model: ModelProto) -> None:
    """The rank's rows of a weight in another order."""
    weight = next(one for one in model.graph.initializer if one.name == "w")
    bounds = {"begin": -1, "end": -weight.dims[0] - 1, "axis": 0, "step": -1}
    model.graph.initializer.extend(numpy_helper.from_array(np.array([k]), name) for name, k in bounds.items())
    for node in model.graph.node:
        node.input[:] = ["reversed" if name == "w" else name for name in node.input]
    model.graph.node.insert(0, onnx.helper.make_node("Slice", ["w", *bounds], ["reversed"], name="reversed"))


def stale_block(model: ModelProto) -> None:
    """The second hop passes on the keys of the turn before it."""
    first, second = [node for node in model.graph.node if node.op_type == "Exchange"][::2][:2]
    second.input[0] = first.input[0]


def verdict(
    case: Case,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *faults: tuple[str, Fault],
) -> tuple[int, str]:
    """Exit code and words of `partc verify`, of an artifact with faults in it."""
    from partc.compiler import pipeline

    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {case.text}')
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in case.weights.items())
    onnx.save(proto, folder / "model.onnx")
    (folder / "plan.yaml").write_text(case.plan)
    compile_model = pipeline.compile_model

    def faulty(*arguments: Any, **options: Any) -> pipeline.Report:
        report = compile_model(*arguments, **options)
        for pattern, change in faults:
            for file in sorted(report.out.glob(pattern)):
                change_file(report.out, file.name, change)
        return report

    monkeypatch.chdir(folder)
    monkeypatch.setattr(pipeline, "compile_model", faulty)
    code = invoke(["verify", "model.onnx", "--plan", "plan.yaml", "--set", case.sizes])
    monkeypatch.setattr(pipeline, "compile_model", compile_model)
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.mark.parametrize("name", CASES)
def test_what_rounding_alone_does_is_equal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = verdict(CASES[name], tmp_path, monkeypatch, capsys)
    assert code == 0, told
    assert CASES[name].told in told


EVERY, LAST = "rank_*.onnx", "rank_000[1-9].onnx"


@pytest.mark.parametrize(
    ("name", "where", "fault", "first"),
    [
        (
            "half",
            EVERY,
            another_reduction,
            "the first value that differs is 'd' of MatMul 'down', on rank 0: it differs by",
        ),
        (
            "half",
            LAST,
            term_dropped,
            "the first value that differs is 'd' of MatMul 'down', on rank 0: it differs by",
        ),
        ("half", LAST, wrong_shard, "the first value that differs is 'd' of MatMul 'down', on rank 0: it differs by"),
        (
            "steps",
            EVERY,
            another_reduction,
            "the first value that differs is 'u' of MatMul 'up', on rank 0: it differs by",
        ),
        ("dead bias", EVERY, gradient_scaled, "the first value that differs is 'loss"),
        ("sum over ranks", EVERY, gradient_scaled, "the first value that differs is 'loss"),
        ("slow", EVERY, gradient_scaled, "the first value that differs is 'loss"),
        ("slow", LAST, term_dropped, "the first value that differs is"),
        ("ring", "rank_0001.onnx", stale_block, "the first value that differs is 'y' of Squeeze 'out', on rank"),
    ],
)
def test_a_fault_is_told_with_the_first_value_that_differs(
    name: str,
    where: str,
    fault: Fault,
    first: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, told = verdict(CASES[name], tmp_path, monkeypatch, capsys, (where, fault))
    assert code == 1, told
    assert "NOT EQUAL" in told
    assert first in told


@pytest.mark.parametrize("name", ["placed", "two groups", "tensor parallel training"])
def test_nothing_inside_of_a_sound_artifact_differs(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    random = np.random.default_rng(5)
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {kind.text}')
    for weight, shape in kind.weights.items():
        proto.graph.initializer.append(numpy_helper.from_array(random.normal(size=shape).astype(np.float32), weight))
    model, plan = tmp_path / "model.onnx", tmp_path / "plan.yaml"
    onnx.save(proto, model)
    plan.write_text(kind.plan)
    report = compile_model(model, plan, tmp_path / "build")
    alone = compile_alone(load(model), report.program.plan, tmp_path / "alone")
    inputs: dict[str, Any] = {word: random.normal(size=shape).astype(np.float32) for word, shape in kind.inputs.items()}
    inputs |= {word: random.integers(0, count, 4) for word, count in kind.classes.items()}
    inputs |= {word: np.array(0.1, np.float32) for word in ("lr", "bias1", "bias2")}
    assert first_difference(alone, Compiled(report.program, report.out), inputs, tmp_path) == ""
