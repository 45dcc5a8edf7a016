"""`stages` of a plan: which nodes form them, where they run, and what cannot be a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_in_parts import LOSSES, close, train, trained, trained_whole
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import run_passes, start, step_program
from partc.compiler.placement.placement import place
from partc.compiler.plan.read import parse_plan
from rows import of_today
from training_equivalence import from_text

NET = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 5] y)
<float[6, 8] w, float[8, 8] v, float[8, 8] u, float[8, 5] t, float[8] shift> {
    [up] a = MatMul (x, w)
    [bend] b = Tanh (a)
    [second] c = MatMul (b, v)
    [skip] d = Add (c, b)
    [third] e = MatMul (d, u)
    [add] f = Add (e, shift)
    [down] y = MatMul (f, t)
}"""
WEIGHTS: dict[str, tuple[int, ...]] = {"w": (6, 8), "v": (8, 8), "u": (8, 8), "t": (8, 5), "shift": (8,)}
LOSS = LOSSES["mean"]


def planned(stages: str, ranks: int = 2, schedule: str = "", head: str = "", count: int = 4) -> str:
    """A plan with these stages."""
    named = f", schedule: {schedule}" if schedule else ""
    return f"ranks: {ranks}\n{head}pipeline: {{microbatches: {count}{named}, stages: {stages}}}\n"


def groups(text: str) -> list[tuple[int, ...]]:
    """The ranks of a plan's stages."""
    pipeline = parse_plan(text, "plan.yaml").pipeline
    assert pipeline is not None
    return [stage.ranks for stage in pipeline.stages]


TRAIN = train(LOSS, 1)
FOUR = "[up, second, third, down]"


@pytest.mark.parametrize(
    ("text", "homes"),
    [
        (planned("[up, down]"), [(0,), (1,)]),
        (planned("[up, down]", 4), [(0, 1), (2, 3)]),
        (planned(FOUR), [(0,), (1,), (0,), (1,)]),
        (planned(FOUR, schedule="zbv"), [(0,), (1,), (1,), (0,)]),
        (planned(FOUR, 4), [(0,), (1,), (2,), (3,)]),
        (planned(FOUR, 4, "zbv"), [(0, 1), (2, 3), (2, 3), (0, 1)]),
        (planned(FOUR, 4, "interleaved"), [(0, 1), (2, 3), (0, 1), (2, 3)]),
        (planned("[up, down]", 4, head="mesh: {tp: 2}\n"), [(0, 1), (2, 3)]),
        (planned("[up, down]", 4, head="mesh: {dp: 2, pp: 2}\n"), [(0, 2), (1, 3)]),
        (planned(FOUR, 4, "zbv", "mesh: {pp: 2, dp: 2}\n"), [(0, 1), (2, 3), (2, 3), (0, 1)]),
        (planned("[{nodes: up, on: 1}, {nodes: [second, third], on: 0}, {nodes: down, on: [0, 1]}]"), [(1,), (0,), (0, 1)]),
    ],
)  # fmt: skip
def test_stages_are_spread_over_ranks(text: str, homes: list[tuple[int, ...]]) -> None:
    assert groups(text + TRAIN) == homes


def stages(plan: str, net: str = NET) -> dict[str, int]:
    """The stage of every node that has one."""
    source = from_text(net, WEIGHTS)
    program = run_passes(start(source, parse_plan(plan + TRAIN, "plan.yaml"), "m"), place)
    return {program.paths[node]: stage for node, stage in program.stages.items()}


def test_nodes_that_are_not_named_are_with_the_latest_stage_that_they_read() -> None:
    found = stages(planned("['up', 'second, third']"))
    assert [name for name, stage in found.items() if stage == 0] == ["up", "bend"]
    assert found["skip"] == found["down"] == found["loss"] == 1
    assert stages(planned(r"['{up,bend}', 'second\,, down']"), NET.replace("second", '"second,"'))["second,"] == 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Any, Any]:
    """Two batches, what one rank makes of them, and the weights before."""
    rng = np.random.default_rng(3)
    steps = [{"x": rng.normal(size=(16, 6)).astype(np.float32), "label": rng.integers(0, 5, 16)} for _ in range(2)]
    source = from_text(NET, WEIGHTS)
    before = {name: value.const_value.numpy().copy() for name, value in source.model.graph.initializers.items()}
    return steps, trained_whole(source, "ranks: 1\n" + TRAIN, steps), before


