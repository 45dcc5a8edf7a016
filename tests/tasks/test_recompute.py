"""Recompute: forward ops that the plan names are done again in the backward task; what is learned is the same, and less is kept for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from batch_in_parts import HEAD, LOSSES, close, numbers, start_of, train, trained, trained_whole
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Compute, TaskKind
from partc.compiler.pipeline import compile_source, step_program
from partc.compiler.plan.read import parse_plan
from partc.runtime.program.steps import Segment
from rows import of_today
from run_steps import steps_of
from training_equivalence import from_text, source_of
from training_models import gpt, lenet

LAYERS = f"""{HEAD}m (float[batch, 6] x) => (float[batch, 5] y)
<float[6, 8] w, float[8] gain, float[8, 8] u, float[8] mean, float[8] var = {{1, 1, 1, 1, 1, 1, 1, 1}}, float[8, 5] v,
 float ratio = {{0.4}}, bool on = {{1}}> {{
    [enter] h = MatMul (x, w)
    [one_norm] a = LayerNormalization (h, gain)
    [one_up] b = MatMul (a, u)
    [one_bend] c = Gelu (b)
    [one_drop] d = Dropout (c, ratio, on)
    [one_add] e = Add (h, d)
    [two_norm] f, m1, v1 = BatchNormalization <training_mode = 1, momentum = 0.9> (e, gain, gain, mean, var)
    [two_bend] g = Tanh (f)
    [two_add] i = Mul (e, g)
    [leave] y = MatMul (i, v)
}}"""
WEIGHTS = {"w": (6, 8), "gain": (8,), "u": (8, 8), "mean": (8,), "v": (8, 5)}
STATISTICS = ", statistics: microbatch"
STAGED = "ranks: 2\nplacement: {enter: 0, 'one_*': 0, 'two_*': 1, leave: 1}\n"
ONE = "ranks: 1\n"
GPT = "mesh: {pp: 2, tp: 2}\nsharding: {'layers.*.*.project': colwise, 'layers.*.*.out': rowwise}\nplacement: {"
GPT += "tokens: {pp: 0}, positions: {pp: 0}, 'layers.0': {pp: 0}, 'layers.1': {pp: 1}, norm: {pp: 1}, head: {pp: 1}}\n"
LABELS = "{type: softmax_cross_entropy, logits: y, labels: labels}"


def pipeline(count: int, recompute: str = "", more: str = "") -> str:
    return f"pipeline: {{microbatches: {count}{f', recompute: {recompute}' if recompute else ''}{more}}}\n"


def compiled(plan: str, source: Source | None = None, loss: str = LOSSES["mean"]) -> Complete:
    """The program of a plan, with the loss and plain gradient descent."""
    given = source or from_text(LAYERS, WEIGHTS)
    return step_program(given, parse_plan(plan + train(loss, 1), "plan.yaml"), "model")


def kept(program: Complete) -> list[str]:
    """What the first rank keeps from the forward to the backward pass, where these are not divided."""
    steps = program.parts[0].steps
    made = [one for step in steps if step.task is TaskKind.FORWARD for one in step.makes]
    read = {one for step in steps if step.task is TaskKind.BACKWARD for one in step.reads}
    return [str(one) for one in made if one in read]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """By number of microbatches what is learned without recomputing."""
    return {"": tmp_path_factory.mktemp("without")}


@pytest.mark.parametrize(
    ("plan", "count", "recompute", "more"),
    of_today(
        [
            (ONE, 1, "['one_*', 'two_*']", ""),
            (ONE, 1, "'**'", ""),
            (ONE, 4, "", ""),
            (ONE, 4, "'{one,two}_*'", ""),
            (STAGED, 1, "['one_*', two_bend]", ""),
            (STAGED, 2, "'*_norm'", ", schedule: gpipe"),
            (STAGED, 4, "['one_*', 'two_*']", ", schedule: zb_h1"),
            (STAGED, 4, "'**'", ", schedule: auto"),
        ],
        3,
    ),
)
def test_what_is_learned_is_the_same(
    plan: str, count: int, recompute: str, more: str, without: dict[Any, Any], tmp_path: Path
) -> None:
    """With masks of a dropout, and statistics, which move once a step."""
    steps, text = [numbers("label")] * 3, train(LOSSES["mean"], 1, "{type: momentum, lr: 0.3}", "  clip: {norm: 0.3}\n")
    if count not in without:
        plain = STAGED + text + pipeline(count, "", STATISTICS)
        without[count] = trained(without[""] / str(count), from_text(LAYERS, WEIGHTS), plain, steps)
    have = trained(
        tmp_path / "build",
        from_text(LAYERS, WEIGHTS),
        plan + text + pipeline(count, recompute, STATISTICS + more),
        steps,
    )
    close(have, without[count], start_of(WEIGHTS, LAYERS), 1e-6)


def test_a_gpt_in_stages_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    model = gpt(16, 2, 2, 30, 8)
    source = source_of(model).model
    feeds = [model.feeds(np.random.default_rng(k), batch=4, seq=6) for k in range(2)]
    text = train(LABELS, 1, "{type: momentum, lr: 0.1}")
    have = trained(
        tmp_path / "build",
        Source(source.clone()),
        "ranks: 4\n" + GPT + text + pipeline(2, "layers.*", ", schedule: zb_h1"),
        feeds,
    )
    want = trained_whole(Source(source.clone()), ONE + text, feeds)
    for one, other in zip(have[0], want[0], strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    for name, array in want[1].items():
        np.testing.assert_allclose(have[1][name], array, rtol=0, atol=1e-6 * np.abs(array).max(), err_msg=name)


def test_a_region_keeps_what_it_reads_from_outside() -> None:
    assert [name for name in kept(compiled(ONE + pipeline(1))) if name in "abcdefghi"] == [*"habegi"]
    regions = compiled(ONE + pipeline(1, "['one_{norm,up,bend,drop}']"))
    assert [name for name in kept(regions) if name in "abcdefghi"] == [*"hegi"]
    again = [step for step in regions.parts[0].steps if isinstance(step, Compute) and step.again]
    assert {step.again for step in again} == {"plan.yaml:2 'one_{norm,up,bend,drop}'"}
    names = {step.source.name for step in again}
    assert names == {"one_norm", "one_up", "one_bend", "one_drop"}
    assert "one_add" not in names  # the backward pass of the region does not read what it makes


def test_patterns_with_commas_are_one_region() -> None:
    """As the nodes of one module are, which a pattern names one by one; patterns apart are regions of their own."""
    kept_by = {
        said: [name for name in kept(compiled(ONE + pipeline(1, said), source_of(lenet()), LABELS)) if "." in name]
        for said in (
            "['conv1, relu.Relu, pool.MaxPool']",
            "[[conv1, relu.Relu, pool.MaxPool]]",
            "['conv1', 'relu']",
            "",
        )
    }
    first, second, apart, plain = ([name for name in names if "_1" not in name] for names in kept_by.values())
    assert first == second == [name for name in plain if name not in ("relu.Relu", "relu.Relu.shape")]
    assert "relu.Relu" in apart


def test_layers_are_regions_of_their_own() -> None:
    """Each is done again from what it reads, which is kept; of the collectives of a layer the last one is not needed."""
    model = source_of(gpt(16, 2, 2, 30, 8)).model
    plan = "ranks: 2\nmesh: {tp: 2}\nsharding: {'layers.*.*.project': colwise, 'layers.*.*.out': rowwise}\n"
    programs = [
        compiled(plan + pipeline(1, recompute), Source(model.clone()), LABELS) for recompute in ("", "layers.*")
    ]
    sums = [sum(event.op_type == "AllReduce" for event in program.events) for program in programs]
    assert sums[1] - sums[0] == 2
    assert len([event for event in programs[1].events if "recomputed by plan.yaml:4 'layers.*'" in event.cause]) == 2
    inner = [[name for name in kept(program) if "layers" in name] for program in programs]
    assert len(inner[1]) == 2 < len(inner[0]) / 10


def test_one_is_repeated_behind_the_other(tmp_path: Path) -> None:
    """A segment begins before each region: one session would make a value once, and keep it."""
    source = source_of(gpt(16, 3, 2, 30, 8))
    compile_source(
        source, parse_plan(ONE + train(LABELS, 1) + pipeline(1, "layers.*"), "plan.yaml"), tmp_path / "build"
    )
    model = onnx.load(tmp_path / "build" / "rank_0000.onnx", load_external_data=False)
    segments = [step for step in steps_of(model, "rank_0000.onnx") if isinstance(step, Segment)]
    paths = [
        {_metadata(node, "partc.path").split(".")[1] for node in one.nodes if _metadata(node, "partc.recomputed")}
        for one in segments
    ]
    assert [one for one in paths if one] == [{"2"}, {"1"}, {"0"}]
    text = (tmp_path / "build" / "ir" / "step_parallel_end.ir").read_text()
    assert "Scope: layers.2.norm1.LayerNormalization   Rule: follows its reader" in text
    assert text.count("   Recomputed: plan.yaml:6 'layers.*'") > 60


def _metadata(node: onnx.NodeProto, key: str) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == key), "")


DRAWN = f"""{HEAD}m (float[batch, 6] x) => (float[batch, 5] y) <float[6, 8] w, float[8, 5] v> {{
    [up] a = MatMul (x, w)
    [draw] noise = RandomNormalLike (a)
    [mix] b = Mul (a, noise)
    [bend] c = Gelu (b)
    [down] y = MatMul (c, v)
}}"""


def test_random_numbers_are_kept() -> None:
    program = compiled(ONE + pipeline(1, "'{up,draw,mix,bend}'"), from_text(DRAWN, {"w": (6, 8), "v": (8, 5)}))
    again = [step.source.name for step in program.parts[0].steps if isinstance(step, Compute) and step.again]
    assert again == ["up", "mix"]
    assert "noise" in kept(program)


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        (
            "['one_*', 'tow_*']",
            ["plan.yaml", "'tow_*' matches no module or node of the model", "the nearest names are 'two_"],
        ),
        ("['[5-1]']", ["the range '[5-1]' runs from 5 down to 1"]),
        ("[3]", ["plan.yaml:", "expected patterns, but got the number 3"]),
    ],
)
def test_what_does_not_fit_is_refused(recompute: str, words: list[str]) -> None:
    with pytest.raises(CompileError) as error:
        compiled(STAGED + pipeline(2, recompute, STATISTICS))
    for word in words:
        assert word in str(error.value)


def test_a_pattern_without_effect_is_told() -> None:
    told = compiled(ONE + pipeline(1, "['one_*', one_add]")).warnings
    assert told == (
        "plan.yaml:2: recompute 'one_add' changes nothing: the backward pass needs only what it keeps anyway",
    )
    frozen = ONE + train(
        LOSSES["mean"], 1, more="  parameters: {w: {frozen: true}, gain: {frozen: true}, u: {frozen: true}}\n"
    )
    program = step_program(
        from_text(LAYERS, WEIGHTS), parse_plan(frozen + pipeline(1, "'one_*'"), "plan.yaml"), "model"
    )
    assert program.warnings == ("plan.yaml:7: recompute 'one_*' changes nothing: no gradient passes through its nodes",)
