"""The samples of fine-tuning train as torch does on one process, data parallel and tensor parallel, in this process and over MPI."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.compiler.emit.whole import write_exported
from partc.compiler.frontend import load
from partc.runtime.artifact.manifest import open_artifact
from safetensors.numpy import load_file
from samples_training_case import SAMPLES, train

torch = pytest.importorskip("torch", reason="the models of these samples are torch modules")

STEPS, BATCH, DECAY = 5, 32, 0.9
FOLDER = SAMPLES / "fine_tuning"
DATA_PARALLEL = "mesh: {dp: 2}\ndataset: data_parallel\nsymbols: {batch: {divisor: 2}}\n"
MOST_LINES = 40


@dataclass(frozen=True)
class Sample:
    """A model and a plan, the transform of its batches, which parameters stay, and a step of torch: losses by name."""

    model: str
    transform: str
    frozen: tuple[str, ...]
    losses: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]


def classified(model: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The cross entropy of what a model says of a batch."""
    given = [value for name, value in batch.items() if name != "label"]
    return {"loss": torch.nn.functional.cross_entropy(model(*given), batch["label"])}


def own(model: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The losses that a model makes itself."""
    more = {"weight": torch.tensor(5.0)} if "ink" in batch else {}
    made: Mapping[str, Any] = model(**batch, **more)
    return made


CASES = {
    "lora": Sample("lora", "pixels", ("up.base", "down.base"), classified),
    "distillation": Sample("distillation", "pixels", ("teacher",), own),
    "frozen_tower": Sample("frozen_tower", "with_words", ("vision",), classified),
    "two_losses": Sample("two_losses", "with_ink", (), own),
    "ema": Sample("two_losses", "with_ink", (), own),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples with their models as files, each exported once, and a data parallel plan beside each plan."""
    samples = tmp_path_factory.mktemp("copy")
    for name in ("fine_tuning", "lenet"):
        shutil.copytree(SAMPLES / name, samples / name, ignore=shutil.ignore_patterns("build*", "__pycache__"))
    place = samples / "fine_tuning"
    for model in {case.model for case in CASES.values()}:
        write_exported(load(place / f"{model}.py"), place / f"{model}.onnx")
    for name in CASES:
        text = (place / f"{name}.yaml").read_text() + "  shuffle: false\n  log: 1\n"
        head, _, rest = text.partition("train:")
        (place / f"{name}.tp.yaml").write_text(text)
        (place / f"{name}.dp.yaml").write_text(f"{head.splitlines()[0]}\n{DATA_PARALLEL}train:{rest}")
    return place


def batches(case: Sample, archive: str) -> list[dict[str, Any]]:
    """The batches of a file of digits, in order."""
    with np.load(SAMPLES / "lenet" / archive) as digits:
        images, labels = digits["images"], digits["labels"]
    transform = runpy.run_path(str(FOLDER / "digits.py"))[case.transform]
    return [
        {name: torch.from_numpy(one) for name, one in transform({"x": images[k:end], "label": labels[k:end]}).items()}
        for k in range(0, len(images), BATCH)
        if (end := k + BATCH)
    ]


@dataclass(frozen=True)
class Reference:
    """What torch has after the steps: losses of each, weights, moving averages of those that are trained, the module."""

    losses: list[dict[str, float]]
    weights: dict[str, np.ndarray]
    averages: dict[str, np.ndarray]
    module: Any


def by_torch(case: Sample) -> Reference:
    """The same training by torch: AdamW over what is not frozen, and e' = e + (1 - decay) (p - e)."""
    module = runpy.run_path(str(FOLDER / f"{case.model}.py"))["model"].train()
    trained = {name: one for name, one in module.named_parameters() if not name.startswith(case.frozen)}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01, weight_decay=0.01)
    averages = {name: one.detach().clone() for name, one in trained.items()}
    losses = []
    for batch in batches(case, "mnist_320.npz")[:STEPS]:
        made = case.losses(module, batch)
        optimizer.zero_grad()
        made["loss"].backward()
        optimizer.step()
        losses.append({name: float(value.detach()) for name, value in made.items()})
        for name, one in trained.items():
            averages[name] += (1 - DECAY) * (one.detach() - averages[name])
    weights = {name: one.detach().numpy() for name, one in module.named_parameters()}
    return Reference(losses, weights, {name: one.numpy() for name, one in averages.items()}, module)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "plan"), [*((name, "tp") for name in CASES), ("lora", "dp"), ("two_losses", "dp")])
