"""The GPT of `model.py` over rows of packed documents, with the same weights: a block-diagonal mask, and positions of each document.

A token sees those of its own document whose position is not behind its own: no mask is an input, and none is larger than a row needs.
"""

from model import CONTEXT, GPT
from partc.compiler import Input, Symbol


class PackedGPT(GPT):
    def forward(self, op, ids, position_ids, documents):
        same = op.Equal(op.Unsqueeze(documents, [1, 2]), op.Unsqueeze(documents, [1, 3]))
        before = op.LessOrEqual(op.Unsqueeze(position_ids, [1, 2]), op.Unsqueeze(position_ids, [1, 3]))
        visible = op.And(same, before)
        x = op.Add(self.tokens(op, ids), self.positions(op, position_ids))
        for layer in self.layers:
            x = layer(op, x, visible)
        return self.head(op, self.norm(op, x))


batch, seq = Symbol(unique=True), Symbol(max=CONTEXT, unique=True)
model = PackedGPT()
inputs = {name: Input([batch, seq], "int64") for name in ("ids", "position_ids", "documents")}
outputs = ["logits"]
