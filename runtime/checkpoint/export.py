"""Exports a checkpoint as safetensors under the tensors' own names, which any tool can read: one file, or a Hugging Face model's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from partc.runtime.artifact.tensors.safetensors_stream import STORED, Stored, write_tensors
from partc.runtime.files.replace import replacing_together

from ..errors import CheckpointError, DamagedError, UsageError
from ..files.regular import read_regular
from ..files.writers import write_new
from .checkpoint import Checkpoint
from .index import ADAPTER, Kind
from .verification import Verification

WEIGHTS: tuple[Kind, ...] = ("parameter", "statistics")
SHARD_BYTES = 5_000_000_000
"""The size in bytes of a file in a folder with several files, as transformers writes them."""
_COPIED = (".json", ".txt", ".model", ".jinja")
_OTHER_BYTES = 1 << 30
"""The largest size in bytes of another file of the model, such as a tokenizer."""
_ADAPTER_CONFIG, _ADAPTER_WEIGHTS, _PEFT = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
"""The two files of a peft adapter, and peft's prefix of tensor names."""
_INDEX = "model.safetensors.index.json"


def export_tensors(checkpoint: Checkpoint, path: Path, kinds: Sequence[Kind] = WEIGHTS) -> list[str]:
    """Writes the full tensors of these kinds into one file, which appears only when it is complete; returns their names.

    Only a block of one tensor is in memory at a time. DamagedError, and no file, where the checkpoint is damaged.
    """
    tensors = {
        name: Stored(STORED[tensor.dtype], tensor.shape)
        for name, tensor in checkpoint.index.tensors.items()
        if tensor.kind in kinds
    }
    if path.resolve().parent.is_relative_to(checkpoint.path.resolve()):
        raise CheckpointError(f"{path}: is inside the checkpoint itself\n  help: give another place with -o")
    with replacing_together(path) as scratch, Verification(checkpoint) as proof:
        write_tensors(scratch / path.name, tensors, checkpoint.blocks)
        if problems := proof.problems():
            raise DamagedError(problems)
    return sorted(tensors)


def export_folder(checkpoint: Checkpoint, folder: Path, config: Path | None, most: int = SHARD_BYTES) -> list[str]:
    """Writes the weights into a folder as `from_pretrained` reads them; returns the names of the files.

    More than `most` bytes are split into several files with an index. `config` is the folder of a model, whose configuration and tokenizer
    are copied. DamagedError, and no file, where the checkpoint is damaged.
    """
    held = {name: one for name, one in checkpoint.index.tensors.items() if one.kind in WEIGHTS}
    shards = [*_shards({name: one.bytes for name, one in held.items()}, most)]
    several = len(shards) > 1
    files = {
        f"model-{k:05d}-of-{len(shards):05d}.safetensors" if several else "model.safetensors": names
        for k, names in enumerate(shards, 1)
    }
    copied = (
        []
        if config is None
        else sorted(one for one in config.iterdir() if one.suffix in _COPIED and one.name != _INDEX)
    )
    if config is not None and not (config / "config.json").is_file():
        raise UsageError(f"{config}: it has no config.json\n  help: give the folder of a Hugging Face model")
    with (
        replacing_together(folder / (_INDEX if several else "model.safetensors")) as scratch,
        Verification(checkpoint) as proof,
    ):
        for file, names in files.items():
            tensors = {name: Stored(STORED[held[name].dtype], held[name].shape) for name in names}
            write_tensors(scratch / file, tensors, checkpoint.blocks, {"format": "pt"})
        if several:
            weight_map = {name: file for file, names in files.items() for name in names}
            total = sum(one.bytes for one in held.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_new(scratch / _INDEX, json.dumps(index, indent=2).encode() + b"\n")
        for one in copied:
            write_new(scratch / one.name, read_regular(one, _OTHER_BYTES))
        if problems := proof.problems():
            raise DamagedError(problems)
    return [*files, *([_INDEX] if several else []), *(one.name for one in copied)]


def export_adapter(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Writes the adapter of a checkpoint into a folder as peft reads it; returns the names of the files.

    CheckpointError where the training's plan had no `adapters`; DamagedError, and no file, as for `export_folder`.
    """
    alphas = checkpoint.index.meta.get(ADAPTER)
    names = [f"{module}.lora_{key}.weight" for module in alphas for key in "AB"] if isinstance(alphas, dict) else []
    tensors = {name: checkpoint.index.tensors[name] for name in names if name in checkpoint.index.tensors}
    if not isinstance(alphas, dict) or not alphas or len(tensors) < len(names):
        help_ = "write the weights alone, with --only '**.lora_*'; a plan with `adapters` trains an adapter as peft's"
        raise CheckpointError(f"{checkpoint.path}: has no adapter of a plan\n  help: {help_}")
    ranks = {module: tensors[f"{module}.lora_A.weight"].shape[0] for module in alphas}
    rank, alpha = max(ranks.values()), max(map(float, alphas.values()))  # type: ignore[arg-type]
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {module: one for module, one in ranks.items() if one != rank},
        "alpha_pattern": {module: one for module, one in alphas.items() if one != alpha},
        "target_modules": sorted(alphas),
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "inference_mode": True,
        "base_model_name_or_path": None,
        "task_type": None,
    }
    with replacing_together(folder / _ADAPTER_CONFIG) as scratch, Verification(checkpoint) as proof:
        written = {f"{_PEFT}{name}": Stored(STORED[one.dtype], one.shape) for name, one in tensors.items()}
        write_tensors(
            scratch / _ADAPTER_WEIGHTS,
            written,
            lambda name: checkpoint.blocks(name.removeprefix(_PEFT)),
            {"format": "pt"},
        )
        write_new(scratch / _ADAPTER_CONFIG, json.dumps(config, indent=2).encode() + b"\n")
        if problems := proof.problems():
            raise DamagedError(problems)
    return [_ADAPTER_WEIGHTS, _ADAPTER_CONFIG]


def _shards(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Splits the names, in order, into one list per file: at most `most` bytes each, but at least one tensor."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > most:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names
