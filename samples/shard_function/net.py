"""Three equal blocks, not cut; `net1.py` and `net2.py` say in two ways how parts of it are."""

from partc.compiler import Input, Symbol, nn

batch = Symbol(divisor=8)
inputs = {"x": Input([batch, 32], "float32")}


class BasicBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense1 = nn.Linear(32, 32)
        self.gelu = nn.GELU()
        self.dense2 = nn.Linear(32, 32)

    def forward(self, op, x):
        x = self.dense1(op, x)
        x = self.gelu(op, x)
        return self.dense2(op, x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1 = BasicBlock()
        self.block2 = BasicBlock()
        self.block3 = BasicBlock()

    def forward(self, op, x):
        x = self.block1(op, x)
        x = self.block2(op, x)
        return self.block3(op, x)
