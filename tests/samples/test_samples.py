"""The samples: each compiles and equals its whole model, and their guide, `samples/README.md`, shows what happens.

In the guide a block whose language is followed by a file's name is that file. In a `console` block a line that begins with
`$` is a command, run in the folder that the last `cd` left, and a line `...` stands for any lines.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from equivalence import whole_outputs
from partc.cli.launch.launcher import Kind, find_launcher
from partc.cli.main import invoke
from partc.compiler.frontend import load
from partc.compiler.pipeline import compile_model
from partc.compiler.plan.read import parse_plan, read_plan
from partc.runtime import load_local
from partc.runtime.artifact.format import Manifest, rank_file

SAMPLES = Path(__file__).parents[2] / "samples"
DIGITS = {32: "digits.npz", 7: "digits_7.npz"}
DELIVERY = "is delivered to"
FENCE = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ANY_LINES = "...\n"
IN_PROCESS = (
    "partc run by_eights",
    "partc run --input digits.npz",
    "partc run --input digits_512.npz",
    "partc run --input digits_12.npz",
    "partc train --plan train.yaml --epochs 120",
    "partc train --plan train.yaml --checkpoint runs\n",
    "partc train train",
    "partc train offload",
    "partc train host",
    "partc train --plan train.yaml --steps 3",
    "partc train --plan train.yaml\n",
    "partc train --plan train_rows.yaml",
    "partc train halves",
    "partc train pipeline",
    "partc eval",
)
"""Commands of the guide whose ranks are threads of this test: others of their kind run over MPI, and to start processes takes long."""
WITHOUT_RANKS = re.compile(r"partc (plan|compile|inspect|check|verify|checkpoint)\b(?!.*--mpi)")
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the samples, without what was made in them."""
    folder = tmp_path_factory.mktemp("copy") / "samples"
    shutil.copytree(SAMPLES, folder, ignore=shutil.ignore_patterns("build*", "resnet18.*", "__pycache__"))
    return folder


@pytest.fixture(scope="module")
def resnet(samples: Path) -> Path:
    """The folder of the ResNet, with its model made."""
    subprocess.run([sys.executable, "make_model.py"], cwd=samples / "resnet", env=ENVIRONMENT, check=True)
    return samples / "resnet"


def whole(path: Path) -> onnx.ModelProto:
    """The whole model with its weights inside."""
    return onnx.load(path) if path.suffix == ".onnx" else ir.to_proto(load(path).model)


def digits(batch: int) -> dict[str, Any]:
    with np.load(SAMPLES / "lenet" / DIGITS[batch]) as archive:
        return dict(archive)


def difference(have: Any, want: Any) -> float:
    assert have.shape == want.shape
    assert have.dtype == want.dtype == np.float32
    assert np.abs(want).max() > 1e-2, "all zeros would be equal too"
    return float(np.abs(have - want).max())


def weight_bytes(graph: onnx.GraphProto) -> dict[str, int]:
    """Bytes by weight, wherever their values are."""
    return {
        tensor.name: math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in graph.initializer
    }


def weight_bytes_of_ranks(manifest: Manifest, out: Path) -> int:
    """The bytes of the weights of all ranks together."""
    files = [onnx.load(out / rank_file(rank), load_external_data=False) for rank in range(manifest.ranks)]
    return sum(sum(weight_bytes(file.graph).values()) for file in files)


@pytest.mark.parametrize(("model", "plan"), [("model.py", "plan.yaml"), ("place_calls.py", "place_calls.yaml")])
def test_lenet_is_the_whole_model(samples: Path, tmp_path: Path, model: str, plan: str) -> None:
    lenet = samples / "lenet"
    report = compile_model(lenet / model, lenet / plan, tmp_path / "build")
    assert not report.warnings
    moved = [(t.source, t.target) for t in report.manifest.transfers if DELIVERY not in t.cause]
    assert moved == [(3, 4), (4, 0), (0, 1), (1, 2)]
    assert [(t.source, t.target) for t in report.manifest.transfers if DELIVERY in t.cause] == [(2, 0)]
    proto = whole(lenet / model)
    assert weight_bytes_of_ranks(report.manifest, report.out) == sum(weight_bytes(proto.graph).values()) == 246_736
    with load_local(report.out) as program:
        for batch in DIGITS:
            (want,) = whole_outputs(proto, digits(batch)).values()
            assert difference(program(digits(batch))["logits"], want) <= 1e-6


