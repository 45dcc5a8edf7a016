"""A compile opens what it wrote: broken files, and what onnx or onnxruntime refuses, are told before anything runs; annotations last."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from equivalence import compiled, model, same_as_whole
from partc.cli.main import partc
from partc.compiler.emit.annotated import annotated
from partc.compiler.emit.rank_model import RankModels
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import RankProgram
from partc.compiler.pipeline import compile_source
from partc.runtime.checker.structures import structures

HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
PLAIN = f"{HEAD} m (float[4, 6] x) => (float[4, 6] y) {{ [a] h = Relu (x) [b] y = Neg (h) }}"


def test_a_broken_rank_file_is_told_as_partcs_own_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = RankModels.of

    def broken(self: RankModels, part: RankProgram) -> bytes:
        made = onnx.load_from_string(good(self, part))
        made.graph.node[1].output[0] = made.graph.node[0].output[0]
        return made.SerializeToString()

    monkeypatch.setattr(RankModels, "of", broken)
    with pytest.raises(CompileError) as error:
        compiled(model(PLAIN), "ranks: 1\n", tmp_path / "build")
    assert "rank_0000.onnx: Neg 'b': its output 'h' is defined twice\n  this is a bug in partc" in str(error.value)
    assert not (tmp_path / "build").exists()


TWO = f"""{HEAD} m (float[4, 6] x) => (float[2, 12] y, float[2, 12] z)
  {{ [a] h = Relu (x) [shape] s = Constant <value_ints = [2, 12]> () [b] y = Reshape (h, s) [c] z = Neg (y) }}"""


@pytest.mark.parametrize("planted", ["type", "numbers"])
def test_a_fault_of_one_rank_alone_is_found_in_a_node_that_all_have(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of nodes that several programs have types are inferred once: what differs about them on a later rank is not missed."""
    good = RankModels.of

    def broken(self: RankModels, part: RankProgram) -> bytes:
        made = onnx.load_from_string(good(self, part))
        if part.rank == 0:
            return made.SerializeToString()
        if planted == "type":
            for one in (*made.graph.value_info, *made.graph.output):
                if one.name in ("y", "z"):
                    one.type.tensor_type.shape.dim[1].dim_value = 13
        else:
            (shape,) = (one for one in made.graph.node if one.op_type == "Constant")
            shape.attribute[0].ints[:] = [3, 8]
        return made.SerializeToString()

    text = "ranks: 2\nplacement: {a: [0, 1], b: [0, 1], c: 1}\noutputs: cut\n"
    compiled(model(TWO), text, tmp_path / "good")
    assert len(structures(tmp_path / "good")) == 2
    monkeypatch.setattr(RankModels, "of", broken)
    with pytest.raises(CompileError) as error:
        compiled(model(TWO), text, tmp_path / "build")
    assert "rank_0001.onnx: " in str(error.value)
    assert "'y'" in str(error.value)


ALIKE = f"""{HEAD} m (float[4, 6] x) => (float[2, 12] y, float[2, 12] z)
  {{ [s] s = Constant <value_ints = [2, 12]> () [b] y = Reshape (x, s)
     [t] t = Constant <value_ints = [2, 12]> () [c] z = Reshape (x, t) }}"""


