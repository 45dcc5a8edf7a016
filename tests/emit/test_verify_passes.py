"""What valid means after each pass: every law finds the fault that is planted for it, and the error names the pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
from partc.compiler import pipeline
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Comm, Compute
from partc.compiler.plan.read import parse_plan
from partc.compiler.verify import InvalidProgram, verify
from sharded_models import BLOCK_STYLES, block

PLAN = f"""ranks: 4
symbols: {{batch: {{divisor: 2}}}}
sharding: {{{BLOCK_STYLES}}}
train:
  loss: {{type: mean_squared, prediction: y, target: t}}
  optimizer: {{type: sgd, lr: 0.1}}
"""


@pytest.fixture(scope="module")
def valid() -> Complete:
    source = Source(from_proto(block(), Path("model.onnx")))
    return pipeline.step_program(source, parse_plan(PLAN, "plan.yaml"), "model")


def first(program: Complete) -> ir.Node:
    return next(iter(program.model.graph))


def without(mapping: object, key: object) -> dict[object, object]:
    assert hasattr(mapping, "items")
    return {other: value for other, value in mapping.items() if other != key}


def no_path(program: Complete) -> Complete:
    return replace(program, paths=without(program.paths, first(program)))


def nowhere(program: Complete) -> Complete:
    return replace(program, placement=without(program.placement, first(program)))


def foreign_rank(program: Complete) -> Complete:
    placed = program.placement[first(program)]
    return replace(program, placement={**program.placement, first(program): replace(placed, groups=((0, 9),))})


def unknown_value(program: Complete) -> Complete:
    return replace(program, values=without(program.values, first(program).outputs[0]))


def unknown_symbol(program: Complete) -> Complete:
    value = program.model.graph.inputs[0]
    info = replace(program.values[value], shape=("batch", "length", 24))
    return replace(program, values={**program.values, value: info})


def uneven_cut(program: Complete) -> Complete:
    instance = next(key for key, one in program.choices.items() if any(one.axes.values()))
    value = instance.node.outputs[0]
    info = program.values[value]
    assert info.shape is not None
    return replace(program, values={**program.values, value: replace(info, shape=(7,) * len(info.shape))})


def too_large_a_mesh(program: Complete) -> Complete:
    instance, choice = next(iter(program.choices.items()))
    return replace(program, choices={**program.choices, instance: replace(choice, mesh=(8,), axes={})})


def axis_twice(program: Complete) -> Complete:
    instance, choice = next((key, one) for key, one in program.choices.items() if len(one.rule.factors) > 1)
    axes = dict.fromkeys(choice.rule.factors[:2], (0,))
    return replace(program, choices={**program.choices, instance: replace(choice, axes=axes)})


def with_steps(program: Complete, changed: Callable[[tuple[object, ...]], object]) -> Complete:
    one = program.parts[1]
    parts = list(program.parts)
    parts[1] = replace(one, steps=changed(one.steps))  # type: ignore[arg-type]
    return replace(program, parts=tuple(parts))


def lost_step(program: Complete) -> Complete:
    return with_steps(
        program, lambda steps: [step for k, step in enumerate(steps) if k or not isinstance(step, Compute)]
    )


def made_twice(program: Complete) -> Complete:
    return with_steps(program, lambda steps: (*steps, next(step for step in steps if isinstance(step, Compute))))


def lost_collective(program: Complete) -> Complete:
    last = next(step for step in reversed(program.parts[1].steps) if isinstance(step, Comm))
    return with_steps(program, lambda steps: tuple(step for step in steps if step is not last))


def lost_rank(program: Complete) -> Complete:
    return replace(program, parts=program.parts[:-1])


PLANTED: dict[Callable[[Complete], Complete], str] = {
    no_path: "it has no path",
    nowhere: "it runs nowhere",
    foreign_rank: r"\[0, 9\] are not distinct ranks of 4",
    unknown_value: "nothing is known of it",
    unknown_symbol: "its dim 'length' has length, of which nothing is known",
    uneven_cut: "is cut into 4 along dim 2, which is 7",
    too_large_a_mesh: r"its mesh \(8,\) is of 8 ranks, its group of 4",
    axis_twice: "each once",
    lost_step: "rank 1: .* reads '.*', which it does not have",
    made_twice: "rank 1: '.*' is defined 2 times",
    lost_collective: "rank 1: it takes no part in the",
    lost_rank: "there are 3 programs for 4 ranks",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_law_that_is_broken_is_told_with_the_pass(
    valid: Complete, plant: Callable[[Complete], Complete], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify(valid, "lower")
    monkeypatch.setattr(pipeline, "PASSES", (plant,))
    monkeypatch.setenv("PARTC_VERIFY_PASSES", "1")
    with pytest.raises(InvalidProgram, match=PLANTED[plant]) as caught:
        pipeline.run_passes(valid, plant)
    assert str(caught.value).startswith(f"the pass '{plant.__name__}' made a program that is not valid:\n  ")


def test_the_last_program_alone_is_verified_where_the_environment_says_so(
    valid: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    def behind(program: Complete) -> Complete:
        return program

    monkeypatch.setattr(pipeline, "PASSES", (lost_rank, behind))
    for requested, name in (("1", "lost_rank"), ("last", "behind")):
        monkeypatch.setenv("PARTC_VERIFY_PASSES", requested)
        with pytest.raises(InvalidProgram, match=f"the pass '{name}' made a program that is not valid"):
            pipeline.run_passes(valid, behind)
    for requested in ("", "0"):
        monkeypatch.setenv("PARTC_VERIFY_PASSES", requested)
        assert len(pipeline.run_passes(valid, behind).parts) == 3


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_a_pass_changed_is_held_against_the_laws_again(
    valid: Complete, plant: Callable[[Complete], Complete]
) -> None:
    """Also where the laws held of the program before: a law is left out only where nothing that it reads has changed."""
    with pytest.raises(InvalidProgram, match=PLANTED[plant]):
        verify(plant(valid), "lower", valid)


def test_a_graph_in_the_wrong_order_is_no_program() -> None:
    source = Source(from_proto(block(), Path("model.onnx")))
    program = pipeline.start(source, None, "model")
    graph = program.model.graph
    node = first(program)
    graph.remove(node)
    graph.append(node)
    with pytest.raises(InvalidProgram, match="which is not made before it"):
        verify(program, "start")


def test_a_message_is_one_value_at_both_ends() -> None:
    plan = "ranks: 2\nsymbols: {batch: {divisor: 2}}\nplacement: {up: [0], down: [1]}\n"
    source = Source(from_proto(block(), Path("model.onnx")))
    sent = pipeline.step_program(source, parse_plan(plan, "plan.yaml"), "model")
    verify(sent, "lower")
    part = sent.parts[1]
    message = next(step for step in part.steps if isinstance(step, Comm))
    other = replace(message, outputs=(message.makes[0].derived(".other"),))
    steps = tuple(other if step is message else step for step in part.steps)
    with pytest.raises(InvalidProgram, match=r"message \d+ is '.*' where it is sent and '.*other' where it arrives"):
        verify(replace(sent, parts=(sent.parts[0], replace(part, steps=steps))), "lower")
