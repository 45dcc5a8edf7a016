"""Training of modules of torch, and of files that torch exports: what is learned has torch's names, and every step is torch's own.

An exporter's clean-up merges equal weights, folds normalizations into convolutions, renames what it transposes and drops dropouts;
each would give wrong gradients without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from partc.compiler.directives.input import Input
from partc.compiler.directives.recorder import Recorder
from partc.compiler.frontend.inputs import DimNames
from partc.compiler.frontend.onnx_file import load_onnx
from partc.compiler.frontend.source import Source
from partc.compiler.ops.families.neural.dropout import DROPOUT
from partc.compiler.pipeline import run_passes, start
from partc.compiler.plan.read import parse_plan
from partc.compiler.rewrite.opset import TARGET, converted
from partc.compiler.training.trainable import trainable_names
from partc.compiler.training_passes import add_training
from rows import of_today
from training_equivalence import Run, run, same_tensors

STEPS, BATCH = 5, 6
TRAIN = """train:
  loss: {type: softmax_cross_entropy, logits: y, labels: t}
  optimizer: {type: momentum, lr: 0.1, momentum: 0.9}
"""
ONE, TWO = "ranks: 1\n", "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n"


def residual() -> Any:
    """Convolutions with normalizations, and a skip."""
    torch = pytest.importorskip("torch")
    nn, functional = torch.nn, torch.nn.functional

    class Net(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
            self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, momentum=0.3)
            self.fc = nn.Linear(4, 5)

        def forward(self, x: Any) -> Any:
            h = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 2)
            h = functional.relu(h + self.bn2(self.conv2(h)))
            return self.fc(h.mean((2, 3)))

    return Net()


def language(drop: float = 0.0) -> Any:
    """A block of attention; the table of tokens is the head's too, one parameter is frozen, the mask is a buffer of floats."""
    torch = pytest.importorskip("torch")
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.ln1, self.ln2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(drop)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x: Any, mask: Any) -> Any:
            batch, time, width = x.shape
            parts = self.qkv(self.ln1(x)).split(width, -1)
            q, k, v = (one.view(batch, time, 2, -1).transpose(1, 2) for one in parts)
            scores = q @ k.transpose(-1, -2) * 0.5 + mask[:time, :time]
            x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width))
            return x + self.drop(self.down(functional.gelu(self.up(self.ln2(x)))))

    class GPT(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self, tokens: int = 11, width: int = 8, time: int = 5) -> None:
            super().__init__()
            self.head = nn.Linear(width, tokens, bias=False)
            self.tok, self.pos = nn.Embedding(tokens, width), nn.Parameter(torch.randn(time, width))
            self.tok.weight = self.head.weight
            self.blocks = nn.ModuleList([Block(width)])
            self.ln = nn.LayerNorm(width)
            self.register_buffer("mask", torch.full((time, time), -1e9).triu(1))
            self.scale = nn.Parameter(torch.full((width,), 1.5), requires_grad=False)

        def forward(self, x: Any) -> Any:
            y = self.tok(x) * self.scale + self.pos
            for block in self.blocks:
                y = block(y, self.mask)
            return self.head(self.ln(y))

    return GPT()


def exported(module: Any, x: Input) -> Source:
    from partc.compiler.frontend.torch.torch_module import export

    names = DimNames({}, set())
    return Source(export(module, {"x": x}, None, names, ["y"], "model.py:1", Recorder(Path())))


