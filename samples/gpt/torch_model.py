"""The GPT of `model.py` as a torch module, with torch's own weights. Its modules have the same names, so the same plans fit."""

import math
from dataclasses import dataclass

import torch
from partc.compiler import Input, Symbol
from torch import nn

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT = 4, 192, 12, 384, 128

torch.manual_seed(5)


@dataclass(frozen=True)
class Sizes:
    """As in `model.py`."""

    layers: int = LAYERS
    width: int = WIDTH
    heads: int = HEADS
    vocabulary: int = VOCABULARY
    context: int = CONTEXT


class Attention(nn.Module):
    """Every token looks at itself and those before it. Each head has its own rows of `project`: its q, then k, then v."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.project = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x, visible):
        q, k, v = self.project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        shares = torch.where(visible, scores, -1e9).softmax(dim=-1)
        return self.out((shares @ v).transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.project = nn.Linear(sizes.width, 4 * sizes.width)
        self.gelu = nn.GELU()
        self.out = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x):
        return self.out(self.gelu(self.project(x)))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.norm2 = nn.LayerNorm(sizes.width)
        self.mlp = Perceptron(sizes)

    def forward(self, x, visible):
        x = x + self.attention(self.norm1(x), visible)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, sizes: Sizes = Sizes()) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.layers = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, ids):
        places = torch.arange(ids.shape[1])
        visible = places <= places.unsqueeze(1)
        x = self.tokens(ids) + self.positions(places)
        for layer in self.layers:
            x = layer(x, visible)
        return self.head(self.norm(x))


batch = Symbol()
seq = Symbol(max=CONTEXT)
model = GPT().eval()
inputs = {"ids": Input([batch, seq], "int64")}
outputs = ["logits"]
