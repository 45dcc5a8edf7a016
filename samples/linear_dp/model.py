"""A linear classifier of digits: raw pixels, from 0 to 255, times a weight that begins as zeros."""

from partc.compiler import Input, Symbol, nn

batch = Symbol()


class Linear(nn.Module):
    def __init__(self, features: int = 28 * 28, classes: int = 10) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.w = nn.Parameter([features, classes], "float32", init=nn.init.zeros())
        self.b = nn.Parameter([classes], "float32", init=nn.init.zeros())

    def forward(self, op, x):
        return op.Add(op.MatMul(self.flatten(op, x), self.w), self.b)


model = Linear()
inputs = {"x": Input([batch, 28, 28], "float32")}
outputs = ["logits"]
