"""The samples that cut operators: what each communicates and why, and that the ranks give what the whole model gives."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from equivalence import whole_outputs
from partc.cli.launch.launcher import Hosts, command_line, find_launcher, launch_environment
from partc.compiler.cost.memory import rank_memory
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.pipeline import Report, compile_model
from partc.compiler.plan.read import parse_plan, read_plan
from partc.runtime import InputError, load_local
from partc.runtime.artifact.manifest import open_artifact
from sample_scripts import run_script

SAMPLES = Path(__file__).parents[2] / "samples"
FFN, SHARD, GPT = "ffn_dynamic", "shard_function", "gpt"
LAYERS = 4
BLOCKS = Counter({"AllReduce": 2 * LAYERS})
STAGES = Counter({"Broadcast": 1, "Send": 3})
"""What goes from stage to stage: the first one's rank hands its value to both ranks of the second at once."""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the samples, without what was made in them."""
    folder = tmp_path_factory.mktemp("copy") / "samples"
    made = shutil.ignore_patterns("build*", "*.onnx", "*.data", "digits_*.npz", "__pycache__")
    shutil.copytree(SAMPLES, folder, ignore=made)
    return folder


@pytest.fixture(scope="module")
def ffn(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = samples / FFN
    return compile_model(folder / "model.py", folder / "plan.yaml", tmp_path_factory.mktemp("ffn") / "build")


@pytest.fixture(scope="module")
def digits(samples: Path) -> dict[int, Path]:
    """The inputs of the feedforward network, by batch."""
    batches = (8, 12, 64, 512)
    run_script(samples / FFN / "digits.py", [*map(str, batches)])
    return {batch: samples / FFN / f"digits_{batch}.npz" for batch in batches}


def whole(path: Path) -> onnx.ModelProto:
    """The whole model with its weights inside."""
    return onnx.load(path) if path.suffix == ".onnx" else ir.to_proto(load(path).model)


def kinds(report: Report) -> Counter[str]:
    """How many messages and collectives of each kind a step has."""
    return Counter(event.op_type for event in report.program.events)


def edited(plan: Path, out: Path, *changes: tuple[str, str]) -> Path:
    """The plan with other words in places that it has."""
    text = plan.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    out.write_text(text)
    return out


def relative_error(have: Any, want: Any) -> float:
    """The largest difference, in parts of the largest value."""
    assert have.shape == want.shape
    assert have.dtype == want.dtype == np.float32
    largest = np.abs(want).max()
    assert largest > 1e-3, "all zeros would be equal too"
    assert np.std(want) > 1e-4, "so would be a constant"
    return float(np.abs(have - want).max() / largest)


def same_as_whole(out: Path, proto: onnx.ModelProto, *steps: Mapping[str, Any], tolerance: float) -> None:
    """Compares every output of every step on in-process ranks."""
    with load_local(out) as program:
        for inputs in steps:
            have = program(dict(inputs))
            for name, want in whole_outputs(proto, inputs).items():
                assert relative_error(have[name], want) <= tolerance


def floats(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def token_ids(batch: int, seq: int, vocabulary: int = 384) -> dict[str, Any]:
    return {"ids": np.random.default_rng(batch * seq).integers(0, vocabulary, (batch, seq))}


def test_the_communication_of_the_feedforward_network(ffn: Report) -> None:
    found = [(e.op_type, e.value.name, e.ranks, e.bytes, e.cause) for e in ffn.program.events]
    everyone = (tuple(range(8)),)
    assert found == [
        (
            "ReduceScatter",
            "matmul1.MatMul",
            ((0, 2), (1, 3), (4, 6), (5, 7)),
            "512*batch",
            "read by relu1.Relu (plan.yaml:12 'relu1')",
        ),
        (
            "AllReduce",
            "matmul1.MatMul",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
            "512*batch",
            "read by relu1.Relu (plan.yaml:12 'relu1')",
        ),
        ("Exchange", "relu1.Relu", everyone, "192*batch", "read by matmul2.MatMul (plan.yaml:13 'matmul2')"),
        ("ReduceScatter", "matmul2.MatMul", everyone, "1792*batch", "read by relu2.Relu (plan.yaml:14 'relu2')"),
        ("Exchange", "logits", everyone, "35*batch", "output 'logits' is delivered to rank 0"),
    ]


def test_the_feedforward_network_has_the_strategies_of_its_plan(ffn: Report) -> None:
    text = (ffn.out / "ir" / "step_parallel_begin.ir").read_text()
    for name, strategy in {
        "matmul1.MatMul": "((2, 4), (4, 1))",
        "relu1.Relu": "((4, 1))",
        "matmul2.MatMul": "((1, 8), (8, 1))",
        "relu2.Relu": "((8, 1))",
        "logits": "((8, 1), (1, 1))",
    }.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"  %{name} = ")]
        assert f"{{in_strategy: {strategy}}}" in line


