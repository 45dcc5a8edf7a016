"""Whatever opens a file that a user or a file names refuses what is none, at once: pipes, devices, sockets, folders, endless files."""

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_model, compile_source
from partc.compiler.plan.read import read_plan
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import ArtifactError
from partc.runtime.files.regular import NotRegularError, fault, open_regular, read_regular

SECONDS = 60


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A test that waits for a pipe fails."""
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a pipe (FIFO), and no regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, and no regular file"),
    "folder": (os.mkdir, "is a folder, and no regular file"),
    "socket": (bind, "is a socket, and no regular file"),
}


@pytest.fixture(params=KINDS)
def other(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """Something that is no regular file, and what it is said to be."""
    make, text = KINDS[request.param]
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    make(Path("other"))
    return tmp_path / "other", text


def constant(location: str, length: int = 12) -> onnx.ModelProto:
    """`y = x + w`, twice: w is a weight, and a Constant of a function, in a file."""
    where = {"location": location, "offset": "0", "length": str(length)}
    tensor = TensorProto(name="w", data_type=1, dims=[3], data_location=TensorProto.EXTERNAL)
    for key, value in where.items():
        tensor.external_data.add(key=key, value=value)
    inner = helper.make_node("Constant", [], ["c"], value=tensor)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    body = [inner, helper.make_node("Add", ["a", "c"], ["b"])]
    function = helper.make_function("own", "Shifted", ["a"], ["b"], body, opsets[:1])
    nodes = [helper.make_node("Add", ["x", "w"], ["h"]), helper.make_node("Shifted", ["h"], ["y"], domain="own")]
    ports = [helper.make_tensor_value_info(name, 1, [3]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [tensor])
    return helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=9)


def test_a_regular_file_is_read_and_a_link_to_one(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"text")
    link.symlink_to(file)
    assert (read_regular(file), read_regular(link, 4), fault(link)) == (b"text", b"text", "")
    with open_regular(file) as stream:
        assert not os.get_inheritable(stream.fileno())
    with pytest.raises(NotRegularError, match=r"has 4 bytes; at most 3 are read"):
        read_regular(file, 3)
    assert fault(tmp_path / "none") == "there is no such file"
    assert read_regular("/proc/self/stat") == b"", "a file without a size is not read"


def test_what_is_no_file_is_said(other: tuple[Path, str]) -> None:
    path, text = other
    assert fault(path) == text
    with pytest.raises(NotRegularError) as caught:
        open_regular(path)
    assert (caught.value.strerror, caught.value.filename) == (text, str(path))


def test_models_and_plans(other: tuple[Path, str]) -> None:
    path, text = other
    with pytest.raises(CompileError, match="the plan cannot be read: it is a "):
        read_plan(path)
    for ending in (".py", ".onnx"):
        path.with_suffix(ending).symlink_to(path)
        with pytest.raises(CompileError) as caught:
            load(path.with_suffix(ending))
        # a folder is a model of transformers
        assert ("the folder has no config.json" if path.is_dir() else text) in str(caught.value)


def test_weights_of_a_model(other: tuple[Path, str]) -> None:
    path, text = other
    if path.is_symlink():
        text = "points outside of the model's folder"
    model = path.parent / "model.onnx"
    onnx.save(constant(path.name), model)
    with pytest.raises(CompileError) as caught:
        load(model)
    told = [problem.fact for problem in caught.value.problems]
    assert len(told) == 2
    assert told[0].startswith("the weight 'w' ")
    assert told[1].startswith("'value' of Constant ")
    assert all(text in one for one in told)


@pytest.mark.parametrize("location", ["../w.bin", "link.bin", "folder/w.bin", "{}"])
def test_weights_out_of_the_folder(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(12))
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    (folder / "folder").symlink_to(tmp_path)
    onnx.save(constant(location.format(tmp_path / "w.bin")), folder / "model.onnx")
    with pytest.raises(CompileError) as caught:
        load(folder / "model.onnx")
    assert [problem.fact.partition(" points ")[2][:20] for problem in caught.value.problems] == [
        "outside of the model"
    ] * 2


def test_a_constant_in_a_file_comes_into_the_rank_file(tmp_path: Path) -> None:
    numbers = np.array([1, 2, 3], np.float32)
    numbers.tofile(tmp_path / "w.bin")
    onnx.save(constant("w.bin"), tmp_path / "model.onnx")
    compile_model(tmp_path / "model.onnx", None, tmp_path / "build")
    assert check_artifact(tmp_path / "build") == []
    with load_local(tmp_path / "build") as program:
        assert program(x=numbers)["y"].tolist() == [3, 6, 9]


@pytest.mark.parametrize("file", ["manifest.json", "rank_0000.onnx", "weights/rank_0000.safetensors"])
def test_files_of_an_artifact(other: tuple[Path, str], file: str) -> None:
    path, text = other
    weight = ir.tensor(np.zeros((64, 3), np.float32), name="w")
    x, w = ir.val("x", ir.DataType.FLOAT, (2, 64)), ir.val("w", const_value=weight)
    node = ir.node("MatMul", [x, w], name="product")
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[w], opset_imports={"": 21}, name="g")
    folder = path.parent / "build"
    compile_source(Source(ir.Model(graph, ir_version=11)), None, folder)
    (folder / file).unlink()
    if path.is_symlink() or path.is_dir():
        shutil.move(path, folder / file)
    else:
        os.link(path, folder / file)
    if path.is_symlink() and file != "manifest.json":
        text = "leaves the folder"
    with pytest.raises(ArtifactError) as caught:
        load_local(folder)
    assert text in str(caught.value) or "leaves the folder" in str(caught.value)
    assert check_artifact(folder) != []
