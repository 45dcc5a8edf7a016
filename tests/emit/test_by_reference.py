"""Weights that stay in the files that have them: their boxes give the bits of copied ones, and another file is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from partc.cli.main import invoke
from partc.compiler.frontend.huggingface.safetensors_files import InFile
from partc.compiler.frontend.huggingface.weights import stored_as
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.computed import WidenedTensor, box_of, in_file
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.artifact.format import SOURCE
from partc.runtime.artifact.graph.bodies import read_model
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.tensors.safetensors_stream import STORED, Stored, read_header, write_tensors
from partc.runtime.checker.check import check_artifact
from partc.runtime.checker.graph.weights import check_weights
from small_training import with_numbers
from training_equivalence import fed, tensors

TEXT = """<ir_version: 10, opset_import: ["": 21]>
net (int64[batch] ids, float[batch, 24] t) => (float[batch, 24] y)
<float[24, 36] table, float[36, 60] packed, float[20, 36] second, float[36] bias> {
    rows = Gather <axis: int = 0> (table, ids)
    [joined] joined = MatMul (rows, packed)
    q, k, v = Split <axis: int = 1, num_outputs: int = 3> (joined)
    [gate] qk = Mul (q, k)
    hidden = Add (qk, v)
    [back] back = MatMul (hidden, second)
    sum = Add (back, bias)
    head = Transpose <perm: ints = [1, 0]> (table)
    y = MatMul (sum, head)
}
"""
SHARDED = """ranks: 2
mesh: {tp: 2}
sharding: {joined: {parameters: {packed: [null, tp]}}, back: {parameters: {second: [tp, null]}}}
"""
TRAINED = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: adam, lr: 0.1}}\n"
STEP: dict[str, Any] = {"ids": np.array([3, 1, 4, 1, 5, 23]), "t": np.ones((6, 24), np.float32)}


def file_of(folder: Path, narrow: str = "float32") -> tuple[Path, dict[str, Stored]]:
    """The network's weights in a file, under other names, and what its header says."""
    numbers = {
        f"net.{name}": value.const_value.numpy().astype(STORED[narrow].numpy)
        for name, value in from_proto(with_numbers(TEXT), Path("net.onnx")).graph.initializers.items()
        if value.const_value is not None
    }
    path = folder / "net.safetensors"
    write_tensors(
        path, {name: Stored(STORED[narrow], one.shape) for name, one in numbers.items()}, lambda name: [numbers[name]]
    )
    return path, read_header(path)


def compiled(out: Path, plan: str, file: Path, stored: dict[str, Stored], by_reference: bool = True) -> Path:
    model = from_proto(with_numbers(TEXT), Path("net.onnx"))
    for name, value in model.graph.initializers.items():
        value.const_value = stored_as(InFile(file, stored[f"net.{name}"]), ir.DataType.FLOAT, name)
    compile_source(Source(model), parse_plan(plan, "plan.yaml"), out, by_reference=by_reference)
    return out


@pytest.mark.parametrize(
    ("narrow", "header", "plan"),
    [("float32", False, "ranks: 1\n"), ("float32", True, SHARDED), ("bfloat16", True, SHARDED + TRAINED)],
)
def test_they_give_the_bits_of_copied_ones(tmp_path: Path, narrow: str, header: bool, plan: str) -> None:
    """Rows and columns; outputs, and after a step of training the parameters."""
    file, stored = file_of(tmp_path, narrow)
    if not header:  # as the external data of an .onnx file are
        file.write_bytes(bytes(8) + file.read_bytes()[8:])
    found = []
    for by_reference in (True, False):
        folder = compiled(tmp_path / str(by_reference), plan, file, stored, by_reference)
        assert check_artifact(folder) == []
        assert by_reference != any(path.stat().st_size for path in folder.rglob("*.safetensors"))
        with load_local(folder, threads=1) as ranks:
            step = {**(fed(ranks, 0) if ranks.manifest.training else {}), **STEP}
            found.append({**ranks({port.name: step[port.name] for port in ranks.inputs}), **tensors(ranks)})
    assert found[0].keys() == found[1].keys()
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name], name)


def _changes(file: Path) -> Iterator[tuple[str, str]]:
    """Changes a file of weights, and gives what is said of each: its numbers, a tensor's name, its size, its place."""
    data, status = file.read_bytes(), file.stat()
    file.write_bytes(data[:-4] + b"abcd")
    yield "was written again since the artifact was compiled", "cp -p"
    file.write_bytes(data.replace(b"net.second", b"net.secund"))
    yield "has another safetensors header", "compile again"
    file.write_bytes(data + b"more")
    yield f"has {len(data) + 4} bytes, and had {len(data)}", "compile again"
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    yield "", ""
    file.rename(file.with_name("moved.safetensors"))
    yield "there is no such file", "compile again"
    os.mkfifo(file)
    yield "is a pipe", "compile again"


