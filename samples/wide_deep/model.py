"""Wide & deep (Cheng et al., 2016) on the shape of Criteo's data: 26 categorical features, 13 numbers, and whether an ad was clicked.

Each feature has a table of 16 numbers an id, for the deep half, and the wide half has a number for each id of all features. `SIZES` are
Criteo's, the large ones made smaller. All tables start from the seed, row by row: no machine has all of one.
"""

from partc.compiler import Input, nn

SIZES = [1460, 584, 12000, 8000, 304, 24, 6000, 632, 4, 9000, 5684, 12000, 3196]
SIZES += [28, 7000, 12000, 12, 5652, 2172, 4, 12000, 20, 16, 8000, 104, 8000]
NUMBERS, WIDTH = 13, 16

nn.seed(7)


class WideDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Embedding(sum(SIZES), 1, init=nn.init.zeros())
        self.tables = nn.ModuleList([nn.Embedding(size, WIDTH, init=nn.init.normal(0.05)) for size in SIZES])
        self.deep = nn.Sequential(
            nn.Linear(WIDTH * len(SIZES) + NUMBERS, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, op, ids, numbers):
        features = op.Split(ids, axis=1, num_outputs=len(SIZES), _outputs=len(SIZES))
        rows = [op.Squeeze(table(op, one), [1]) for table, one in zip(self.tables, features, strict=True)]
        deep = self.deep(op, op.Concat(*rows, numbers, axis=1))
        # In the wide table each feature's ids begin where those of the one before end.
        begins = op.Constant(value_ints=[sum(SIZES[:k]) for k in range(len(SIZES))])
        wide = op.ReduceSum(op.Squeeze(self.wide(op, op.Add(ids, begins)), [2]), [1], keepdims=1)
        return {"logit": op.Add(deep, wide)}


model = WideDeep()
inputs = {"ids": Input(["batch", len(SIZES)], "int64"), "numbers": Input(["batch", NUMBERS])}
