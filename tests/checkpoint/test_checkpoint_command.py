"""The commands `partc checkpoint show`, `verify` and `export`, and a trained model as onnxruntime runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from checkpoint_case import layout, record, save_all, tensors
from onnx import numpy_helper
from partc.cli.commands.checkpoint import command
from partc.cli.comparison.checkpoint_model import export_model
from partc.cli.output.failures import report
from partc.compiler.frontend import load
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.checkpoint.checkpoint import Checkpoint
from safetensors.numpy import load_file


def invoke(*arguments: object) -> int:
    """The exit code of `partc checkpoint ARGUMENTS`."""
    try:
        code = command.main([str(one) for one in arguments], prog_name="partc checkpoint", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except Exception as error:
        return report(error)
    return code if isinstance(code, int) else 0


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tensors()
    names = ("fc.weight", "norm.count", "embed.weight.exp_avg")
    records = [one for one in layout(whole, 6) if one.tensor in names]
    save_all(tmp_path / "ck", 120, 6, whole, records=records)
    assert invoke("show", tmp_path / "ck") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == [
        "tensor                dtype     shape     kind        shards  bytes",
        "embed.weight.exp_avg  float32   [24, 7]   optimizer        6  672 B",
        "fc.weight             bfloat16  [12, 24]  parameter        6  576 B",
        "norm.count            int64     []        statistics       1    8 B",
        "",
        "epoch: 2",
        'data: {"position": 77, "seed": 5}',
        "optimizer: adam",
    ]
    folder = tmp_path / "ck" / "step_00000120"
    assert last == f"{folder}: step 120, 3 tensors, 1.23 KiB, written by 6 ranks in 6 files"
    assert invoke("show", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["meta"]["epoch"], found["tensors"]["fc.weight"]["bytes"]) == (120, 2, 576)
    assert invoke("show", tmp_path / "none") == 2
    assert "none: there is no such folder" in capsys.readouterr().err


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20):
        save_all(tmp_path, step, 6, tensors())
    assert invoke("verify", tmp_path) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'step_00000020'}: ok, step 20, 8 tensors, 6 files\n"
    file = tmp_path / "step_00000020" / "rank_0002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    assert invoke("verify", tmp_path) == 1
    said = capsys.readouterr().err
    assert f"{file}: has " in said
    assert said.endswith(f"{tmp_path / 'step_00000020'}: 1 problem\n")
    assert invoke("verify", tmp_path / "step_00000010") == 0


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tensors()
    save_all(tmp_path / "ck", 120, 6, whole)
    out = tmp_path / "w.safetensors"
    assert invoke("export", tmp_path / "ck", "-o", out, "--all") == 0
    assert capsys.readouterr().out.startswith(f"{out}: 8 tensors of step 120, ")
    found = load_file(out)
    assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in whole.items()}
    assert invoke("export", tmp_path / "ck", "-o", tmp_path / "w.onnx") == 2
    assert "its name must end in .safetensors\n  help: add --model" in capsys.readouterr().err


def test_some_weights_are_exported_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the optimizer's tensors of theirs where these are asked for; a pattern that matches none is told."""
    whole = tensors()
    save_all(tmp_path / "ck", 120, 6, whole)
    out = tmp_path / "w.safetensors"
    for words, names in (
        (["--only", "fc.*"], ["fc.bias", "fc.cube", "fc.weight"]),
        (["--only", "*.weight", "--only", "norm"], ["embed.weight", "fc.weight", "norm.count", "norm.mask"]),
        (["--only", "embed", "--all"], ["embed.weight", "embed.weight.exp_avg"]),
    ):
        assert invoke("export", tmp_path / "ck", "-o", out, *words) == 0
        found = load_file(out)
        assert sorted(found) == names, words
        assert {name: array.tobytes() for name, array in found.items()} == {n: whole[n].tobytes() for n in found}
    capsys.readouterr()
    assert invoke("export", tmp_path / "ck", "-o", out, "--only", "embad.weight", "--only", "[", "--only", "fc") == 2
    error = capsys.readouterr().err
    assert "--only: 'embad.weight' matches no weight of " in error
    assert "  help: the nearest names are 'embed.weight'" in error
    assert "--only: '[' is not a pattern: " in error
    assert (
        invoke("export", tmp_path / "ck", "-o", tmp_path / "w.pt", "--format", "torch", "--only", "fc", "--like", out)
        == 2
    )
    assert "--only: it goes with weights alone" in capsys.readouterr().err


MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[n, 3] x) => (float[n, 2] y)
  <float[3, 4] a = {1,2,3,4, 5,6,7,8, 9,10,11,12}, float[4, 2] b = {1,2, 3,4, 5,6, 7,8}, float[2] frozen = {0.5, -0.5}>
{ h = MatMul(x, a)  r = Relu(h)  z = MatMul(r, b)  y = Add(z, frozen) }
"""


def run(model: Path, x: Array) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def trained(folder: Path, whole: Mapping[str, Array]) -> Checkpoint:
    """A checkpoint of two ranks, each tensor cut by its first dim."""
    records = [record(name, array, [0, 1], (2, *[1] * (array.ndim - 1))) for name, array in whole.items()]
    (path, _) = save_all(folder, 5, 2, whole, records=records)
    return Checkpoint.open(path)  # type: ignore[arg-type]


def test_a_folder_as_transformers_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors import safe_open

    random = np.random.default_rng(1)
    whole = {f"layers.{k}.weight": random.standard_normal((6, 4), np.float32) for k in range(3)}
    trained(tmp_path / "ck", whole)
    config = tmp_path / "config"
    config.mkdir()
    words = ("export", tmp_path / "ck", "--format", "hf", "-o", tmp_path / "out", "--config", config)
    assert invoke(*words) == 2
    assert "it has no config.json" in capsys.readouterr().err
    for name in ("config.json", "merges.txt", "model.safetensors.index.json", "weights.bin"):
        (config / name).write_text("{}")
    assert invoke(*words, "--shard", "200") == 0
    files = [f"model-{k:05}-of-00002.safetensors" for k in (1, 2)]
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == sorted(
        ["config.json", "merges.txt", "model.safetensors.index.json", *files]
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 288}
    for name, array in whole.items():
        with safe_open(tmp_path / "out" / index["weight_map"][name], "numpy") as file:
            assert file.metadata()["format"] == "pt"
            assert file.get_tensor(name).tobytes() == array.tobytes()
    capsys.readouterr()
    assert invoke(*words[:-2]) == 0
    assert "from_pretrained needs config.json as well" in capsys.readouterr().out
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == sorted(whole)


@pytest.mark.parametrize("large", [False, True])
def test_a_model_gets_the_trained_weights(tmp_path: Path, large: bool) -> None:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "net.onnx")
    random = np.random.default_rng(1)
    whole = {"a": random.standard_normal((4, 3), np.float32).T.copy(), "b": random.standard_normal((4, 2), np.float32)}
    checkpoint = trained(tmp_path / "ck", {"b": whole["b"]})
    assert export_model(checkpoint, tmp_path / "net.onnx", tmp_path / "out.onnx", 0 if large else 1 << 20) == 1
    x = random.standard_normal((5, 3), np.float32)
    a = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    wanted = np.maximum(x @ a, 0) @ whole["b"] + np.array([0.5, -0.5], np.float32)
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x), wanted, rtol=1e-5, atol=1e-5)
    initializers = onnx.load(tmp_path / "out.onnx").graph.initializer
    found = {one.name: numpy_helper.to_array(one, str(tmp_path)) for one in initializers}
    assert found["b"].tobytes() == whole["b"].tobytes()


def test_large_weights_stand_beside_the_model(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    weight = random.standard_normal((6, 50), np.float32)
    text = "<ir_version: 10, opset_import: ['' : 20]> net (float[n, 6] x) => (float[n, 50] y) { y = MatMul(x, w) }"
    model = onnx.parser.parse_model(text.replace("'", '"'))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros_like(weight), "w"))
    onnx.save(model, tmp_path / "net.onnx", save_as_external_data=True, location="net.data", size_threshold=0)
    checkpoint = trained(tmp_path / "ck", {"w": weight})
    export_model(checkpoint, tmp_path / "net.onnx", tmp_path / "out.onnx", 100)
    assert (tmp_path / "out.onnx.data").stat().st_size == weight.nbytes
    x = random.standard_normal((2, 6), np.float32)
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x), x @ weight, rtol=1e-5, atol=1e-5)


def test_weights_that_do_not_fit_the_model_are_all_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "net.onnx")
    whole = {"a": np.zeros((4, 3), np.float32), "b": np.zeros((4, 2), np.float16), "frozn": np.zeros(2, np.float32)}
    checkpoint = trained(tmp_path / "ck", whole)
    command_line = ("export", tmp_path / "ck", "--model", tmp_path / "net.onnx", "-o", tmp_path / "out.onnx")
    assert invoke(*command_line) == 1
    where = tmp_path / "net.onnx"
    assert capsys.readouterr().err.splitlines() == [
        f"{where}: 'a' is float32 [3, 4]; in the checkpoint it is float32 [4, 3]",
        f"{where}: 'b' is float32 [4, 2]; in the checkpoint it is float16 [4, 2]",
        f"{where}: has no weight 'frozn'; the nearest are 'frozen'",
        f"  help: use the model that was trained; {checkpoint.path} is from another one",
    ]
    assert not (tmp_path / "out.onnx").exists()


NET = """
from partc.compiler import nn
from partc.compiler.directives.input import Input