@pytest.mark.parametrize("planted", ["type", "numbers"])
def test_a_fault_of_the_second_of_two_alike_nodes_is_found(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of nodes that a program has alike types are inferred once: alike are those over the same types, and of the same shapes' numbers."""
    good = RankModels.of

    def broken(self: RankModels, part: RankProgram) -> bytes:
        made = onnx.load_from_string(good(self, part))
        if planted == "type":
            (result,) = (one for one in made.graph.output if one.name == "z")
            result.type.tensor_type.shape.dim[1].dim_value = 13
        else:
            (last,) = (one for one in made.graph.node if "z" in one.output)
            (shape,) = (one for one in made.graph.node if last.input[1] in one.output)
            shape.attribute[0].ints[:] = [3, 8]
        return made.SerializeToString()

    compiled(model(ALIKE), "ranks: 1\n", tmp_path / "good")
    (one,) = structures(tmp_path / "good")
    assert len(one.rest.graph.node) < len(one.model.graph.node)
    monkeypatch.setattr(RankModels, "of", broken)
    with pytest.raises(CompileError) as error:
        compiled(model(ALIKE), "ranks: 1\n", tmp_path / "build")
    assert "rank_0000.onnx: " in str(error.value)
    assert "'z'" in str(error.value)


TASKS = f"""{HEAD} m (float[batch, 6] x) => (float[batch, 4] y) <float[6, 4] w>
  {{ [a] h = MatMul (x, w) [b] r = Relu (h) [c] y = Neg (r) }}"""


def test_a_fault_of_one_ranks_task_alone_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose rows call the same tasks are looked at once if these do the same, too."""
    proto = onnx.parser.parse_model(TASKS)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(24, dtype=np.float32).reshape(6, 4), "w"))
    del proto.graph.value_info[:]
    good = RankModels.of

    def broken(self: RankModels, part: RankProgram) -> bytes:
        made = onnx.load_from_string(good(self, part))
        for node in (node for function in made.functions for node in function.node):
            if part.rank == 1 and node.op_type == "Relu":
                node.op_type = "Nonsense"
        return made.SerializeToString()

    text = """ranks: 4
symbols: {batch: {divisor: 2}}
placement: {a: [0, 1], b: [0, 1], c: [2, 3]}
sharding: {a: {in: [null, [1, 2]]}}
outputs: cut
pipeline: {microbatches: 2}
"""
    compiled(proto, text, tmp_path / "good")
    assert len(structures(tmp_path / "good")) == 2
    monkeypatch.setattr(RankModels, "of", broken)
    with pytest.raises(CompileError, match=r"rank_0001\.onnx: .*Nonsense"):
        compiled(proto, text, tmp_path / "build")


REFUSED = [
    f"{HEAD} m (uint16[4, 6] x) => (uint16[4, 6] y) {{ [a] y = Max (x, x) }}",
    f"{HEAD} m (double[4, 6] x) => (double[4, 6] y) {{ [a] y = Selu (x) }}",
]


@pytest.mark.parametrize("text", REFUSED, ids=["type", "kernel"])
def test_what_onnxruntime_has_no_kernel_for_is_told(text: str, tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text("ranks: 2\nplacement: {a: 1}\n")
    call = [
        "compile",
        str(tmp_path / "model.onnx"),
        "--plan",
        str(tmp_path / "plan.yaml"),
        "-o",
        str(tmp_path / "build"),
    ]
    refused = CliRunner().invoke(partc, call)
    assert isinstance(refused.exception, CompileError)
    assert "does not load the unsharded model" in str(refused.exception)
    assert "--no-check" in str(refused.exception)
    assert CliRunner().invoke(partc, [*call, "--no-check"], standalone_mode=False).exception is None
    assert (tmp_path / "build" / "manifest.json").is_file()


def test_ranks_of_one_structure_are_looked_at_once(tmp_path: Path) -> None:
    text = f"{HEAD} m (float[4, 6] x) => (float[4, 6] y) <float[6, 6] w> {{ [mm] y = MatMul (x, w) }}"
    proto = onnx.parser.parse_model(text)
    weight = np.arange(36, dtype=np.float32).reshape(6, 6)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    del proto.graph.value_info[:]
    compiled(proto, "ranks: 3\nsharding: {mm: {in: [null, [1, 3]]}}\noutputs: cut\n", tmp_path / "build")
    assert len(structures(tmp_path / "build")) == 1
    assert len([*(tmp_path / "build").glob("rank_*.onnx")]) == 3


def test_an_older_model_is_converted_no_further_than_needed() -> None:
    """From opset 21 on, onnxruntime's optimizer breaks what moves a quantized value."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 17]> m (int8[1, 4, 2] x) => (float[4, 1, 2] y) <float s = {0.05}, int8 z = {2}> {
            [dq] d = DequantizeLinear (x, s, z)
            [tr] y = Transpose <perm = [1, 0, 2]> (d)
        }"""
    )
    x = np.arange(8, dtype=np.int8).reshape(1, 4, 2)
    same_as_whole(proto, "ranks: 2\nsharding: {tr: replicate}\n", {"x": x}, rtol=0, atol=1e-6)


def again(proto: onnx.ModelProto, plan: str, out: Path, opset: int) -> tuple[Complete, Complete]:
    """A program by a plan, and by the annotations that it was written with alone, in an older opset."""
    first = compiled(proto, plan, out)
    told = onnx.load_from_string(onnx_bytes(first))
    for entry in told.opset_import:
        entry.version = opset if not entry.domain else entry.version
    return first, compile_source(Source(from_proto(told, Path("model.onnx"))), None, out).program


def onnx_bytes(program: Complete) -> bytes:
    import onnx_ir as ir

    data: bytes = ir.serde.serialize_model(annotated(program)).SerializeToString()
    return data


def test_annotations_of_an_older_opset_are_followed(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]> m (float[4, 6] x) => (float[6, 4] y) {
            [r] h = Relu (x)
            [t] y = Transpose <perm = [1, 0]> (h)
        }"""
    )
    plan = "ranks: 2\nsharding: {t: {in: [[1, 2]]}}\ndataset: {x: [2, 1]}\n"
    first, second = again(proto, plan, tmp_path / "build", 13)
    assert [str(event.op_type) for event in second.events] == [str(event.op_type) for event in first.events] != []


def test_annotations_tell_where_a_constant_is_delivered(tmp_path: Path) -> None:
    proto = model(
        f"{HEAD} m (float[4, 6] x) => (float[2] t, float[4, 6] y) <float[2] w = {{1, 2}}> {{ [c] t = Tanh (w) [n] y = Neg (x) }}"
    )
    first, second = again(proto, "ranks: 4\nplacement: {n: [0, 3, 1, 2]}\noutputs: producer\n", tmp_path / "build", 21)
    for part, other in zip(first.parts, second.parts, strict=True):
        assert [str(held.value) for held in other.outputs] == [str(held.value) for held in part.outputs]


def test_annotations_of_a_value_of_unknown_rank(tmp_path: Path) -> None:
    """Only the annotation tells how many dims the inverse has."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> m
        (float[4, 2, 2] x, float[4, 6] v) => (float[N, K, L] y, float[4, 6] z) {
            [i] y = com.microsoft.Inverse (x)
            [r] z = Relu (v)
        }"""
    )
    first, second = again(proto, "ranks: 2\nsharding: {r: {in: [[2, 1]]}}\n", tmp_path / "build", 21)
    assert len(first.events) == len(second.events)
