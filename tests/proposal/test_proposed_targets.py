"""What `partc plan --target auto` proposes: lines with reasons, an optimizer on the CPU, what does not fit, and errors with figures."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from partc.cli.commands.plan import command
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.edited_plan import with_targets
from partc.compiler.proposal.propose import propose
from partc.compiler.proposal.targets import Device

ROWS, WIDTH = 400_000, 16
FLOW = "optimizer: {type: adamw, lr: 0.001}   # mine"
BLOCK = "optimizer:\n    type: adamw\n    lr: 0.001"
TRAIN = """ranks: 1
# a comment
inputs: {{ids: [batch, 3]}}
train:
  loss: {{type: softmax_cross_entropy, logits: y, labels: label}}
  {}
  batch: 32
"""


def wide(rows: int = ROWS, pick: str = "Softmax") -> Source:
    """A table, two products, and between them an op of which CUDA may have no kernel."""
    shapes = {"table": (rows, WIDTH), "up": (3 * WIDTH, 300), "bias": (300,), "down": (300, 6)}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], "embed.Gather"),
        helper.make_node("Flatten", ["rows"], ["flat"], "embed.Flatten"),
        helper.make_node("Gemm", ["flat", "up", "bias"], ["h"], "fc1.Gemm"),
        helper.make_node(pick, ["h"], ["m"], f"pick.{pick}"),
        helper.make_node("MatMul", ["m", "down"], ["y"], "fc2.MatMul"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 6])],
        [numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in shapes.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return Source(from_proto(proto, Path("model.onnx")))


def proposed(text: str) -> list[tuple[str, str]]:
    return [(rule.pattern, rule.target) for rule in parse_plan(text, "p").target]


def of_training(optimizer: str, limit: int | None) -> str:
    return with_targets(wide(), TRAIN.format(optimizer), Path("train.yaml"), "model.onnx", Device(limit))


def test_ops_without_a_kernel_and_large_tables_are_on_the_cpu() -> None:
    text, _ = propose(wide(pick="Hardmax"), "model.onnx", Degrees(), Device())
    assert proposed(text) == [("**", "cuda"), ("pick.Hardmax", "cpu"), ("embed.Gather", "cpu")]
    assert "# onnxruntime's CUDA provider has no kernel for Hardmax" in text
    assert "# table: a table of 24.4 MiB, of which a step reads 192 B (batch=1)" in text


def test_a_small_table_stays() -> None:
    text, _ = propose(wide(rows=100), "model.onnx", Degrees(), Device())
    assert proposed(text) == [("**", "cuda")]


def test_targets_go_with_other_proposals() -> None:
    text, _ = propose(wide(), "model.onnx", Degrees(tp=2, dp=2), Device())
    plan = parse_plan(text, "p")
    assert plan.ranks == 4
    assert plan.dataset.where
    assert proposed(text) == [("**", "cuda"), ("embed.Gather", "cpu")]


@pytest.mark.parametrize("optimizer", [FLOW, BLOCK], ids=["flow", "block"])
def test_the_optimizer_goes_first_where_a_training_does_not_fit(optimizer: str) -> None:
    roomy, tight = of_training(optimizer, 10**9), of_training(optimizer, 300_000)
    assert roomy.startswith(TRAIN.format(optimizer))  # all else as it was written
    assert parse_plan(tight, "p").train.optimizer.target == "cpu"
    assert "# a comment" in tight
    assert proposed(tight) == proposed(roomy) == [("**", "cuda"), ("embed.Gather", "cpu")]


def test_then_weights_go_the_largest_first() -> None:
    assert proposed(propose(wide(100), "m", Degrees(), Device(70_000))[0]) == [("**", "cuda"), ("embed.Gather", "cpu")]
    text, _ = propose(wide(100), "m", Degrees(), Device(20_000))
    assert proposed(text) == [("**", "cuda"), ("embed.Gather", "cpu"), ("fc1.Gemm", "cpu")]


def test_a_node_with_two_weights_has_one_line() -> None:
    text, _ = propose(wide(100), "m", Degrees(), Device(3_000))
    assert [pattern for pattern, _ in proposed(text)] == ["**", "embed.Gather", "fc1.Gemm", "fc2.MatMul"]
    assert "# bias" not in text


def test_what_cannot_fit_is_refused_with_figures() -> None:
    with pytest.raises(CompileError) as caught:
        of_training(FLOW, 15_000)
    text = str(caught.value)
    assert "model.onnx: rank 0 needs" in text
    assert "of its GPU, but has 14.6 KiB" in text
    assert "what is left is " in text
    assert "help: propose more ranks or stages" in text


def test_a_plan_with_targets_is_refused() -> None:
    with pytest.raises(CompileError, match="has targets already"):
        with_targets(wide(100), "ranks: 1\ntarget: cpu\n", Path("p"), "m", Device())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device-memory", "8GB"], "add --target auto"),
        (["--target", "auto", "--device-memory", "8XB"], "'8XB' is not a size"),
        (["--target", "auto", "--device-memory", "0"], "0 bytes hold nothing"),
        (["--target", "auto", "--plan", "p", "--tp", "2"], "--plan has ranks of its own"),
    ],
    ids=["alone", "no size", "nothing", "plan and tp"],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: list[str], said: str) -> None:
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [])), tmp_path / "m.onnx")
    result = CliRunner().invoke(command, [str(tmp_path / "m.onnx"), *options])
    assert result.exit_code != 0
    assert said in f"{result.output}{result.exception}"
