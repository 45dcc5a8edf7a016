"""Reads one rank file, and checks it with ONNX's own checker."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto
from partc.runtime.artifact.comm.schemas import register
from partc.runtime.artifact.format import DOMAIN, OF_RANKS, Manifest
from partc.runtime.artifact.graph.bodies import read_model
from partc.runtime.artifact.graph.onnx_graph import metadata_of, not_text, structure_of
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.artifact.tasks.rows import row_of
from partc.runtime.checker.graph.kinds import without_known
from partc.runtime.checker.graph.types import as_plain_onnx
from partc.runtime.checker.graph.uniform_rows import KEPT, is_uniform
from partc.runtime.checker.subject import SingleFile, Subject
from partc.runtime.errors import ArtifactError, Violation, reason_of
from partc.runtime.files.counted import MOST_NODES

_AGAIN = "compile the model again"


def read_rank(subject: Subject, firsts: dict[bytes, SingleFile]) -> list[Violation]:
    """Reads the rank file of a subject into its `file`, with calls of tasks; returns the reasons where it cannot be read.

    `firsts`: of the files read before, the first of each structure, to which it adds this one.
    """
    file = subject.file.name
    try:
        model = read_model(subject.folder / file)
    except OSError as error:
        return [Violation(file, f"it {reason_of(error)}", help=_AGAIN)]
    except DecodeError as error:
        return [Violation(file, f"it is not an ONNX file: {error}", help=_AGAIN)]
    if (count := len(model.graph.node) + sum(len(function.node) for function in model.functions)) > MOST_NODES:
        return [Violation(file, f"it has {count:,} nodes; at most {MOST_NODES:,} are read", help=_AGAIN)]
    if broken := not_text(model):
        return [Violation(file, f"it has a name or a text that is not UTF-8: {broken}", help=_AGAIN)]
    single = subject.file
    single.listed = model
    state = repr([(record.value, record.next) for record in single.state])
    single.structure = structure_of(model) + state.encode()
    if (first := firsts.get(single.structure)) is not None:
        single.row, single.uniform = first.row, first.uniform
        return []
    try:
        single.row = row_of(model, file)
    except ArtifactError as error:
        return [Violation(file, line.removeprefix(f"{file}: "), help=_AGAIN) for line in str(error).splitlines()[:-1]]
    stored, training = subject.manifest.stored, subject.manifest.training
    if single.row is not None:  # gathers and trees of sums are proven call by call
        by_calls = stored is not None or (training is not None and bool(training.parts))
        single.uniform = not by_calls and is_uniform(model, single.row)
    firsts[single.structure] = single
    return []


def inline_tasks(single: SingleFile, uniform: bool, known: dict[Hashable, int]) -> list[Violation]:
    """Inlines the tasks of a rank file: for the first two microbatches if all are `uniform`, else for all; `known`: kinds of nodes."""
    file, listed = single.name, single.listed
    single.model = unrolled(listed, file, limit=KEPT if uniform else None)
    single.once = unrolled(listed, file, once=True)
    single.traffic = unrolled(listed, file, is_inlined=_communicates) if uniform else single.model
    single.rest = without_known(file, single.model, known)
    return []


def inline_as(single: SingleFile, first: SingleFile) -> None:
    """Gives a rank file the inlined nodes of a file of equal structure, with its own weights."""
    single.once, single.traffic = first.once, first.traffic
    single.model = single.listed
    if first.model is not first.listed:
        single.model = ModelProto()
        single.model.CopyFrom(first.model)
        own = len(single.listed.graph.initializer)
        of_tasks = list(first.model.graph.initializer)[own:]
        del single.model.graph.initializer[:]
        del single.model.metadata_props[:]
        single.model.graph.initializer.extend([*single.listed.graph.initializer, *of_tasks])
        single.model.metadata_props.extend(single.listed.metadata_props)


def _communicates(node: NodeProto) -> bool:
    return node.domain == DOMAIN


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
