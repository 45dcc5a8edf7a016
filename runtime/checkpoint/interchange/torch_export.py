"""Exports a checkpoint to PyTorch: as a `state_dict`, or as a copy of a training script's file with the tensors that partc has trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, DamagedError
from ..checkpoint import Checkpoint
from ..compatibility import nearest_text
from ..export import WEIGHTS
from ..index import SKIPPED
from ..verification import Verification
from .dcp_folder import write_dcp
from .torch_file import TorchFile, read_torch, torch_of, write_torch
from .torch_optimizer import StateNames, optimizer_content

if TYPE_CHECKING:
    import torch


def export_torch(checkpoint: Checkpoint, path: Path, like: Path | None = None, distributed: bool = False) -> list[str]:
    """Writes the weights as a `state_dict`, or as a folder of torch.distributed.checkpoint, under the key `model`; returns their names.

    `like` is a file that a training script saved; the new file then has its structure: weights, the optimizer's state and the number of
    steps come from the checkpoint, all else (frozen weights, buffers, rates) from that file. CheckpointError lists all tensors that do not
    fit; DamagedError, and no file, where the checkpoint is damaged.
    """
    held = checkpoint.index.tensors
    names = sorted(name for name, one in held.items() if one.kind in WEIGHTS)
    file = None if like is None else read_torch(like)
    if file is not None:
        _check(checkpoint, names, file)
    with Verification(checkpoint) as proof:
        if problems := proof.problems():
            raise DamagedError(problems)
        weights: dict[str, Any] = {name: torch_of(checkpoint.read(name)) for name in names}
        content = weights if file is None else _content(checkpoint, weights, file)
        if distributed:
            write_dcp(path, content if file is not None and file.model_key else {"model": content})
        else:
            write_torch(path, content)
    return names


def _content(checkpoint: Checkpoint, weights: dict[str, torch.Tensor], file: TorchFile) -> dict[str, Any]:
    """Returns the file's content with the checkpoint's tensors; tied weights stay one tensor, and dtypes are those of the file."""
    index = checkpoint.index
    names = StateNames.of((name, one.kind, one.parameter) for name, one in index.tensors.items())
    optimizer = None
    if file.optimizer is not None:
        slots = {name: torch_of(checkpoint.read(name)) for own in names.slots.values() for name in own.values()}
        skipped = index.meta.get(SKIPPED, 0)
        optimizer = optimizer_content(file, names, slots, index.step - (skipped if isinstance(skipped, int) else 0))
    made = {name: one.to(file.weights[name].dtype) for name, one in weights.items()}
    tied = file.tied()
    first = {tied[name]: one for name, one in made.items()}
    return file.replaced({name: first[own] for name, own in tied.items() if own in first}, optimizer, index.step)


def _check(checkpoint: Checkpoint, names: list[str], file: TorchFile) -> None:
    shapes = {name: tuple(one.shape) for name, one in file.weights.items()}
    problems = []
    for name in names:
        shape = checkpoint.index.tensors[name].shape
        if name not in shapes:
            problems.append(f"{file.path}: has no '{name}' {list(shape)}{nearest_text(name, shapes)}")
        elif shapes[name] != shape:
            problems.append(f"{file.path}: '{name}' is {list(shapes[name])}; the checkpoint's is {list(shape)}")
    if problems:
        help = "give with --like a file of the model that was trained"
        raise CheckpointError("\n".join([*problems, f"  help: {help}"]))
