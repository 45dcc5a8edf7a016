"""Makes a checkpoint of an artifact from another library's training, so that `partc train --resume` continues it.

Sources are a file of `torch.save` (`torch_file.py`), a folder of torch.distributed.checkpoint, a `.safetensors` file, and a folder of a
Hugging Face model. Names and shapes are those of the model's modules, in the source as in partc. Optimizer's tensors that the source lacks
have their initial values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from partc.runtime.artifact.format import OF_A_PLAN, Manifest, StateRecord
from partc.runtime.artifact.tensors.dtypes import Array, dense
from partc.runtime.files.counted import CHECKPOINT_INDEX, parse_json
from partc.runtime.files.regular import read_regular
from pydantic import JsonValue

from ...errors import CheckpointError, UsageError
from ..checkpoint import Checkpoint
from ..compatibility import OPTIMIZER, nearest_text
from ..index import SKIPPED
from ..newest import alone
from ..save import save
from .dcp_folder import is_dcp, read_dcp
from .torch_file import TorchFile, numpy_of, read_torch
from .torch_optimizer import StateNames, read_state

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_SUGGESTED = 20


@dataclass(frozen=True)
class Source:
    """Tensors by name, each with its shape and its reader; the optimizer's tensors have the artifact's names.

    `applied`: the optimizer's number of steps.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Array]
    slots: Mapping[str, Array] = field(default_factory=dict)
    applied: int | None = None
    step: int | None = None


@dataclass(frozen=True)
class Imported:
    """The written checkpoint, its step, and the names in the source that the artifact does not use."""

    path: Path
    step: int
    tensors: int
    slots: int
    unused: tuple[str, ...]


def import_checkpoint(
    path: Path, manifest: Manifest, folder: Path, step: int | None = None, weights_only: bool = False
) -> Imported:
    """Writes the checkpoint of a step into `folder` from a source, for the training of an artifact.

    The step is the given one, else that of the source. Raises UsageError for an artifact that does not train, CheckpointError with all
    tensors that do not fit.
    """
    if manifest.training is None:
        raise UsageError("the artifact has no training program\n  help: compile it with a plan that has `train:`")
    records = [
        one.model_copy(update={"ranks": [0], "boxes": None}) for one in manifest.state if one.kind not in OF_A_PLAN
    ]
    records = [*{one.tensor: one for one in records}.values()]
    source = _opened(path, records, weights_only)
    taken, unused = _matched(source, records)
    applied = source.applied
    count = step if step is not None else next((one for one in (applied, source.step) if one is not None), 0)
    if applied is not None and count < applied:
        raise UsageError(
            f"--step {count}: the optimizer of {path} has counted {applied} steps\n  help: leave --step out, or give {applied} or more"
        )
    meta: dict[str, JsonValue] = {OPTIMIZER: manifest.training.optimizer.types}
    if applied is not None and count > applied:
        meta[SKIPPED] = count - applied
    pieces = [(one, taken[one.tensor]()) for one in records]
    written = save(folder, count, 0, pieces, records, meta, alone)
    return Imported(written, count, len(records), len(source.slots), unused)


def _opened(path: Path, records: list[StateRecord], weights_only: bool) -> Source:
    if is_dcp(path):
        return _of_torch(read_dcp(path), records, weights_only)
    if path.is_dir():
        return _of_folder(path)
    if path.suffix == ".safetensors":
        return _of_checkpoints(path, [Checkpoint.of_file(path)])
    file = read_torch(path)
    return _of_torch(file, records, weights_only)


def _of_folder(path: Path) -> Source:
    """Returns the weights of a Hugging Face model: one file, or several with an index."""
    if not (path / _INDEX).is_file():
        if not (path / _WEIGHTS).is_file():
            raise UsageError(
                f"{path}: has neither {_WEIGHTS} nor {_INDEX}\n  help: give a folder that save_pretrained wrote"
            )
        return _of_checkpoints(path, [Checkpoint.of_file(path / _WEIGHTS)])
    try:
        index: Any = parse_json(read_regular(path / _INDEX, CHECKPOINT_INDEX.bytes), CHECKPOINT_INDEX)
        files = sorted({str(name) for name in index["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{path / _INDEX}: is not an index with a 'weight_map'") from None
    if strange := [name for name in files if Path(name).name != name]:
        raise CheckpointError(f"{path / _INDEX}: names {json.dumps(strange[0])}, which is outside the folder")
    return _of_checkpoints(path, [Checkpoint.of_file(path / name) for name in files])


def _of_checkpoints(path: Path, files: list[Checkpoint]) -> Source:
    held = {name: one for one in files for name in one.index.tensors}
    shapes = {name: one.index.tensors[name].shape for name, one in held.items()}
    return Source(path, shapes, lambda name: held[name].read(name))


def _of_torch(file: TorchFile, records: list[StateRecord], weights_only: bool) -> Source:
    shapes = {name: tuple(one.shape) for name, one in file.weights.items()}

    def read(name: str) -> Array:
        return numpy_of(file.weights[name])

    if file.optimizer is None or weights_only:
        return Source(file.path, shapes, read, step=file.step)
    state = read_state(file, StateNames.of((one.tensor, one.kind, one.parameter) for one in records))
    slots = {name: numpy_of(one) for name, one in state.slots.items()}
    return Source(file.path, shapes, read, slots, state.step, file.step)


def _matched(source: Source, records: list[StateRecord]) -> tuple[dict[str, Callable[[], Array]], tuple[str, ...]]:
    """Maps each tensor of the records to its source; also returns the unused names. Raises CheckpointError with all that does not fit."""
    wanted = {one.tensor for one in records}
    unused = [name for name in source.shapes if name not in wanted]
    problems: list[str] = []
    sources: dict[str, Callable[[], Array]] = {}
    for record in records:
        name, shape = record.tensor, tuple(record.shape)
        optimizer = record.kind == "optimizer"
        if optimizer and name not in source.slots:
            sources[name] = partial(_first, record)
            continue
        have = source.slots[name].shape if optimizer else source.shapes.get(name)
        if have is None:
            like = nearest_text(name, unused) if len(problems) < _SUGGESTED else ""
            problems.append(f"{source.path}: has no '{name}' {list(shape)}{like}")
        elif not (have == shape or (optimizer and _without_ones(have) == _without_ones(shape))):
            turned = ", its transpose" if have == shape[::-1] else ""
            problems.append(f"{source.path}: '{name}' is {list(have)}; the program's is {list(shape)}{turned}")
        else:
            sources[name] = partial(_as, partial(source.slots.__getitem__ if optimizer else source.read, name), record)
    if problems:
        help = "give a file of the model that was compiled, with the names of its modules"
        raise CheckpointError("\n".join([*problems, f"  help: {help}"]))
    return sources, tuple(unused)


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [dim for dim in shape if dim != 1]


def _as(read: Callable[[], Array], record: StateRecord) -> Array:
    """Returns the source's tensor in the record's type and shape."""
    dtype = dense(record.type)
    assert dtype is not None
    return np.ascontiguousarray(read().reshape(record.shape).astype(dtype.numpy, copy=False))


def _first(record: StateRecord) -> Array:
    """Returns the value of an optimizer's tensor before the first step."""
    dtype = dense(record.type)
    assert dtype is not None
    assert isinstance(record.initial, float)
    return np.full(tuple(record.shape), record.initial, dtype.numpy)
