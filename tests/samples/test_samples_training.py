"""The samples learn: whatever their plans say, the losses and weights of the same steps are those of the whole model on one rank.

What they carry is enough for that; where all of MNIST lies beside the repository, the figures of their origins are held as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from partc.compiler.frontend import load
from partc.compiler.plan.read import parse_plan, read_plan
from partc.runtime.data.files import open_field
from partc.runtime.data.sampler import Order
from samples_training_case import SAMPLES, Trained, same, samples, train, with_few_tables
from training_equivalence import train_whole

__all__ = ["samples"]

MNIST = SAMPLES.parent.parent / "shared" / "mnist"
LENET = ("train_one.yaml", "train.yaml", "train_dp.yaml", "train_dp_stages.yaml")
ORIGIN_LOSSES = (0.618, 0.392, 0.358, 0.341, 0.330)
needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason=f"there is no {MNIST} with the files of MNIST")


def whole(folder: Path, out: Path, *options: str) -> Trained:
    """The training that `train.yaml` says, on one rank, whose program has no communication."""
    (folder / "whole.yaml").write_text(train_whole((folder / "train.yaml").read_text()))
    return train(folder, "whole.yaml", out, *options)


def full(*, test: bool = False) -> list[str]:
    """What the command line says of the digits of MNIST as they are, all of them."""
    kind, option = ("t10k", "--test") if test else ("train", "--data")
    files = {"x": MNIST / f"{kind}-images-idx3-ubyte.gz", "label": MNIST / f"{kind}-labels-idx1-ubyte.gz"}
    return [word for name, path in files.items() for word in (option, f"{name}={path}")]


def test_the_plans_of_lenet_learn_the_same_in_the_same_way() -> None:
    texts = {(SAMPLES / "lenet" / plan).read_text().partition("# `label`")[2] for plan in LENET}
    assert len(texts) == 1
    placed = [
        [rule.pattern for rule in read_plan(SAMPLES / "lenet" / plan).placement] for plan in ("plan.yaml", "train.yaml")
    ]
    assert placed[0] == placed[1]


@pytest.fixture(scope="module")
def lenet_alone(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """LeNet's training on one rank."""
    return train(samples / "lenet", LENET[0], tmp_path_factory.mktemp("alone"), "--steps", "15", "--log", "1")


@pytest.mark.parametrize("plan", LENET[1:])
def test_lenet(samples: Path, lenet_alone: Trained, tmp_path: Path, plan: str) -> None:
    have = train(samples / "lenet", plan, tmp_path, "--steps", "15", "--log", "1")
    same(have, lenet_alone, rtol=1e-5, atol=1e-5)
    assert [line["accuracy"] for line in have.evaluations] == [line["accuracy"] for line in lenet_alone.evaluations]
    assert len(have.steps) == 15
    assert len(have.evaluations) == 2