def test_a_file_that_changed_or_moved_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, stored = file_of(tmp_path)
    folder = compiled(tmp_path / "build", SHARDED, file, stored)
    for fact, remedy in _changes(file):
        for command in ("check", "inspect", "run"):
            asked = ["--random", "1", "--set", "batch=2"] if command == "run" else []
            if command == "run" and fact not in ("", "there is no such file"):
                continue
            assert (invoke([command, str(folder), *asked]) == 0) == (not fact), (command, fact)
            said = capsys.readouterr().err
            assert fact in said
            assert remedy in said
            assert not fact or str(file) in said
            assert "Traceback" not in said


def test_another_box_or_tensor_is_found(tmp_path: Path) -> None:
    """What a rank file says of a weight's source is held against the header of its file."""
    file, stored = file_of(tmp_path)
    folder = compiled(tmp_path / "build", SHARDED, file, stored)
    manifest = open_artifact(folder).manifest
    facts = {
        "net.first[0:10/20, 0:36/36]": "its data is that of 'net.second' in {}; it is 'net.first'",
        "net.second[0:10/10, 0:36/36]": "it has 2880 bytes of data, and its type and shape need 1440",
        "net.second[0:10/36, 0:36/20]": "its data in {}: 'net.second[0:10/36, 0:36/20]' is not a box of a tensor",
        "net.second[0:11/20, 0:36/36]": "its data in {}: 'net.second[0:11/20, 0:36/36]' is not of the shape [10, 36]",
        "net.second": "its data in {}: 'net.second' is not a box of a tensor",
    }
    for text, fact in facts.items():
        model = read_model(folder / manifest.program(0))
        (weight,) = [one for one in model.graph.initializer if one.name == "second"]
        (entry,) = [entry for entry in weight.metadata_props if entry.key == SOURCE]
        assert entry.value == "net.second[0:10/20, 0:36/36]"
        entry.value = text
        found = [found.fact for found in check_weights(folder, "rank_0000.onnx", model, manifest)]
        assert fact.format("referenced/0/net.safetensors") in found


def test_a_part_of_a_part_is_one_box_of_the_file(tmp_path: Path) -> None:
    numbers = np.arange(60, dtype=np.float32).reshape(5, 4, 3)
    (tmp_path / "w.data").write_bytes(bytes(7) + numbers.astype(ml_dtypes.bfloat16).tobytes())
    place = ("w.data", 7, 120, ir.DataType.BFLOAT16)
    file = ir.ExternalTensor(*place, shape=ir.Shape([5, 4, 3]), name="w", base_dir=tmp_path)
    outer, inner = np.s_[1:5, 1:4, 0:3], np.s_[1:3, 0:2, 1:3]
    part = box_of(box_of(WidenedTensor(file, ir.DataType.FLOAT, "w"), outer, "w"), inner, "w")
    assert isinstance(part, WidenedTensor)
    assert in_file(part.source) == (file, np.s_[2:4, 1:3, 1:3])
    np.testing.assert_array_equal(part.numpy(), numbers[outer][inner])


def test_a_model_without_files_of_weights_says_that_they_are_written(tmp_path: Path) -> None:
    model = from_proto(with_numbers(TEXT), Path("net.onnx"))
    report = compile_source(Source(model), None, tmp_path / "build", by_reference=True)
    assert any("all are written" in warning for warning in report.warnings)
    assert not report.manifest.referenced


def test_files_of_weights_that_did_not_change_are_kept(tmp_path: Path) -> None:
    """A second compile into the folder links them; what differs, or was damaged, is written, and nothing is written through a link."""
    file, stored = file_of(tmp_path)
    build = compiled(tmp_path / "build", SHARDED, file, stored, by_reference=False)
    weights = [build / f"weights/rank_{rank:04d}.safetensors" for rank in range(2)]
    first, places = [path.read_bytes() for path in weights], [path.stat().st_ino for path in weights]
    compiled(build, SHARDED, file, stored, by_reference=False)
    assert [path.stat().st_ino for path in weights] == places
    assert [path.stat().st_nlink for path in weights] == [1, 1]
    os.link(weights[1], tmp_path / "other")
    weights[0].write_bytes(first[0][:-4] + b"abcd")
    (begin,) = [one.offset + one.bytes for name, one in stored.items() if name == "net.packed"]
    with file.open("r+b") as out:
        out.seek(begin - 4)  # the last column, of rank 1
        out.write(b"abcd")
    compiled(build, SHARDED, file, stored, by_reference=False)
    assert weights[0].read_bytes() == first[0]
    assert weights[1].read_bytes() != first[1]
    assert (tmp_path / "other").read_bytes() == first[1]
    assert check_artifact(build) == []
