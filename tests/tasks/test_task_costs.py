"""What tasks of stages take and keep: work and saved bytes by the model's sizes, and what a limit in bytes makes of schedules."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from batch_in_parts import LOSSES, train
from partc.compiler.cost.node import BYTE, multiply_adds, work
from partc.compiler.errors import CompileError
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import compile_source, step_program
from partc.compiler.plan.read import parse_plan
from partc.compiler.schedule.costs import unit_costs
from partc.compiler.schedule.memory import parse_limit, peaks
from partc.compiler.schedule.simulate import simulate
from partc.compiler.schedulers.auto import auto
from partc.runtime.checker.check import check
from training_equivalence import from_text

NET = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 64] x) => (float[batch, 5] y) <float[64, 256] w, float[256, 1024] v, float[1024, 5] u> {
    [up] a = MatMul (x, w)
    [bend] b = Tanh (a)
    [second] c = MatMul (b, v)
    [curve] d = Tanh (c)
    [down] y = MatMul (d, u)
}"""
WEIGHTS = {"w": (64, 256), "v": (256, 1024), "u": (1024, 5)}
STATE = 4 * (64 * 256 + 256 * 1024 + 1024 * 5)
"""Bytes of the parameters."""


def analysed(pipeline: str, ranks: int = 3, head: str = "symbols: {batch: {divisor: 32, max: 1024}}\n") -> Complete:
    """The program of a step."""
    text = f"ranks: {ranks}\n{head}pipeline: {{microbatches: 8, {pipeline}}}\n" + train(LOSSES["squares"], 1)
    return step_program(from_text(NET, WEIGHTS), parse_plan(text, "plan.yaml"), "m")


THREE = "stages: ['up, bend', 'second, curve', down]"


def node(op: str, *ranks: int, **attributes: int | str) -> ir.Node:
    return ir.node(op, [ir.Value(name=f"i{k}") for k in range(len(ranks) or 2)], attributes)


@pytest.mark.parametrize(
    ("op", "inputs", "made", "count", "attributes"),
    [
        ("MatMul", [[3, 4, 5], [5, 7]], [3, 4, 7], 3 * 4 * 5 * 7, {}),
        ("Gemm", [[5, 4], [5, 7]], [4, 7], 4 * 5 * 7, {"transA": 1}),
        ("Gemm", [[4, 5], [7, 5], [7]], [4, 7], 4 * 5 * 7, {"transB": 1}),
        ("MatMul", [[2, 3, 4, 5], [2, 3, 5, 7]], [2, 3, 4, 7], 6 * 4 * 5 * 7, {}),
        ("Attention", [[2, 3, 8, 4], [2, 3, 9, 4], [2, 3, 9, 4]], [2, 3, 8, 4], 2 * 6 * 8 * 9 * 4, {}),
        ("LSTM", [[7, 2, 5], [1, 12, 5], [1, 12, 3]], [7, 1, 2, 3], 7 * 2 * 12 * (5 + 3), {}),
        ("Conv", [[2, 6, 9, 9], [8, 3, 3, 3]], [2, 8, 7, 7], 2 * 8 * 49 * 27, {}),
        ("ConvTranspose", [[2, 8, 7, 7], [8, 3, 3, 3]], [2, 3, 9, 9], 2 * 8 * 49 * 27, {}),
        ("Einsum", [[2, 3, 4], [2, 4, 5]], [2, 3, 5], 2 * 3 * 4 * 5, {"equation": "bij, bjk -> bik"}),
        ("Relu", [[3, 4]], [3, 4], 12, {}),
        ("ReduceSum", [[3, 4], None], [3], 12, {}),
        ("Reshape", [[3, 4], [2]], [4, 3], 0, {}),
        ("MatMul", [None, None], None, 0, {}),
    ],
)
def test_operations_of_a_node(
    op: str, inputs: list[list[int] | None], made: list[int] | None, count: int, attributes: dict[str, int | str]
) -> None:
    one = node(op, *range(len(inputs)), **attributes)
    assert multiply_adds(one, inputs, [made]) == count
    assert work(one, inputs, [made], 10_000) == (0 if op == "Reshape" else BYTE * 10_000)