@pytest.mark.parametrize("batch", [8, 64, 512])
def test_the_feedforward_network_is_the_whole_model(
    samples: Path, ffn: Report, digits: Mapping[int, Path], batch: int
) -> None:
    with np.load(digits[batch]) as archive:
        x = archive["x"]
    assert x.shape == (batch, 1, 28, 28)
    same_as_whole(ffn.out, whole(samples / FFN / "model.py"), {"x": x}, tolerance=1e-5)


def test_a_batch_that_the_symbol_excludes_is_refused(ffn: Report, digits: Mapping[int, Path]) -> None:
    with load_local(ffn.out) as program, np.load(digits[12]) as archive, pytest.raises(InputError) as caught:
        program(x=archive["x"])
    assert "'batch' is 8*N" in str(caught.value)


def test_a_divisor_that_proves_too_little_is_refused_at_compile_time(samples: Path, tmp_path: Path) -> None:
    plan = edited(samples / FFN / "plan.yaml", tmp_path / "by_fours.yaml", ("divisor: 8", "divisor: 4"))
    with pytest.raises(CompileError) as caught:
        compile_model(samples / FFN / "model.py", plan, tmp_path / "build")
    said = str(caught.value)
    assert f"{plan}:14: Relu (relu2.Relu): cannot cut" in said
    assert "dim 0 (batch) into 8" in said
    assert "help: declare `batch: {divisor: 8}`" in said
    assert not (tmp_path / "build").exists()


STEPS = """
import sys
import numpy as np
import partc.runtime as runtime
from mpi4py import MPI

with runtime.load(sys.argv[1], MPI.COMM_WORLD, threads=1) as program:
    for path in sys.argv[2:]:
        x = np.load(path)["x"]
        try:
            outputs = program(x=x)
        except runtime.InputError as error:
            print("refused", program.rank, str(error).splitlines()[0], flush=True)
        else:
            if "logits" in outputs:
                np.save(f"{path}.logits.npy", outputs["logits"])
"""


def test_the_feedforward_network_over_mpi(samples: Path, ffn: Report, digits: Mapping[int, Path]) -> None:
    launcher = find_launcher(8)
    files = [str(digits[batch]) for batch in (8, 12, 64, 512)]
    steps = [sys.executable, "-c", STEPS, str(ffn.out), *files]
    command = command_line(launcher, 8, Hosts(), [], steps)
    done = subprocess.run(
        command, env=launch_environment(launcher), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"refused {rank} input 'x' axis 0 is 12" for rank in range(8)]
    proto = whole(samples / FFN / "model.py")
    for batch in (8, 64, 512):
        with np.load(digits[batch]) as archive:
            want = whole_outputs(proto, dict(archive))["logits"]
        assert want.shape == (batch, 10)
        assert relative_error(np.load(f"{digits[batch]}.logits.npy"), want) <= 1e-5


