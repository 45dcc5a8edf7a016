"""A folder of a model of `transformers` is a model: its weights are taken by name, and what is wrong with it is said at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from partc.compiler.emit.whole import write_exported
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source, unsound
from partc.compiler.plan.read import parse_plan

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip(
    "transformers", "5.0", reason='needs transformers: pip install "partc[transformers]"'
)

SIZES: dict[str, Any] = {
    "vocab_size": 12, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In shards, as links to blobs, with tied embeddings, one weight and the configuration in bfloat16.

    JSON has no infinity, so that transformers writes an object for it, and decodes that.
    """
    root = tmp_path_factory.mktemp("cache")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, tie_word_embeddings=True)
    model = transformers.MixtralForCausalLM(config)
    model.model.norm.to(torch.bfloat16)
    model.save_pretrained(root / "blobs", max_shard_size="2KB")
    rotary = {"rope_type": "default", "rope_theta": {"__float__": "Infinity"}}
    _config(dtype="bfloat16", rope_parameters=rotary)(root / "blobs")
    (root / "mixtral").mkdir()
    for file in (root / "blobs").iterdir():
        os.symlink(file, root / "mixtral" / file.name)
    return root / "mixtral"


def test_a_folder_is_sound_wherever_its_weights_are(mixtral: Path) -> None:
    """What a pass cannot do with it is not blamed on it."""
    assert unsound(mixtral) == ""


@pytest.fixture(scope="module")
def source(mixtral: Path) -> Source:
    """The folder, loaded once."""
    return load(mixtral)


def test_a_folder_gives_what_transformers_gives(mixtral: Path, source: Source, tmp_path: Path) -> None:
    """Experts are fused, bfloat16 is widened, the tied weight is one, frequencies are computed; the other weights stay in their files."""
    import onnxruntime

    weights = source.model.graph.initializers
    assert "lm_head.weight" not in weights
    assert {type(weights[f"model.layers.0.mlp.experts.{name}_proj"].const_value) for name in ("gate_up", "down")} == {
        ir.LazyTensor
    }
    assert isinstance(weights["model.norm.weight"].const_value, ir.LazyTensor)
    assert isinstance(weights["model.layers.0.self_attn.q_proj.weight"].const_value, ir.ExternalTensor)
    frequencies = weights["model.rotary_emb.inv_freq"].const_value
    assert frequencies is not None
    assert frequencies.numpy().tolist() == [1.0, 0.0]
    assert "bfloat16 becomes float32" in source.declared.warnings[0]
    assert source.declared.symbols["sequence"].max == 16
    model = source.model.clone()
    ir.external_data.load_to_model(model)
    ir.save(model, tmp_path / "whole.onnx")
    ids = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int64)
    have = onnxruntime.InferenceSession(tmp_path / "whole.onnx").run(["logits"], {"input_ids": ids})[0]
    whole = transformers.MixtralForCausalLM.from_pretrained(mixtral, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        want = whole(torch.from_numpy(ids), use_cache=False).logits.numpy()
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In two shards."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size="2KB")
    return folder


@pytest.mark.filterwarnings("ignore")
def test_the_file_of_an_export_compiles_to_the_same_programs(source: Source, tmp_path: Path) -> None:
    """On two ranks, with weights that stay in their files and weights that are fused."""
    plan = parse_plan('ranks: 2\nsharding: {"**.q_proj": colwise, "**.o_proj": rowwise}\n', "plan.yaml")
    own = source.model.clone()
    compile_source(replace(source, model=own), plan, tmp_path / "own")
    write_exported(source, tmp_path / "model.onnx")
    compile_source(load(tmp_path / "model.onnx"), plan, tmp_path / "exported")
    made = {
        path.relative_to(tmp_path / "own"): path.read_bytes()
        for path in (tmp_path / "own").rglob("*")
        if path.is_file()
    }
    assert len([path for path in made if path.suffix in (".onnx", ".safetensors")]) == 3
    assert [path for path, data in made.items() if data != (tmp_path / "exported" / path).read_bytes()] == []


def _config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return changed


def _only_bin(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def _cut(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-8])


def _adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "llama: the folder has no config.json\n  help: save a model"),
    (_adapter, "llama: the folder has an adapter alone, and no model\n  help: give its model, and `adapters: {name: llama}` in the plan"),
    (lambda folder: (folder / "config.json").write_text("{"), "llama/config.json: is not JSON: "),
    (_config(architectures=["LamaForCausalLM"]), "has no model 'LamaForCausalLM'\n  help: the nearest names are 'LlamaForCausalLM'"),
    (_config(architectures=["Own"], auto_map={}), "has no model 'Own'\n  code of the folder's own is not run\n"),
    (_config(architectures=None), "llama/config.json: names no architecture\n"),
    (_config(quantization_config={"quant_method": "quark"}), "llama/config.json: the weights are quantized (quark)\n"),
    (_config(num_attention_heads=[]), "llama/config.json: makes no LlamaForCausalLM: "),
    (_only_bin, "it has pytorch_model.bin\n  help: save the model with save_pretrained, which writes safetensors"),
    (_cut, "is not a sound safetensors file: its tensors end at byte "),
    (_index(lambda index: index.update({"lm_head.weight": "model-9.safetensors"})), "is in 'model-9.safetensors', which is missing\n"),
    (_index(lambda index: index.update({"lm_head.weight": "../model.safetensors"})), "which is not in the folder\n"),
    (_index(lambda index: index.update({"lm_head.wait": index["lm_head.weight"]})), "which has no such tensor\n  help: the nearest"),
    (
        _index(lambda index: index.pop("model.norm.weight")),
        "llama: 'model.norm.weight' [8] of the model is in no file\n  help: the nearest names are ",
    ),
    (_config(vocab_size=14), "llama: 'lm_head.weight' is [12, 8]; the model's is [14, 8]\n"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "told"), BROKEN)
def test_a_broken_folder_is_one_error(llama: Path, tmp_path: Path, change: Callable[[Path], object], told: str) -> None:
    """Before anything is exported."""
    folder = shutil.copytree(llama, tmp_path / "llama")
    change(folder)
    with pytest.raises(CompileError) as caught:
        load(folder)
    assert told in str(caught.value)


def test_all_that_does_not_fit_is_told_at_once(llama: Path, tmp_path: Path) -> None:
    """Two shapes and the lines of a layer that the folder lacks."""
    folder = shutil.copytree(llama, tmp_path / "llama")
    _config(vocab_size=14, num_hidden_layers=2)(folder)
    with pytest.raises(CompileError) as caught:
        load(folder)
    assert len(caught.value.problems) == 2 + 9
