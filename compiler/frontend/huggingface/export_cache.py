"""Stores exports of folders between commands: the graph and the model's declarations, without weights, which stay in their files.

    ~/.cache/partc/exports/<key>.onnx

The key is a hash of everything that an export depends on: the folder's name (messages show it), its configuration, the names, types and
shapes of its weights, the versions of the libraries, and the code of this package that exports. When an entry is used, the weights are
read from the folder as it is then. A folder's export is not stored where values of its weights decide the graph, or where weights are
converted.

`PARTC_CACHE` names another folder than `~/.cache/partc`; if it is empty, nothing is stored. An entry begins with the SHA-256 of its other
bytes: a damaged entry is removed. Entries in another user's folder are not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from partc.compiler.frontend.exported import read_declared, write_declared
from partc.compiler.frontend.huggingface.safetensors_files import CONFIG, InFile
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.runtime.errors import PartcError, reason_of
from partc.runtime.files.regular import read_regular
from partc.runtime.files.replace import remove_file, replacing

MOST_BYTES = 1 << 30
"""The limit of all entries' bytes together; the least recently used entries are removed."""
_FORMAT = 1
_FACTS = "partc.export_cache"
_SUFFIX = ".onnx"
_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")
_CODE = ("frontend", "directives", "dims", "ir")
_READ = (CONFIG, "generation_config.json")
_LARGEST_JSON = 100_000_000
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Export:
    """A folder's export without its weights: the source, the tensor in the files for each weight, and how torch called the module.

    `weights` maps each weight to the name of its tensor in the files. `inputs`, `outputs`, `sizes`, `arguments` are those of `TorchModel`,
    `names` are the names of parameters and buffers. `compared`: whether it was compared with the module, or is too large for that.
    """

    source: Source
    weights: Mapping[str, str]
    inputs: Sequence[Spec]
    outputs: Mapping[str, int]
    sizes: Mapping[str, int]
    arguments: Sequence[str]
    names: Sequence[str]
    compared: bool = False


def cache_folder() -> Path | None:
    """Returns the folder of the entries; None where nothing is to be stored."""
    said = os.environ.get("PARTC_CACHE")
    if said is not None:
        return Path(said) / "exports" if said else None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # the user has no home
        return None
    return Path(base) / "partc" / "exports"


def key_of(folder: Path, files: Mapping[str, InFile] | None, decoder: bool, absent: bool = False) -> str:
    """Returns an entry's key; `decoder`: the model is exported with past and present, `absent`: without the values of its weights."""
    said = {
        "format": _FORMAT,
        "decoder": decoder,
        "absent": absent,
        "folder": folder.name,
        "versions": _versions(),
        "code": _code(),
        "config": {
            name: hashlib.sha256(read_regular(folder / name, _LARGEST_JSON)).hexdigest()
            for name in _READ
            if (folder / name).exists()
        },
        "weights": sorted((name, one.stored.dtype.name, *one.stored.shape) for name, one in (files or {}).items()),
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:40]


@cache
def _versions() -> dict[str, str]:
    versions = {"python": sys.version}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


@cache
def _code() -> str:
    """Returns a hash of this package's files that an export depends on."""
    root, total = Path(__file__).parents[2], hashlib.sha256()
    for folder in _CODE:
        for path in sorted((root / folder).rglob("*.py")):
            total.update(path.relative_to(root).as_posix().encode())
            total.update(read_regular(path))
    return total.hexdigest()