def test_times_and_bytes_of_stages() -> None:
    """A product costs once forward and twice backward; Tanh saves what it makes, and so does what a later stage reads."""
    tasks = analysed(THREE).tasks
    assert tasks is not None
    costs = tasks.costs
    assert (costs.clock, costs.sizes) == ("million operations", "batch=1024")
    second = costs.stages[1]
    product, moved = 128 * 256 * 1024 / 1e6, BYTE * 4 * 128 * 1024 / 1e6
    assert second.forward == pytest.approx(product + 2 * moved)
    assert product < second.backward < product + 8 * moved
    assert second.weight == pytest.approx(product + BYTE * 3 * 4 * 256 * 1024 / 1e6), "and a sum is added to"
    assert [str(saved) for saved, _ in costs.expressions] == ["128*batch", "640*batch", "1029*batch/2 + 8"]
    assert [one.saved for one in costs.stages] == [128 * 1024, 640 * 1024, 1029 * 512 + 8]
    assert not costs.unbounded


def test_an_order_fits_the_stages() -> None:
    """With the stages' own times the found order is at least as fast, for these, as the one for equal times."""
    program = analysed(f"schedule: auto, {THREE}")
    assert program.tasks is not None
    stages = program.tasks.schedule.stages
    equal = auto(stages, 8, unit_costs(stages)).schedule
    assert simulate(program.tasks.schedule, program.tasks.costs).total <= simulate(equal, program.tasks.costs).total


def test_a_limit_in_bytes() -> None:
    """It is held against all that a rank keeps; what is refused says the least that is enough, and that is."""
    with pytest.raises(CompileError) as caught:
        analysed(f"schedule: 1f1b, memory: 1MB, {THREE}")
    text = str(caught.value)
    assert text.startswith("plan.yaml:3: schedule: 1f1b does not keep to memory: 1MB: rank 0 keeps")
    assert "rank 1 keeps" in text
    assert "(2 microbatches, and" in text
    least = text.rpartition("from ")[2].partition(" on")[0]
    with pytest.raises(
        CompileError, match=r"(?s)no schedule keeps to memory: 1MB: rank 1 keeps .*1 microbatch, and .*from"
    ):
        analysed(f"schedule: auto, memory: 1MB, {THREE}")
    program = analysed(f"schedule: auto, memory: {least}, {THREE}")
    assert program.tasks is not None
    kept = peaks(program.tasks.schedule, program.tasks.costs)
    assert (
        max(one + more for one, more in zip(kept, program.tasks.costs.fixed, strict=True)) <= parse_limit(least).amount
    )
    assert max(program.tasks.costs.fixed) > 2 * 4 * 256 * 1024, "the parameters and the sum of their gradients"
    assert sum(program.tasks.costs.fixed) > 2 * STATE
    with pytest.raises(CompileError, match="'batch' has no largest size"):
        analysed(f"memory: 1GB, {THREE}", head="")
    assert analysed(f"memory: 3 microbatches, {THREE}", head="").tasks is not None


def test_the_dump_shows_them_and_files_keep_no_more(tmp_path: Path) -> None:
    plan = f"ranks: 3\npipeline: {{microbatches: 8, schedule: zb_h1, {THREE}}}\n" + train(LOSSES["squares"], 1)
    report = compile_source(from_text(NET, WEIGHTS), parse_plan(plan, "plan.yaml"), tmp_path / "build")
    lines = (tmp_path / "build" / "ir" / "schedule.txt").read_text().splitlines()
    assert lines[2] == "# Costs: million operations of the model's sizes, with batch=1024"
    assert lines[3].startswith("# Stage 0: rank 0   F ")
    assert lines[3].endswith(", saves 128*batch bytes   read by 1")
    assert " W " not in lines[3], "the first stage's backward pass is whole"
    assert " W " in lines[4]
    assert "keeps 3 microbatches: 384*batch bytes; besides at least" in lines[7]
    found, costs, schedule = check(tmp_path / "build"), report.program.tasks.costs, report.program.tasks.schedule
    assert costs is not None
    assert schedule is not None
    shares = [eval(one.bytes, {"batch": 1024}) for one in found.memory]
    estimates = [one + more for one, more in zip(peaks(schedule, costs), costs.fixed, strict=True)]
    assert all(share <= estimate for share, estimate in zip(shares, estimates, strict=True)), "what the files keep"