def test_lenet_streams_as_the_whole_model(samples: Path, tmp_path: Path) -> None:
    lenet = samples / "lenet"
    report = compile_model(lenet / "model.py", lenet / "pipeline.yaml", tmp_path / "build")
    assert str(report.program.schedule).count("F") == 5 * 8
    with load_local(report.out) as program:
        want = whole_outputs(whole(lenet / "model.py"), digits(32))["logits"]
        assert difference(program(digits(32))["logits"], want) <= 1e-6


@pytest.mark.parametrize("size", [(224, 224), (64, 96)], ids=str)
def test_resnet_is_the_whole_model(resnet: Path, tmp_path: Path, size: tuple[int, int]) -> None:
    text = (resnet / "plan.yaml").read_text()
    assert "224, 224" in text
    (tmp_path / "plan.yaml").write_text(text.replace("224, 224", "{}, {}".format(*size)))
    report = compile_model(resnet / "resnet18.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    assert not report.warnings
    assert [(t.value, t.source, t.target) for t in report.manifest.transfers] == [
        ("layer2.1.relu.Relu_1", 0, 1),
        ("layer3.1.relu.Relu_1", 1, 2),
        ("layer4.0.downsample.1.BatchNormalization", 1, 2),
        ("layer4.0.relu.Relu_1", 2, 3),
    ]
    parameters, statistics = 11_689_512, 9_600
    assert weight_bytes_of_ranks(report.manifest, report.out) == 4 * (parameters + statistics)
    proto = whole(resnet / "resnet18.onnx")
    with load_local(report.out) as program:
        for batch in (1, 3):
            x = np.random.default_rng(batch).standard_normal((batch, 3, *size)).astype(np.float32)
            assert difference(program(x=x)["logits"], whole_outputs(proto, {"x": x})["logits"]) <= 1e-6


def test_lenet_over_mpi(lenet_build: Path, tmp_path: Path) -> None:
    lenet, batch = SAMPLES / "lenet", 7
    run = [sys.executable, "-m", "partc.cli", "run", str(lenet_build), "--threads", "1"]
    run += ["--input", str(lenet / DIGITS[batch]), "-o", str(tmp_path / "y.npz")]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT, timeout=120)
    with np.load(tmp_path / "y.npz") as outputs:
        assert outputs.files == ["logits"]
        want = whole_outputs(whole(lenet / "model.py"), digits(batch))["logits"]
        assert difference(outputs["logits"], want) <= 1e-6


@pytest.fixture(scope="module")
def lenet_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lenet") / "build"
    compile_model(SAMPLES / "lenet" / "model.py", SAMPLES / "lenet" / "plan.yaml", out)
    return out


@pytest.mark.parametrize(("folder", "model"), [("lenet", "model.py"), ("resnet", "resnet18.onnx")])
def test_same_input_same_bytes(resnet: Path, tmp_path: Path, folder: str, model: str) -> None:
    sample = resnet.parent / folder
    first, second = tmp_path / "first", tmp_path / "second" / "elsewhere"
    for out in (first, second):
        compile_model(sample / model, sample / "plan.yaml", out)
    assert contents(first) == contents(second)
    assert len(contents(first)) == 1 + len(json.loads((first / "manifest.json").read_text())["files"])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclass(frozen=True)
class Command:
    """A line of a console, and what is shown below it."""

    line: str
    shown: str

    @property
    def exit_code(self) -> int:
        """1 where the text tells a failure, 2 where it refuses what the user gave."""
        refused = "help:" in self.shown or "run it with" in self.shown
        return 1 if "violation" in self.shown else 2 if refused else 0

    def matches(self, output: str) -> bool:
        shards = [re.escape(shard) for shard in comparable(self.line, self.shown).split(ANY_LINES)]
        return re.fullmatch(r"(?:.*\n)*?".join(shards), comparable(self.line, output)) is not None


