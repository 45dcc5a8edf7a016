"""What hashes cannot tell is refused when a program is loaded: another rank's program, and a weight that is another tensor's bytes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import onnx
import pytest
from artifact_text import write
from partc.runtime import ArtifactError, load_local
from partc.runtime.artifact.format import OF_RANKS

GRAPH = """rank{rank} (float[2, 2] x{rank}) => (float[2, 2] y{rank}) <float[2, 2] w = {{{numbers}}}, float[2, 2] v = {{1, 1, 1, 1}}>
{{ h = MatMul(x{rank}, w)  y{rank} = Add(h, v) }}"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graphs = [GRAPH.format(rank=rank, numbers=", ".join(map(str, range(4 * rank, 4 * rank + 4)))) for rank in range(2)]
    folder = write(tmp_path_factory.mktemp("sound") / "a", graphs, external=True)
    for rank in range(2):
        model = onnx.load(folder / f"rank_{rank:04d}.onnx", load_external_data=False)
        onnx.helper.set_model_props(model, {OF_RANKS: str(rank)})
        save(folder, rank, model)
    return folder


def save(folder: Path, rank: int, model: onnx.ModelProto) -> None:
    """The model as a rank's file, with its hash in the manifest."""
    name, raw = f"rank_{rank:04d}.onnx", model.SerializeToString()
    (folder / name).write_bytes(raw)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_the_sound_artifact_is_loaded(sound: Path) -> None:
    with load_local(sound) as program:
        assert [port.name for port in program.outputs] == ["y0", "y1"]


def test_the_program_of_another_rank_is_refused(sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "a"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["programs"]["infer"]["rank_files"] = ["rank_0001.onnx", "rank_0001.onnx"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="program of ranks 1, and the manifest makes it that of ranks 0-1"):
        load_local(folder)


def test_a_weight_that_lies_where_another_tensor_does_is_refused(sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "a"))
    model = onnx.load(folder / "rank_0001.onnx", load_external_data=False)
    first, second = model.graph.initializer
    del first.external_data[:]
    first.external_data.extend(second.external_data)
    save(folder, 1, model)
    with pytest.raises(ArtifactError, match=f"its data is that of '{second.name}' in .*; it is '{first.name}'"):
        load_local(folder)
