"""A compiled training on one rank against torch: the loss of every step, all parameters, and running statistics.

The same weights on both sides; torch's own optimizers, schedules and clipping take the other side's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import training_models as models
from rows import of_today
from training_equivalence import Run, run, same_tensors, source_of
from training_models import Model

torch = pytest.importorskip("torch")

from training_torch import TorchStep  # noqa: E402

if TYPE_CHECKING:
    from torch.optim import Optimizer

CROSS_ENTROPY = "{type: softmax_cross_entropy, logits: y, labels: labels}"
MODELS: dict[str, tuple[Callable[[], Model], dict[str, int]]] = {
    "mlp": (lambda: models.mlp(width=20, inputs=13), {"batch": 7}),
    "lenet": (models.lenet, {"batch": 5}),
    "resnet": (lambda: models.resnet(width=4, size=64), {"batch": 9}),
    "gpt": (lambda: models.gpt(width=24, layers=2, heads=4, vocabulary=31, context=10), {"batch": 3, "seq": 7}),
    "dlrm": (lambda: models.dlrm(tables=3, rows=17, width=6, dense=5, inner=12), {"batch": 11}),
}


def steps_of(one: Model, sizes: Mapping[str, int], count: int) -> list[dict[str, np.ndarray]]:
    """Batches, each one record larger than the last."""
    random = np.random.default_rng(3)
    return [one.feeds(random, **{**sizes, "batch": sizes["batch"] + k}) for k in range(count)]


def feeds(step: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in step.items()}


def tensors_of(other: TorchStep) -> dict[str, np.ndarray]:
    """Copies of the module's parameters and statistics, by name."""
    state = other.module.state_dict().items()
    return {name: value.detach().numpy().copy() for name, value in state if value.is_floating_point()}


@pytest.mark.parametrize("name", MODELS)
def test_models_learn_as_with_torch(name: str, tmp_path: Path) -> None:
    """One step, which shows the gradients themselves, and some."""
    make, sizes = MODELS[name]
    one, rate = make(), 0.01 if name == "resnet" else 0.1
    source = source_of(one)
    loss = "loss" if name == "dlrm" else CROSS_ENTROPY
    plan = f"ranks: 1\ntrain: {{loss: {loss}, optimizer: {{type: sgd, lr: {rate}}}}}\n"
    for count in (2,) if name == "resnet" else (1, 3):
        steps = steps_of(one, sizes, count)
        have = run(source, plan, tmp_path / f"{count}", steps)
        same_as_torch(one, have, steps, rate)


def same_as_torch(one: Model, have: Run, steps: list[dict[str, np.ndarray]], rate: float) -> None:
    """torch's SGD from the same start."""
    other = TorchStep(one, have.before)
    optimizer = torch.optim.SGD(other.module.parameters(), rate)
    biases = [Bias(module) for module in other.module.modules() if hasattr(module, "running_var")]
    for given, step in zip(have.outputs, steps, strict=True):
        want = other(feeds(step))
        optimizer.step()
        for bias in biases:
            bias.undo()
        np.testing.assert_allclose(given["loss"], want.numpy(), rtol=2e-5)
    same_tensors(have.after, tensors_of(other), have.before, 5e-4)


class Bias:
    """torch's running variance is moved by the unbiased variance of the batch, ONNX's by the biased one: n / (n - 1) of it."""

    def __init__(self, module: Any) -> None:
        self.module, self.before, self.count = module, module.running_var.clone(), 0
        module.register_forward_pre_hook(self.counted)

    def counted(self, _: Any, inputs: tuple[Any, ...]) -> None:
        self.count = inputs[0].numel() // inputs[0].shape[1]

    def undo(self) -> None:
        """Moves the running variance by the biased variance in place of the unbiased one."""
        share = self.module.momentum
        moved = (self.module.running_var - (1 - share) * self.before) / share
        self.module.running_var.copy_((1 - share) * self.before + share * moved * (self.count - 1) / self.count)
        self.before = self.module.running_var.clone()


