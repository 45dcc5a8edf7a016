"""An export of a folder is kept for the next command, and is used only for what it is an export of."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from partc.cli.main import invoke
from partc.cli.output.stats import all_rank_stats
from partc.compiler.cost.memory import memory_of_ranks
from partc.compiler.emit.weights import INLINE_BYTES
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.huggingface import export_cache
from partc.compiler.frontend.huggingface.safetensors_files import stored_tensors
from partc.compiler.frontend.torch import compare_with_torch
from partc.compiler.frontend.torch.torch_model import torch_model_of
from partc.compiler.pipeline import Report, compile_model
from partc.runtime import load_local
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.tensors.stored_weight import numbers
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import ArtifactError
from partc.runtime.files import replace as replace_module
from safetensors.numpy import save_file

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip(
    "transformers", "5.0", reason='needs transformers: pip install "partc[transformers]"'
)
PLAN = """ranks: 2
mesh: {tp: 2}
sharding: {"**.{q_proj,gate_proj,up_proj}": colwise, "**.{o_proj,down_proj}": rowwise, model.embed_tokens: rowwise}
generate: {slots: 2, length: 16, chunk: 4}
"""


@pytest.fixture(scope="module")
def programs() -> list[Any]:
    """What torch exported of the folder, for tests of what becomes of it: an export takes four seconds."""
    return []


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, programs: list[Any]) -> Iterator[Path]:
    """A place with a folder of bfloat16 weights, a plan, and the artifact of a compile that kept its export."""
    root, export = tmp_path_factory.mktemp("kept"), torch.onnx.export

    def remembered(*args: Any, **kwargs: Any) -> Any:
        programs.append(export(*args, **kwargs))
        return programs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", remembered)
        patch.setenv("PARTC_CACHE", str(root / "cache"))
        _save(root / "llama", 0)
        (root / "plan.yaml").write_text(PLAN)
        report = _compile(root, "first")
        assert report.exported
        assert report.is_export_cached
        patch.setattr(torch.onnx, "export", export)
        yield root


def _save(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=16, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _compile(root: Path, name: str) -> Report:
    return compile_model(root / "llama", root / "plan.yaml", root / name)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def without_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch exports nothing."""

    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch exports")

    monkeypatch.setattr(torch.onnx, "export", refused)


@pytest.mark.usefixtures("without_exporter")
def test_a_second_compile_is_the_first_one_byte_by_byte(kept: Path) -> None:
    report = _compile(kept, "second")
    assert not report.exported
    assert _files(kept / "second") == _files(kept / "first")
    assert any("bfloat16 becomes float32" in warning for warning in report.warnings)


@pytest.mark.usefixtures("without_exporter")
def test_weights_are_those_of_the_folder_now(kept: Path, tmp_path: Path) -> None:
    """Other numbers of the same shapes, and torch itself to compare with."""
    _save(tmp_path / "llama", 1)
    source = load(tmp_path / "llama", cache=True, compare=True)
    wanted = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "llama", dtype=torch.float32, local_files_only=True
    )
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = source.model.graph.initializers[name].const_value
    assert tensor is not None
    assert (tensor.numpy() == wanted.state_dict()[name].numpy()).all()
    torch_model = torch_model_of(source.model)
    assert torch_model is not None
    assert (torch_model.tensors()[name].detach().numpy() == tensor.numpy()).all()
    (tmp_path / "plan.yaml").write_text(PLAN)
    assert invoke(["verify", str(tmp_path / "llama"), "--plan", str(tmp_path / "plan.yaml")]) == 0


def test_an_export_is_compared_once_whoever_kept_it(
    kept: Path, programs: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared = list[str]()

    def compare(model: ir.Model) -> list[str]:
        compared.append(str(model.graph.name))
        return ["it is too large"]

    monkeypatch.setenv("PARTC_CACHE", str(tmp_path))
    monkeypatch.setattr(compare_with_torch, "compare_with_torch", compare)
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: programs[0])
    for wanted, count in ((False, 0), (False, 0), (True, 1), (True, 1), (False, 1)):
        source = load(kept / "llama", cache=True, compare=wanted)
        assert len(compared) == count
        assert ("it is too large" in source.declared.warnings) is (count > 0)
        monkeypatch.setattr(torch.onnx, "export", None)


