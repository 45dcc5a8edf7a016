"""`partc plan --from`: plans of torch, Hugging Face, Megatron-LM and MindSpore become plans of partc, equal to the unsharded model."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from equivalence import compiled, same_as_whole
from onnx import TensorProto, helper
from partc.cli.commands.plan import command
from partc.compiler.errors import CompileError
from partc.compiler.plan.read import parse_plan
from partc.runtime.errors import PartcError
from proposal_case import HIDDEN, WIDTH, Graph

OUT = 8
X = {"x": np.random.default_rng(3).standard_normal((32, WIDTH)).astype(np.float32)}


def blocks(layers: int = 2) -> onnx.ModelProto:
    """Blocks of a norm, an up and a down projection, whose weights are [inputs, outputs], and a head."""
    g = Graph()
    x = "x"
    for layer in (f"layers.{k}" for k in range(layers)):
        h = g.node(f"{layer}.act", "Relu", g.linear(f"{layer}.up", g.norm(f"{layer}.norm", x), WIDTH, HIDDEN))
        x = g.node(f"{layer}.add", "Add", x, g.linear(f"{layer}.down", h, HIDDEN, WIDTH))
    logits = g.linear("head", x, WIDTH, OUT)
    ends = [("x", ["batch", WIDTH]), (logits, ["batch", OUT])]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in ends]
    graph = helper.make_graph(g.nodes, "g", ports[:1], ports[1:], g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def planned(folder: Path, *files: Path, more: tuple[str, ...] = ()) -> str:
    """What the command writes for the model of blocks."""
    onnx.save(blocks(), folder / "model.onnx")
    options = [word for file in files for word in ("--from", str(file))]
    result = CliRunner().invoke(command, [str(folder / "model.onnx"), *options, *more], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


TORCH = """
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

"""
WHOLE = """parallelize_plan = {
    "layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())}
"""
BLOCK = """tp_plan = {
    "norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1)), "gone": ColwiseParallel(),
    "add": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())}
"""


def test_a_plan_of_torch_is_followed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = planned(tmp_path, written(tmp_path, "parallelize.py", TORCH + WHOLE), more=("--tp", "2"))
    rules = {rule.pattern: rule.style for rule in parse_plan(text, "plan.yaml").sharding}
    assert rules == {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise"}
    program = same_as_whole(blocks(), text, X, rtol=1e-4, atol=1e-5)
    assert Counter(event.op_type for event in program.events) == {"AllReduce": 2, "Exchange": 1}


def test_a_plan_of_one_block_is_of_all_blocks_and_what_is_not_taken_is_listed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = planned(tmp_path, written(tmp_path, "block.py", TORCH + BLOCK), more=("--tp", "2", "--dp", "2"))
    rules = {rule.pattern: rule.style for rule in parse_plan(text, "plan.yaml").sharding}
    assert rules.items() >= {"layers.*.up": "colwise", "layers.*.down": "rowwise"}.items()
    left = text.partition("# Of block.py not taken as it stands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split(": ")[0].removeprefix("#   ") for line in left] == ["norm", "down", "gone"]
    assert "`{style: rowwise, level: 1}` keeps it sharded" in left[1]
    assert "matches no module and no weight" in left[2]
    same_as_whole(blocks(), text, X, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["config", "words"])
def test_a_tp_plan_of_transformers_is_a_file_too(form: str, tmp_path: Path) -> None:
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "replicated"}
    content = {"architectures": ["Blocks"], "base_model_tp_plan": plan} if form == "config" else plan
    text = planned(tmp_path, written(tmp_path, "config.json", json.dumps(content)), more=("--tp", "3"))
    rules = {rule.pattern: rule.style for rule in parse_plan(text, "plan.yaml").sharding}
    assert rules == {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    same_as_whole(blocks(), text, X, rtol=1e-4, atol=1e-5)


SCRIPT = """#!/bin/bash
# a pretraining
torchrun --nproc_per_node 8 pretrain_gpt.py \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size=2 --sequence-parallel \\
  --num-layers 2 --hidden-size 12 --context-parallel-size 2 \\
  --micro-batch-size 4 --global-batch-size 32 --use-distributed-optimizer \\
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 10 --train-iters 100 \\
  --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95 --data-path "my data"
