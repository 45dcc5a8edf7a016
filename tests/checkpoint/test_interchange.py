"""A training that PyTorch began goes on in partc and back, step for step; what does not fit is said all at once."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.checkpoint import Checkpoint
from safetensors.numpy import save_file

torch = pytest.importorskip("torch")

MODEL = """
import torch
torch.manual_seed(3)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)
        self.norm = torch.nn.LayerNorm(8)
        self.again = torch.nn.Linear(6, 8)
        self.again.weight = self.up.weight
        self.fixed = torch.nn.Linear(6, 6).requires_grad_(False)
        self.head = torch.nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        h = self.fixed(self.down(torch.tanh(self.up(x))))
        return self.head(self.norm(self.again(h)))
model = Net()
inputs = {"x": torch.zeros(4, 6)}
outputs = ["y"]
"""
TRAIN = """
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: OPTIMIZER
  data: data.npz
  batch: 4
  shuffle: false
  steps: 6
"""
OPTIMIZERS = {
    "adamw": "{type: adamw, lr: 0.01, weight_decay: 0.1}\n  parameters: {'**.bias': {weight_decay: 0}, 'norm': {weight_decay: 0}}",
    "sgd": "{type: momentum, lr: 0.05, momentum: 0.9}",
}
PLANS = {
    "adamw": "ranks: 2\nsharding: {up: colwise, down: rowwise, again: colwise}\n",
    "sgd": "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\n",
}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, its data, and an artifact for each optimizer."""
    folder = tmp_path_factory.mktemp("interchange")
    (folder / "model.py").write_text(MODEL)
    random = np.random.default_rng(1)
    x, label = random.standard_normal((36, 6)).astype(np.float32), random.integers(0, 4, 36)
    np.savez(folder / "data.npz", x=x, label=label)
    assert invoke(["export", str(folder / "model.py"), "-o", str(folder / "net.onnx"), "-q"]) == 0
    for name, plan in PLANS.items():
        (folder / f"{name}.yaml").write_text(plan + TRAIN.replace("OPTIMIZER", OPTIMIZERS[name]))
        compile_model(folder / "net.onnx", folder / f"{name}.yaml", folder / name)
    return folder


class TorchRun:
    """The same training in torch: AdamW with two groups, or SGD with momentum."""

    def __init__(self, folder: Path, name: str) -> None:
        self.model = runpy.run_path(str(folder / "model.py"))["model"].train()
        self.data = np.load(folder / "data.npz")
        named = [*self.model.named_parameters()]
        if name == "adamw":
            groups = [[one for _, one in named if one.dim() > 1], [one for _, one in named if one.dim() == 1]]
            self.optimizer: Any = torch.optim.AdamW(
                [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=0.01
            )
        else:
            self.optimizer = torch.optim.SGD([one for _, one in named], lr=0.05, momentum=0.9)

    def steps(self, begin: int, end: int) -> None:
        for k in range(begin, end):
            records = slice(4 * k, 4 * k + 4)
            x, label = (torch.from_numpy(self.data[key][records]) for key in ("x", "label"))
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(x), label).backward()
            self.optimizer.step()

    def content(self, step: int) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": step,
            "note": "mine",
        }