STEPS = 20
DECAY, FACTOR, MINIMUM = 0.05, 0.25, 0.1
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "type: sgd, lr: 0.2": lambda groups: torch.optim.SGD(groups, 0.2),
    "type: momentum, lr: 0.1": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9),
    "type: nesterov, lr: 0.1, momentum: 0.8": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.8, nesterov=True),
    "type: adagrad, lr: 0.05, initial_accumulator: 0.1": lambda groups: torch.optim.Adagrad(
        groups, 0.05, initial_accumulator_value=0.1
    ),
    "type: adam, lr: 0.01, betas: [0.8, 0.99], eps: 0.0001": lambda groups: torch.optim.Adam(
        groups, 0.01, betas=(0.8, 0.99), eps=1e-4
    ),
    "type: adamw, lr: 0.01, eps: 0.0001": lambda groups: torch.optim.AdamW(groups, 0.01, eps=1e-4),
    "type: adam_weight_decay, lr: 0.01, eps: 0.0001": lambda groups: Moments(groups, 0.01, lamb=False),
    "type: lamb, lr: 0.01, eps: 0.0001": lambda groups: Moments(groups, 0.01, lamb=True),
}
CLIPS = {
    "": lambda learned: None,
    "norm: 0.3": lambda learned: torch.nn.utils.clip_grad_norm_(learned, 0.3),
    "value: 0.02": lambda learned: torch.nn.utils.clip_grad_value_(learned, 0.02),
}


class Moments:
    """Adam with decoupled weight decay and no correction of its moments, and LAMB, as their papers' formulas in float64.

    Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020; J. Devlin et al., "BERT", 2019.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, lamb: bool) -> None:
        self.param_groups, self.lamb, self.steps = groups, lamb, 0
        self.rates = [group.get("lr", lr) for group in groups]
        self.moments = {p: (np.zeros(p.shape), np.zeros(p.shape)) for group in groups for p in group["params"]}

    def step(self, share: float) -> None:
        self.steps += 1
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            for p in group["params"]:
                w, g = (one.detach().numpy().astype(np.float64) for one in (p, p.grad))
                m, v = self.moments[p]
                m, v = self.moments[p] = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                if self.lamb:
                    m, v = m / (1 - 0.9**self.steps), v / (1 - 0.999**self.steps)
                d = m / (np.sqrt(v) + 1e-4) + group["weight_decay"] * w
                norms = np.sqrt((w * w).sum()), np.sqrt((d * d).sum())
                trust = min(norms[0] / norms[1], 10.0) if self.lamb and min(norms) > 0 else 1.0
                with torch.no_grad():
                    p.copy_(torch.from_numpy(w - share * rate * trust * d))


@pytest.mark.parametrize(
    ("options", "clip"),
    of_today(
        [
            (one, clip)
            for one in OPTIMIZERS
            for clip in CLIPS
            if not clip or one.startswith(("type: sgd", "type: adam,", "type: lamb"))
        ],
        4,
    ),
)
def test_optimizers_take_torchs_steps(options: str, clip: str, tmp_path: Path) -> None:
    """Twenty steps on a cosine, with no decay of biases, a slower last layer and a frozen bias."""
    one = models.mlp(width=9, inputs=6)
    rate = float(options.split("lr: ")[1].split(",")[0])
    plan = f"""ranks: 1
train:
  loss: {CROSS_ENTROPY}
  optimizer: {{{options}, weight_decay: {DECAY}}}
  schedule: {{type: cosine, steps: {STEPS}, minimum: {MINIMUM * rate}}}
  parameters: {{"**.bias": {{weight_decay: 0}}, "layers.2.*": {{lr: {FACTOR}}}, layers.1.bias: {{frozen: true}}}}
  clip: {{{clip}}}
"""
    steps = steps_of(one, {"batch": 6}, STEPS)
    have = run(source_of(one), plan, tmp_path / "build", steps)
    parameters = {name: value for name, value in have.before.items() if name.endswith(("weight", "bias"))}
    other = TorchStep(one, parameters)
    named = [(name, p) for name, p in other.module.named_parameters() if name != "layers.1.bias"]
    other.module.get_parameter("layers.1.bias").requires_grad_(False)
    groups = [
        {
            "params": [p],
            "weight_decay": 0.0 if name.endswith("bias") else DECAY,
            "lr": rate * (FACTOR if name.startswith("layers.2.") else 1.0),
        }
        for name, p in named
    ]
    optimizer = OPTIMIZERS[options](groups)
    starts = [group["lr"] for group in optimizer.param_groups]
    for k, (given, step) in enumerate(zip(have.outputs, steps, strict=True)):
        loss = other(feeds(step))
        np.testing.assert_allclose(given["loss"], loss.numpy(), rtol=5e-5, err_msg=f"step {k}")
        CLIPS[clip]([p for _, p in named])
        share = MINIMUM + (1 - MINIMUM) * (1 + np.cos(np.pi * k / STEPS)) / 2
        if isinstance(optimizer, Moments):
            optimizer.step(share)
            continue
        for group, start in zip(optimizer.param_groups, starts, strict=True):
            group["lr"] = start * share
        optimizer.step()
    want = tensors_of(other)
    assert want["layers.1.bias"].tobytes() == have.after["layers.1.bias"].tobytes()
    same_tensors({name: have.after[name] for name in want}, want, have.before, 5e-4)