"""


def test_arguments_of_megatron_become_a_training(tmp_path: Path) -> None:
    text = planned(tmp_path, written(tmp_path, "pretrain.sh", SCRIPT))
    plan = parse_plan(text, "plan.yaml")
    assert plan.ranks == 8
    assert dict(plan.mesh) == {"pp": 2, "dp": 2, "tp": 2}
    for line in (
        "pipeline: {microbatches: 4, schedule: 1f1b}",
        "  batch: 32",
        "  optimizer: {type: adamw, lr: 0.0003, betas: [0.9, 0.95], eps: 1e-08, weight_decay: 0.1, shard: dp}",
        "  schedule: {type: cosine, steps: 100, warmup: 10, from_zero: true, minimum: 3e-05}",
        "  clip: {norm: 1}",
        "  steps: 100",
    ):
        assert f"\n{line}\n" in text
    left = text.partition("# Of pretrain.sh not taken as it stands:\n")[2].partition("\n\n")[0]
    names = [line.split()[1].rstrip(":") for line in left.splitlines()]
    assert names == ["--sequence-parallel", "--context-parallel-size", "--data-path"]
    program = compiled(blocks(), text, tmp_path / "build")
    assert {"ReduceScatter", "AllGather", "AllReduce", "Send"} <= {event.op_type for event in program.events}


def test_a_configuration_of_megatron_without_a_rate_is_an_inference(tmp_path: Path) -> None:
    file = written(
        tmp_path, "model.yaml", "tensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\nbf16: false\n"
    )
    text = planned(tmp_path, file, more=("--dp", "2"))
    assert dict(parse_plan(text, "plan.yaml").mesh) == {"pp": 2, "dp": 2, "tp": 2}
    assert parse_plan(text, "plan.yaml").train is None
    same_as_whole(blocks(), text, X, rtol=1e-4, atol=1e-5)


def strategy(stage: int, **items: list[list[int]]) -> str:
    """A file of a stage as MindSpore writes it; `_` between the parts of a parameter's name."""
    names = {key: key.partition("_")[2].replace("__", ".") for key in items}
    ops = {f"{key.partition('_')[0]}_network.{names[key]}": dims for key, dims in items.items()}
    shapes = {"up.weight": [HIDDEN, WIDTH], "down.weight": [WIDTH, HIDDEN], "head.weight": [OUT, WIDTH]}
    layouts = {
        f"network.{name}": {
            "dev_matrix": [2, 2],
            "tensor_map": [0, -1],
            "tensor_shape": shape,
            "opt_weight_shard_size": 2,
        }
        for name in names.values()
        for tail, shape in shapes.items()
        if name.endswith(tail)
    }
    content = {
        "current_stage": stage,
        "parallel_strategy_item": {op: {"stage": stage, "parallel_strategy": dims} for op, dims in ops.items()},
        "parallel_layout_item": layouts,
    }
    return json.dumps(content)


FIRST = {"LayerNorm_layers__0__norm__gamma": [[2, 1], [1], [1]], "MatMul_layers__0__up__weight": [[2, 1], [2, 1]],
         "BiasAdd_layers__0__up__bias": [[2, 2], [2]], "MatMul_layers__0__down__weight": [[2, 2], [1, 2]]}  # fmt: skip
SECOND = {"MatMul_layers__1__up__weight": [[1, 4], [1, 4]], "MatMul_head__weight": [[2, 1], [2, 1]],
          "MatMul_gone__weight": [[2, 1], [2, 1]]}  # fmt: skip


def test_strategies_of_mindspore_are_rules_of_nodes(tmp_path: Path) -> None:
    """Its matrices are transposed, its norm's scale is gamma; the ranks are those of its device matrix."""
    text = planned(tmp_path, written(tmp_path, "strategy.json", strategy(0, **FIRST, **SECOND)))
    plan = parse_plan(text, "plan.yaml")
    assert plan.ranks == 4
    for line in (
        "layers.0.norm.Norm: {in: [[2, 1], [1]]}",
        "layers.0.up.MatMul: {in: [[2, 1], [1, 2]]}",
        "layers.0.up.Add: {in: [[2, 2], [2]]}",
        "layers.0.down.MatMul: {in: [[2, 2], [2, 1]]}",
        "layers.1.up.MatMul: {in: [[1, 4], [4, 1]]}",
    ):
        assert f"\n  {line}\n" in text
    assert "#   MatMul_network.gone.weight: the model has no such weight\n" in text
    assert "write `optimizer: {shard: true}`" in text
    program = same_as_whole(blocks(), text, X, rtol=1e-4, atol=1e-5)
    assert any(event.op_type == "AllReduce" for event in program.events)


