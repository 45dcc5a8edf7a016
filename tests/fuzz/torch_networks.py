"""Random torch modules that learn: linear layers, convolutions, tables and attention, drawn from chance, with their own batches.

    net = grown(random.Random("3 net 17"))
    net.module        in the mode that it trains in, its weights drawn, float64 where every op of it has such a kernel
    net.blocks        the paths of its modules in the order of the data's way, a block for each entry
    net.batch(8, 0)   numbers for the inputs and labels of 8 records

Sizes divide by 2 and by 3 more often than not. What is drawn avoids gradients that are zero but for rounding, which an optimizer that
divides by their size would make large: no bias goes before a batch normalization, and no bias of keys into a softmax.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional

CLASSES = 6
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "leaky": lambda x: functional.leaky_relu(x, 0.1),
    "softplus": functional.softplus,
}

FLOAT_ONLY = (ACTIVATIONS["leaky"], ACTIVATIONS["softplus"])
"""Without kernels of float64 in onnxruntime."""


class Mlp(nn.Module):
    """Two layers, with a norm before, a gate beside, or the input added, as they are asked for."""

    def __init__(self, width: int, inner: int, act: str, norm: bool, gated: bool, residual: bool) -> None:
        super().__init__()
        self.act, self.residual = ACTIVATIONS[act], residual
        self.norm = nn.LayerNorm(width, eps=1e-2) if norm else None
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=not gated)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x if self.norm is None else self.norm(x)
        up = self.up(h)
        y = self.down(self.act(up) if self.gate is None else self.act(self.gate(h)) * up)
        return x + y if self.residual else y


class Attention(nn.Module):
    """Self-attention of some heads, causal or not, written out or by torch's own function; keys may have fewer heads than queries."""

    def __init__(self, width: int, heads: int, of_keys: int, causal: bool, fused: bool) -> None:
        super().__init__()
        self.times, self.size, self.causal, self.fused = heads // of_keys, width // heads, causal, fused
        self.norm = nn.LayerNorm(width, eps=1e-2)
        less = width // self.times
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, less, bias=False)
        self.v, self.o = nn.Linear(width, less), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(2, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.times > 1)
        else:
            if self.times > 1:
                k, v = (one.repeat_interleave(self.times, dim=1) for one in (k, v))
            scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
            if self.causal:
                seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
                scores = scores.masked_fill(~seen, -1e4)
            y = scores.softmax(-1) @ v
        return x + self.o(y.transpose(1, 2).flatten(2))


