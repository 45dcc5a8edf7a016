"""Into how many pieces ranks deal out the records of a batch, of each of which a microbatch has its share (`pipelines/cutting.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from partc.compiler.ir.program import Targeted
from partc.compiler.ir.sharded import ShardedValue


def pieces_of(program: Targeted, inputs: Iterable[ShardedValue]) -> int:
    """Into how many pieces the batch of a training is dealt out that runs in parts: all inputs of all ranks lie in so many, or in fewer."""
    training, rules = program.training, program.plan.pipeline
    if training is None or training.rules.accumulate == 1:
        return 1
    dims = program.batch_dims
    shards = (one.layout.num_shards(dims[one.value]) for one in inputs if one.value in dims)
    return math.lcm(training.records.shards, rules.pieces if rules is not None else 1, *shards)