def test_a_key_is_of_all_that_an_export_depends_on(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kept / "llama"
    files = stored_tensors(folder)
    keys = [export_cache.key_of(folder, files, True), export_cache.key_of(folder, files, False)]
    keys.append(export_cache.key_of(folder, {name: one for name, one in files.items() if "norm" not in name}, True))
    config = folder / "config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "rms_norm_eps": 0.5}))
    keys.append(export_cache.key_of(folder, files, True))
    config.write_text(before)
    monkeypatch.setattr(export_cache, "_versions", lambda: {"torch": "another"})
    keys.append(export_cache.key_of(folder, files, True))
    monkeypatch.undo()
    monkeypatch.setattr(export_cache, "_code", lambda: "another")
    keys.append(export_cache.key_of(folder, files, True))
    assert len({*keys}) == len(keys)


def test_a_damaged_entry_is_removed(kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (entry,) = (kept / "cache/exports").iterdir()
    monkeypatch.setenv("PARTC_CACHE", str(tmp_path))
    copy = tmp_path / "exports" / entry.name
    copy.parent.mkdir(mode=0o700)
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)
    assert export_cache.read(entry.stem, "llama") is None
    assert not copy.exists()


def test_a_place_that_cannot_be_used_is_named_and_nothing_is_kept(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (entry,) = (kept / "cache/exports").iterdir()
    export = export_cache.read(entry.stem, "llama")
    assert export is not None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PARTC_CACHE", str(tmp_path / "file"))
    assert "the export is not kept" in export_cache.keep("key", "llama", export)
    monkeypatch.setenv("PARTC_CACHE", str(tmp_path))
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports").chmod(0o777)
    assert "others may write into" in export_cache.keep("key", "llama", export)
    assert not [*(tmp_path / "exports").iterdir()]
    (tmp_path / "exports" / entry.name).write_bytes(entry.read_bytes())
    assert export_cache.read(entry.stem, "llama") is None
    (tmp_path / "exports").chmod(0o700)
    assert export_cache.read(entry.stem, "llama") is not None
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert export_cache.read(entry.stem, "llama") is None
    assert "is another user's" in export_cache.keep("key", "llama", export)
    monkeypatch.setenv("PARTC_CACHE", "")
    assert export_cache.keep("key", "llama", export) == ""


def test_a_folder_that_may_only_be_read_is_read(kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    (entry,) = (kept / "cache/exports").iterdir()
    monkeypatch.setattr(os, "utime", refused)
    assert export_cache.read(entry.stem, "llama") is not None
    monkeypatch.setattr(export_cache, "remove_file", refused)
    monkeypatch.setattr(export_cache, "_export", refused)
    assert export_cache.read(entry.stem, "llama") is None


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "make room on the disk"), (errno.EROFS, "give a place that you may write to")]
)
def test_a_full_or_read_only_place_keeps_nothing_and_is_named(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, remedy: str
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    (entry,) = (kept / "cache/exports").iterdir()
    export = export_cache.read(entry.stem, "llama")
    assert export is not None
    monkeypatch.setenv("PARTC_CACHE", str(tmp_path))
    monkeypatch.setattr(replace_module, "take_place", refused)
    told = export_cache.keep("key", "llama", export)
    assert f"{tmp_path}/exports/key.onnx: cannot be written: {os.strerror(number)}; {remedy}, or name another" in told
    assert not [*(tmp_path / "exports").iterdir()]


def test_two_that_keep_one_export_leave_a_whole_one(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (entry,) = (kept / "cache/exports").iterdir()
    export = export_cache.read(entry.stem, "llama")
    assert export is not None
    monkeypatch.setenv("PARTC_CACHE", str(tmp_path))
    monkeypatch.setattr(export_cache, "MOST_BYTES", 3 * entry.stat().st_size)
    assert export_cache.keep("key", "llama", export) == ""

    def keep_and_read(number: int) -> list[str]:
        texts = [export_cache.keep("key", "llama", export) for _ in range(5)]
        texts += [export_cache.keep(f"own{number}{k}", "llama", export) for k in range(3)]
        return texts + ["damaged"] * (export_cache.read(f"own{number}2", "llama") is None)

    with ThreadPoolExecutor(2) as pool:
        assert {text for texts in pool.map(keep_and_read, range(2)) for text in texts} <= {"", "damaged"}
    assert all(export_cache.read(path.stem, "llama") is not None for path, _, _ in export_cache.entries())


def test_an_export_of_a_folder_that_changes_meanwhile_is_not_kept(
    kept: Path, programs: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(kept / "llama", tmp_path / "llama")
    monkeypatch.setenv("PARTC_CACHE", str(tmp_path / "cache"))
    config = tmp_path / "llama/config.json"

    def change(*_: Any, **__: Any) -> Any:
        config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 0.5}))
        return programs[0]

    monkeypatch.setattr(torch.onnx, "export", change)
    source = load(tmp_path / "llama", cache=True)
    assert any("was changed meanwhile; compile it again" in warning for warning in source.declared.warnings)
    assert export_cache.entries() == []


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PARTC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert export_cache.cache_folder() is None