LEARNING = [
    (planned("[up, second, down]", 3, "1f1b"), "rank 2: 2F0 2B0"),
    (planned("[up, second, third, down]", schedule="zbv"), "rank 0: 0F0 0F1 0F2 3F0"),
    (planned("[up, second, third, down]", schedule="interleaved"), "rank 0: 0F0 0F1 2F0"),
    (planned("[up, [second, third]]", 4, head="mesh: {pp: 2, tp: 2}\nsharding: {second: colwise, third: rowwise}\n"), "ranks 2,3"),
    (planned("[up, down]", 1, "gpipe"), "rank 0: 0F0 0F1 0F2 0F3 1F0"),
    (planned("[{nodes: up, on: 1}, {nodes: second, on: 0}, {nodes: down, on: 0}]", 2, "auto"), "rank 1: 0F0"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "rows"), of_today(LEARNING, 2))
def test_named_stages_learn_alike(plan: str, rows: str, whole: Any, tmp_path: Path) -> None:
    steps, want, before = whole
    close(trained(tmp_path / "build", from_text(NET, WEIGHTS), plan + TRAIN, steps), want, before, 2e-6)
    assert rows in (tmp_path / "build" / "ir" / "schedule.txt").read_text()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (planned("[up, dwon]"), "plan.yaml:2: 'dwon' matches no module or node of the model\n  help: the nearest names are 'down'"),
        (planned("[up, 'up, down']"), "plan.yaml:2: stage 1: 'up' is in stage 0 by plan.yaml:2 'up', too\n  a node is in one stage"),
        (planned("['up, third', second]"), "'third' of stage 0 reads 'd', which 'skip' makes in stage 1"),
        (planned("[up, '']"), "plan.yaml:2: stage 1: the stage names no nodes"),
        (planned("[up, {nodes: down, at: 0}]"), "stage 1: unknown key 'at'"),
        (planned("[up, 7]"), "stage 1: expected patterns, but got the number 7"),
        (planned("[up, 'do[wn']"), "stage 1: not a valid pattern"),
        (planned("[up, {nodes: down, on: 2}]"), "stage 1: rank 2, but there are 2 ranks"),
        (planned("[up, {nodes: down, on: 1}]"), "stage 1 says where it runs, and stage 0 does not"),
        (planned("[up, second, down]"), "3 stages cannot be divided evenly among 2 ranks\n  help: make it 2 or 4 stages, or say"),
        (planned("[up, second, down]", 4, head="mesh: {pp: 2, dp: 2}\n"), "3 stages cannot be divided evenly among the 2 slices"),
        (planned("[up, down]", 4, head="mesh: {tp: 2, dp: 2}\n"), "the mesh tp=2 x dp=2 has no axis 'pp'"),
        (planned("[]"), "stages"),
        (planned("[up, down]", head="placement: {third: 1, add: 1}\n"), "'third' is placed on rank 1, and its stage 0 runs on rank 0"),
        (planned("[up, second, down]", 3, "zbv"), "zbv does not fit"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_stage_is_refused(plan: str, words: str) -> None:
    with pytest.raises(CompileError) as error:
        step_program(from_text(NET, WEIGHTS), parse_plan(plan + TRAIN, "plan.yaml"), "m")
    assert words in str(error.value)
    assert "plan.yaml:" in str(error.value)


def test_a_stage_of_constants_alone_is_refused() -> None:
    net = NET.replace("[up]", "[sizes] s = Shape (x) [up]").replace("[bend] b = Tanh (a)", "[bend] b = Reshape (a, s8)")
    net = net.replace("[bend]", "[first] s1 = Slice (s, zero, one) [both] s8 = Concat <axis = 0> (s1, eight) [bend]")
    net = net.replace("shift>", "shift, int64[1] zero = {0}, int64[1] one = {1}, int64[1] eight = {8}>")
    assert stages(planned("['up, sizes', down]"), net)["up"] == 0
    with pytest.raises(CompileError, match="stage 1 has no nodes of its own"):
        stages(planned("[up, sizes]"), net)
