"""A bias next to a sharded contraction: every rank computes a partial product, and only one rank adds the bias."""

from __future__ import annotations

import numpy as np
from partc.compiler.ops.rule import Local


def bias_once(local: Local) -> None:
    """Adds the bias, operand 2, on the first of the ranks that each make a term of a sum."""
    add_once(local, 2)


def add_once(local: Local, k: int) -> None:
    """The node with operand `k`, its bias, multiplied by 1 on the first rank of a sum's terms and by 0 on the others."""
    if all(local.num_shards(factor) == 1 for factor in local.rule.reduce):
        local.same()
        return
    bias = local.node.inputs[k]
    assert bias is not None
    assert bias.dtype is not None
    first = all(local.index(factor) == 0 for factor in local.rule.reduce)
    keep = local.constant("keep", np.array(first, bias.dtype.numpy()))
    inputs = list(local.inputs)
    inputs[k] = local.emit("Mul", [inputs[k], keep], "bias")
    local.same(inputs)
