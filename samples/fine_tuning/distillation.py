"""Distillation: a small student learns from the labels and from a teacher, which stays; both are in one model, and so is the loss."""

import torch
from partc.compiler import Input
from torch import nn
from torch.nn import functional

TEMPERATURE, SHARE = 4.0, 0.3


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(49, 128), nn.ReLU(), nn.Linear(128, 10))
        self.student = nn.Sequential(nn.Linear(49, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x, label):
        wanted = torch.softmax(self.teacher(x).detach() / TEMPERATURE, 1)
        logits = self.student(x)
        hard = functional.cross_entropy(logits, label)
        soft = functional.kl_div(torch.log_softmax(logits / TEMPERATURE, 1), wanted, reduction="batchmean")
        return {"loss": SHARE * hard + (1 - SHARE) * TEMPERATURE**2 * soft, "hard": hard, "soft": soft}


torch.manual_seed(0)
model = Distillation()
inputs = {"x": Input(["batch", 49], "float32"), "label": Input(["batch"], "int64")}