def test_stages_of_mindspore_are_files_of_their_own(tmp_path: Path) -> None:
    files = [written(tmp_path, f"s{k}.json", strategy(k, **items)) for k, items in enumerate((FIRST, SECOND))]
    text = planned(tmp_path, *files)
    placed = {rule.pattern: rule.ranks for rule in parse_plan(text, "plan.yaml").placement}
    assert placed["layers.0.up.MatMul"] == (0, 1, 2, 3)
    assert placed["head.MatMul"] == (4, 5, 6, 7)
    same_as_whole(blocks(), text, X, rtol=1e-4, atol=1e-5)


def test_a_strategy_that_the_compiler_refuses_is_left_out_with_its_reason(tmp_path: Path) -> None:
    items = {**FIRST, "MatMul_layers__1__up__weight": [[1, 1], [4, 1]]}  # 30 columns in 4 shards
    text = planned(tmp_path, written(tmp_path, "strategy.json", strategy(0, **items)))
    assert "#   layers.1.up.MatMul: " in text
    assert "layers.1.up.MatMul: {" not in text
    same_as_whole(blocks(), text, X, rtol=1e-4, atol=1e-5)


BAD = {
    "no plan in a .py": ("a.py", "x = 1\n", (), "the file defines neither parallelize_plan nor tp_plan"),
    "a .py that fails": ("a.py", "1 / 0\n", (), "ZeroDivisionError"),
    "no dict": ("a.py", "tp_plan = 3\n", (), "tp_plan is int, not a dict"),
    "unknown": ("a.json", '{"alpha": {"beta": 1}}', (), "not a plan that partc can import: its keys are alpha"),
    "a list": ("a.json", "[1, 2]", (), "the file has no keys"),
    "no degree": ("a.json", '{"layers.*.up": "colwise"}', (), "add --tp"),
    "two degrees": ("a.yaml", "tensor_model_parallel_size: 2\n", ("--tp", "4"), "--tp 4: a.yaml has tp 2"),
    "a variable": ("a.sh", "x --tensor-model-parallel-size $TP", (), "is '$TP', not a whole number of at least 1"),
    "an open quote": ("a.sh", "x --tensor-model-parallel-size 2 'y", (), "No closing quotation"),
    "ranks": ("a.sh", "t --nproc_per_node 6 x --tensor-model-parallel-size 4", (), "6 ranks are not a multiple of 4 x 1"),
    "no strategies": ("a.json", '{"parallel_strategy_item": {"MatMul_w": {"stage": 0}}}', (), "'MatMul_w' has no stage and list"),
    "other weights": (
        "a.json", '{"parallel_strategy_item": {"MatMul_w": {"stage": 0, "parallel_strategy": [[2, 1], [1, 1]]}}}', (),
        "none of its 1 strategies is of a weight of model.onnx",
    ),
    "a search": ("a.yaml", "tensor_model_parallel_size: 2\n", ("--ranks", "2"), "--from is for a proposal of given degrees"),
    "targets": ("a.yaml", "tensor_model_parallel_size: 2\n", ("--target", "auto"), "--target is not for a plan that is imported"),
    "tokens of a training": (
        "a.yaml", "tensor_model_parallel_size: 2\nlr: 0.1\n", ("--generate", "64"),
        "--generate: a.yaml has a training, and a plan that generates has none\n  help: leave out --generate or --from",
    ),
    "a bad layout": ("a.json", '{"parallel_layout_item": {"w": {"dev_matrix": "2"}}}', (), "the layout of 'w'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_plan_is_told(case: str, tmp_path: Path) -> None:
    name, text, more, told = BAD[case]
    with pytest.raises((CompileError, PartcError), match=re.escape(told)):
        planned(tmp_path, written(tmp_path, name, text), more=more)
