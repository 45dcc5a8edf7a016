"""Two losses: which digit it is, and how much ink it takes; the model adds them, the second by a weight that it is given."""

import torch
from partc.compiler import Input
from torch import nn
from torch.nn import functional


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(49, 64)
        self.digit, self.ink = nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, x, label, ink, weight):
        hidden = torch.relu(self.trunk(x))
        digit = functional.cross_entropy(self.digit(hidden), label)
        off = functional.mse_loss(self.ink(hidden), ink)
        return {"loss": digit + weight * off, "digit": digit, "off": off}


torch.manual_seed(0)
model = TwoHeads()
inputs = {"x": ["batch", 49], "label": Input(["batch"], "int64"), "ink": ["batch", 1], "weight": []}
