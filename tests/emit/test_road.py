"""The road: passes in one tuple, each of which gives a program of its own; dumps, tasks and failures name where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from partc.compiler import pipeline
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Loaded, Lowered, Sharded, Targeted
from partc.compiler.ir.programs import Comm, TaskKind
from partc.compiler.lower.local_view import Localized
from partc.compiler.plan.read import parse_plan
from partc.compiler.verify import VARIABLE, InvalidProgram
from sharded_models import BLOCK_STYLES, block

PLAN = f"""ranks: 4
mesh: {{dp: 2, tp: 2}}
symbols: {{batch: {{divisor: 2}}}}
dataset: {{x: [dp, null, null], t: [dp, null, null]}}
sharding: {{{BLOCK_STYLES}}}
train:
  loss: {{type: mean_squared, prediction: y, target: t}}
  optimizer: {{type: momentum, lr: 0.1, shard: dp}}
  clip: {{norm: 1.0}}
"""


def started(plan: str = PLAN) -> Loaded:
    source = Source(from_proto(block(), Path("model.onnx")))
    return pipeline.start(source, parse_plan(plan, "plan.yaml"), "model.onnx")


def contents(program: Loaded) -> dict[str, Any]:
    """What a program holds, by field; of its local view all that a pass could write into."""
    found = {
        name: list(getattr(program, name, {}).items()) for name in ("values", "symbols", "placement", "at", "paths")
    }
    found["model"] = [(node, *node.inputs, *node.outputs, *node.attributes) for node in program.model.graph]
    choices = program.choices if isinstance(program, Sharded) else {}
    found["choices"] = [(instance, dict(choice.axes), choice.passing) for instance, choice in choices.items()]
    if isinstance(program, Localized):
        comm = program.local.comm
        found["table"] = [*comm.values.infos.items(), *comm.values.at.items()]
        found["events"] = [len(comm.events), *comm.groups, *comm.masked]
        job = comm.job
        found["ops"] = [*job.steps, *job.program]
        found["records"] = [
            (value, ranks) for some in (job.listed, job.constants, job.state, job.outputs) for value, _, ranks in some
        ]
        found["created"] = [*job.created.items()]
        found["types"] = [(value, value.of, value.shape) for value, _, _ in job.listed]
    return found


def test_no_pass_changes_the_program_that_it_is_given() -> None:
    program = pipeline.run_passes(started(), pipeline.unpack)
    for step in pipeline.PASSES[pipeline.PASSES.index(pipeline.unpack) + 1 :]:
        before = contents(program)
        after = step(program)
        assert contents(program) == before, step.__name__
        program = after


def test_every_op_knows_its_task() -> None:
    program = pipeline.run_passes(started(), pipeline.check_budget)
    parameters = {one.parameter for part in program.parts for one in part.state if one.parameter}
    for part in program.parts:
        tasks = [step.task for step in part.steps]
        forward = max(k for k, one in enumerate(tasks) if one is TaskKind.FORWARD)
        assert tasks.index(TaskKind.BACKWARD) > forward
        sent = {str(one): step.task for step in part.steps if isinstance(step, Comm) for one in step.makes}
        reduced = {task for name, task in sent.items() if name.removesuffix(".grad") in parameters}
        assert reduced == {TaskKind.UPDATE}, "the gradients of parameters are reduced once a step"
        assert sent["gradients.square_norm"] is TaskKind.UPDATE
        assert TaskKind.BACKWARD in sent.values(), "cotangents are reduced where tensor parallel layers meet"


def broken(program: Loaded) -> Loaded:
    raise KeyError("h")


def refused(program: Loaded) -> Loaded:
    raise CompileError(Problem("plan.yaml:3", "is not to be had"))


def emptied(program: Localized) -> Lowered:
    lowered = pipeline.lower(program)
    return pipeline.replace(lowered, parts=lowered.parts[1:])


@pytest.mark.parametrize("plant", [broken, refused])
def test_a_pass_that_fails_is_named(plant: pipeline.Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PASSES", (pipeline.normalize, plant))
    with pytest.raises((KeyError, CompileError)) as caught:
        pipeline.run_passes(started(), plant)
    assert caught.value.__notes__ == [f"in the pass '{plant.__name__}'"]


def lost_forward(program: Targeted) -> Localized:
    after = pipeline.localize(program)
    del after.local.comm.job.steps[1]
    return after


def late_forward(program: Localized) -> Localized:
    after = pipeline.update(program)
    job = after.local.comm.job
    job.steps.append(job.steps.pop(0))
    return after


def silent_rank(program: Localized) -> Localized:
    after = pipeline.differentiate(program)
    steps = after.local.comm.job.steps
    at = next(k for k, (step, ranks) in enumerate(steps) if isinstance(step, Comm) and ranks & 2)
    steps[at] = steps[at][0], steps[at][1] & ~2
    return after


PLANTED = {
    lost_forward: (pipeline.localize, "rank 0: .* reads '.*', which it does not have"),
    late_forward: (pipeline.update, "rank 0: .* is forward, and stands behind .*, which is not"),
    silent_rank: (pipeline.differentiate, "rank 1: it takes no part in the "),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_ranks_do_is_verified_before_it_is_finished(plant: pipeline.Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    in_place_of, told = PLANTED[plant]
    passes = tuple(plant if step is in_place_of else step for step in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    with pytest.raises(InvalidProgram, match=told) as caught:
        pipeline.run_passes(started(), pipeline.check_budget, verify_passes=True)
    assert f"the pass '{plant.__name__}'" in str(caught.value)


def test_verification_is_asked_for_by_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES[: pipeline.PASSES.index(pipeline.lower)], emptied))
    assert len(pipeline.run_passes(started(), emptied).parts) == 3
    with pytest.raises(InvalidProgram, match="the pass 'emptied' made a program that is not valid"):
        pipeline.run_passes(started(), emptied, verify_passes=True)


def test_a_dump_of_every_pass_is_written(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    pipeline.compile_model(tmp_path / "model.py", None, tmp_path / "build", dump_ir=True, check=False)
    written = sorted(path.name for path in (tmp_path / "build" / "ir").glob("[0-9]*.ir"))
    wanted = sorted(f"{k}_{step.__name__}.ir" for k, step in enumerate(pipeline.PASSES, 1))
    assert written == wanted


MODEL = """from partc.compiler import Input, nn
model = nn.Linear(4, 3)
inputs = {"x": Input([2, 4], "float32")}
"""


def test_the_page_of_one_value_quotes_the_dumps(tmp_path: Path) -> None:
    """What compiler/README.md shows of `conv1.weight` is what a compile writes; what it names is there."""
    root = Path(__file__).parents[2]
    sample, page = root / "samples" / "lenet", (root / "compiler" / "README.md").read_text()
    page = page.split("## One value from end to end\n")[1].split("\n## ")[0]
    pipeline.compile_model(sample / "model.py", sample / "train.yaml", tmp_path / "build", dump_ir=True)
    written = {
        line.strip() for path in (tmp_path / "build" / "ir").glob("*.ir") for line in path.read_text().splitlines()
    }
    quoted = [line.strip() for line in page.splitlines() if line.startswith("    ")]
    assert len(quoted) == 7
    assert [line for line in quoted if line not in written] == []
