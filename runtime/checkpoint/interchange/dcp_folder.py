"""Reads and writes folders of `torch.distributed.checkpoint` (DCP): `.metadata` locates the parts of each tensor in other files.

torch reads `.metadata` with pickle, which runs any function that the file names. Here the file may name only classes that DCP itself
writes, and each part is read with `weights_only`. The result is the nested data that was saved, so a folder is used in the same way as a
file of `torch.save`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partc.runtime.files.regular import is_outside, open_regular, read_regular
from partc.runtime.files.replace import replacing_together

from ...errors import CheckpointError, UsageError, reason_of
from .torch_file import TorchFile, parsed, torch_module

METADATA = ".metadata"
_METADATA_BYTES = 1 << 30
_DCP = "torch.distributed.checkpoint"
_NAMED = {
    f"{_DCP}.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "MetadataIndex",
        "StorageMeta",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}
"""Maps each module to the names of it that a checkpoint's metadata may use, in addition to torch's dtypes."""


class _Metadata(pickle.Unpickler):
    """Reads the metadata; UnpicklingError where it names any other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        torch = torch_module()
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if name in _NAMED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def is_dcp(path: Path) -> bool:
    """Whether `path` is a folder that DCP wrote."""
    return (path / METADATA).is_file()


def read_dcp(folder: Path) -> TorchFile:
    """Reads the content of a folder as a `TorchFile`; CheckpointError where a part is missing or needs code to be read."""
    distributed_checkpoint()
    try:
        metadata = _Metadata(io.BytesIO(read_regular(folder / METADATA, _METADATA_BYTES))).load()
        content: dict[str, Any] = {}
        for name, stored in metadata.state_dict_metadata.items():
            path = (metadata.planner_data or {}).get(name, (name,))
            _put(content, path, _read(folder, metadata.storage_data, name, stored))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        reason = reason_of(error).splitlines()[0]
        raise CheckpointError(
            f"{folder}: cannot be read as a checkpoint of torch.distributed without running code: {reason}\n"
            "  help: save tensors and plain data alone, by torch.distributed.checkpoint.save"
        ) from None
    return parsed(folder, content)


def _read(folder: Path, places: Mapping[Any, Any], name: str, stored: Any) -> Any:
    """Reads a tensor, assembled from its parts, or plain data."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    if not isinstance(stored, TensorStorageMetadata):
        return _load(folder, places[MetadataIndex(name)])
    whole = torch_module().empty(stored.size, dtype=stored.properties.dtype)
    for chunk in stored.chunks:
        part = _load(folder, places[MetadataIndex(name, chunk.offsets)])
        box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = part
    return whole


def _load(folder: Path, place: Any) -> Any:
    file = folder / place.relative_path
    if is_outside(file, folder):
        raise ValueError(f"{place.relative_path} is outside the folder")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{place.relative_path} is compressed")
    with open_regular(file) as opened:
        opened.seek(place.offset)
        return torch_module().load(io.BytesIO(opened.read(place.length)), map_location="cpu", weights_only=True)


def _put(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Sets a value at a path in nested mappings and lists, creating those that are missing."""
    at: Any = content
    for key, following in zip(path, [*path[1:], None], strict=True):
        new = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(at, list):
            at.extend([None] * (key + 1 - len(at)))
            at[key] = new if following is None or at[key] is None else at[key]
        elif following is None or key not in at:
            at[key] = new
        at = at[key]


def write_dcp(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes a folder that `torch.distributed.checkpoint.load` reads."""
    dcp = distributed_checkpoint()
    with replacing_together(folder / METADATA) as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that only one process saves
        dcp.save(dict(content), storage_writer=dcp.FileSystemWriter(scratch), no_dist=True)


def distributed_checkpoint() -> Any:
    """Returns the module torch.distributed.checkpoint; UsageError where PyTorch lacks it."""
    torch_module()
    try:
        import torch.distributed.checkpoint as dcp
    except ImportError:
        raise UsageError("this PyTorch has no torch.distributed.checkpoint\n  help: pip install torch>=2.6") from None
    return dcp
