"""A checkpoint as one safetensors file under the tensors' own names, which any tool reads: written tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partc.runtime.files.replace import replacing_together

from ..artifact.safetensors_stream import STORED, Stored, write_tensors
from ..errors import CheckpointError, DamagedError
from .checkpoint import Checkpoint
from .index import Kind
from .verification import Verification

WEIGHTS: tuple[Kind, ...] = ("parameter", "statistics")


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