def test_it_trains_as_torch_does(name: str, plan: str, folder: Path, tmp_path: Path) -> None:
    """Losses and weights after five steps; what is frozen is as it was, and has no state of an optimizer. LoRA runs over MPI."""
    case = CASES[name]
    want = by_torch(case)
    words = ["--steps", str(STEPS), "--evaluate", "1000"]
    found = train(
        folder, f"{name}.{plan}.yaml", tmp_path, *words, mpi=name == "lora" and plan == "tp", model=f"{case.model}.onnx"
    )
    for row, losses in zip(found.steps, want.losses, strict=True):
        assert {key: row[key] for key in losses} == pytest.approx(losses, abs=1e-5)
    begun = runpy.run_path(str(FOLDER / f"{case.model}.py"))["model"].state_dict()
    assert max(abs(want.weights[one] - begun[one].numpy()).max() for one in want.averages) > 1e-2
    for one, array in want.weights.items():
        np.testing.assert_allclose(found.tensors[one], array, rtol=0, atol=1e-5, err_msg=one)
    slots = {one.parameter for one in open_artifact(tmp_path / "build").manifest.state if one.kind == "optimizer"}
    assert slots == set(want.averages)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_averages_are_evaluated_as_torchs(
    plan: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, want = CASES["ema"], by_torch(CASES["ema"])
    words = ["--steps", str(STEPS), "--evaluate", "1000"]
    train(folder, f"ema.{plan}.yaml", tmp_path, *words, model="two_losses.onnx")
    said = {}
    for more in ((), ("--ema",)):
        capsys.readouterr()
        evaluate = [
            "eval",
            str(tmp_path / "build"),
            "--plan",
            str(folder / f"ema.{plan}.yaml"),
            "--in-process",
            "--json",
        ]
        assert invoke([*evaluate, "--checkpoint", str(tmp_path / "checkpoints"), *more]) == 0
        said[bool(more)] = json.loads(capsys.readouterr().out)["metrics"]
    for averaged, metrics in said.items():
        if averaged:
            want.module.load_state_dict({name: torch.from_numpy(one) for name, one in want.averages.items()})
        with torch.no_grad():
            each = [case.losses(want.module, batch) for batch in batches(case, "mnist_160.npz")]
        mean = {name: float(np.mean([one[name] for one in each])) for name in ("loss", "digit", "off")}
        assert {name: metrics[name] for name in mean} == pytest.approx(mean, abs=1e-5)
    assert abs(said[True]["loss"] - said[False]["loss"]) > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_exported_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And torch's module with them is the one that was trained."""
    want = by_torch(CASES["lora"])
    train(folder, "lora.tp.yaml", tmp_path, "--steps", str(STEPS), model="lora.onnx")
    runs, out = str(tmp_path / "checkpoints"), tmp_path / "adapters.safetensors"
    assert invoke(["checkpoint", "export", runs, "--only", "**.lora_*", "-o", str(out)]) == 0
    adapters = load_file(out)
    assert adapters.keys() == want.averages.keys()
    module = runpy.run_path(str(FOLDER / "lora.py"))["model"]
    module.load_state_dict({name: torch.from_numpy(one) for name, one in adapters.items()}, strict=False)
    batch = batches(CASES["lora"], "mnist_160.npz")[0]
    with torch.no_grad():
        torch.testing.assert_close(module(batch["x"]), want.module(batch["x"]), rtol=0, atol=1e-5)
    begin_anew(folder, tmp_path, out)
    refused(tmp_path, out, capsys)


def begin_anew(folder: Path, tmp_path: Path, adapters: Path) -> None:
    """A training that begins with adapters alone has the whole file's bits, under another plan; the base is the model's own."""
    whole, runs = tmp_path / "whole.safetensors", str(tmp_path / "checkpoints")
    assert invoke(["checkpoint", "export", runs, "-o", str(whole)]) == 0
    found = {}
    for name, source in {
        "all": [whole],
        "adapters": [adapters, "**.lora_*"],
        "some of all": [whole, "**.lora_*"],
    }.items():
        words = ["--steps", "2", "--init", *map(str, source[:1]), *(("--only", str(source[1])) if source[1:] else ())]
        (tmp_path / name).mkdir()
        found[name] = train(folder, "lora.dp.yaml", tmp_path / name, *words, model="lora.onnx")
    for one in found.values():
        assert one.losses == found["all"].losses
        assert all(np.array_equal(one.tensors[name], array) for name, array in found["all"].tensors.items())
    fresh = train(folder, "lora.dp.yaml", tmp_path, "--steps", "2", model="lora.onnx")
    assert fresh.losses != found["all"].losses


def refused(tmp_path: Path, adapters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of adapters is no whole model without `--only`; what the patterns name must be in both; patterns need a file."""
    words = [
        "train",
        str(tmp_path / "build"),
        "--trust-code",
        "--in-process",
        "--threads",
        "1",
        "--init",
        str(adapters),
    ]
    for more, code, told in (
        ([], 1, "adapters.safetensors: has no 'up.base.weight'"),
        (
            ["--only", "**.lora_*", "--only", "up.base"],
            1,
            "adapters.safetensors: has no 'up.base.weight'",
        ),
        (["--only", "**.lora_c"], 2, "--only: '**.lora_c' matches no weight of the program"),
        (["--only", "{"], 2, "--only: '{' is not a pattern"),
    ):
        capsys.readouterr()
        assert invoke([*words, *more]) == code
        assert told in capsys.readouterr().err
    assert invoke([*words[:-2], "--only", "**.lora_*"]) == 2
    assert "--only: it says which weights --init gives" in capsys.readouterr().err


def test_they_are_short() -> None:
    """A model and its plan together, as they stand in the samples."""
    for name, case in CASES.items():
        files = (FOLDER / f"{case.model}.py", FOLDER / f"{name}.yaml")
        lines = {file.name: len(file.read_text().splitlines()) for file in files}
        assert sum(lines.values()) <= MOST_LINES, lines