def comparable(line: str, text: str) -> str:
    """The text without what another machine or moment changes: times, progress of a slow run, and computed values in tables."""
    text = re.sub(r"^step \d+ of \d+\n", "", text, flags=re.MULTILINE)
    if re.search(r"partc (run|verify)", line):
        text = re.sub(r"^(output|logits) .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\d[\d,]*(\.\d+)? (us|ms|s\b|steps/s)", "<time>", text)


def blocks() -> Iterator[tuple[str, str, str]]:
    """Language, file name and text of every fenced block."""
    for found in FENCE.finditer((SAMPLES / "README.md").read_text()):
        yield found[1], found[2], found[3]


def commands(text: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        yield Command(line, shown)


def ended(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and words of a command: in this process where it starts no ranks, or could as well have them here, else in a shell."""
    here = f"{line}\n".startswith(IN_PROCESS)
    if here or WITHOUT_RANKS.match(line):
        capsys.readouterr()
        with contextlib.chdir(folder):
            code = invoke([*shlex.split(line)[1:], *["--in-process"] * here])
        return code, "".join(capsys.readouterr())
    done = subprocess.run(["sh", "-c", line], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def run(command: Command, folder: Path, trouble: list[str], capsys: pytest.CaptureFixture[str]) -> Path:
    """Runs a command in the folder; gives the folder where the next one runs."""
    line = command.line
    if line.startswith("cd "):
        return (folder / line[3:]).resolve(strict=True)
    if find_launcher(1).kind is not Kind.OPEN_MPI:
        line = line.replace(" --oversubscribe", "")
    code, told = ended(line, folder, capsys)
    if code != command.exit_code or not command.matches(told):
        trouble.append(f"$ {command.line}\n{told}exit code {code}")
    return folder


def test_the_guide_shows_what_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "samples"
    shutil.copytree(SAMPLES, folder, ignore=shutil.ignore_patterns("build", "resnet18.*", "__pycache__"))
    trouble: list[str] = []
    for language, name, text in blocks():
        if language == "console":
            for command in commands(text):
                folder = run(command, folder, trouble, capsys)
        elif name:
            (folder / name).write_text(text)
    assert not trouble, "\n".join(trouble)
    learned = json.loads(
        ended("partc eval --plan train.yaml --checkpoint runs --json", tmp_path / "samples" / "lenet", capsys)[1]
    )
    assert learned["metrics"]["accuracy"] >= 0.8


@pytest.mark.parametrize("name", [name for language, name, text in blocks() if "model = " in text and name])
def test_the_models_of_the_guide(tmp_path: Path, name: str) -> None:
    if "torch" in name:
        pytest.importorskip("torch")
    (text,) = (text for _, other, text in blocks() if other == name)
    (tmp_path / name).write_text(text)
    (tmp_path / "plan.yaml").write_text('ranks: 2\nplacement: {"**": 1}\n')
    report = compile_model(tmp_path / name, tmp_path / "plan.yaml", tmp_path / "build")
    (port,) = report.manifest.inputs
    assert port.shape is not None
    assert port.shape[0] == "batch"
    x = np.random.default_rng(0).standard_normal((16, *port.shape[1:])).astype(np.float32)
    with load_local(report.out) as program:
        (have,) = program({port.name: x}).values()
    (want,) = whole_outputs(ir.to_proto(load(tmp_path / name).model), {port.name: x}).values()
    assert difference(have, want) <= 1e-6


@pytest.mark.parametrize(
    ("sample", "quoted"),
    [("lenet", r"`(placement: \{conv1.*?\})`"), ("resnet", r'^```yaml\n(placement:\n  "layer.*?)^```$')],
    ids=["lenet", "resnet"],
)
def test_the_plans_that_the_guide_quotes(sample: str, quoted: str) -> None:
    real = read_plan(SAMPLES / sample / "plan.yaml")
    (text,) = re.findall(quoted, (SAMPLES / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    shown = parse_plan(f"ranks: {real.ranks}\n{text}\n", "README.md")
    assert [replace(rule, where="") for rule in shown.placement] == [replace(rule, where="") for rule in real.placement]
