"""Checks an artifact from its files alone: what the compiler promises of them is proved again, without running it.

files     the manifest's schema, sizes and hashes, strangers in the folder, sound weights files
graphs    onnx.checker, each value made once and before its use, known ops, weights inside their files
types     what the nodes of a file make, inferred anew, is what it declares
order     every Send has its Recv and every collective all its ranks, all agree with the manifest, and the common order ends
          without a deadlock
layouts   each collective makes of how its value lies before how it lies after
state     what ranks keep from step to step is in their files, and together all of each tensor; updates in place are safe, and copies
          of a piece stay equal; gradients of the parts of a batch are all added up
named     what a training names beside its programs is no code inside of the artifact
inside    the evaluation of an artifact that trains, and the program of a part of a batch, are artifacts of their own, checked as such
          and beside it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from partc.runtime.check_files import check_folder, missing_programs, read_manifest
from partc.runtime.format import MANIFEST, TOTALS, Manifest, stays_inside
from partc.runtime.violation import Violation

if TYPE_CHECKING:
    from onnx import ModelProto
    from partc.runtime.training.named import Named

__all__ = ["Checked", "Violation", "check", "check_artifact"]


@dataclass(frozen=True)
class Checked:
    """What was looked at, and what was found.

    Of the tensors that ranks keep, so many are replaced in place, and so many by a copy when a step ends; `copies` counts the pieces
    that several ranks hold. `named` is what a training names outside of the folder, which only the user can say is wanted.
    """

    violations: list[Violation]
    ranks: int = 0
    files: int = 0
    nodes: int = 0
    transfers: int = 0
    collectives: int = 0
    in_place: int = 0
    copied: int = 0
    copies: int = 0
    named: Sequence[Named] = ()


def check_artifact(folder: str | Path) -> list[Violation]:
    """Every violation in the artifact `folder`; an empty list means that all promises hold."""
    return check(folder).violations


def check(folder: str | Path) -> Checked:
    """The violations together with counts of what was checked."""
    from partc.runtime.training.named import carried_code, outside

    checked, manifest, _ = _check(Path(folder))
    if manifest is None or manifest.training is None:
        return checked
    carried = carried_code(Path(folder), manifest)
    named = [] if carried else outside(Path(folder), manifest.training)
    return replace(checked, violations=[*checked.violations, *carried], named=named)


def _check(folder: Path) -> tuple[Checked, Manifest | None, dict[int, ModelProto]]:
    """What was found, the manifest if it can be read, and the models of the ranks whose files can."""
    from partc.runtime.check_numbers import Classes, Numbering
    from partc.runtime.check_order import check_order
    from partc.runtime.check_replicas import check_replicas, copies_of
    from partc.runtime.check_state import check_state
    from partc.runtime.check_sums import check_parts, classes_of
    from partc.runtime.check_updates import Replaced, check_updates

    manifest, found = read_manifest(folder)
    if manifest is None:
        return Checked(found), None, {}
    found = check_folder(folder, manifest)
    if any(missing_programs(manifest)):
        return Checked(found), manifest, {}
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
    state, order = check_state(manifest, models), check_order(manifest, models)
    found += [*state, *order]
    replaced = Replaced()
    if not state:
        replaced, unsafe = check_updates(manifest, models)
        found += unsafe
    inner, problems = _check_inside(folder, manifest)
    copies = copies_of(manifest) if not found and not problems else []
    counted = 0
    if not found and not problems and (copies or inner is not None):
        classes, made = classes_of(*inner) if inner is not None else (Classes(), {})
        numbering = Numbering(folder, manifest, models, classes)
        if numbering.done:
            counted = len(copies)
            found += [*check_replicas(numbering, copies), *check_parts(numbering, made)]
    found += problems
    checked = Checked(
        found,
        manifest.ranks,
        len(manifest.files) + 1,
        nodes,
        len(manifest.transfers),
        len(manifest.collectives),
        replaced.in_place,
        replaced.copied,
        counted,
    )
    return checked, manifest, models


Inside: TypeAlias = "tuple[Path, Manifest, dict[int, ModelProto]]"


def _check_inside(folder: Path, manifest: Manifest) -> tuple[Inside | None, list[Violation]]:
    """The program of a part of a batch, and what is wrong with it and the evaluation, alone and beside the training."""
    from partc.runtime.check_inner import check_evaluation, check_part, check_totals
    from partc.runtime.check_sums import check_accumulation

    if manifest.training is None:
        return None, []
    training, found, accumulation = manifest.training, list[Violation](), None
    kinds = {"evaluation": check_evaluation, "accumulation": check_part, "totals": check_totals}
    folders = (training.evaluation, training.accumulation, TOTALS if training.totals else "")
    for kind, name in zip(kinds, folders, strict=True):
        if not name:
            continue
        if not stays_inside(name):
            fact = f"its {kind} lies at '{name}', out of the folder"
            found.append(Violation(MANIFEST, fact, help="compile the model again"))
            continue
        checked, inner, models = _check(folder / name)
        if inner is None:
            found += [replace(one, file=f"{name}/{MANIFEST}") for one in checked.violations]
            continue
        found += [replace(one, file=f"{name}/{one.file}") for one in checked.violations]
        found += kinds[kind](manifest, inner, name)
        if kind == "accumulation":
            accumulation = folder / name, inner, models
    if not training.accumulation or accumulation is not None:
        found += check_accumulation(manifest, accumulation[1] if accumulation else None)
    return accumulation, found


def _check_rank(folder: Path, file: str, manifest: Manifest) -> tuple[ModelProto | None, list[Violation]]:
    """The model in a rank file, None where it cannot be read, and what is wrong with it alone."""
    import onnx
    from google.protobuf.message import DecodeError
    from partc.runtime.check_graph import check_graph
    from partc.runtime.check_types import as_plain_onnx, check_types
    from partc.runtime.check_weights import check_weights
    from partc.runtime.comm_ops import register

    try:
        model = onnx.load(folder / file, load_external_data=False)
    except DecodeError as error:
        return None, [Violation(file, f"it is not an ONNX file: {error}", help="compile the model again")]
    found = [*check_graph(file, model), *check_weights(folder, file, model, manifest)]
    if not found:
        register()
        try:
            onnx.checker.check_model(as_plain_onnx(model))
        except onnx.checker.ValidationError as error:
            text = " ".join(str(error).split())
            found.append(Violation(file, f"onnx.checker refuses it: {text}"))
        else:
            found += check_types(file, model, manifest)
    return model, found
