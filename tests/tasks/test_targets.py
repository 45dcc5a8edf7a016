"""Targets within a rank: the law of each op's target, the copies between them, and that ranks compute what they compute without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_in_parts import LOSSES, NET, WEIGHTS, numbers, train
from dealt import dealt
from partc.compiler.errors import CompileError
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Call, Compute, Copy, Op
from partc.compiler.plan.read import parse_plan
from targets_case import ADAM, ON_CPU, PIPED, PLANS
from training_equivalence import Run, from_text, run, run_whole, same_tensors, same_training

MEAN = LOSSES["mean"]


@pytest.fixture(scope="module")
def whole() -> Run:
    """What one rank without targets makes of two steps."""
    text = "ranks: 1\n" + train(MEAN, 1, ADAM)
    return run_whole(from_text(NET, WEIGHTS), text, [numbers(MEAN)] * 2)


def ops(program: Complete, rank: int = 0) -> Iterator[Op]:
    """The ops of a rank, those of each body once, in its first call's place."""
    seen = set()
    for step in program.parts[rank].steps:
        if not isinstance(step, Call):
            yield step
        elif step.body not in seen:
            seen.add(step.body)
            yield from step.body.steps


def copies(program: Complete, rank: int = 0) -> list[str]:
    return [f"{one.source} -> {one.target}" for one in ops(program, rank) if isinstance(one, Copy)]


@pytest.mark.parametrize(("name", "optimizer"), dealt(PLANS, [ADAM, ON_CPU]))
def test_targets_change_no_number(name: str, optimizer: str, whole: Run, tmp_path: Path) -> None:
    plan = PLANS[name] + train(MEAN, 1, optimizer)
    steps = [numbers(MEAN)] * 2
    program = same_training(lambda: from_text(NET, WEIGHTS), plan, tmp_path, steps, rtol=2e-6, atol=2e-5, whole=whole)
    assert copies(program)
    if "target: cpu" in optimizer:
        states = {one.target for part in program.parts for one in part.state}
        assert states == {"cpu"}


@pytest.mark.parametrize("more", ["", ", recompute: ['**']"])
def test_tasks_have_copies(more: str, whole: Run, tmp_path: Path) -> None:
    plan = PIPED + train(MEAN, 1, ON_CPU) + f"pipeline: {{microbatches: 4{more}}}\n"
    steps = [numbers(MEAN)] * 2
    program = same_training(lambda: from_text(NET, WEIGHTS), plan, tmp_path, steps, rtol=2e-6, atol=2e-5, whole=whole)
    weights = [one for one in program.parts[0].steps if isinstance(one, Copy) and str(one.source) in WEIGHTS]
    assert weights
    assert len(weights) == len({one.source for one in weights}), "a weight is copied once a step"
    bodies = [one for body in program.parts[0].bodies for one in body.steps]
    assert {one.target for one in bodies if isinstance(one, Compute)} == {"cuda", "device"}


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_gpus_16_bits_run_on_a_cpu(kind: str, tmp_path: Path) -> None:
    """Nodes on cuda have no Casts to float32 around them in the file; on a CPU they compute as they do there without targets."""
    plan = train(MEAN, 1, ADAM) + f"precision: {{compute: {kind}}}\n"
    steps = [numbers(MEAN)] * 2
    want = run(from_text(NET, WEIGHTS), "ranks: 1\n" + plan, tmp_path / "plain", steps)
    have = run(from_text(NET, WEIGHTS), "ranks: 1\ntarget: {'**': cuda, bend: cpu}\n" + plan, tmp_path / "cuda", steps)
    products = [one for one in ops(have.program) if isinstance(one, Compute) and one.node.op_type == "MatMul"]
    assert products
    assert not any(str(value).endswith(".read") for one in products for value in one.reads)
    same_tensors(have.after, want.after, want.before, 2e-3)


MISTAKES = {
    "{up: gpu}": "plan.yaml:2: target of 'up': 'gpu' is no target\n  a target is a kind of device: cpu or cuda\n  help: write cuda",
    "{up: cuda:1}": "plan.yaml:2: target of 'up': 'cuda:1' names one device",
    "{up: 3}": "plan.yaml:2: target of 'up': expected a target, but got the number 3",
    "{upp: cuda}": "plan.yaml:2: 'upp' matches no module or node of the model\n  help: the nearest names are 'up'",
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes(said: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        run(from_text(NET, WEIGHTS), f"ranks: 1\ntarget: {said}\n{train(MEAN, 1, ADAM)}", tmp_path / "build", [])
    assert str(caught.value).startswith(MISTAKES[said])


def test_the_optimizers_target_is_a_device() -> None:
    plan = "ranks: 1\n" + train(MEAN, 1, ADAM.replace("}", ", target: tpu}"))
    with pytest.raises(CompileError, match="'tpu' is no target\n  a target is a kind of device: cpu or cuda"):
        parse_plan(plan, "plan.yaml")


CENTRED = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 5] y) <int64[1] rows = {0}> {
    [first] h = MatMul(x, w0)
    [up] a = MatMul(h, w1)
    [mean] m = ReduceMean(a, rows)
    [less] b = Sub(a, m)
    [down] y = MatMul(b, w2)
}"""


@pytest.mark.parametrize("cut", ["", "sharding: {up: colwise}\n"])
def test_sizes_are_of_inputs_on_the_ranks_that_have_these(cut: str, tmp_path: Path) -> None:
    """One rank of a group has labels, and makes the shape of a value of their size; the other asks the value. Copies stay equal."""
    plan = f"ranks: 3\nplacement: {{first: 0, '{{up,mean,less}}': [1, 2], down: 2}}\n{cut}target: cuda\n"
    shapes = {"w0": (6, 6), "w1": (6, 8), "w2": (8, 5)}
    program = same_training(
        lambda: from_text(CENTRED, shapes), plan + train(MEAN, 1, ADAM), tmp_path, [numbers(MEAN)], rtol=2e-6, atol=2e-5
    )
    made = [
        {
            one.node.op_type
            for one in ops(program, k)
            if isinstance(one, Compute) and str(one.outputs[0]).endswith(".shape")
        }
        for k in (1, 2)
    ]
    assert made == [{"Shape"}, {"Concat"}]
