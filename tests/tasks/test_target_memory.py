"""What `partc inspect` and `partc plan` say of the memory of each target is what the runtime asks for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from batch_in_parts import LOSSES, NET, WEIGHTS, numbers, train
from partc.compiler.cost.memory import rank_memory
from partc.compiler.emit.emit import Unwritten
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.artifact.format import CPU
from partc.runtime.artifact.manifest import open_artifact
from targets_case import ADAM, ON_CPU, PIPED, PLANS
from training_equivalence import fed, from_text

MEAN = LOSSES["mean"]
CASES = {
    "one rank": PLANS["one rank"] + train(MEAN, 1, ADAM),
    "zero": "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\nsymbols: {batch: {divisor: 2}}\ntarget: cuda\n"
    + train(MEAN, 1, ON_CPU.replace("}", ", shard: dp}")),
    "piped": PIPED + train(MEAN, 1, ON_CPU) + "pipeline: {microbatches: 4}\n",
}


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_each_target_are_those_that_are_asked_for(name: str, tmp_path: Path) -> None:
    plan, build, step = parse_plan(CASES[name], "plan.yaml"), tmp_path / "build", numbers(MEAN)
    program = compile_source(from_text(NET, WEIGHTS), plan, build).program
    artifact = open_artifact(build)
    with load_local(build, devices={"cuda": "cpu"}) as ranks:
        ranks({**fed(ranks, 0), **step})
        for rank in ranks.ranks:
            arenas = {
                CPU: rank._program.arenas.host.size,
                **{name: one.size for name, one in rank._program.arenas.blocks.items()},
            }
            lying, kept = rank.state.targets, Counter[str]()
            for key, value in rank.state.tensors.items():
                kept[lying.get(key, CPU)] += value.dtype.bytes_of(value.shape)
            needed = rank_memory(artifact, rank.rank, {"batch": len(step["x"])})
            assert rank_memory(Unwritten([program], "model"), rank.rank, {"batch": len(step["x"])}, alone=True) == (
                rank_memory(artifact, rank.rank, {"batch": len(step["x"])}, alone=True)
            )
            found = {one.target: one for one in needed.targets}
            assert {target: one.between for target, one in found.items() if one.between or target == CPU} == arenas
            for target, one in found.items():
                assert one.parameters + one.optimizer == kept[target]
                assert one.weights <= 100
                assert one.peak >= kept[target] + one.between