inputs = {"x": Input(["n", 3, 5, 7], "float32")}
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU()).MODE()
"""


def test_a_model_in_training_mode_takes_its_inference_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "learning.py").write_text(NET.replace("MODE", "train"))
    (tmp_path / "whole.py").write_text(NET.replace("MODE", "eval"))
    random = np.random.default_rng(4)
    initial = {
        name: value.const_value.numpy()
        for name, value in load(tmp_path / "learning.py").model.graph.initializers.items()
        if value.const_value is not None and value.const_value.size > 1
    }
    assert {"1.running_mean", "1.running_var", "0.weight"} < set(initial)
    whole = {name: np.abs(random.standard_normal(array.shape, np.float32)) + 0.1 for name, array in initial.items()}
    trained(tmp_path / "ck", whole)
    for name in ("learning", "whole"):
        arguments = ("--model", tmp_path / f"{name}.py", "-o", tmp_path / f"{name}.onnx")
        assert invoke("export", tmp_path / "ck", *arguments) == 0
        assert capsys.readouterr().out == f"{tmp_path / name}.onnx: {name}.py with 6 weights of step 5\n"
    x = random.standard_normal((2, 3, 5, 7), np.float32)
    found = run(tmp_path / "learning.onnx", x)
    assert found.std() > 0.1
    assert found.tobytes() == run(tmp_path / "whole.onnx", x).tobytes()
    nodes = [node.op_type for node in onnx.load(tmp_path / "learning.onnx").graph.node]
    assert "BatchNormalization" in nodes


TORCH = """
import torch
from partc.compiler.directives.input import Input

inputs = {"x": Input(["n", 3, 5, 7], "float32")}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5)).train()
"""


def test_a_torch_module_gets_back_what_it_learned(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(TORCH)
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5)
    model = torch.nn.Sequential(*layers).train()
    x = torch.randn(6, 3, 5, 7)
    for _ in range(3):
        model(x)
    state = {name: one.detach().numpy() for name, one in model.state_dict().items() if one.dim()}
    export_model(trained(tmp_path / "ck", state), tmp_path / "net.py", tmp_path / "out.onnx")
    with torch.no_grad():
        wanted = model.eval()(x).numpy()
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x.numpy()), wanted, rtol=1e-4, atol=1e-5)
