"""Reads one rank file, and checks it with ONNX's own checker."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto
from partc.runtime.artifact.comm.schemas import register
from partc.runtime.artifact.format import OF_RANKS, Manifest
from partc.runtime.artifact.graph.bodies import read_model
from partc.runtime.artifact.graph.onnx_graph import metadata_of, not_text
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.artifact.tasks.rows import row_of
from partc.runtime.checker.graph.kinds import without_known
from partc.runtime.checker.graph.types import as_plain_onnx
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import ArtifactError, Violation
from partc.runtime.files.counted import MOST_NODES

_AGAIN = "compile the model again"


def read_rank(subject: Subject) -> list[Violation]:
    """Reads the rank file of a subject into its `file`, with tasks inlined; returns the reasons where it cannot be read."""
    file = subject.file.name
    try:
        model = read_model(subject.folder / file)
    except OSError as error:
        return [Violation(file, f"it {error.strerror}", help=_AGAIN)]
    except DecodeError as error:
        return [Violation(file, f"it is not an ONNX file: {error}", help=_AGAIN)]
    if (count := len(model.graph.node) + sum(len(function.node) for function in model.functions)) > MOST_NODES:
        return [Violation(file, f"it has {count:,} nodes; at most {MOST_NODES:,} are read", help=_AGAIN)]
    if broken := not_text(model):
        return [Violation(file, f"it has a name or a text that is not UTF-8: {broken}", help=_AGAIN)]
    try:
        subject.file.row, subject.file.model = row_of(model, file), unrolled(model, file)
        subject.file.once = unrolled(model, file, once=True)
        subject.file.rest = without_known(file, subject.file.model, subject.known.kinds)
    except ArtifactError as error:
        return [Violation(file, line.removeprefix(f"{file}: "), help=_AGAIN) for line in str(error).splitlines()[:-1]]
    return []


def check_ranks(file: str, model: ModelProto, manifest: Manifest) -> Iterator[Violation]:
    """Yields a violation if a rank file names other ranks than those whose program it is in the manifest."""
    said = metadata_of(model, OF_RANKS)
    ranks = ranks_text(rank for rank in range(manifest.ranks) if manifest.program(rank) == file)
    if said and said != ranks:
        fact = f"it is the program of ranks {said}, and the manifest makes it that of ranks {ranks}"
        yield Violation(file, fact, help=_AGAIN)


def check_onnx(file: str, model: ModelProto) -> list[Violation]:
    """Returns a violation if `onnx.checker` refuses a rank file, whose graph is valid by the checks of nodes."""
    register()
    try:
        onnx.checker.check_model(as_plain_onnx(model))
    except (onnx.checker.ValidationError, UnicodeDecodeError, TypeError) as error:
        return [Violation(file, f"onnx.checker refuses it: {' '.join(str(error).split())}")]
    return []