class Multihead(nn.Module):
    """Self-attention by torch's own module, which merges tokens and records, and records and heads; tokens or records first."""

    def __init__(self, width: int, heads: int, causal: bool, records_first: bool) -> None:
        super().__init__()
        self.causal, self.records_first = causal, records_first
        self.norm = nn.LayerNorm(width, eps=1e-2)
        self.attention = nn.MultiheadAttention(width, heads, bias=False, batch_first=records_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h = h if self.records_first else h.transpose(0, 1)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().logical_not() if self.causal else None
        y = self.attention(h, h, h, attn_mask=hidden, need_weights=False)[0]
        return x + (y if self.records_first else y.transpose(0, 1))


class Conv(nn.Module):
    """A convolution with what goes with it."""

    def __init__(self, a: int, b: int, stride: int, groups: int, norm: bool, act: str, residual: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(a, b, 3, stride, 1, groups=groups, bias=not norm)
        self.bn = nn.BatchNorm2d(b, eps=1e-2, momentum=0.2) if norm else None
        self.act, self.residual = ACTIVATIONS[act], residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y = y if self.bn is None else self.bn(y)
        return self.act(x + y if self.residual else y)


class Statistics(nn.Module):
    """A linear layer that a normalization by the batch follows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(width, width, bias=False), nn.BatchNorm1d(width, eps=1e-2, momentum=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.bn(self.linear(x)))


class Scale(nn.Module):
    """A parameter of its own, and a softmax."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width) / 3 + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + x.softmax(-1)


class Twice(nn.Module):
    """One layer that is called twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.tanh(self.linear(torch.tanh(self.linear(x)))))


class Shared(nn.Module):
    """A layer of another block, and a bias of its own."""

    def __init__(self, width: int, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.bias = linear, nn.Parameter(torch.randn(width) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) + self.bias)


class Stopped(nn.Module):
    """A layer with something that takes no gradient: its input, what a block makes, or a difference, straight through."""

    def __init__(self, width: int, what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(width, width), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.what:
            case "input":
                return x + torch.tanh(self.linear(x.detach()))
            case "data":
                return torch.tanh(self.linear(x)) / (1 + x.data.square())
            case "weight":
                return self.linear(x) + torch.tanh(functional.linear(x, self.linear.weight.detach()))
            case "block":
                with torch.no_grad():
                    target = torch.tanh(self.linear(x)) * 2
                return target * self.linear(x)
            case _:
                h = self.linear(x)
                return h + (torch.tanh(h) - h).detach()


class Rows(nn.Module):
    """Numbers and ids: tables of their own or one for all, their rows side by side, added up, or their mean."""

    def __init__(self, tables: int, rows: int, width: int, numbers: int, bag: str, out: int) -> None:
        super().__init__()
        self.bag = bag
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.linear = nn.Linear(numbers + (width * tables if bag == "concat" else width), out)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if len(self.tables) == 1:
            found = self.tables[0](ids)
            h = found.sum(1) if self.bag == "sum" else found.mean(1)
        else:
            each = [table(ids[:, k]) for k, table in enumerate(self.tables)]
            h = torch.cat(each, 1) if self.bag == "concat" else torch.stack(each).sum(0)
        return torch.tanh(self.linear(torch.cat([x, h], 1)))


class Tokens(nn.Module):
    """Rows of a table of words and of one of positions."""

    def __init__(self, words: int, width: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))


class Net(nn.Module):
    """A stem, blocks and a head, called b0, b1 and so on."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module | None) -> None:
        super().__init__()
        self.tied = head is None
        for k, block in enumerate([stem, *blocks, *([head] if head is not None else [])]):
            self.add_module(f"b{k}", block)

    def run(self, h: torch.Tensor) -> torch.Tensor:
        for block in list(self.children())[1:]:
            h = block(h)
        return functional.linear(h, self.b0.words.weight) if self.tied else h  # type: ignore[union-attr, arg-type]


class Single(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.b0(x))  # type: ignore[operator]


class Looked(Net):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.run(self.b0(x, ids))  # type: ignore[operator]


class Sentences(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.run(self.b0(ids))  # type: ignore[operator]


@dataclass
class Network:
    """A module with what plans and batches need to know of it."""

    family: str
    module: Net
    double: bool
    x: tuple[int, ...] = ()
    ids: int = 0
    """How many ids a record has; 0 where a record has a length of its own."""
    words: int = 0
    classes: int = CLASSES
    length: int = 0
    statistics: bool = False
    blocks: list[str] = field(default_factory=list)

    @property
    def inputs(self) -> list[str]:
        """The names of its inputs."""
        return [*(["x"] if self.x else []), *(["ids"] if self.words else [])]

    def layers(self, kind: type[nn.Module]) -> dict[str, nn.Module]:
        """Its layers of a kind, by path."""
        return {name: one for name, one in self.module.named_modules() if isinstance(one, kind)}

    def batch(self, records: int, seed: int, length: int) -> dict[str, np.ndarray]:
        """Inputs and labels of all kinds: `label` classes, `t` numbers like the output, `ones` zeros and ones."""
        chance = np.random.default_rng(seed)
        kind = np.float64 if self.double else np.float32
        made: dict[str, np.ndarray] = {}
        if self.x:
            made["x"] = chance.standard_normal((records, *self.x)).astype(kind)
        if self.words:
            made["ids"] = chance.integers(0, self.words, (records, self.ids or length))
        shape = (records, length) if self.length else (records,)
        made["label"] = chance.integers(0, self.classes, shape)
        made["t"] = chance.standard_normal((*shape, self.classes)).astype(kind)
        made["ones"] = chance.integers(0, 2, (*shape, self.classes)).astype(kind)
        return made


def grown(chance: random.Random) -> Network:
    """The network that chance says."""
    torch.manual_seed(chance.randrange(1 << 30))
    family = chance.choice(["vector", "vector", "image", "tables", "tables", "tokens", "tokens"])
    net = {"vector": _vector, "image": _image, "tables": _tables, "tokens": _tokens}[family](chance)
    net.blocks = [name for name, _ in net.module.named_children()]
    net.statistics = bool(net.layers(nn.BatchNorm1d) or net.layers(nn.BatchNorm2d))
    net.module.train()
    if net.statistics and chance.random() < 0.2:
        net.statistics = False
        for one in net.module.modules():
            if isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d):
                one.eval()
    rounded = any(getattr(one, "act", None) in FLOAT_ONLY for one in net.module.modules())
    net.double = net.double and not rounded and chance.random() < 0.8
    if net.double:
        net.module.double()
    return net


def _mlp(chance: random.Random, width: int) -> nn.Module:
    inner = chance.choice([12, 24, 36])
    norm, gated, residual = (chance.random() < 0.5 for _ in range(3))
    return Mlp(width, inner, chance.choice(list(ACTIVATIONS)), norm, gated, residual)


def _flat(chance: random.Random, width: int, most: int, statistics: bool) -> list[nn.Module]:
    made: list[nn.Module] = []
    for _ in range(chance.randint(1, most)):
        kind = chance.choice(
            ["mlp", "mlp", "mlp", "scale", "twice", "linear", "shared", "stopped", "stopped", *(["bn"] * statistics)]
        )
        match kind:
            case "mlp":
                made.append(_mlp(chance, width))
            case "scale":
                made.append(Scale(width))
            case "twice":
                made.append(Twice(width))
            case "linear":
                made.append(nn.Linear(width, width))
            case "shared":
                known = [one for block in made for one in block.modules() if isinstance(one, nn.Linear)]
                fitting = [one for one in known if one.in_features == one.out_features]
                made.append(Shared(width, chance.choice(fitting) if fitting else nn.Linear(width, width)))
            case "stopped":
                what = chance.choice(["input", "data", "weight", "block", "straight through"])
                made.append(Stopped(width, what))
            case "bn":
                made.append(Statistics(width))
    return made


def _vector(chance: random.Random) -> Network:
    inputs, width = chance.choice([10, 12, 18]), chance.choice([12, 24])
    blocks = _flat(chance, width, 4, chance.random() < 0.4)
    return Network(
        "vector",
        Single(nn.Linear(inputs, width), blocks, nn.Linear(width, CLASSES)),
        True,
        x=(inputs,),
    )


def _tables(chance: random.Random) -> Network:
    tables, rows, row = chance.choice([1, 2, 3]), chance.choice([12, 24, 60]), chance.choice([4, 6, 12])
    bag = chance.choice(["sum", "mean"]) if tables == 1 else chance.choice(["concat", "sum"])
    width = chance.choice([12, 24])
    stem = Rows(tables, rows, row, 5, bag, width)
    module = Looked(stem, _flat(chance, width, 3, False), nn.Linear(width, CLASSES))
    return Network("tables", module, True, x=(5,), ids=tables if tables > 1 else 3, words=rows)


def _tokens(chance: random.Random) -> Network:
    words, width, length = chance.choice([12, 18]), chance.choice([12, 24]), 8
    blocks: list[nn.Module] = []
    for _ in range(chance.randint(1, 2)):
        kind = chance.random()
        if kind < 0.4:
            heads, of_keys = chance.choice([(2, 2), (3, 3), (6, 6), (2, 1), (3, 1), (6, 3), (6, 2)])
            blocks.append(Attention(width, heads, of_keys, chance.random() < 0.6, chance.random() < 0.4))
        elif kind < 0.8:
            blocks.append(Multihead(width, chance.choice([2, 3, 6]), chance.random() < 0.6, chance.random() < 0.5))
        blocks += _flat(chance, width, 1, False)
    tied = chance.random() < 0.3
    head = None if tied else nn.Linear(width, words, bias=chance.random() < 0.5)
    module = Sentences(Tokens(words, width, length), blocks, head)
    return Network("tokens", module, True, words=words, classes=words, length=length)


def _image(chance: random.Random) -> Network:
    channels, size = chance.choice([1, 3]), 8
    at, blocks, norm = chance.choice([6, 12]), [], chance.random() < 0.6
    stem = Conv(channels, at, chance.choice([1, 2]), 1, norm, "relu", False)
    for _ in range(chance.randint(0, 3)):
        kind = chance.choice(["conv", "same", "group", "max", "mean"])
        if kind == "conv":
            to = chance.choice([6, 12])
            blocks.append(Conv(at, to, 1, 1, norm, chance.choice(["relu", "tanh"]), False))
            at = to
        elif kind in ("same", "group"):
            blocks.append(Conv(at, at, 1, 1 if kind == "same" else at // 3, norm, "tanh", chance.random() < 0.5))
        else:
            blocks.append(nn.MaxPool2d(3, 1, 1) if kind == "max" else nn.AvgPool2d(3, 1, 1))
    pool = chance.choice([nn.AdaptiveAvgPool2d(1), nn.MaxPool2d(2), nn.AvgPool2d(2)])
    with torch.no_grad():
        h = torch.zeros(2, channels, size, size)
        for one in (stem, *blocks, pool):
            h = one.eval()(h)
    head = nn.Linear(h.flatten(1).shape[1], CLASSES)
    module = Single(stem, [*blocks, nn.Sequential(pool, nn.Flatten())], head)
    return Network("image", module, False, x=(channels, size, size))
