"""An artifact has all programs over one state, in one manifest; any of them is loaded by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from partc.runtime import load_local
from partc.runtime.artifact.format import MANIFEST, SymbolRecord
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.manifest_file import ManifestFile
from partc.runtime.artifact.replace_folder import obstacle
from partc.runtime.errors import ArtifactError
from small_training import DATA_PARALLEL, PERCEPTRON, compiled


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("sound") / "build", PERCEPTRON, DATA_PARALLEL)


def test_each_program_is_loaded_by_its_name_and_begins_with_the_same_values(build: Path) -> None:
    rng = np.random.default_rng(5)
    batch = {"x": rng.normal(size=(4, 6)).astype(np.float32), "t": rng.normal(size=(4, 3)).astype(np.float32)}
    with load_local(build) as step, load_local(build, program="evaluate") as alone:
        assert (step.manifest.name, alone.manifest.name) == ("train", "evaluate")
        loss = alone(batch)["loss"]
        np.testing.assert_allclose(step({**batch, "lr": np.float32(0.1)})["loss"], loss, rtol=1e-6)
        assert alone(batch)["loss"] == loss, "it replaces nothing"
    with pytest.raises(ArtifactError, match="has no program 'decode'\n  help: its programs are 'train', 'evaluate'"):
        load_local(build, program="decode")


def test_the_state_is_listed_once_and_weights_are_stored_once(build: Path) -> None:
    data = json.loads((build / MANIFEST).read_text())
    assert [*data["programs"]] == ["train", "evaluate"]
    assert sorted(data["programs"]["evaluate"]["kept"]) == sorted(
        one["value"] for one in data["state"] if one["kind"] == "parameter"
    )
    assert len([*build.rglob(MANIFEST)]) == 1
    assert not [*build.glob("weights/evaluate*")]


def test_what_differs_by_program_is_the_programs_own(build: Path) -> None:
    artifact = open_artifact(build)
    main, other = (artifact.program_named(name).manifest for name in artifact.programs)
    law, lists = {"batch": SymbolRecord(min=7)}, {next(iter(main.groups)): [[1, 0]]}
    odd = other.model_copy(update={"symbols": law, "groups": lists})
    index = ManifestFile.model_validate_json(ManifestFile.of([main, odd]).model_dump_json())
    assert (index.manifest().symbols, index.manifest().groups) == (main.symbols, main.groups)
    assert (index.manifest("evaluate").symbols, index.manifest("evaluate").groups) == (law, lists)
    assert index.manifest("evaluate").state == other.state


def test_an_artifact_of_format_1_is_replaced_by_a_compile(build: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(build, tmp_path / "old"))
    data = json.loads((old / MANIFEST).read_text())
    (old / "evaluation").mkdir()
    (old / "evaluation" / MANIFEST).write_text("{}")
    data["files"]["evaluation/manifest.json"] = {"bytes": 2, "sha256": ""}
    (old / MANIFEST).write_text(json.dumps({**data, "format": 1}))
    assert obstacle(old) is None
