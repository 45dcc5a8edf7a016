"""Replicated operands of nodes that pass partial sums on: the operand is the first rank's partial value, and zeros are those of the others.

    x + attn + mlp      rank 0   Where(true, x, 0) + attn.partial + mlp.partial
                        rank 1   Where(false, x, 0) + attn.partial + mlp.partial

It is made right before the node that reads it, since no rank waits for another, and so lives no longer than it must. Multiplied by 0, an
infinity would be no number, so it is chosen. Its cotangent is the whole operand's: what is added has that of the sum.
"""

from __future__ import annotations

import numpy as np
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.constants import RankConstant
from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.layout.mesh import normal
from partc.compiler.lower.comm import CommLowering
from partc.compiler.sharding.values.operands import input_layout_of


def operand(comm: CommLowering, instance: NodeOnGroup, k: int) -> Value | None:
    """The value that a node on a group reads as its input `k`, None where it has none."""
    if instance.node.inputs[k] is None:
        return None
    return operand_as(comm, instance, k, input_layout_of(comm.program, instance, k))


def operand_as(comm: CommLowering, instance: NodeOnGroup, k: int, copy: ShardedValue) -> Value:
    """The value that a node on a group reads as its input `k`, if it needs the version `copy`."""
    choice = comm.program.choices.get(instance)
    return (
        comm.values.at[copy] if choice is None or k not in choice.masked else comm.masked[copy, _terms(copy, choice, k)]
    )


def keep_operands(comm: CommLowering, instance: NodeOnGroup) -> None:
    """Writes the partial versions of the replicated inputs that a node adds to partial sums."""
    choice = comm.program.choices.get(instance)
    if choice is None:
        return
    for k in sorted(choice.masked):
        copy = input_layout_of(comm.program, instance, k)
        after = _terms(copy, choice, k)
        if (copy, after) in comm.masked:
            continue
        dtype = copy.value.dtype
        assert dtype is not None
        out = comm.masked[copy, after] = comm.job.derived_on(copy.group, comm.values.at[copy], ".kept")
        zero = comm.constant(copy.group, out, "zero", np.zeros((), dtype.numpy()))
        _, group = comm.subgroups(choice.mesh, choice.passing, copy.group)
        first = comm.constant(copy.group, out, "first", RankConstant.first(group, np.bool_))
        comm.emit(copy.group, "Where", [first, comm.values.at[copy], zero], out)
        comm.declare(after, out)


def _terms(copy: ShardedValue, choice: NodeSharding, k: int) -> ShardedValue:
    return ShardedValue(copy.value, copy.group, normal(choice.masked_layout(k)))