def test_what_was_not_used_for_longest_makes_room(kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (entry,) = (kept / "cache/exports").iterdir()
    export = export_cache.read(entry.stem, "llama")
    assert export is not None
    monkeypatch.setenv("PARTC_CACHE", str(tmp_path))
    for k, key in enumerate("abc"):
        assert export_cache.keep(key, "llama", export) == ""
        os.utime(tmp_path / "exports" / f"{key}.onnx", (k, k))
    monkeypatch.setattr(export_cache, "MOST_BYTES", 2 * entry.stat().st_size)
    assert export_cache.keep("d", "llama", export) == ""
    assert [path.stem for path, _, _ in export_cache.entries()] == ["d", "c"]
    assert export_cache.model_of(export_cache.entries()[0][0]) == "llama"
    assert invoke(["cache", "clear"]) == 0
    assert export_cache.entries() == []


@pytest.fixture(scope="module")
def alone(kept: Path) -> Path:
    """A folder with the configuration alone, which is called as the folder is."""
    folder = kept / "alone/llama"
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(kept / "llama" / name, folder)
    return folder


@pytest.fixture(scope="module")
def absent(kept: Path, alone: Path) -> Path:
    """The artifact of the configuration alone."""
    report = compile_model(alone, kept / "plan.yaml", kept / "absent", weights=False)
    assert any("not compared with torch: it has no weights" in warning for warning in report.warnings)
    return kept / "absent"


def test_without_weights_programs_are_the_same(kept: Path, absent: Path) -> None:
    """A weight of a few bytes, which would stand in a program with its numbers, is in the file of weights."""
    whole, found = _files(kept / "first"), _files(absent)
    assert {name for name in whole if name.startswith("weights")} == whole.keys() - found.keys()
    for rank in range(2):
        ours, theirs = (onnx.load_model_from_string(files[f"rank_{rank:04d}.onnx"]) for files in (found, whole))
        assert ours.graph.node == theirs.graph.node
        assert list(ours.graph.value_info) == list(theirs.graph.value_info)
        inside = [{one.name for one in model.graph.initializer if one.data_location == 0} for model in (ours, theirs)]
        assert inside[1] - inside[0] <= {
            one.name for one in theirs.graph.initializer if len(one.raw_data) <= INLINE_BYTES
        }
    assert check_artifact(absent) == []


def test_without_weights_the_bytes_of_a_rank_are_those_of_the_whole_folder(kept: Path, absent: Path) -> None:
    whole, found = (open_artifact(folder) for folder in (kept / "first", absent))
    assert all_rank_stats(found, {}) == all_rank_stats(whole, {})
    ours, theirs = (memory_of_ranks(artifact, {}) for artifact in (found, whole))
    assert [one.targets[0].caches for one in ours] == [one.targets[0].caches for one in theirs]
    assert [one.targets[0].weights for one in ours] == [one.targets[0].weights for one in theirs]


@pytest.mark.parametrize("command", ["inspect", "report", "check"])
def test_an_artifact_without_weights_can_be_looked_at(absent: Path, command: str, tmp_path: Path) -> None:
    out = ["-o", str(tmp_path / "page.html")] if command == "report" else []
    assert invoke([command, str(absent), *out]) == 0


@pytest.mark.parametrize("command", ["run", "generate", "serve", "train", "eval"])
def test_an_artifact_without_weights_is_not_run(absent: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--ids", "1"] if command == "generate" else []
    assert invoke([command, str(absent), *asked]) != 0
    said = capsys.readouterr().err
    assert "the artifact has no weights, and cannot be run" in said
    assert "partc compile llama --weights FOLDER" in said
    with pytest.raises(ArtifactError, match="has no weights"):
        load_local(absent)


@pytest.mark.usefixtures("without_exporter")
def test_weights_of_another_folder_give_the_bytes_of_a_whole_one(kept: Path, absent: Path, tmp_path: Path) -> None:
    shutil.copytree(absent, tmp_path / "build")
    compile_model(kept / "alone/llama", kept / "plan.yaml", tmp_path / "build", weights=kept / "llama")
    assert _files(tmp_path / "build") == _files(kept / "first")


@pytest.mark.usefixtures("without_exporter")
def test_weights_stay_in_a_folder_by_reference(kept: Path, alone: Path, tmp_path: Path) -> None:
    """Of the folder itself, and of one beside the configuration: both artifacts are the same, and have the copied numbers."""
    compile_model(kept / "llama", kept / "plan.yaml", tmp_path / "own", by_reference=True)
    compile_model(alone, kept / "plan.yaml", tmp_path / "other", weights=kept / "llama", by_reference=True)
    assert _files(tmp_path / "own") == _files(tmp_path / "other")
    assert check_artifact(tmp_path / "own") == []
    copied, named = open_artifact(kept / "first"), open_artifact(tmp_path / "own")
    assert [*named.manifest.referenced] == ["referenced/0/model.safetensors"]
    for rank in range(2):
        whole = {one.name: one for one in copied.model(rank).graph.initializer if one.external_data}
        for weight in named.model(rank).graph.initializer:
            if weight.external_data:
                found, wanted = (
                    numbers(one, artifact.folder, artifact.manifest)
                    for one, artifact in ((weight, named), (whole.pop(weight.name), copied))
                )
                np.testing.assert_array_equal(found, wanted, weight.name)
        assert not whole


def test_weights_of_another_model_are_refused_and_nothing_is_written(
    kept: Path, alone: Path, absent: Path, tmp_path: Path
) -> None:
    before = _files(absent)
    wide = {name: np.zeros((3, 5), np.float32) for name in stored_tensors(kept / "llama")}
    save_file(wide, str(tmp_path / "model.safetensors"))
    with pytest.raises(CompileError, match=r"'model.norm.weight' is \[3, 5\]; the model's is \[8\]"):
        compile_model(alone, kept / "plan.yaml", absent, weights=tmp_path)
    assert _files(absent) == before


def test_what_depends_on_numbers_is_refused_by_the_weight(kept: Path, alone: Path, tmp_path: Path) -> None:
    """Of names that are tied only numbers tell whether the folder's are one weight."""
    both = {name: one.stored.shape for name, one in stored_tensors(kept / "llama").items()}
    both["lm_head.weight"] = both["model.embed_tokens.weight"]
    folder = tmp_path / "llama"
    shutil.copytree(alone, folder)
    save_file({name: np.zeros(shape, np.float32) for name, shape in both.items()}, str(folder / "model.safetensors"))
    with pytest.raises(CompileError, match=r"weight '.*' *: the graph depends on its numbers"):
        compile_model(folder, kept / "plan.yaml", kept / "tied", weights=False)
    assert not (kept / "tied").exists()
