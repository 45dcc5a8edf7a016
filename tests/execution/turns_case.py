"""The programs of two ranks that send a value there and back."""

from __future__ import annotations

PING_PONG = [
    """rank0 (float[batch, 3] x) => (float[batch, 3] y) <float[batch, 3] h, float[batch, 3] k>
    { h = Relu(x) = partc.comm.Send <peer = 1, tag = 0> (h) k = partc.comm.Recv <peer = 1, tag = 1> () y = Sub(k, h) }""",
    """rank1 () => () <float[batch, 3] h, float[batch, 3] k, float c = {0.5}>
    { h = partc.comm.Recv <peer = 0, tag = 0> () k = Mul(h, c) = partc.comm.Send <peer = 0, tag = 1> (k) }""",
]
