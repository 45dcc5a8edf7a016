"""A function cut by `shard`: what a call of it emits is a region with the function's name, `dense_relu`."""

from partc.compiler import Input, nn, shard

nn.seed(3)


def dense_relu(op, x, weight, bias):
    x = op.MatMul(x, weight)
    x = op.Add(x, bias)
    return op.Relu(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter([128, 10], "float32", init=nn.init.uniform())
        self.bias = nn.Parameter([10], "float32", init=nn.init.uniform())

    def forward(self, op, x):
        # x is cut into 4 by 2; how weight and bias are cut is derived from that.
        return shard(dense_relu, in_strategy=((4, 2), None, None))(op, x, self.weight, self.bias)


model = Net()
inputs = {"x": Input([32, 128], "float32")}
