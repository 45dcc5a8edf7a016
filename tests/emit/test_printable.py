"""What a terminal would obey, in names of models, plans and artifacts, is printed as escapes by every command, and not at all by dumps."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from mutated import change_file, change_manifest
from onnx import TensorProto, helper, numpy_helper
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.runtime import ArtifactError, InputError, RankError, load_local
from partc.runtime.errors import one_line, printable

ESC, BIDI, CSI = "\x1b[31m\x1b]0;x\x07", "\u202egnp.\u2066", "\x9b2J"
BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
TOLD = r"\x1b[31m\x1b]0;x\x07"


def hostile(path: Path, line_end: str = "") -> Path:
    """A model of two steps whose nodes, values, inputs, dims and outputs have such names."""
    names = [f"{word}{ESC}{BIDI}{CSI}[red]{line_end}" for word in ("x", "w", "h", "y", "first", "second", "n")]
    x, w, h, y, first, second, n = names
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", [x, w], [h], name=first),
            helper.make_node("Gather", [h, "index"], [y], name=second, axis=1),
        ],
        f"g{ESC}",
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, [n, 4]), helper.make_tensor_value_info("index", 7, [2])],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, [n, 2])],
        [numpy_helper.from_array(np.ones((4, 3), np.float32), w)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hostile(tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text('ranks: 2\nplacement: {"first*": 0, "second*": 1}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_prints_escapes(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = ""
    for words, code in (
        (["compile", "model.onnx", "--plan", "plan.yaml"], 0),
        (["compile", "model.onnx", "--plan", "plan.yaml", "--json"], 0),
        (["inspect"], 0),
        (["inspect", "--node", "*"], 0),
        (["inspect", "--rank", "1"], 0),
        (["check"], 0),
        (["plan", "model.onnx"], 0),
        (["run", "--in-process", "--random", "1", "--set", f"n{ESC}=3"], 2),
        (["run", "--in-process", "--input", "none.npz"], 2),
        (["run", "--in-process", "--input", f"x{ESC}=none.npy"], 2),
        (["verify", "model.onnx", "--plan", "plan.yaml", "--input", "index=[0, 1]", "--random", "1"], 0),
        (["verify", "model.onnx", "--plan", "plan.yaml", "--input", "index=[0, 1]", "--random", "1", "--json"], 0),
        (["compile", f"none{ESC}.onnx"], 2),
        (["run", f"none{ESC}"], 1),
        (["compile", "model.onnx", f"--none{ESC}"], 2),
    ):
        found = invoke(words)
        out, err = capfd.readouterr()
        assert not BAD.search(out + err), (words, out + err)
        assert found == code, (words, out + err)
        told += out + err
    assert TOLD in told
    assert "[red]" in told
    for dump in (folder / "build" / "ir").iterdir():
        assert not BAD.search(dump.read_text()), dump


def test_errors_of_the_library_are_printable(folder: Path) -> None:
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    with load_local(folder / "build") as program:
        x = next(port.name for port in program.inputs if port.name != "index")
        with pytest.raises(RankError) as failed:
            program({x: np.ones((2, 4), np.float32), "index": np.array([0, 9])})
        with pytest.raises(InputError) as refused:
            program({x: np.ones((2, 4, 1), np.float32), "index": np.array([0, 1])})
    for error in (failed, refused):
        assert TOLD in str(error.value)
        assert not BAD.search(str(error.value))


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028", "\x85"])
def test_names_with_line_ends_are_refused(tmp_path: Path, end: str) -> None:
    hostile(tmp_path / "model.onnx", f"{end}model.onnx: all is well")
    with pytest.raises(CompileError) as caught:
        compile_model(tmp_path / "model.onnx", None, tmp_path / "build")
    assert len(caught.value.problems) == 7
    assert all(line.startswith(("model.onnx: the name ", "  help: ")) for line in str(caught.value).splitlines())


def test_line_ends_in_an_artifact_are_refused(folder: Path) -> None:
    build = folder / "build"
    compile_model(folder / "model.onnx", folder / "plan.yaml", build)
    manifest = (build / "manifest.json").read_text()
    change_manifest(build, lambda data: data["model"].update(name="m\nbuild: ok, 2 ranks"))
    with pytest.raises(ArtifactError, match="a text in it has a line end"):
        load_local(build)
    (build / "manifest.json").write_text(manifest)

    def rename(model: onnx.ModelProto) -> None:
        model.graph.node[0].name = "n\nbuild: ok, 2 ranks"

    change_file(build, "rank_0000.onnx", rename)
    with pytest.raises(ArtifactError, match=r"the name 'n\\nbuild: ok, 2 ranks' has a line end"):
        load_local(build)


def test_printable() -> None:
    assert printable("a\tb\n é 数 x\u202e\x1b\ud800") == "a\tb\n é 数 x\\u202e\\x1b\\ud800"
    assert one_line("a\nb") == "a\\nb"


def test_all_that_commands_print_goes_one_way() -> None:
    """Past `console.echo` and tables nothing is printed, but by what prints no names."""
    top = Path(__file__).parents[2]
    for path in sorted((top / "cli").glob("*.py")):
        found = re.findall(r"click\.echo\(|(?<![\w.])print\(", path.read_text())
        assert len(found) == (path.name == "console.py"), path
