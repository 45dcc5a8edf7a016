"""`partc export`: the file that it writes compiles to the same programs as the model does."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir
import pytest
from partc.cli.main import invoke
from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import CompileError
from partc.compiler.frontend.annotation_keys import DECLARED
from partc.compiler.frontend.exported import read_declared, write_declared
from partc.compiler.ir.declared import Declared, Placement
from partc.compiler.plan.rules import Dataset, DatasetSpec, RegionCall, ShardingRule
from partc.compiler.plan.target import TargetRule

TORCH = """import torch
from torch import nn
from partc.compiler import Input, Symbol, place
torch.manual_seed(3)
batch = Symbol(divisor=2, max=64)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(60, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
model[1].weight.requires_grad = False
model[5].eval()
place(model[4], 1)
inputs = {"x": Input(["batch", 1, 5, 7])}
outputs = ["logits"]
"""
BUILT = """from partc.compiler import Input, nn, shard
nn.seed(5)
fc = nn.Linear(8, 32)
model = nn.Sequential(fc, nn.ReLU(), nn.Linear(32, 3))
shard(fc, in_strategy=((2, 1),))
inputs = {"x": Input([4, 8])}
outputs = ["logits"]
"""
TRAIN = """ranks: 2
train:
  loss: {type: softmax_cross_entropy, logits: logits, labels: label}
  optimizer: {type: momentum, lr: 0.1, momentum: 0.9}
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", [TORCH, BUILT], ids=["torch", "built"])
def test_an_exported_model_compiles_to_the_same_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """With its frozen parameters, BatchNormalizations of both modes, symbols, placements and shardings."""
    if text is TORCH:
        pytest.importorskip("torch", reason="needs partc[torch]")
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(text)
    Path("plan.yaml").write_text(TRAIN)
    assert invoke(["compile", "model.py", "--plan", "plan.yaml", "-o", "a"]) == 0
    assert ("to export it once: partc export model.py -o model.onnx\n" in capsys.readouterr().out) is (text is TORCH)
    assert invoke(["export", "model.py", "-o", "model.onnx"]) == 0
    assert invoke(["compile", "model.onnx", "--plan", "plan.yaml", "-o", "b"]) == 0
    assert "to export it once" not in capsys.readouterr().out
    files = [path.relative_to("a") for path in Path("a").rglob("*") if path.suffix in (".onnx", ".safetensors")]
    assert files
    assert [path for path in files if (Path("a") / path).read_bytes() != (Path("b") / path).read_bytes()] == []
    one, other = (json.loads(Path(folder, "manifest.json").read_text()) for folder in ("a", "b"))
    told = ("model", "files")  # the name and the hash of the model, and of the dumps, which have its name
    assert [key for key in one if one[key] != other[key] and key not in told] == []


def _model() -> ir.Model:
    return ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 21]>\ng (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }'
    )


def test_all_that_a_model_declares_is_read_again() -> None:
    """Every kind of declaration, with tuples and mappings in them."""
    call = RegionCall(("x",), ("y",))
    declared = Declared(
        placements=(Placement("a", 1, "model.py:1"), Placement("b", (0, 1), "m:2"), Placement("c", {"pp": 1}, "m:3")),
        symbols={"n": Symbol(divisor=4, max=64)},
        sharding=(
            ShardingRule("a", None, ((2, 1), None), None, {"weight": (("dp", "tp"), ())}, "m:4", calls=(call,)),  # type: ignore[arg-type]
            ShardingRule("b", "colwise", None, None, {}, "m:5", level=1, packed=(64, 16), gathers=True),
        ),
        dataset=Dataset("", {"x": DatasetSpec((2, 1), "m:6")}, "m:6"),
        targets=(TargetRule("a", "cuda", "m:7"),),
    )
    model = _model()
    write_declared(model, declared, ())
    assert read_declared(model, "model.onnx") == declared
    assert not model.metadata_props
    model.metadata_props[DECLARED] = '{"symbols": {"n": {"max": -1}}}'
    with pytest.raises(CompileError, match=r"model.onnx: its metadata of declarations is broken"):
        read_declared(model, "model.onnx")


def test_a_name_that_does_not_end_in_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name with another ending."""
    (tmp_path / "model.py").write_text(BUILT)
    assert invoke(["export", str(tmp_path / "model.py"), "-o", str(tmp_path / "model.pt")]) == 2
    assert "its name must end in .onnx\n  help: write -o " in capsys.readouterr().err