def test_lenet_learns_as_in_torch(samples: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    have = train(samples / "lenet", "train.yaml", tmp_path, "--steps", "10", "--log", "1")
    weights = whole_weights(samples / "lenet" / "model.py")
    learned = {name: torch.tensor(weights[name], requires_grad=True) for name in weights}
    optimizer = torch.optim.SGD(learned.values(), lr=0.01, momentum=0.9)
    one = torch.nn.functional

    def logits(x: Any) -> Any:
        for conv in ("conv1", "conv2"):
            x = one.max_pool2d(one.conv2d(x, learned[f"{conv}.weight"]).relu(), 2)
        x = x.flatten(1)
        for fc in ("fc1", "fc2", "fc3"):
            x = one.linear(x if fc == "fc1" else x.relu(), learned[f"{fc}.weight"], learned[f"{fc}.bias"])
        return x

    with np.load(samples / "lenet" / "mnist_320.npz") as archive:
        images, labels = archive["images"], archive["labels"]
    pixels = torch.tensor(images)[:, None].float()
    x = one.interpolate(pixels, (32, 32), mode="bilinear", align_corners=False).round() / 255
    x = (x - 0.1307) / 0.3081
    for step, rows in enumerate(Order(320, 32).epoch(0).reshape(10, 32)):
        loss = one.cross_entropy(logits(x[rows]), torch.tensor(labels[rows]).long())
        assert have.losses[step] == pytest.approx(float(loss.detach()), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, weight in learned.items():
        np.testing.assert_allclose(have.tensors[name], weight.detach().numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def whole_weights(model: Path) -> dict[str, np.ndarray]:
    """The weights that a model begins with."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in ir.to_proto(load(model).model).graph.initializer}


@needs_mnist
def test_lenet_over_mpi_on_all_of_mnist(samples: Path, tmp_path: Path) -> None:
    lenet = samples / "lenet"
    data = [*full(), "--data", f"transform={lenet / 'digits.py'}:for_lenet"]
    options = [*data, "--steps", "20", "--log", "1"]
    want = train(lenet, "train_one.yaml", tmp_path / "one", *options)
    same(train(lenet, "train.yaml", tmp_path / "cut", *options, mpi=True), want, rtol=1e-5, atol=1e-5)


@needs_mnist
def test_the_digits_that_are_carried_are_of_the_test_set() -> None:
    for name, field in (("images", "x"), ("labels", "label")):
        file = next(Path(word.partition("=")[2]) for word in full(test=True) if word.startswith(f"{field}="))
        real = open_field(field, file).take(np.arange(480))
        carried = [np.load(SAMPLES / "lenet" / f"mnist_{count}.npz")[name] for count in (320, 160)]
        np.testing.assert_array_equal(np.concatenate(carried), real)


def linear_losses(images: np.ndarray, labels: np.ndarray, ranks: int, epochs: int, rate: float) -> list[float]:
    """By epoch, the mean over its steps of the loss of a linear classifier whose gradients are sums over ranks of their means."""
    x, hot = images.reshape(len(images), -1).astype(np.float64), np.eye(10)[labels]
    w, b, own, losses = np.zeros((x.shape[1], 10)), np.zeros(10), 100, []
    for _ in range(epochs):
        each = []
        for begin in range(0, len(x), ranks * own):
            rows = slice(begin, begin + ranks * own)
            y = x[rows] @ w + b
            y -= y.max(axis=1, keepdims=True)
            shares = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
            each.append(-np.log((shares * hot[rows]).sum(axis=1)).mean())
            off = (shares - hot[rows]) / own
            w, b = w - rate * x[rows].T @ off, b - rate * off.sum(axis=0)
        losses.append(float(np.mean(each)))
    return losses


def test_linear_adds_up_the_gradients_of_its_ranks(samples: Path, tmp_path: Path) -> None:
    have = train(samples / "linear_dp", "train.yaml", tmp_path)
    with np.load(samples / "lenet" / "mnist_320.npz") as archive:
        images, labels = (np.resize(archive[name], (2400, *archive[name].shape[1:])) for name in ("images", "labels"))
    assert len(have.steps) == 5, "a line is an epoch"
    np.testing.assert_allclose(have.losses, linear_losses(images, labels, ranks=8, epochs=5, rate=1e-6), rtol=1e-5)


@needs_mnist
def test_linear_has_the_losses_of_its_origin(samples: Path, tmp_path: Path) -> None:
    have = train(samples / "linear_dp", "train.yaml", tmp_path, *full(), "--epochs", "2")
    assert [round(loss, 3) for loss in have.losses] == list(ORIGIN_LOSSES[:2])


def test_two_stages_have_the_gradients_of_their_origin(samples: Path, tmp_path: Path) -> None:
    rate = parse_plan((samples / "two_stage" / "train.yaml").read_text(), "train.yaml").train
    assert rate is not None
    have = train(samples / "two_stage", "train.yaml", tmp_path).tensors
    begun = {"layer1.weight": -1.54725, "layer2.weight": -0.4865, "layer1.bias": 0.0, "layer2.bias": 0.0}
    gradients = {name: (start - float(have[name].item())) / rate.optimizer.lr for name, start in begun.items()}
    want = {"layer2.weight": -2.4756, "layer1.weight": -0.7784, "layer1.bias": -0.4865, "layer2.bias": 1.0}
    assert gradients == pytest.approx(want, abs=2e-4)


def test_microbatches_of_two_stages_have_the_mean_of_their_gradients(samples: Path, tmp_path: Path) -> None:
    have = train(samples / "two_stage", "train_pipeline.yaml", tmp_path, model="batch.py").tensors
    mean, first, second = np.mean([1.6, 0.4, -0.8, 2.8]), -1.54725, -0.4865
    gradients = {
        "layer1.weight": mean * second,
        "layer1.bias": second,
        "layer2.weight": mean * first,
        "layer2.bias": 1.0,
    }
    begun = {"layer1.weight": first, "layer2.weight": second, "layer1.bias": 0.0, "layer2.bias": 0.0}
    for name, gradient in gradients.items():
        assert float(have[name].item()) == pytest.approx(begun[name] - 1e-3 * gradient, abs=1e-7)


def test_ffn_dynamic(samples: Path, tmp_path: Path) -> None:
    for batch in (64, 32):
        steps = ("--steps", "4", "--log", "1", "--batch", str(batch))
        want = whole(samples / "ffn_dynamic", tmp_path / f"one_{batch}", *steps)
        have = train(samples / "ffn_dynamic", "train.yaml", tmp_path / f"cut_{batch}", *steps)
        same(have, want, rtol=1e-4, atol=1e-4)
    assert have.losses[-1] < have.losses[0] - 0.02


def test_tables_whole_and_on_servers_learn_the_same(tmp_path: Path) -> None:
    steps = ("--steps", "3", "--log", "1")  # the guide runs the plan that cuts them, with all tables
    plans = ("train.yaml", "train_servers.yaml")
    samples = with_few_tables(tmp_path / "wide_deep")
    want, have = (train(samples, plan, tmp_path / plan, *steps) for plan in plans)
    same(have, want, rtol=1e-4, atol=1e-5)
    assert want.losses[-1] < want.losses[0]
    assert have.evaluations[-1]["auc"] == pytest.approx(want.evaluations[-1]["auc"], abs=1e-6)
    told = [json.loads(line) for line in (tmp_path / plans[1] / "metrics.jsonl").read_text().splitlines()]
    (lookups,) = (line for line in told if line["kind"] == "lookups")
    assert lookups["pull"]["ids"] == 128 * (6 + 6)
    assert 400 < lookups["pull"]["rows"] < 128 * 12
    assert lookups["pull"]["bytes"] > 0
    assert lookups["push"]["rows"] == lookups["pull"]["rows"]


def test_gpt(samples: Path, tmp_path: Path) -> None:
    """With two of its four layers, which are alike."""
    steps, gpt = ("--steps", "2", "--log", "1"), samples / "gpt"
    text = (gpt / "model.py").read_text()
    assert text.count("CONTEXT = 4, ") == 1
    (gpt / "model.py").write_text(text.replace("CONTEXT = 4, ", "CONTEXT = 2, "))
    want = whole(gpt, tmp_path / "one", *steps)
    have = train(gpt, "train.yaml", tmp_path / "cut", *steps)
    same(have, want, rtol=1e-4, atol=1e-3)
    assert have.losses[0] == pytest.approx(np.log(384), abs=0.2)
    assert have.losses[1] < have.losses[0]
