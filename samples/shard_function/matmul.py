"""Single ops cut: where they are made, as in MindSpore's `ops.MatMul().shard(((2, 4), (4, 1)))`, and where they are called."""

from partc.compiler import Input, Symbol, nn, shard

batch = Symbol(divisor=8)
nn.seed(3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1_weight = nn.Parameter([128, 64], "float32", init=nn.init.uniform())
        self.fc2_weight = nn.Parameter([64, 10], "float32", init=nn.init.uniform())
        self.matmul1 = nn.Op("MatMul").shard(((2, 4), (4, 1)))
        self.relu1 = nn.ReLU().shard(((4, 1),))

    def forward(self, op, x):
        x = self.matmul1(op, x, self.fc1_weight)
        x = self.relu1(op, x)
        return shard(op.MatMul, in_strategy=((1, 8), (8, 1)), out_strategy=((8, 1),))(x, self.fc2_weight)


model = Net()
inputs = {"x": Input([batch, 128], "float32")}
