"""The values of a job, before any file is written, are those of the unsharded model: of sample plans, and of random graphs and plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from equivalence import same, whole_outputs
from hypothesis import HealthCheck, Phase, assume, given, settings
from job_reference import JobRun
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.sharded import ShardedValue, members
from partc.compiler.pipeline import run_passes, start
from partc.compiler.plan.read import parse_plan
from partc.compiler.training_passes import update
from partc.runtime.artifact.tensors.boxes import merge
from random_cases import cases
from random_losses import changing
from risky_graphs import Case
from rows import of_today
from training_equivalence import train_whole

SAMPLES = Path(__file__).parents[2] / "samples"
TRAININGS = [
    "lenet/train.yaml",
    "lenet/train_dp_stages.yaml",
    "two_stage/train.yaml",
    "ffn_dynamic/train.yaml",
    "wide_deep/train_servers.yaml",
    "wide_deep/train_rows.yaml",
]
INPUTS: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "lenet": lambda random: {"x": _floats(random, 8, 1, 32, 32), "label": random.integers(0, 10, 8)},
    "two_stage": lambda random: {"x": _floats(random, 1, 1)},
    "ffn_dynamic": lambda random: {"x": _floats(random, 8, 1, 28, 28), "label": random.integers(0, 10, 8)},
    "wide_deep": lambda random: {
        "ids": random.integers(0, 4, (8, 26)),
        "numbers": _floats(random, 8, 13),
        "clicked": random.integers(0, 2, (8, 1)).astype(np.float32),
    },
}
"""By sample the inputs of a step."""
FEW = settings(
    max_examples=5,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def _floats(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape, np.float32)


def begun(source: Source, plan: str) -> JobRun:
    """The job of a step before `lower`."""
    return JobRun(run_passes(start(source, parse_plan(plan, "plan.yaml"), "model"), update))


def delivered(run: JobRun) -> dict[str, list[tuple[ShardedValue, int, Any]]]:
    """By output what every rank has of it."""
    versions, at = run.local.versions.delivered, run.local.comm.values.at
    return {
        str(one.name): [(each, rank, run.at[at[each], rank]) for each in versions[one] for rank in each.group]
        for one in run.program.model.graph.outputs
    }


def kept(run: JobRun) -> dict[str, Any]:
    """What ranks keep behind the step, by global name and whole; ranks of one shard have the same."""
    found: dict[str, dict[tuple[tuple[int, ...], ...], Any]] = {}
    for one, state, ranks in run.job.state:
        layout = state.version.layout
        for rank in members(ranks):
            number = layout.shard(state.version.places[rank])
            box = tuple((at, at + 1, of) for at, of in zip(number, layout.shards, strict=True))
            array = run.at[state.next or one, rank]
            known = found.setdefault(state.tensor, {}).setdefault(box, array)
            np.testing.assert_array_equal(array, known, err_msg=f"{state.tensor} on rank {rank}")
    return {name: merge([*shards], [*shards.values()]) for name, shards in found.items()}


def step(run: JobRun, inputs: Mapping[str, Any]) -> None:
    """Runs a step, with a small rate."""
    fed = run.program.training.fed if run.program.training is not None else ()
    run(inputs, {**dict.fromkeys(fed, np.array(0.1, "f")), "lr": np.array(1e-3, "f"), "step": np.array(0)})


def same_outputs(run: JobRun, wanted: Mapping[str, Any], rtol: float, atol: float) -> None:
    """What ranks have of every output is what they should have of the whole one."""
    found = delivered(run)
    assert found.keys() == wanted.keys()
    for name, there in found.items():
        for version, rank, have in there:
            same(have, run.shard(version, rank, wanted[name]), f"{name} on rank {rank}", rtol, atol)


def same_step(source: Callable[[], Source], plan: str, inputs: Mapping[str, Any], rtol: float, atol: float) -> None:
    """A step gives the outputs, and leaves the tensors, of a step on one rank."""
    run, alone = begun(source(), plan), begun(source(), train_whole(plan))
    step(run, inputs)
    step(alone, inputs)
    same_outputs(run, {name: there[0][2] for name, there in delivered(alone).items()}, rtol, atol)
    have, want = kept(run), kept(alone)
    assert have.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_allclose(have[name], array, rtol, atol, err_msg=name)


@pytest.mark.parametrize("plan", of_today(TRAININGS, 2))
def test_a_step_of_a_sample_is_that_of_one_rank(plan: str) -> None:
    path = SAMPLES / plan
    inputs = INPUTS[path.parent.name](np.random.default_rng(1))
    same_step(lambda: load(path.parent / "model.py"), path.read_text(), inputs, 1e-4, 1e-4)


@FEW
@given(cases())
def test_random_plans_have_the_values_of_the_unsharded_model(case: Case) -> None:
    def source() -> Source:
        return Source(from_proto(case.model, Path("model.onnx")))

    known = changing(case.model.graph)
    try:
        run = begun(source(), case.plan)
    except CompileError:
        assume(False)
    for inputs in case.steps():
        if run.program.training is None:
            step(run, inputs)
            same_outputs(run, whole_outputs(case.model, inputs), 1e-5, 1e-5)
        else:
            same_step(source, case.plan, {name: one for name, one in inputs.items() if name in known}, 1e-3, 1e-3)