def read(key: str, where: str) -> Export | None:
    """Reads an entry; None where there is no usable one. Its weights have no values yet."""
    folder = cache_folder()
    path = None if folder is None else folder / f"{key}{_SUFFIX}"
    if path is None or folder is None or refusal(folder) or not path.exists():
        return None
    try:
        data = read_regular(path)
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            raise ValueError("it is damaged")
        proto = onnx.load_model_from_string(data[32:])
        facts = json.loads(next(one.value for one in proto.metadata_props if one.key == _FACTS))
        export = _export(proto, facts, path, where)
    except Exception:  # protobuf raises its own kinds, by version
        with contextlib.suppress(OSError, PartcError):  # the folder may be read-only
            remove_file(path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return export


def _export(proto: onnx.ModelProto, facts: dict[str, Any], path: Path, where: str) -> Export:
    model = from_proto(proto, path)
    model.metadata_props.pop(_FACTS, None)
    declared = replace(read_declared(model, where), warnings=tuple(facts["warnings"]))
    graph = model.graph
    inputs_by_name = {str(value.name): value for value in graph.inputs}
    own = dict(graph.initializers)
    graph.initializers.clear()
    for name in facts["initializers"]:
        value = own.get(name)
        if value is None:
            value = inputs_by_name[name]
            graph.inputs.remove(value)
            assert value.dtype is not None
            assert value.shape is not None
            value.const_value = ir.LazyTensor(_without_numbers, value.dtype, ir.Shape(value.shape.numpy()), name=name)
            value.metadata_props.update(facts["metadata"].get(name, {}))
        graph.register_initializer(value)
    inputs = [Spec(name, tuple(dims), ir.DataType(code)) for name, dims, code in facts["inputs"]]
    source = Source(model, declared)
    return Export(
        source,
        facts["weights"],
        inputs,
        facts["outputs"],
        facts["sizes"],
        facts["arguments"],
        facts["names"],
        facts["compared"],
    )


def _without_numbers() -> ir.TensorProtocol:
    raise AssertionError("the weight of a kept export has no numbers yet")


def keep(key: str, folder_name: str, export: Export) -> str:
    """Writes the entry of a folder; returns a warning where that is not possible, else ""."""
    folder = cache_folder()
    if folder is None:
        return ""
    model = export.source.model.clone()
    write_declared(model, export.source.declared, None)
    facts = {
        "folder": folder_name,
        "warnings": export.source.declared.warnings,
        "initializers": [*model.graph.initializers],
        "metadata": {name: dict(model.graph.initializers[name].metadata_props) for name in export.weights},
        "weights": export.weights,
        "inputs": [(spec.name, spec.dims, spec.dtype.value) for spec in export.inputs],
        "outputs": export.outputs,
        "sizes": export.sizes,
        "arguments": export.arguments,
        "names": export.names,
        "compared": export.compared,
    }
    for name in export.weights:
        value = model.graph.initializers.pop(name)
        value.const_value = None
        if value not in model.graph.inputs:
            model.graph.inputs.append(value)
    model.metadata_props[_FACTS] = json.dumps(facts)
    data = ir.to_proto(model).SerializeToString()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if fact := refusal(folder):
            return fact
        with replacing(folder / f"{key}{_SUFFIX}", settle=False) as out:
            out.write(hashlib.sha256(data).digest() + data)
        _bound()
    except (OSError, PartcError) as error:
        fact, _, remedy = " ".join(str(error).split()).partition(" help: ")
        return f"the export is not kept: {fact}; {remedy or 'free the folder'}, or name another folder in PARTC_CACHE"
    return ""


def refusal(folder: Path) -> str:
    """Returns the reason why the entries in a folder are not used; "" where they are used."""
    try:
        found = folder.stat()
    except OSError as error:
        return f"the export is not kept: {folder}: {reason_of(error)}"
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        return f"the export is not kept: {folder} is another user's; PARTC_CACHE names another folder"
    if os.name == "posix" and found.st_mode & _OTHERS_WRITE:
        return f"the export is not kept: others may write into {folder}; chmod go-w it, or name another folder in PARTC_CACHE"
    return ""


def entries() -> list[tuple[Path, int, float]]:
    """Returns each entry with its bytes and the time of its last use, the latest first."""
    folder = cache_folder()
    stored = []
    for path in folder.glob(f"*{_SUFFIX}") if folder is not None and folder.is_dir() else ():
        try:
            status = path.lstat()
        except OSError:  # another process removed it
            continue
        if stat.S_ISREG(status.st_mode):
            stored.append((path, status.st_size, status.st_mtime))
    return sorted(stored, key=lambda one: -one[2])


def model_of(path: Path) -> str:
    """Returns the name of the folder whose export an entry is; "" where the entry cannot be read."""
    try:
        proto = onnx.load_model_from_string(read_regular(path)[32:])
        return str(json.loads(next(one.value for one in proto.metadata_props if one.key == _FACTS))["folder"])
    except Exception:  # protobuf raises its own kinds, by version
        return ""


def clear() -> int:
    """Removes all entries and returns their number."""
    found = entries()
    for path, _, _ in found:
        remove_file(path)
    return len(found)


def _bound() -> None:
    total = 0
    for path, size, _ in entries():
        total += size
        if total > MOST_BYTES:
            remove_file(path)