@pytest.mark.parametrize(
    ("model", "shape", "communication"),
    [
        ("net1.py", (8, 32), [("AllReduce", "block1.dense1.Gemm"), ("AllReduce", "block2.dense1.Gemm")]),
        (
            "net2.py",
            (24, 32),
            [
                ("AllGather", "block1.dense2.weight"),
                ("AllToAll", "block1.dense2.Gemm"),
                ("AllReduce", "block2.dense1.Gemm"),
            ],
        ),
        ("dense_relu.py", (32, 128), [("AllReduce", "dense_relu.MatMul"), ("Exchange", "output")]),
        (
            "matmul.py",
            (16, 128),
            [
                ("ReduceScatter", "matmul1.MatMul"),
                ("AllReduce", "matmul1.MatMul"),
                ("Exchange", "relu1.Relu"),
                ("ReduceScatter", "output"),
                ("Exchange", "output"),
            ],
        ),
    ],
)
def test_shard_calls_are_the_whole_model(
    samples: Path, tmp_path: Path, model: str, shape: tuple[int, ...], communication: list[tuple[str, str]]
) -> None:
    folder = samples / SHARD
    report = compile_model(folder / model, folder / "plan.yaml", tmp_path / "build")
    assert [(e.op_type, e.value.name) for e in report.program.events] == communication
    same_as_whole(report.out, whole(folder / model), {"x": floats(*shape)}, tolerance=1e-5)


