"""Random numbers: they are drawn whole, and by every rank of a group the same.

A node without a seed would draw other numbers on each rank that holds its result; it gets one that its output's name gives it.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.autodiff.engine import no_gradient
from partc.compiler.ops.local import Local
from partc.compiler.ops.notation import whole_rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import Rule

_DRAWN = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
RANDOM = frozenset((*_DRAWN, "Dropout"))
"""Ops that may give other numbers each time they run."""

LARGEST_SEED = 2**24
"""Integers below it are exact in the attribute's type, a float of 32 bits."""


@op(*_DRAWN)
def drawn(node: ir.Node) -> Rule | None:
    """drawn in the order of the whole, with one seed on every rank."""
    return replace(whole_rule(node), local=seeded)


no_gradient(*_DRAWN)


def seeded(local: Local) -> None:
    """The node with its own seed, or with one that its output's name gives it."""
    seed = zlib.crc32(local.outputs[0].encode()) % LARGEST_SEED
    if "seed" in local.node.attributes:
        local.same()
    else:
        local.same(seed=seed if local.node.op_type == "Dropout" else float(seed))
