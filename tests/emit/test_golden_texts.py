"""What samples compile to is held as text: the dumps of the whole model and of all ranks, and the manifest without hashes and sizes.

A diff of tests/golden shows what a change does to every kind of plan. None of the models needs torch.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Golden
from partc.compiler.cost.memory import rank_memory
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact import format as fmt
from partc.runtime.artifact.legal_sizes import typical_sizes
from partc.runtime.artifact.manifest import open_artifact
from small_training import DATA_PARALLEL, MOMENTUM, PERCEPTRON, compiled

SAMPLES = Path(__file__).parents[2] / "samples"
TEXTS = (fmt.BEGIN_IR, fmt.END_IR)
WIDTH = 120
COMPILED = {
    "placed": ("lenet", "model.py", "plan.yaml"),
    "placed_by_calls": ("lenet", "place_calls.py", "place_calls.yaml"),
    "sharded_op": ("shard_function", "matmul.py", "plan.yaml"),
    "sharded_function": ("shard_function", "dense_relu.py", "plan.yaml"),
    "sharded_module": ("shard_function", "net1.py", "plan.yaml"),
    "sharded_method": ("shard_function", "net2.py", "plan.yaml"),
    "dynamic_tensor_parallel": ("ffn_dynamic", "model.py", "plan.yaml"),
    "transformer_data_tensor_parallel": ("gpt", "one_layer.py", "dp_tp.yaml"),
    "trained_on_one_rank": ("lenet", "model.py", "train_one.yaml"),
    "trained_placed": ("lenet", "model.py", "train.yaml"),
    "trained_data_parallel": ("linear_dp", "model.py", "train.yaml"),
    "trained_in_two_stages": ("two_stage", "model.py", "train.yaml"),
}
ONE_LAYER = """from model import GPT, Sizes, batch, inputs, outputs, seq
__all__ = ["batch", "inputs", "outputs", "seq"]
model = GPT(Sizes(layers=1, width=24, heads=4, vocabulary=32, context=16))
"""
GRID = """ranks: 4
mesh: {dp: 2, tp: 2}
symbols: {batch: {divisor: DIVISOR}}
dataset: {x: [dp, null], t: [dp, null]}
sharding: {one: {parameters: {first: [null, tp]}}, two: {parameters: {second: [tp, null]}}}
"""
LOSS = "loss: {type: mean_squared, prediction: y, target: t}"
TRAINED = {
    "trained_on_a_grid": (GRID.replace("DIVISOR", "2"), f"{LOSS}, optimizer: {MOMENTUM}"),
    "trained_sharing_updates": (
        GRID.replace("DIVISOR", "2"),
        f"{LOSS}, optimizer: {{type: adam, lr: 0.1, shard: dp}}, clip: {{norm: 1.5}}",
    ),
    "trained_by_parts": (
        DATA_PARALLEL.replace("divisor: 2", "divisor: 4"),
        f"{LOSS}, optimizer: {MOMENTUM}, accumulate: 2, on_nonfinite: skip",
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_samples_compile_to_these_texts(golden: Golden, tmp_path: Path, name: str) -> None:
    folder, model, plan = COMPILED[name]
    sample = shutil.copytree(SAMPLES / folder, tmp_path / "sample", ignore=shutil.ignore_patterns("build*", "__*"))
    (sample / "one_layer.py").write_text(ONE_LAYER)
    compile_model(sample / model, sample / plan, tmp_path / "build", check=False)
    hold(golden, name, tmp_path / "build")


@pytest.mark.parametrize("name", TRAINED)
def test_training_compiles_to_these_texts(golden: Golden, tmp_path: Path, name: str) -> None:
    plan, train = TRAINED[name]
    hold(golden, name, compiled(tmp_path / "build", PERCEPTRON.replace("5", "4"), "", f"{plan}train: {{{train}}}\n"))


def hold(golden: Golden, name: str, build: Path) -> None:
    """Compares the texts of an artifact's programs, and its manifest."""
    for program in ("", fmt.EVALUATE):
        for text in TEXTS:
            file = build / fmt.dump_file(text, program)
            if file.is_file():
                golden(f"{name}/{program or 'step'}/{file.name}", file.read_text(encoding="utf-8"))
    golden(f"{name}/step/{fmt.MANIFEST}", index_text(build / fmt.MANIFEST))
    artifact = open_artifact(build)
    sizes = typical_sizes(artifact.manifest)
    unknown = {rank: rank_memory(artifact, rank, sizes).unknown for rank in range(artifact.manifest.ranks)}
    assert not any(unknown.values()), f"values without a type and a shape, by rank: {unknown}"


def index_text(path: Path) -> str:
    """A manifest without what a library's version changes: hashes, sizes of files, partc's version."""
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    manifest |= {"files": [*manifest["files"]], "partc": "", "model": manifest["model"]["name"]}
    if manifest["plan"] is not None:
        manifest["plan"] = manifest["plan"]["name"]
    return _lines(manifest) + "\n"


def _lines(value: Any, indent: str = "") -> str:
    """JSON with what is short on one line."""
    text = json.dumps(value)
    if len(indent) + len(text) <= WIDTH or not isinstance(value, dict | list) or not value:
        return text
    inner = f"{indent} "
    if isinstance(value, dict):
        items, ends = [f"{json.dumps(key)}: {_lines(one, inner)}" for key, one in value.items()], "{}"
    else:
        items, ends = [_lines(one, inner) for one in value], "[]"
    return ends[0] + ",".join(f"\n{inner}{item}" for item in items) + f"\n{indent}{ends[1]}"