def by_torch(
    module: Any, steps: list[dict[str, np.ndarray]], frozen: Sequence[str] = ()
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of torch's own training, and all parameters and buffers after it."""
    import torch

    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    module.train()
    for name in frozen:
        module.get_submodule(name).eval()
    for step in steps:
        optimizer.zero_grad()
        logits = module(torch.from_numpy(step["x"]))
        labels = torch.from_numpy(step["t"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}


def images(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.standard_normal((BATCH, 2, 6, 6)).astype(np.float32), "t": rng.integers(0, 5, BATCH)}


def tokens(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.integers(0, 11, (BATCH, 5)) for name in ("x", "t")}


CASES: dict[str, tuple[Callable[[], Any], Input, Callable[[np.random.Generator], dict[str, np.ndarray]]]] = {
    "resnet in training": (lambda: residual().train(), Input(["batch", 2, 6, 6]), images),
    "resnet in evaluation": (lambda: residual().eval(), Input(["batch", 2, 6, 6]), images),
    "gpt": (language, Input(["batch", 5], "int64"), tokens),
}


@pytest.mark.parametrize("case", CASES)
def test_a_module_trains_as_in_torch(case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(4)
    make, x, feeds = CASES[case]
    module, rng = make(), np.random.default_rng(7)
    source, steps = exported(module, x), [feeds(rng) for _ in range(STEPS)]
    learned = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert sorted(trainable_names(source.model)) == sorted(learned)
    assert sorted(trainable_names(converted(source.model.clone(), "model.py", TARGET))) == sorted(learned)
    before = {name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}
    one = run(source, ONE + TRAIN, tmp_path / "one", steps)
    for name in learned:
        np.testing.assert_array_equal(one.before[name], before[name])
    _as_torch(module, steps, learned, one, by_module=True)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch's own exporter
@pytest.mark.parametrize("case", of_today(["resnet in evaluation", "gpt"], 1))
def test_a_file_that_torch_exports_trains_as_in_torch(case: str, tmp_path: Path) -> None:
    """In inference form, where normalizations have running statistics and dropouts are gone; the law tells what is learned."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(4)
    make, _, feeds = CASES[case]
    module, rng = make().eval(), np.random.default_rng(7)
    steps = [feeds(rng) for _ in range(STEPS)]
    dims = ({0: torch.export.Dim("batch")},)
    program = torch.onnx.export(
        module,
        (torch.from_numpy(steps[0]["x"]),),
        dynamo=True,
        optimize=False,
        verbose=False,
        dynamic_shapes=dims,
        input_names=["x"],
        output_names=["y"],
    )
    program.save(tmp_path / "model.onnx")
    source = Source(load_onnx(tmp_path / "model.onnx"))
    learned = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    # Of the names of a shared parameter torch writes the last.
    learned = ["tok.weight" if name == "head.weight" else name for name in learned]
    taken = trainable_names(source.model)
    assert sorted(taken) == sorted([*learned, *(["scale"] if case == "gpt" else [])])
    keep = "  parameters: {scale: {frozen: true}, mask: {frozen: true}}\n" if case == "gpt" else ""
    _as_torch(module, steps, learned, run(source, ONE + TRAIN + keep, tmp_path / "one", steps), by_module=False)


def _as_torch(
    module: Any, steps: list[dict[str, np.ndarray]], learned: list[str], made: Run, *, by_module: bool
) -> None:
    """Losses, parameters and running means are those of torch's own training, and of a module the running variances."""
    start = {name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}
    losses, after = by_torch(module, steps)
    _same_losses(made, losses)
    have, want, before = ({name: some[name] for name in learned} for some in (made.after, after, start))
    same_tensors(have, want, before, 2e-4)
    means = [name for name in start if name.endswith("running_mean")]
    assert sorted(means) == sorted(name for name in made.after if name.endswith("running_mean"))
    for name in [*means, *(one.replace("mean", "var") for one in means if by_module)]:
        np.testing.assert_allclose(made.after[name], after[name], rtol=1e-4, atol=1e-6)


def _same_losses(made: Run, losses: list[float]) -> None:
    np.testing.assert_allclose([float(one["loss"]) for one in made.outputs], losses, rtol=2e-5)


IN_PARTS = {
    "on two ranks": (TWO, 1),
    "accumulated": ("ranks: 1\nsymbols: {batch: {divisor: 2}}\n" + TRAIN + "  accumulate: 2\n", 2),
    "accumulated on two ranks": ("ranks: 2\nsymbols: {batch: {divisor: 4}}\ndataset: data_parallel\n" + TRAIN + "  accumulate: 2\n", 2),
    "in stages": (
        "ranks: 2\nsymbols: {batch: {divisor: 2}}\n"
        'pipeline: {microbatches: 2, statistics: microbatch, stages: ["conv1, bn1", "conv2, bn2, fc"]}\n' + TRAIN,
        2,
    ),
}  # fmt: skip


@cache
def exported_residual() -> ir.Model:
    """Its export, which is the same for all plans; who compiles takes a clone."""
    return exported(residual().train(), Input(["batch", 2, 3, 2])).model


@pytest.mark.parametrize("case", IN_PARTS)
def test_running_variances_move_by_the_batch_that_statistics_are_of(case: str, tmp_path: Path) -> None:
    """torch's law, with n of the whole batch, or of the microbatch of all ranks; a step moves by the mean of its microbatches."""
    torch = pytest.importorskip("torch")
    plan, parts = IN_PARTS[case]
    torch.manual_seed(4)
    source = Source(exported_residual().clone())
    torch.manual_seed(4)
    module, rng = residual().train(), np.random.default_rng(7)
    step = {"x": rng.standard_normal((12, 2, 3, 2)).astype(np.float32), "t": rng.integers(0, 5, 12)}
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    made = run(source, plan if "train:" in plan else plan + TRAIN, tmp_path, [step]).after
    want: dict[str, list[np.ndarray]] = {}
    # Of records that arrive in shards, a microbatch has an equal run of each shard.
    shards = step["x"].reshape(2 if "two ranks" in case else 1, parts, -1, *step["x"].shape[1:])
    for part in (shards[:, k].reshape(-1, *step["x"].shape[1:]) for k in range(parts)):
        module.load_state_dict(start)
        module(torch.from_numpy(part))
        for name, tensor in module.state_dict().items():
            if "running" in name:
                want.setdefault(name, []).append(tensor.numpy().copy())
    for name, arrays in want.items():
        np.testing.assert_allclose(made[name], np.mean(arrays, 0), rtol=2e-5, atol=1e-6, err_msg=name)


def test_a_batch_norm_in_evaluation_mode_within_a_module_in_training_is_frozen(tmp_path: Path) -> None:
    """As authors freeze one: its statistics stay, its scale and bias learn."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(4)
    module, rng = residual().train(), np.random.default_rng(7)
    module.bn1.eval()
    module.bn1.running_mean += 0.3
    frozen = module.bn1.running_mean.numpy().copy()
    steps = [images(rng) for _ in range(STEPS)]
    made = run(exported(module, Input(["batch", 2, 6, 6])), TWO + TRAIN, tmp_path, steps)
    before = {name: one.detach().numpy().copy() for name, one in module.named_parameters()}
    losses, after = by_torch(module, steps, frozen=["bn1"])
    _same_losses(made, losses)
    same_tensors({name: made.after[name] for name in before}, {name: after[name] for name in before}, before, 2e-4)
    np.testing.assert_array_equal(made.after.get("bn1.running_mean", frozen), frozen)
    np.testing.assert_allclose(made.after["bn2.running_mean"], after["bn2.running_mean"], rtol=1e-4, atol=1e-6)


def test_dropouts_of_a_module_stay() -> None:
    pytest.importorskip("torch")
    source = exported(language(0.25).train(), Input(["batch", 5], "int64"))
    program = run_passes(start(source, parse_plan(ONE + TRAIN, "plan.yaml"), "model.py"), add_training)
    assert [node.op_type for node in program.model.graph].count(DROPOUT) == 1
    assert program.training is not None
    assert sorted(value.name or "" for value in program.training.parameters) == sorted(trainable_names(source.model))
