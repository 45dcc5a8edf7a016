"""The samples: each compiles and equals its whole model."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from equivalence import whole_outputs
from partc.compiler.frontend import load
from partc.compiler.pipeline import compile_model
from partc.runtime import load_local
from partc.runtime.artifact.format import Manifest, rank_file

SAMPLES = Path(__file__).parents[2] / "samples"
DIGITS = {32: "digits.npz", 7: "digits_7.npz"}
DELIVERY = "is delivered to"
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
    assert str(report.program.tasks.schedule).count("F") == 5 * 8
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
