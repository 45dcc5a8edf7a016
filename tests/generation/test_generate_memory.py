"""What `partc inspect` says of a decoder's memory holds however long its sequences are: no value is larger at any position.

Steps make nothing anew, whoever joins and leaves: no plan, session or binding, and no copy of all scores.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import decoder
from onnx.reference import ReferenceEvaluator
from partc.cli.main import invoke
from partc.compiler.cost.memory import rank_memory
from partc.compiler.cost.sizes import FileSizes
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.program.rank_file import read_rank_file
from rows import of_today
from step_allocations import PLANS, VOCABULARY, compiled, made_by_steps

LENGTH, CHUNK, SLOTS = 32, 4, 2


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    onnx.save(decoder(1, ["attention_mask"]), folder / "model.onnx")
    (folder / "plan.yaml").write_text(f"ranks: 1\ngenerate: {{slots: {SLOTS}, length: {LENGTH}, chunk: {CHUNK}}}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


@pytest.mark.parametrize(("name", "rows", "tokens"), [("decode", SLOTS, 1), ("prefill", 1, CHUNK)])
def test_no_value_is_larger_than_it_is_said(name: str, rows: int, tokens: int, build: Path) -> None:
    artifact = open_artifact(build).program_named(name)
    file, model = read_rank_file(artifact, 0), artifact.model(0)
    is_open = [name for name, shape in file.declared_shapes.items() if shape is None]
    sizes = FileSizes(file, {})
    sizes.close(LENGTH - 1 + tokens)
    made = [value for node in model.graph.node for value in node.output]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=value) for value in made)
    onnx.load_external_data_for_model(model, str(build))
    step, largest = ReferenceEvaluator(model), dict[str, tuple[int, ...]]()
    given = {record.value: np.zeros(record.shape, np.float32) for record in artifact.manifest.state}
    given |= {"ids": np.ones((rows, tokens), np.int64)}
    given |= {port.name: np.full(rows, tokens) for port in artifact.manifest.inputs if port.name == "count"}
    for position in (0, 7, LENGTH - 1):
        found = step.run(made, {**given, "position": np.full(rows, position)})
        for value, array in zip(made, found, strict=True):
            largest[value] = tuple(map(max, largest.get(value, array.shape), array.shape))
    assert len(is_open) > 5
    assert {value: largest[value] for value in is_open} == {value: sizes.operand(value).sizes for value in is_open}


def test_the_slots_that_fit_are_those_of_inspect(tmp_path: Path) -> None:
    onnx.save(decoder(1), tmp_path / "model.onnx")

    def compiled_with(slots: int, memory: str = "") -> Path:
        (tmp_path / "plan.yaml").write_text(f"ranks: 1\ngenerate: {{slots: {slots}, length: 200{memory}}}\n")
        compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / f"build{slots}")
        return tmp_path / f"build{slots}"

    few, many = (rank_memory(open_artifact(compiled_with(slots)), 0, {}).peak for slots in (3, 7))
    record = open_artifact(compiled_with(3, f", memory: {many + 4096}")).generation
    assert record is not None
    assert record.room == 7, "within the bytes by which arenas are rounded"
    with pytest.raises(CompileError, match=r"of memory: weights (.*\n)+.*write slots: 2, the most that fit"):
        compiled_with(3, f", memory: {few - 1}")


def test_inspect_says_that_the_longest_sequences_count(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = rank_memory(open_artifact(build), 0, {})
    assert (memory.unknown, memory.peak > 0) == (0, True)
    assert invoke(["inspect", str(build)]) == 0
    shown = capsys.readouterr().out
    assert "+?" not in shown
    assert f"what grows with the sequences counts as in a step of sequences of {LENGTH} tokens, the longest" in shown


@pytest.mark.parametrize("layout", of_today([*PLANS], 1))
def test_a_step_makes_nothing_anew(layout: str, tmp_path: Path) -> None:
    before, made = made_by_steps(compiled(tmp_path, layout, decoder(fused=True)), 24)
    assert min(before.plans, before.sessions, before.bindings) > 0
    assert (made.steps, made.plans, made.sessions, made.bindings) == (24, 0, 0, 0)
    assert made.largest < 1 << 16 < VOCABULARY * 4 * 4
    assert made.kept < VOCABULARY * 4 * 4