@pytest.mark.parametrize("name", PLANS)
def test_a_run_goes_on_in_partc_and_back(
    name: str, builds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, begun = TorchRun(builds, name), TorchRun(builds, name)
    whole.steps(0, 9)
    begun.steps(0, 3)
    torch.save(begun.content(3), "half.pt")
    step = ["--step", "3"] if name == "adamw" else []
    assert invoke(["checkpoint", "import", "half.pt", "--build", str(builds / name), "-o", "runs", *step]) == 0
    assert "not used, since training changes nothing under the name: seen, again.weight, " in capsys.readouterr().out
    plan = str(builds / f"{name}.yaml")
    words = ["train", str(builds / name), "--plan", plan, "--in-process", "--threads", "1", "--checkpoint", "runs"]
    assert invoke([*words, "--resume"]) == 0
    assert invoke(["checkpoint", "export", "runs", "--format", "torch", "--like", "half.pt", "-o", "more.pt"]) == 0
    more = torch.load("more.pt", weights_only=True)
    assert (more["step"], more["note"], list(more)) == (6, "mine", ["model", "optimizer", "step", "note"])
    assert more["model"]["up.weight"].data_ptr() == more["model"]["again.weight"].data_ptr()
    end = TorchRun(builds, name)
    end.model.load_state_dict(more["model"])
    end.optimizer.load_state_dict(more["optimizer"])
    end.steps(6, 9)
    for key, want in whole.model.state_dict().items():
        torch.testing.assert_close(
            end.model.state_dict()[key], want, rtol=0, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
        )
    assert (more["model"]["head.weight"] - begun.model.head.weight).abs().max() > 1e-3


def test_weights_of_other_files(builds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state_dict of a wrapped model, safetensors and a folder of shards are one checkpoint, whose optimizer begins anew."""
    monkeypatch.chdir(tmp_path)
    state: Mapping[str, Any] = TorchRun(builds, "adamw").model.state_dict()
    torch.save(
        {f"module.{name}": one.bfloat16() if "head" in name else one for name, one in state.items()},
        "w.pt",
        _use_new_zipfile_serialization=False,
    )
    save_file({name: one.numpy() for name, one in state.items()}, "w.safetensors")
    build = ["--build", str(builds / "adamw")]
    assert invoke(["checkpoint", "import", "w.safetensors", *build, "-o", "a", "--step", "5"]) == 0
    assert invoke(["checkpoint", "export", "a", "-o", "folder", "--shard", "200"]) == 0
    assert invoke(["checkpoint", "import", "folder", *build, "-o", "b"]) == 0
    assert invoke(["checkpoint", "import", "w.pt", *build, "-o", "c"]) == 0
    assert invoke(["checkpoint", "export", "a", "--format", "torch", "-o", "plain.pt"]) == 0
    plain = torch.load("plain.pt", weights_only=True)
    a, b, c = (Checkpoint.open(name) for name in "abc")
    assert (a.index.step, b.index.step) == (5, 0)
    for name, one in a.index.tensors.items():
        assert a.read(name).tobytes() == b.read(name).tobytes()
        np.testing.assert_allclose(c.read(name), a.read(name), atol=1e-2 if "head" in name else 0)
        if one.kind == "parameter":
            assert torch.equal(plain[name], state[name])
        else:
            assert not a.read(name).any()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_folders_of_distributed_checkpoint(
    builds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By names, as `get_state_dict` gives them, and back; a folder that would run code is refused."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    monkeypatch.chdir(tmp_path)
    run, other = TorchRun(builds, "adamw"), TorchRun(builds, "adamw")
    run.steps(0, 2)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    begun = {"model": model, "optim": optimizer, "step": 2}
    dcp.save(begun, checkpoint_id="half", no_dist=True)
    torch.save(begun, "half.pt")
    assert invoke(["checkpoint", "import", "half", "--build", str(builds / "adamw"), "-o", "runs"]) == 0
    checkpoint = Checkpoint.open("runs")
    assert checkpoint.index.step == 2
    kept = run.optimizer.state[run.model.up.weight]["exp_avg_sq"]
    np.testing.assert_array_equal(checkpoint.read("up.weight.exp_avg_sq"), kept.numpy())
    assert invoke(["checkpoint", "export", "runs", "--format", "dcp", "--like", "half.pt", "-o", "more"]) == 0
    other.steps(5, 6)
    model, optimizer = get_state_dict(other.model, other.optimizer)
    dcp.load(state := {"model": model, "optim": optimizer, "step": 0}, checkpoint_id="more", no_dist=True)
    set_state_dict(other.model, other.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for one in (run, other):
        one.steps(2, 4)
    for want, have in zip(run.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(want, have)
    assert state["step"] == 2
    dcp.save({"model": run.model.state_dict(), "extra": Fraction(1)}, checkpoint_id="code", no_dist=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    for folder in ("code", "run"):
        assert invoke(["checkpoint", "import", folder, "--build", str(builds / "adamw"), "-o", "no"]) == 1
        assert (
            f"{folder}: cannot be read as a checkpoint of torch.distributed without running code"
            in capsys.readouterr().err
        )
    assert not (tmp_path / "ran").exists()


def test_what_does_not_fit_is_said_at_once(
    builds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = TorchRun(builds, "adamw")
    run.steps(0, 1)
    state = {**run.model.state_dict()}
    state["encoder.up.bias"], state["head.weight"] = state.pop("up.bias"), state["head.weight"].T
    torch.save(state, "other.pt")
    words = ["checkpoint", "import", "--build", str(builds / "adamw"), "-o", "runs"]
    assert invoke([*words, "other.pt"]) == 1
    said = capsys.readouterr().err
    assert "other.pt: has no 'up.bias' [8]; the nearest is 'encoder.up.bias'" in said
    assert "other.pt: 'head.weight' is [8, 4]; the program's is [4, 8], its transpose" in said
    torch.save(run.content(1), "adamw.pt")
    assert invoke(["checkpoint", "import", "adamw.pt", "--build", str(builds / "sgd"), "-o", "runs"]) == 1
    assert (
        "the optimizer keeps exp_avg, exp_avg_sq of 'up.weight'; the program's keeps momentum_buffer"
        in capsys.readouterr().err
    )
    assert invoke([*words, "adamw.pt", "--step", "0"]) == 2
    assert "--step 0: the optimizer of adamw.pt has counted 1 steps" in capsys.readouterr().err
    torch.save({"model": Fraction(1)}, "code.pt")
    assert invoke([*words, "code.pt"]) == 1
    assert "code.pt: cannot be read without running code" in capsys.readouterr().err
    torch.save({"model": torch.nn.Linear(2, 2)}, "module.pt", _use_new_zipfile_serialization=False)
    assert invoke([*words, "module.pt"]) == 1
    assert (
        "module.pt: cannot be read without running code: WeightsUnpickler error: Unsupported" in capsys.readouterr().err
    )
    Path("text.pt").write_text("hello")
    assert invoke([*words, "text.pt"]) == 1
    assert "text.pt: is not a file that torch.save wrote" in capsys.readouterr().err
    named = torch.optim.AdamW([{"params": [one]} for one in run.model.parameters()])
    torch.save({"model": run.model.state_dict(), "optimizer": named.state_dict()}, "many.pt")
    assert invoke([*words, "many.pt"]) == 1
    assert (
        "does not follow from the file's weights\n  help: make the optimizer of model.named_parameters()"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "runs").exists()
