"""Tasks as functions of a rank file: there once however many microbatches there are, and run by one session each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from batch_in_parts import train
from equivalence import compiled
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import STEP_ALONE, compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.artifact.format import TASKS
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.errors import ArtifactError, RankError
from partc.runtime.execution.in_process import load_local
from partc.runtime.program.steps import Segment
from pipelines_case import CLASSES, pipeline, placed, small_gpt
from run_steps import steps_of
from sharded_models import with_weights
from training_equivalence import source_of

Built = Callable[..., Path]
HALVES = "ranks: 2\nsymbols: {batch: {divisor: 8}}\n" + placed("0 1")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The artifact of a GPT in two stages, by microbatches and schedule; what is asked for again is there."""
    source = source_of(small_gpt(2))

    @functools.cache
    def compiled(count: int, schedule: str = "1f1b") -> Path:
        text = HALVES + train(CLASSES, 1, "{type: momentum, lr: 0.1}") + pipeline(count, schedule)
        folder = tmp_path_factory.mktemp("halves") / "build"
        compile_source(Source(source.model.clone()), parse_plan(text, "plan.yaml"), folder, kinds=STEP_ALONE)
        return folder

    return compiled


def models(folder: Path) -> list[onnx.ModelProto]:
    """The rank files of an artifact."""
    return [onnx.load(folder / f"rank_{rank:04d}.onnx", load_external_data=False) for rank in range(2)]


def tasks(model: onnx.ModelProto) -> dict[str, onnx.FunctionProto]:
    return {one.name: one for one in model.functions if one.domain == TASKS}


def row(model: onnx.ModelProto) -> str:
    return " ".join(node.name for node in model.graph.node if node.domain == TASKS)


def test_a_body_is_there_once_and_the_main_graph_is_the_row(built: Built) -> None:
    """ONNX accepts the file; only the row is longer with more microbatches."""
    two, four = models(built(2)), models(built(4))
    onnx.checker.check_model(str(built(2) / "rank_0000.onnx"))
    assert row(two[0]) == "0F0 0F1 0B0 0B1"
    assert row(two[1]) == "1F0 1B0 1F1 1B1"
    for few, many in zip(two, four, strict=True):
        assert tasks(few).keys() == tasks(many).keys()
        for name, function in tasks(few).items():
            assert [node.op_type for node in function.node] == [node.op_type for node in tasks(many)[name].node]
        calls = 2 * 2
        messages = 2 * 2
        assert len(many.graph.node) == len(few.graph.node) + calls + messages
        assert many.ByteSize() < 1.5 * few.ByteSize()


def test_a_body_has_one_session(built: Built) -> None:
    """Three sessions a stage at most, but for what adds at indices, and as many beside the row with more microbatches."""
    beside: dict[int, set[int]] = {}
    for count in (2, 4):
        for rank, model in enumerate(models(built(count, "zb_h1"))):
            segments = [step for step in steps_of(model, "file") if isinstance(step, Segment)]
            bodies = {id(one.formal): one for one in segments if one.task}
            alone = [one for one in bodies.values() if any(node.op_type == "ScatterND" for node in one.nodes)]
            assert len(tasks(model)) <= len(bodies) <= len(tasks(model)) + 2 * len(alone)
            assert len(tasks(model)) <= 3
            assert {one.task for one in segments if one.task} == {*row(model).split()}
            beside.setdefault(rank, set()).add(len({id(one.formal) for one in segments}) - len(bodies))
    assert all(len(counts) == 1 for counts in beside.values())


def test_sums_lie_where_the_first_zeros_lay_and_weights_are_not_copied(built: Built) -> None:
    """No task makes a copy of a weight, and what a task adds to takes no memory of its own."""
    for model in models(built(4)):
        for function in tasks(model).values():
            weights = [name for name in function.input if name.endswith((".weight", ".Transpose"))]
            assert not any(name.endswith(".Transpose") for name in weights)

    with load_local(built(4)) as ranks:
        for one in ranks.ranks:
            program = one._program
            made = [name for step in program.steps if isinstance(step, Segment) for name in step.outputs]
            sums = [name for name in made if ".grad.sum.next" in name and name in program.values.slots]
            found = {program.arenas.aliases.get(name, name) for name in sums}
            assert found
            assert all(name.endswith(".grad.sum.zeros") for name in found)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("function", "is a call of 'F9', which is not a function of the file"),
        ("microbatch", "is of no microbatch"),
        ("operand", "has other numbers of inputs and outputs than"),
    ],
)
def test_forged_calls_are_refused(fault: str, words: str, built: Built) -> None:
    model = models(built(2))[0]
    call = next(node for node in model.graph.node if node.domain == TASKS)
    if fault == "function":
        call.op_type = "F9"
    elif fault == "microbatch":
        del call.attribute[:]
    else:
        del call.input[-1]
    for reader in (unrolled, steps_of):
        with pytest.raises(ArtifactError, match=words):
            reader(model, "rank_0000.onnx")


PICK = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x, float[batch] at) => (float[batch, 8] y) <float[6, 8] w, float[5, 8] table> {
    [up] a = MatMul (x, w)
    [ids] ids = Cast <to = 7> (at)
    [look] g = Gather (table, ids)
    [add] y = Add (a, g)
}"""


def test_a_failure_names_the_task_and_its_microbatch(tmp_path: Path) -> None:
    """An op that fails, and messages, of which reports of what ranks wait for are made."""
    plan = "ranks: 2\nsymbols: {batch: {divisor: 8}}\nplacement: {up: 0, look: 1, add: 1}\n" + pipeline(4, "1f1b")
    compiled(with_weights(PICK, {"w": (6, 8), "table": (5, 8)}), plan, tmp_path)
    at = np.zeros(8, np.float32)
    at[5] = 99
    with load_local(tmp_path) as program:
        texts = [[str(step) for step in one._program.steps] for one in program.ranks]
        with pytest.raises(RankError, match=r"rank 1 failed in 1F2: .*Gather"):
            program(x=np.ones((8, 6), np.float32), at=at)
    assert "Send of 'a.2' to rank 1 (up, 0F2)" in texts[0]
    assert "Recv of 'a.2' from rank 0 (up, 0F2)" in texts[1]
