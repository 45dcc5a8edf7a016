"""Wide & deep (Cheng et al., 2016) on the shape of Criteo's data: 26 categorical features, 13 numbers, and whether an ad was clicked.

Each feature has a table of 16 numbers an id, for the deep half, and the wide half has a number for each id of all features. `SIZES` are
Criteo's, the large ones made smaller. All tables start from the seed, row by row: no machine has all of one.
"""

from partc.compiler import Input, nn

SIZES = [1460, 584, 12000, 8000, 304, 24, 6000, 632, 4, 9000, 5684, 12000, 3196]
SIZES += [28, 7000, 12000, 12, 5652, 2172, 4, 12000, 20, 16, 8000, 104, 8000]
NUMBERS, WIDTH = 13, 16

nn.seed(7)


class Tables(nn.Sequential):
    """Of each feature's id the numbers in its table, side by side."""

    def forward(self, op, ids):
        features = op.Split(ids, axis=1, num_outputs=len(SIZES), _outputs=len(SIZES))
        return op.Concat(*(op.Squeeze(table(op, one), [1]) for table, one in zip(self, features, strict=True)), axis=1)


class Wide(nn.Embedding):
    """The sum of the numbers of all features' ids, from one table."""

    def forward(self, op, ids):
        # Each feature's ids begin where those of the one before end.
        begins = op.Constant(value_ints=[sum(SIZES[:k]) for k in range(len(SIZES))])
        return op.ReduceSum(op.Squeeze(super().forward(op, op.Add(ids, begins)), [2]), [1], keepdims=1)


class WideDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = Wide(sum(SIZES), 1, init=nn.init.zeros())
        self.tables = Tables(*(nn.Embedding(size, WIDTH, init=nn.init.normal(0.05)) for size in SIZES))
        self.deep = nn.Sequential(
            nn.Linear(WIDTH * len(SIZES) + NUMBERS, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, op, ids, numbers):
        deep = self.deep(op, op.Concat(self.tables(op, ids), numbers, axis=1))
        return {"logit": op.Add(deep, self.wide(op, ids))}


model = WideDeep()
inputs = {"ids": Input(["batch", len(SIZES)], "int64"), "numbers": Input(["batch", NUMBERS])}
