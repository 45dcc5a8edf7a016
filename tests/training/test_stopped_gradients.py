"""What takes no gradient in torch takes none here: `detach`, `.data` and blocks `with torch.no_grad()`, held against torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.compiler import nn
from partc.compiler.directives.input import Input
from partc.compiler.directives.recorder import Recorder
from partc.compiler.frontend.inputs import DimNames
from partc.compiler.frontend.onnx_file import load_onnx
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.compiler.ir.graph import STOPS_GRADIENT
from training_equivalence import run

torch = pytest.importorskip("torch")
functional = torch.nn.functional

BATCH, WIDTH = 6, 4
TRAIN = """train:
  loss: loss
  optimizer: {type: momentum, lr: 0.2, momentum: 0.9}
"""
PLANS = {
    "one": "ranks: 1\n",
    "dp": "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n",
    "stages": "ranks: 2\nplacement: {encoder: 0, head: 1}\nsymbols: {batch: {divisor: 2}}\npipeline: {microbatches: 2}\n",
}


class _Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    """An encoder and a head, of which a case makes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)


class Residual(_Net):
    """A gradient that goes through one of two ways."""

    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.encoder(x))
        return (h.detach() * self.head(h) - x).square().mean()


class SameOps(_Net):
    """A product of a detached value, and the same one of the value itself."""

    def forward(self, x: Any) -> Any:
        h = self.encoder(x)
        return (torch.sigmoid(h * 2) + torch.tanh(self.head(torch.sigmoid(h.detach() * 2)))).square().mean()


class Weight(_Net):
    """A weight that learns from one of its two readers."""

    def forward(self, x: Any) -> Any:
        h = functional.linear(self.encoder(x), self.encoder.weight.detach())
        return (self.head(h) - x).square().mean()


class Data(_Net):
    """A scale taken from `.data`."""

    def forward(self, x: Any) -> Any:
        h = self.encoder(x)
        return (self.head(h / (1 + h.data.abs())) - x).square().mean()


class Target(_Net):
    """A target network: the encoder itself, and a layer that only a block without gradients reads, which stays."""

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            wanted = self.target(torch.tanh(self.encoder(x * 2)))
            with torch.enable_grad():
                scale = self.head(x)
            wanted = wanted * 2
        return (self.head(self.encoder(x)) - wanted).square().mean() + 0.1 * scale.square().mean()


class Distilled(_Net):
    """A student's divergence from a teacher that learns by another term."""

    def forward(self, x: Any) -> Any:
        taught, student = self.encoder(x), self.head(x)
        soft = functional.kl_div(student.log_softmax(-1), taught.softmax(-1).detach(), reduction="none").sum(-1).mean()
        return soft + (taught - x).square().mean()


class Quantized(_Net):
    """A vector quantization, straight through, with its codes' and its commitment's losses."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = torch.nn.Embedding(5, WIDTH)

    def forward(self, x: Any) -> Any:
        z = self.encoder(x)
        distances = (z[:, None] - self.codes.weight[None]).square().sum(-1)
        q = self.codes(distances.argmin(-1))
        losses = (q - z.detach()).square().mean() + 0.25 * (z - q.detach()).square().mean()
        return (self.head(z + (q - z).detach()) - x).square().mean() + losses


CASES: dict[str, Callable[[], Any]] = {
    one.__name__: one for one in (Residual, SameOps, Weight, Data, Target, Distilled, Quantized)
}


def exported(module: Any) -> Source:
    from partc.compiler.frontend.torch_module import export

    inputs = {"x": Input(["batch", WIDTH])}
    return Source(export(module, inputs, None, DimNames({}, set()), ["loss"], "model.py:1", Recorder(Path())))


def by_torch(module: Any, steps: list[dict[str, np.ndarray]]) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of torch's own training, and the parameters after it."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = module(torch.from_numpy(step["x"]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}


def learns_alike(source: Source, module: Any, plan: str, folder: Path, count: int) -> None:
    """Steps of both, from the module's weights, give the same losses and parameters."""
    rng = np.random.default_rng(7)
    steps = [{"x": rng.standard_normal((BATCH, WIDTH)).astype(np.float32)} for _ in range(count)]
    have = run(source, PLANS[plan] + TRAIN, folder, steps)
    first = {name: tensor.detach().numpy().copy() for name, tensor in module.named_parameters()}
    losses, wanted = by_torch(module, steps)
    np.testing.assert_allclose([float(one["loss"]) for one in have.outputs], losses, rtol=1e-5)
    for name, tensor in wanted.items():
        np.testing.assert_allclose(have.after.get(name, first[name]), tensor, rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [1, 3])
def test_a_module_learns_as_in_torch(case: str, plan: str, count: int, tmp_path: Path) -> None:
    torch.manual_seed(4)
    module = CASES[case]()
    learns_alike(exported(module), module, plan, tmp_path / "build", count)