def test_a_plan_wins_over_shard_calls(samples: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text((samples / SHARD / "plan.yaml").read_text() + "sharding: {block1: replicate}\n")
    report = compile_model(samples / SHARD / "net1.py", plan, tmp_path / "build")
    assert kinds(report) == Counter()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_lines_cut_every_block_with_two_all_reduces(samples: Path, tmp_path: Path, ranks: int) -> None:
    folder = samples / GPT
    plan = edited(folder / "plan.yaml", tmp_path / "plan.yaml", ("ranks: 2", f"ranks: {ranks}"))
    report = compile_model(folder / "model.py", plan, tmp_path / "build")
    assert kinds(report) == BLOCKS
    for layer in range(LAYERS):
        inside = [e for e in report.program.events if (e.value.name or "").startswith(f"layers.{layer}.")]
        assert [e.value.name for e in inside] == [f"layers.{layer}.{part}.out.MatMul" for part in ("attention", "mlp")]
        assert {e.ranks for e in inside} == {(tuple(range(ranks)),)}
    steps = [token_ids(1, 1), token_ids(3, 7), token_ids(2, 128)]
    same_as_whole(report.out, whole(folder / "model.py"), *steps, tolerance=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_data_parallel_inference_sends_nothing(samples: Path, tmp_path: Path, ranks: int) -> None:
    folder = samples / GPT
    changes = [("ranks: 2", f"ranks: {ranks}"), ("divisor: 2", f"divisor: {ranks}")]
    report = compile_model(
        folder / "model.py", edited(folder / "dp.yaml", tmp_path / "p.yaml", *changes), tmp_path / "b"
    )
    assert kinds(report) == Counter()
    same_as_whole(report.out, whole(folder / "model.py"), token_ids(ranks, 5), token_ids(2 * ranks, 7), tolerance=1e-5)


def test_data_parallel_times_tensor_parallel(samples: Path, tmp_path: Path) -> None:
    folder = samples / GPT
    report = compile_model(folder / "model.py", folder / "dp_tp.yaml", tmp_path / "build")
    assert kinds(report) == BLOCKS + Counter({"AllReduce": 1})
    assert {e.ranks for e in report.program.events} == {((0, 1), (2, 3))}
    first = report.program.events[0]
    assert first.value.name == "tokens.Gather", "the rows that each rank has are summed"
    same_as_whole(report.out, whole(folder / "model.py"), token_ids(2, 5), token_ids(6, 3), tolerance=1e-5)


def test_placement_and_cuts_in_one_model(samples: Path, tmp_path: Path) -> None:
    folder = samples / GPT
    report = compile_model(folder / "model.py", folder / "stages.yaml", tmp_path / "build")
    assert kinds(report) == BLOCKS + STAGES
    sent = [(e.value.name, e.ranks) for e in report.program.events if e.op_type in STAGES]
    assert sent == [
        ("Add", ((0, 1, 2),)),
        ("layers.1.Add_1", ((1,), (3,))),
        ("layers.1.Add_1", ((2,), (4,))),
        ("layers.3.Add_1", ((3,), (0,))),
    ]
    same_as_whole(report.out, whole(folder / "model.py"), token_ids(1, 9), token_ids(5, 3), tolerance=1e-5)


def test_the_gpt_as_a_file(samples: Path, tmp_path: Path) -> None:
    folder = samples / GPT
    run_script(folder / "make_model.py")
    ids = token_ids(2, 5)
    path = folder / "gpt.onnx"
    want = whole_outputs(whole(folder / "model.py"), ids)["logits"]
    np.testing.assert_array_equal(whole_outputs(whole(path), ids)["logits"], want)
    for name, expected in {"plan": BLOCKS, "stages": BLOCKS + STAGES}.items():
        report = compile_model(path, folder / f"{name}.yaml", tmp_path / name)
        assert kinds(report) == expected
        same_as_whole(report.out, whole(path), ids, tolerance=1e-5)


def test_the_gpt_in_other_sizes(samples: Path, tmp_path: Path) -> None:
    folder = samples / GPT
    sizes = {"layers": 1, "width": 30, "heads": 5, "vocabulary": 35, "context": 11}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    shutil.copytree(folder, tmp_path / "gpt")
    run_script(tmp_path / "gpt" / "make_model.py", options)
    plan = edited(folder / "plan.yaml", tmp_path / "plan.yaml", ("ranks: 2", "ranks: 5"))
    path = tmp_path / "gpt" / "gpt.onnx"
    report = compile_model(path, plan, tmp_path / "build")
    assert kinds(report) == Counter({"AllReduce": 2})
    same_as_whole(report.out, whole(path), token_ids(3, 11, 35), tolerance=1e-5)


@pytest.fixture(scope="module")
def exported(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The torch model as a file: exporting it takes longer than all else."""
    pytest.importorskip("torch", reason="needs partc[torch]")
    path = tmp_path_factory.mktemp("exported") / "torch.onnx"
    onnx.save(whole(samples / GPT / "torch_model.py"), path)
    return path


@pytest.mark.parametrize(
    ("plan", "communication"),
    [
        ("plan", BLOCKS),
        ("dp", Counter()),
        ("dp_tp", BLOCKS + Counter({"AllReduce": 1})),
        ("stages", BLOCKS + STAGES),
    ],
)
def test_the_gpt_of_torch(
    samples: Path, exported: Path, tmp_path: Path, plan: str, communication: Counter[str]
) -> None:
    report = compile_model(exported, samples / GPT / f"{plan}.yaml", tmp_path / "build")
    assert kinds(report) == communication
    needed = (
        rank_memory(open_artifact(report.out), rank, {"batch": 2, "seq": 5}) for rank in range(report.manifest.ranks)
    )
    assert not any(one.unknown for one in needed)
    same_as_whole(report.out, whole(exported), token_ids(2, 5), tolerance=1e-5)


@pytest.mark.parametrize("sample", [FFN, GPT])
def test_the_strategies_that_the_guide_quotes(sample: str) -> None:
    guide = (SAMPLES / "guide/sharding.md").read_text()
    quoted = re.findall(r"^```yaml\n(sharding:\n.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    real = read_plan(SAMPLES / sample / "plan.yaml")
    plans = [parse_plan(f"ranks: {real.ranks}\n{text}", "guide") for text in quoted]
    assert [replace(rule, where="") for rule in real.sharding] in [
        [replace(rule, where="") for rule in plan.sharding] for plan in plans
    ]
