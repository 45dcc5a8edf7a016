"""A feedforward network for digits, MatMul and ReLU in turns, with a dynamic batch; `plan.yaml` beside it cuts it over 8 ranks.

The three products are modules of their own, so that the plan can name them: `matmul1`, `relu1` and so on.
"""

from partc.compiler import Input, Symbol, nn

nn.seed(2)

batch = Symbol(min=1)


class MatMul(nn.Module):
    """The product with a weight `[in, out]`, without a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter([in_features, out_features], "float32", init=nn.init.normal(0.01))

    def forward(self, op, x):
        return op.MatMul(x, self.weight)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.matmul1 = MatMul(28 * 28, 512)
        self.relu1 = nn.ReLU()
        self.matmul2 = MatMul(512, 512)
        self.relu2 = nn.ReLU()
        self.matmul3 = MatMul(512, 10)

    def forward(self, op, x):
        x = self.flatten(op, x)
        x = self.relu1(op, self.matmul1(op, x))
        x = self.relu2(op, self.matmul2(op, x))
        return self.matmul3(op, x)


model = Network()
inputs = {"x": Input([batch, 1, 28, 28], "float32")}
outputs = ["logits"]
