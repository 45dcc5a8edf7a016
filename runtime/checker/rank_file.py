"""Checks one rank file by itself: bytes, graph, weights, and the types inside."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto
from partc.runtime.artifact.comm_schemas import register
from partc.runtime.artifact.format import Manifest
from partc.runtime.checker.graph import check_graph, not_text
from partc.runtime.checker.types import as_plain_onnx, check_types
from partc.runtime.checker.weights import check_weights
from partc.runtime.errors import Violation

_AGAIN = "compile the model again"


def read_rank(folder: Path, file: str) -> tuple[ModelProto | None, list[Violation]]:
    """The model in a rank file; None, and why, where there is none."""
    try:
        model = onnx.load(folder / file, load_external_data=False)
    except DecodeError as error:
        return None, [Violation(file, f"it is not an ONNX file: {error}", help=_AGAIN)]
    if broken := not_text(model):
        return None, [Violation(file, f"it has a name or a text that is not UTF-8: {broken}", help=_AGAIN)]
    return model, []


def check_rank(
    folder: Path, file: str, model: ModelProto, manifest: Manifest, wrong: Collection[str]
) -> list[Violation]:
    """What is wrong with a rank file alone; the files `wrong` are not those of the manifest, and are not read."""
    found = [*check_graph(file, model), *check_weights(folder, file, model, manifest, wrong)]
    if found:
        return found
    register()
    try:
        onnx.checker.check_model(as_plain_onnx(model))
    except (onnx.checker.ValidationError, UnicodeDecodeError) as error:
        return [Violation(file, f"onnx.checker refuses it: {' '.join(str(error).split())}")]
    return check_types(file, model, manifest)
