"""Copies of an artifact whose rank files are changed: for measuring, and for looking at what is inside."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import onnx
from partc.compiler.emit.run_list import run_list
from partc.runtime.artifact.format import MANIFEST, OF_RANKS, WEIGHTS, FileRecord, Manifest, run_list_file
from partc.runtime.artifact.graph.onnx_graph import read_model
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.manifest_file import ManifestFile
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.files.replace import remove_file
from partc.runtime.files.writers import write_new

Change: TypeAlias = Callable[[int, onnx.ModelProto, Manifest], Manifest]
"""What is done to the file of a rank; the program's manifest then."""


def variant(folder: Path, out: Path, change: Change, apart: bool = False) -> Path:
    """The artifact in `folder` with every rank file changed, `change` getting the lowest rank that has it.

    The copy has no hashes, and is to be trusted. With `apart` every rank gets a file of its own. Programs inside of the artifact are
    changed alike, and tasks as their nodes are. Where `out` is there already, from the same folder, its weights are left as they are.
    """
    artifact = open_artifact(folder, trust=True)
    other_numbers = filter(None, artifact.manifest.numbers.values())
    stays = shutil.ignore_patterns(*[WEIGHTS] * out.exists(), *other_numbers)
    shutil.copytree(folder, out, ignore=stays, dirs_exist_ok=True)
    files = {name: record for name, record in artifact.manifest.files.items() if (out / name).exists() or record.path}
    changed = [_changed(out, artifact.program_named(name).manifest, change, apart, files) for name in artifact.programs]
    remove_file(out / MANIFEST)
    index = ManifestFile.of([one.model_copy(update={"files": files}) for one in changed])
    write_new(out / MANIFEST, index.model_dump_json().encode())
    return out


def _changed(folder: Path, manifest: Manifest, change: Change, apart: bool, files: dict[str, FileRecord]) -> Manifest:
    """Changes the rank files of a program; its manifest then. What is written is added to `files`."""
    before = [manifest.program(rank) for rank in range(manifest.ranks)]
    models = {file: unrolled(read_model(folder / file)) for file in before}
    own = [f"{manifest.prefix}own_{rank:04d}.onnx" for rank in range(manifest.ranks)]
    for file in models:
        ranks = [rank for rank, one in enumerate(before) if one == file]
        for rank in ranks if apart else ranks[:1]:
            model = onnx.ModelProto()
            model.CopyFrom(models[file])
            manifest = change(rank, model, manifest)
            if apart:
                for entry in model.metadata_props:
                    if entry.key == OF_RANKS:
                        entry.value = str(rank)
            name = own[rank] if apart else file
            written = {name: model.SerializeToString()}
            if run_list_file(file) in files:
                kept = [record.value for record in manifest.state if rank in record.ranks]
                listed = run_list(model, manifest.name, manifest.guard, kept)
                written[run_list_file(name)] = listed.text().encode()
            for path, data in written.items():
                remove_file(folder / path)
                write_new(folder / path, data)
                files[path] = FileRecord(bytes=len(data), sha256="")
    return manifest.model_copy(update={"rank_files": own}) if apart else manifest
