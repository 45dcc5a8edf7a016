"""LoRA: the weights of two layers stay as they are, and a product of two narrow ones beside each is trained."""

from collections import OrderedDict

import torch
from partc.compiler import Input
from torch import nn


class LoRA(nn.Module):
    def __init__(self, inputs, outputs, rank=4, alpha=8.0):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_a, self.lora_b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * self.lora_b(self.lora_a(x))


torch.manual_seed(0)
model = nn.Sequential(OrderedDict(up=LoRA(49, 64), relu=nn.ReLU(), down=LoRA(64, 10)))
inputs = {"x": Input(["batch", 49], "float32")}
outputs = ["logits"]
