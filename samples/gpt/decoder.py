"""The GPT of `model.py` as a decoder: keys and values of earlier tokens come in as past, and go out as present, with those of the new ones.

Its weights have the names of that model's, so what is trained there is used here. `generate.yaml` keeps the past on the ranks.
"""

from model import CONTEXT, GPT, HEADS, LAYERS, WIDTH, Attention, Block
from partc.compiler import Input, Symbol

CACHES = [f"{side}.{layer}" for layer in range(LAYERS) for side in ("k", "v")]


class CachedAttention(Attention):
    def forward(self, op, x, visible, past_k, past_v):
        sizes = self.sizes
        by_head = op.Reshape(self.project(op, x), op.Constant(value_ints=[0, 0, sizes.heads, 3 * sizes.head_width]))
        q, k, v = op.Split(op.Transpose(by_head, perm=[0, 2, 1, 3]), axis=-1, num_outputs=3, _outputs=3)
        k, v = op.Concat(past_k, k, axis=2), op.Concat(past_v, v, axis=2)
        mixed = op.Transpose(op.Attention(q, k, v, visible), perm=[0, 2, 1, 3])
        return self.out(op, op.Reshape(mixed, op.Constant(value_ints=[0, 0, sizes.width]))), k, v


class CachedBlock(Block):
    attends = CachedAttention

    def forward(self, op, x, visible, past_k, past_v):
        mixed, k, v = self.attention(op, self.norm1(op, x), visible, past_k, past_v)
        x = op.Add(x, mixed)
        return op.Add(x, self.mlp(op, self.norm2(op, x))), k, v


class Decoder(GPT):
    block = CachedBlock

    def forward(self, op, ids, **caches):
        past = op.Squeeze(op.Shape(caches["past_k.0"], start=2, end=3))
        length = op.Squeeze(op.Shape(ids, start=1, end=2))
        places = op.Unsqueeze(op.Add(op.Range(0, length, 1), past), [0])
        visible = op.LessOrEqual(op.Range(0, op.Add(past, length), 1), op.Unsqueeze(places, [1, 3]))
        x, present = op.Add(self.tokens(op, ids), self.positions(op, places)), []
        for layer, block in enumerate(self.layers):
            x, k, v = block(op, x, visible, caches[f"past_k.{layer}"], caches[f"past_v.{layer}"])
            present += [k, v]
        return self.head(op, self.norm(op, x)), *present


batch, seq, past = Symbol(), Symbol(max=CONTEXT), Symbol()
model = Decoder()
inputs = {"ids": Input([batch, seq], "int64")}
inputs |= {f"past_{name}": Input([batch, HEADS, past, WIDTH // HEADS]) for name in CACHES}
outputs = ["logits", *(f"present_{name}" for name in CACHES)]
