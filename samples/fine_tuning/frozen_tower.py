"""Two towers: what the tower of pictures makes of them is given to a classifier together with a text; that tower is not trained."""

import torch
from partc.compiler import Input
from torch import nn


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(49, 96), nn.GELU(), nn.Linear(96, 24))
        self.text = nn.Embedding(16, 24)
        self.head = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, x, ids):
        return self.head(torch.cat([self.vision(x), self.text(ids).mean(1)], 1))


torch.manual_seed(0)
model = Towers()
inputs = {"x": Input(["batch", 49], "float32"), "ids": Input(["batch", 7], "int64")}
outputs = ["logits"]
