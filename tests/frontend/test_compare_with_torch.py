"""What torch exports is compared with its module: planted differences are found, and nothing is where there is none."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from partc.cli.main import invoke

torch = pytest.importorskip("torch", reason="needs partc[torch]")
import planted_differences as planted  # noqa: E402, it imports torch
from partc.compiler.directives.recorder import Recorder  # noqa: E402
from partc.compiler.frontend.inputs import DimNames  # noqa: E402
from partc.compiler.frontend.torch import compare_with_torch  # noqa: E402
from partc.compiler.frontend.torch.torch_module import export  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
MODULES = {
    "eps": "'norm' (Norm)",
    "gelu": "'gelu' (GELU)",
    "causal": "'attention' (Attention)",
    "bias": "'up' (Linear)",
}
"""By a word of a planted difference the module that the message names."""
OTHERWISE_EXPORTED = """import torch
from partc.compiler import Input

class Otherwise(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x) if torch.compiler.is_exporting() else torch.cos(x)

model = Otherwise()
inputs = {"x": Input(["batch", 3], "float32")}
outputs = ["y"]
"""
SMALL_EPSILON = """import torch

class Norm(torch.nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8)

model = Norm()
inputs = {"x": torch.zeros(2, 3)}
dynamic_shapes = {"x": {0: "batch"}}
outputs = ["y"]
"""


def test_no_difference_is_found_where_none_is() -> None:
    assert planted.planted_forward("") == ""


@pytest.mark.parametrize("name", planted.FORWARD)
def test_a_difference_of_the_exported_graph_is_found(name: str) -> None:
    told = planted.planted_forward(name)
    assert "the exported graph is not the torch module" in told or "does not run on" in told
    assert all(module in told for word, module in MODULES.items() if word in name.split())


@pytest.mark.parametrize("name", ["", "stopped gradient dropped", "decay of adamw"])
def test_a_difference_of_a_training_is_found(name: str, tmp_path: Path) -> None:
    wrong = planted.planted_training(name, tmp_path)
    assert ("words.weight" in wrong) is bool(name), wrong


def test_what_is_not_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose weights are more than a fifth of the memory; outputs that are drawn. Dropout is off on both sides."""
    module = torch.nn.Sequential(torch.nn.Linear(6, 70), torch.nn.BatchNorm1d(70), torch.nn.Dropout(0.5)).train()

    class Drawn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.layers(x)
            return y, y + torch.rand_like(y)

    inputs, dims = {"x": torch.zeros(3, 6)}, {"x": {0: "batch"}}
    model: ir.Model = export(Drawn().train(), inputs, dims, DimNames({}, set()), ["y", "z"], "m.py", Recorder(Path()))
    statistics = module[1].running_mean.clone()
    assert compare_with_torch.compare_with_torch(model) == [
        "z of the exported graph is drawn, and not compared with torch"
    ]
    assert torch.equal(statistics, module[1].running_mean)
    monkeypatch.setattr(compare_with_torch, "free_memory", lambda: 1000)
    (note,) = compare_with_torch.compare_with_torch(model)
    assert note.endswith("of weights are more than a fifth of 1000 B")


def test_commands_refuse_an_export_that_is_not_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(OTHERWISE_EXPORTED)
    assert invoke(["export", "model.py", "-o", "model.onnx"]) == 1
    told = capsys.readouterr().err
    assert "model.py:9: the exported graph is not the torch module: on ordinary numbers 'y' is" in told
    assert invoke(["export", "model.py", "-o", "model.onnx", "--no-compare"]) == 0


def test_a_constant_that_torchs_optimizer_has_dropped_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(SMALL_EPSILON)
    space: dict[str, object] = {}
    exec(SMALL_EPSILON, space)
    shapes = {"x": {0: torch.export.Dim("batch")}}
    torch.onnx.export(space["model"], (torch.zeros(2, 3),), "model.onnx", dynamic_shapes=shapes, verbose=False)
    assert invoke(["verify", "model.onnx", "--set", "batch=4"]) == 0
    capsys.readouterr()
    assert invoke(["verify", "model.onnx", "--against", "model.py", "--set", "batch=4"]) == 1
    told = capsys.readouterr().err
    assert "model.onnx is not the torch module: on zeros" in told
