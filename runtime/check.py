"""Checks an artifact from its files alone: what the compiler promises of them is proved again, without running it.

files     the manifest's schema, sizes and hashes, strangers in the folder, sound weights files
graphs    onnx.checker, each value made once and before its use, known ops, weights inside their files
order     every Send has its Recv and every collective all its ranks, all agree with the manifest, and the common order ends
          without a deadlock
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partc.runtime.check_files import check_folder, read_manifest
from partc.runtime.format import Manifest
from partc.runtime.violation import Violation

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["Checked", "Violation", "check", "check_artifact"]


@dataclass(frozen=True)
class Checked:
    """What was looked at, and what was found."""

    violations: list[Violation]
    ranks: int = 0
    files: int = 0
    nodes: int = 0
    transfers: int = 0
    collectives: int = 0


def check_artifact(folder: str | Path) -> list[Violation]:
    """Every violation in the artifact `folder`; an empty list means that all promises hold."""
    return check(folder).violations


def check(folder: str | Path) -> Checked:
    """The violations together with counts of what was checked."""
    from partc.runtime.check_order import check_order

    folder = Path(folder)
    manifest, found = read_manifest(folder)
    if manifest is None:
        return Checked(found)
    found = check_folder(folder, manifest)
    models = {}
    nodes = 0
    read: dict[str, ModelProto | None] = {}
    for rank in range(manifest.ranks):
        file = manifest.program(rank)
        if file not in read and (folder / file).is_file():
            read[file], problems = _check_rank(folder, file, manifest)
            found.extend(problems)
        model = read.get(file)
        if model is not None:
            models[rank] = model
            nodes += len(model.graph.node)
    found.extend(check_order(manifest, models))
    transfers, collectives = len(manifest.transfers), len(manifest.collectives)
    return Checked(found, manifest.ranks, len(manifest.files) + 1, nodes, transfers, collectives)


def _check_rank(folder: Path, file: str, manifest: Manifest) -> tuple[ModelProto | None, list[Violation]]:
    """The model in a rank file, None where it cannot be read, and what is wrong with it alone."""
    import onnx
    from google.protobuf.message import DecodeError
    from partc.runtime.check_graph import check_graph, check_weights
    from partc.runtime.comm_ops import register

    try:
        model = onnx.load(folder / file, load_external_data=False)
    except DecodeError as error:
        return None, [Violation(file, f"it is not an ONNX file: {error}", help="compile the model again")]
    found = [*check_graph(file, model), *check_weights(folder, file, model, manifest)]
    if not found:
        register()
        try:
            onnx.checker.check_model(str(folder / file))
        except onnx.checker.ValidationError as error:
            text = " ".join(str(error).split())
            found.append(Violation(file, f"onnx.checker refuses it: {text}"))
    return model, found
