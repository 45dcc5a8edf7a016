"""The networks of `training_models.py` as torch modules, with the same parameters by the same names.

step = TorchStep(one, parameters)      loss, gradients = step(feeds)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from training_models import Model, sample


class Perceptron(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(functional.relu(x) if k else x)
        return x


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, bias=False), nn.Conv2d(6, 16, 5, bias=False)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in (self.conv1, self.conv2):
            x = functional.max_pool2d(functional.relu(conv(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        return self.fc3(functional.relu(self.fc2(x)))


class BasicBlock(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.downsample = None
        if stride != 1 or a != b:
            self.downsample = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        pairs = zip(widths[:-1], widths[1:], (1, 2, 2, 2), strict=True)
        self.stages = nn.ModuleList(
            nn.Sequential(BasicBlock(a, b, stride), BasicBlock(b, b, 1)) for a, b, stride in pairs
        )
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in self.stages:
            x = stage(x)
        return self.fc(x.mean((2, 3)))


class Clicks(nn.Module):
    def __init__(self, tables: int, rows: int, width: int, dense: int, inner: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        self.bottom = Perceptron(dense, inner, inner, width)
        count = tables + 1
        self.top = Perceptron(width + count * (count - 1) // 2, inner, inner, 1)
        self.pairs = torch.tensor([i * count + j for i in range(count) for j in range(i)])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        low = self.bottom(x)
        rows = torch.stack([low, *(table(ids[:, k]) for k, table in enumerate(self.tables))], 1)
        pairs = (rows @ rows.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.top(torch.cat([low, pairs], 1)).squeeze(1)


def network(one: Model) -> nn.Module:
    """The torch module of a model, with torch's own weights, in training."""
    match one.name:
        case "mlp":
            return Perceptron(one.sizes["inputs"], one.sizes["width"], one.sizes["width"], 10)
        case "lenet":
            return LeNet()
        case "resnet":
            return ResNet(**one.sizes)
        case "gpt":
            own = sample("gpt/torch_model")
            made: nn.Module = own.GPT(own.Sizes(**one.sizes))
            return made
        case _:
            return Clicks(**one.sizes)


class TorchStep:
    """One step's loss and gradients, the module's parameters being `parameters` by their names in partc."""

    def __init__(self, one: Model, parameters: Mapping[str, np.ndarray]) -> None:
        self.module, self.name = network(one), one.name
        self.prefix = "" if one.name == "dlrm" else "net."
        given = {name.removeprefix(self.prefix): torch.from_numpy(array.copy()) for name, array in parameters.items()}
        left = self.module.load_state_dict(given, strict=False)
        assert not left.unexpected_keys
        assert not [name for name, _ in self.module.named_parameters() if name in left.missing_keys]

    def __call__(self, feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Forward and backward; gradients start from none, as after `zero_grad`."""
        self.module.zero_grad()
        if self.name == "dlrm":
            scores = self.module(feeds["x"], feeds["ids"])
            loss = functional.binary_cross_entropy_with_logits(scores, feeds["clicked"])
        else:
            scores = self.module(feeds["x"])
            loss = functional.cross_entropy(scores.flatten(0, -2), feeds["labels"].flatten())
        loss.backward()
        return loss.detach()

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        """By the names in partc, those of the last step."""
        found = self.module.named_parameters()
        return {f"{self.prefix}{name}": p.grad.numpy() for name, p in found if p.grad is not None}
