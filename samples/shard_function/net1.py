"""A module cut by its own method: what enters block1 is cut along its second dim; blocks 2 and 3 are not spoken of."""

from net import Net, batch, inputs
from partc.compiler import nn

__all__ = ["batch", "inputs", "model"]
nn.seed(3)


class Net1(Net):
    def __init__(self) -> None:
        super().__init__()
        self.block1.shard(in_strategy=((1, 8),), parameter_plan={"self.block1.dense2.weight": (8, 1)})


model = Net1()
