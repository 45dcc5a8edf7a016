"""Random numbers: every rank of a group draws the same ones, in the global order.

A node without a seed would draw other numbers on each rank that holds its result; it gets one that its output's name gives it.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.ops.notation import replicated_rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Local, Rule

LARGEST_SEED = 2**24
"""Integers below it are exact in the attribute's type, a float of 32 bits."""


drawn = op(
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    why="drawn in the global order, with one seed on every rank",
    draws=True,
    stops_gradient=True,
)


@drawn.sharding
def _(node: ir.Node) -> Rule | None:
    return replace(replicated_rule(node), local=seeded)


def seeded(local: Local) -> None:
    """The node with its own seed, or with one derived from its output's name."""
    seed = zlib.crc32(local.outputs[0].encode()) % LARGEST_SEED
    if "seed" in local.node.attributes:
        local.same()
    else:
        local.same(seed=seed if local.node.op_type == "Dropout" else float(seed))
