"""Who opens an artifact while another one takes its place has the old one or the new one, or is told to try again: never a mix."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.artifact import manifest as artifact_of
from partc.runtime.artifact.graph import bodies as graph_of
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.replace_folder import replacing_folder
from partc.runtime.checker.check import check_artifact
from partc.runtime.communication.in_process import LocalWorld
from partc.runtime.errors import ArtifactError
from partc.runtime.execution import program as program_of

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
main (float[64] x) => (float[64] y)
<float[64] first, float[64] second> {
    [one] h = Add(x, first)
    [two] y = Add(h, second)
}"""
SUMS = {"old": 11.0, "new": 22.0}


def built(folder: Path, name: str) -> Path:
    """`y = x + 1 + 10`, each on a rank of its own; of the new one twice that."""
    model = onnx.parser.parse_model(MODEL)
    for port, number in zip(model.graph.value_info, (1, 10), strict=True):
        numbers = np.full(64, number * SUMS[name] / 11, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, port.name))
    del model.graph.value_info[:]
    plan = parse_plan("ranks: 2\nplacement: {one: 0, two: 1}", "plan.yaml")
    compile_source(Source(from_proto(model, Path("model.onnx"))), plan, folder / name)
    return folder / name


class Replaced:
    """Puts the new artifact in the place of the old one at a call of what it stands for."""

    def __init__(self, out: Path, new: Path, at: int) -> None:
        self.out, self.new, self.left = out, new, at

    def now(self) -> None:
        self.left -= 1
        if self.left == -1:
            with replacing_folder(self.out) as folder:
                shutil.copytree(self.new, folder, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("both")
    return built(folder, "old"), built(folder, "new")


@pytest.mark.parametrize("trust", [True, False])
def test_a_reader_has_one_of_both(
    tmp_path: Path, both: tuple[Path, Path], trust: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    read = artifact_of.read_regular
    for at in range(6):
        out = tmp_path / f"build{at}"
        shutil.copytree(both[0], out)
        replaced = Replaced(out, both[1], at)

        def slow(path: Path, most: int | None = None, replaced: Replaced = replaced) -> bytes:
            replaced.now()
            return read(path, most)

        for module in (artifact_of, graph_of):  # manifests, and rank files
            monkeypatch.setattr(module, "read_regular", slow)
        try:
            with load_local(out, trust=trust) as program:
                found.append(str(program(x=np.zeros(64, np.float32))["y"][0]))
        except ArtifactError as error:
            found.append(str(error).removeprefix(f"{out}: "))
    again = "was replaced while it was read\n  help: try again"
    assert found == [again] * 3 + ["11.0"] * 3, "before the manifest, before the first program, the second; later"


def test_ranks_that_read_different_artifacts_are_told(tmp_path: Path, both: tuple[Path, Path]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    world = LocalWorld(2)
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(program_of.load, both[rank], world.transport(rank)) for rank in range(2)]
    for future in futures:
        with pytest.raises(ArtifactError, match="the ranks read different artifacts: it was replaced meanwhile"):
            future.result()


def test_check_is_told_to_be_done_again(
    tmp_path: Path, both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "build"
    shutil.copytree(both[0], out)
    replaced = Replaced(out, both[1], 0)
    whole = Artifact.__init__

    def slow(self: Artifact, folder: Path, trust: bool, program: str = "") -> None:
        whole(self, folder, trust, program)
        replaced.now()

    monkeypatch.setattr(Artifact, "__init__", slow)
    (told,) = check_artifact(out)
    assert (told.fact, told.help) == ("the artifact was replaced while it was checked", "check it again")
    assert check_artifact(out) == []
