"""A checkpoint as safetensors under the tensors' own names, which any tool reads: one file, or the folder of a Hugging Face model."""

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
from .index import Kind
from .verification import Verification

WEIGHTS: tuple[Kind, ...] = ("parameter", "statistics")
SHARD_BYTES = 5_000_000_000
"""The size of a file in a folder of several, as transformers writes them."""
_COPIED = (".json", ".txt", ".model", ".jinja")
_OTHER_BYTES = 1 << 30
"""A file beside the weights, such as a tokenizer, has at most so many."""
_INDEX = "model.safetensors.index.json"


def export_tensors(checkpoint: Checkpoint, path: Path, kinds: Sequence[Kind] = WEIGHTS) -> list[str]:
    """Writes the whole tensors of some kinds into one file, which is there when it is whole; their names.

    A part of one tensor is in memory at a time. DamagedError, and no file, where the checkpoint turns out not to be as it was written.
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
    """Writes the weights into a folder as `from_pretrained` reads them; the names of the files.

    More than `most` bytes go to several files with an index. `config` is the folder of a model, whose configuration and tokenizer are
    copied. DamagedError, and no file, where the checkpoint turns out not to be as it was written.
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


def _shards(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Splits the names, in order, into files of at most so many bytes, with at least one tensor in each."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > most:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names
