"""Opening artifacts: a whole one opens, a changed, truncated, foreign or escaping one is refused in one line with its remedy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from artifact_text import record, write
from mutated import change_manifest
from partc.runtime import ArtifactError, load_local, open_artifact
from partc.runtime.artifact.format import MANIFEST

GRAPHS = [
    """rank0 (float[n, 2] x) => () <float[n, 3] h, float[2, 3] w = {1, 2, 3, 4, 5, 6}>
    { h = MatMul(x, w) = partc.comm.Send <peer = 1, tag = 0> (h) }""",
    "rank1 () => (float[n, 3] y) <float[n, 3] h> { h = partc.comm.Recv <peer = 0, tag = 0> () y = Neg(h) }",
]
WEIGHTS = "weights/rank_0000.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "build", GRAPHS, external=True)


def edit_model(folder: Path, rank: int, change: Callable[[onnx.ModelProto], object]) -> None:
    """Change a rank file, and its record in the manifest."""
    file = folder / f"rank_{rank:04d}.onnx"
    model = onnx.load(file, load_external_data=False)
    change(model)
    file.write_bytes(model.SerializeToString())
    change_manifest(folder, lambda data: data["files"].update({file.name: record(file).model_dump()}))


def refusal(folder: Path, rank: int | None = 0, trust: bool = False) -> str:
    """The message, which ends with a remedy, its paths from the folder on."""
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder, rank=rank, trust=trust)
    lines = str(caught.value).splitlines()
    assert lines[-1].startswith("  help: "), lines
    return "\n".join(lines[:-1]).replace(str(folder), "build")


def test_a_whole_artifact_opens(folder: Path) -> None:
    artifact = open_artifact(folder, rank=0)
    assert artifact.manifest.ranks == 2
    assert [node.op_type for node in artifact.model(1).graph.node] == ["Recv", "Neg"]


def test_no_artifact(tmp_path: Path, folder: Path) -> None:
    assert refusal(tmp_path / "nowhere") == "build: there is no such folder"
    assert refusal(tmp_path) == "build: has no manifest.json"
    (folder / MANIFEST).write_text("{")
    assert refusal(folder).startswith("build/manifest.json: is not JSON: ")
    (folder / MANIFEST).write_text("[" * 100_000)
    assert refusal(folder).startswith("build/manifest.json: is not JSON: ")
    (folder / MANIFEST).write_bytes(b"\xff\xfe\x00")
    assert refusal(folder).startswith("build/manifest.json: is not JSON: ")


def test_another_format(folder: Path) -> None:
    change_manifest(folder, lambda data: data.update(format=1, more=1))
    assert refusal(folder) == "build/manifest.json: is of format 1, this partc reads format 3"
    with pytest.raises(
        ArtifactError, match="help: compile again with this partc, its checkpoints stay valid; or install"
    ):
        open_artifact(folder)


def test_every_violation_of_the_schema_is_told(folder: Path) -> None:
    change_manifest(folder, lambda data: (data.update(ranks=0), data["inputs"][0].pop("type"), data.update(extra=3)))
    assert refusal(folder) == (
        "build/manifest.json: ranks: Input should be greater than or equal to 1\n"
        "build/manifest.json: programs.infer.inputs.0.type: Field required\n"
        "build/manifest.json: extra: Extra inputs are not permitted"
    )


def test_a_mesh_that_is_not_all_ranks(folder: Path) -> None:
    change_manifest(folder, lambda data: data.update(mesh={"dp": 3, "tp": 5}))
    assert "the mesh {'dp': 3, 'tp': 5} is not a grid of " in refusal(folder)
    change_manifest(folder, lambda data: data.update(mesh={"dp": -1, "tp": -data["ranks"]}))
    assert "mesh.dp: Input should be greater than or equal to 1" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["inputs"][0].update(ranks=[0, 2]), "input 'x' names rank 2: the ranks are 0 to 1"),
        (
            lambda data: data["transfers"][0].update(target=0),
            "transfer 0 of 'h' goes from rank 0 to 0: two different ranks",
        ),
        (
            lambda data: data["transfers"].append(data["transfers"][0]),
            "transfer 0 of 'h': another transfer has the same tag",
        ),
        (
            lambda data: data["transfers"][0].update(shape=["os.x"]),
            "transfer 0 of 'h': 'os.x' is not an expression over dims",
        ),
        (
            lambda data: data["outputs"][0].update(shape=["n + k"]),
            "output 'y': the dim 'n + k' needs 'k', which is not a symbol",
        ),
    ],
)
def test_contradictions_in_the_manifest(folder: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    change_manifest(folder, change)
    assert message in refusal(folder)


def test_missing_truncated_and_changed_files(folder: Path) -> None:
    weights = folder / WEIGHTS
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    assert refusal(folder) == f"build/{WEIGHTS}: has {len(data) - 1} bytes, the manifest says {len(data)}"
    assert refusal(folder, trust=True) == f"build/{WEIGHTS}: has {len(data) - 1} bytes, the manifest says {len(data)}"
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert refusal(folder).startswith(f"build/{WEIGHTS}: was changed: its SHA-256 is ")
    open_artifact(folder, rank=0, trust=True)
    weights.unlink()
    assert refusal(folder) == f"build/{WEIGHTS}: is missing"
    open_artifact(folder, rank=1)


def test_a_file_that_the_manifest_does_not_list(folder: Path) -> None:
    change_manifest(folder, lambda data: data["files"].pop(WEIGHTS))
    assert refusal(folder) == f"build/{WEIGHTS}: is needed, but the manifest does not list it"


def test_a_file_that_is_no_model(folder: Path) -> None:
    file = folder / "rank_0000.onnx"
    file.write_bytes(b"\xff" * 50)
    change_manifest(folder, lambda data: data["files"].update({file.name: record(file).model_dump()}))
    assert refusal(folder) == "build/rank_0000.onnx: is not an ONNX model"


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "weights/../../secret", "C:\\secret", "..\\secret", ""])
def test_a_weight_outside_the_folder(folder: Path, path: str) -> None:
    def move(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].external_data[0].value = path

    (folder.parent / "secret").write_bytes(b"0" * 1000)
    edit_model(folder, 0, move)
    assert refusal(folder) == (
        f"build: the path '{path}' leaves the folder\n  a file of an artifact lies inside its folder"
    )


def test_a_weight_behind_a_link(folder: Path) -> None:
    secret = folder.parent / "secret"
    (folder / WEIGHTS).rename(secret)
    (folder / WEIGHTS).symlink_to(secret)
    assert refusal(folder).startswith(f"build: the path '{WEIGHTS}' leaves the folder")


@pytest.mark.parametrize(("key", "value"), [("offset", "9000"), ("length", "9000"), ("offset", "-8"), ("offset", "x")])
def test_a_weight_outside_its_file(folder: Path, key: str, value: str) -> None:
    def move(model: onnx.ModelProto) -> None:
        next(item for item in model.graph.initializer[0].external_data if item.key == key).value = value

    edit_model(folder, 0, move)
    expected = (
        "weight 'w' has external data that is not at"
        if value == "x"
        else "build/rank_0000.onnx: weight 'w' lies at bytes"
    )
    assert refusal(folder).startswith(expected)


def test_a_file_and_a_manifest_that_differ(folder: Path) -> None:
    def drop(data: dict[str, Any]) -> None:
        data["transfers"] = []
        data["outputs"] = []

    change_manifest(folder, drop)
    with pytest.raises(ArtifactError) as caught:
        load_local(folder)
    assert (
        str(caught.value)
        .splitlines()[0]
        .endswith("rank_0000.onnx: the manifest lists no transfer 0 for the Send of 'h' to rank 1 (net.h)")
    )


def test_a_removed_receive_is_named(folder: Path) -> None:
    edit_model(folder, 1, lambda model: model.graph.node.pop(0))
    with pytest.raises(ArtifactError) as caught:
        load_local(folder)
    assert (
        str(caught.value)
        .splitlines()[0]
        .endswith("rank_0001.onnx: Neg (net.y) needs the value 'h', which nothing before it makes")
    )


def test_an_op_that_onnxruntime_does_not_have(folder: Path) -> None:
    def rename(model: onnx.ModelProto) -> None:
        model.graph.node[1].op_type = "Negate"

    edit_model(folder, 1, rename)
    with pytest.raises(ArtifactError, match=r"onnxruntime \S+ does not load Negate \(net.y\): "):
        load_local(folder)


def test_importing_the_runtime_imports_nothing_heavy() -> None:
    heavy = ("onnx", "onnxruntime", "numpy", "mpi4py", "pydantic")
    script = f"import sys, partc.runtime; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_one_rank_needs_no_mpi(tmp_path: Path) -> None:
    write(tmp_path, ["rank0 (float[n] x) => (float[n] y) { y = Neg(x) }"])
    script = f"""
import sys, numpy, partc.runtime
print(partc.runtime.load({str(tmp_path)!r})(x=numpy.ones(2, "float32"))["y"].tolist(), "mpi4py" in sys.modules)
"""
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[-1.0, -1.0] False\n"
    )
