"""Checks an artifact from its files alone: what the compiler promises of them is proved again, without running it.

files     the manifest's schema, sizes and hashes, strangers in the folder, sound weights files
graphs    onnx.checker, each value made once and before its use, known ops, weights inside their files
types     what the nodes of a file make, inferred anew, is what it declares
order     every Send has its Recv and every collective all its ranks, all agree with the manifest, and the common order ends
          without a deadlock
layouts   each collective makes of how its value lies before how it lies after
places    shards that meet in a node lie in the same places on all ranks, and what is made as terms of a sum is reduced
state     what ranks keep from step to step is in their files, and together all of each tensor; updates in place are safe, and copies
          of a shard stay equal; gradients of the parts of a batch are all added up
named     what a training names beside its programs is no code inside of the artifact
training  its names are those of inputs and outputs, its numbers those of the update nodes, its schedule one that can be followed
inside    the evaluation of an artifact that trains, and the program of a part of a batch, are artifacts of their own, checked as such
          and beside it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from partc.runtime.artifact.format import MANIFEST, TOTALS, Manifest, stays_inside
from partc.runtime.artifact.manifest import stamp
from partc.runtime.checker.files import check_folder, missing_programs, read_manifest
from partc.runtime.errors import Violation

if TYPE_CHECKING:
    from onnx import ModelProto
    from partc.runtime.checker.training.in_place import Replaced
    from partc.runtime.training.named import Named

__all__ = ["Checked", "Violation", "check", "check_artifact"]


@dataclass(frozen=True)
class Checked:
    """What was looked at, and what was found.

    Of the tensors that ranks keep, so many are replaced in place, and so many by a copy when a step ends; `copies` counts the shards
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

    before = stamp(Path(folder))
    checked, manifest, _ = _check(Path(folder))
    if stamp(Path(folder)) != before:
        return Checked([Violation(MANIFEST, "the artifact was replaced while it was checked", help="check it again")])
    if manifest is None or manifest.training is None:
        return checked
    carried = carried_code(Path(folder), manifest)
    named = [] if carried else outside(Path(folder), manifest.training)
    return replace(checked, violations=[*checked.violations, *carried], named=named)


class _Artifact:
    """An artifact while it is checked: its manifest, what was found so far, and the models of the ranks whose files can be read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.found = check_folder(folder, manifest)
        self.wrong = frozenset(one.file for one in self.found)
        self.models: dict[int, ModelProto] = {}
        self.replaced: Replaced | None = None
        self.copies = 0

    def prove(self, what: str, stage: Callable[[], Iterable[Violation]]) -> bool:
        """Adds what a stage finds; whether that is nothing. A stage that stumbles over files that are wrong has nothing to add."""
        try:
            found = [*dict.fromkeys(stage())]
        except Exception as error:  # whatever bytes a file has, the user is told that the artifact is not proven sound
            kind = f"{type(error).__name__}: {error}".splitlines()[0]
            fact = f"{what} cannot be proven: the check itself failed with {kind}"
            found = [] if self.found else [Violation(MANIFEST, fact, help="compile the model again, and report this")]
            self.found += found
            return False
        self.found += found
        return not found

    def read(self) -> None:
        """Reads each rank file once; one that is not the manifest's is not read."""
        read: dict[str, ModelProto | None] = {}
        for rank in range(self.manifest.ranks):
            file = self.manifest.program(rank)
            if file not in read:
                read[file] = None
                if file not in self.wrong:
                    self.prove(f"{file} alone", lambda: self._read(file, read))  # noqa: B023, it is called at once
            if (model := read[file]) is not None:
                self.models[rank] = model

    def _read(self, file: str, read: dict[str, ModelProto | None]) -> list[Violation]:
        from partc.runtime.checker.rank_file import check_rank, read_rank

        model, found = read_rank(self.folder, file)
        if model is None or found:
            return found
        read[file] = model
        return check_rank(self.folder, file, model, self.manifest, self.wrong)

    def together(self) -> None:
        """What the rank files and the manifest say of each other."""
        from partc.runtime.checker.across.ordering import check_order
        from partc.runtime.checker.across.places import check_places
        from partc.runtime.checker.training.in_place import check_updates
        from partc.runtime.checker.training.section import check_training
        from partc.runtime.checker.training.state import check_state

        def updates() -> list[Violation]:
            self.replaced, unsafe = check_updates(self.manifest, self.models)
            return unsafe

        self.prove("the training", lambda: check_training(self.manifest, self.models))
        kept = self.prove("what ranks keep", lambda: check_state(self.manifest, self.models))
        self.prove("the order of communication", lambda: check_order(self.manifest, self.models))
        if kept:
            self.prove("updates in place", updates)
        if not self.found:
            self.prove("that shards fit and sums are whole", lambda: check_places(self.manifest, self.models))

    def equal(self, inner: Inside | None) -> None:
        """Values that must be equal on several ranks, once all else is proven."""
        from partc.runtime.checker.training.accumulation import check_parts, classes_of
        from partc.runtime.checker.training.replicas import check_replicas, copies_of
        from partc.runtime.checker.training.value_numbering import Classes, Numbering

        if self.found:
            return
        copies = copies_of(self.manifest)
        if not copies and inner is None:
            return

        def numbers() -> Iterator[Violation]:
            classes, made = classes_of(*inner) if inner is not None else (Classes(), {})
            numbering = Numbering(self.folder, self.manifest, self.models, classes)
            if numbering.done:
                self.copies = len(copies)
                yield from check_replicas(numbering, copies)
                yield from check_parts(numbering, made)

        self.prove("that copies stay equal", numbers)

    def checked(self) -> Checked:
        """All that was found."""
        manifest, replaced = self.manifest, self.replaced
        return Checked(
            self.found,
            manifest.ranks,
            len(manifest.files) + 1,
            sum(len(model.graph.node) for model in self.models.values()),
            len(manifest.transfers),
            len(manifest.collectives),
            replaced.in_place if replaced else 0,
            replaced.copied if replaced else 0,
            self.copies,
        )


def _check(folder: Path) -> tuple[Checked, Manifest | None, dict[int, ModelProto]]:
    """What was found, the manifest if it can be read, and the models of the ranks whose files can."""
    manifest, found = read_manifest(folder)
    if manifest is None:
        return Checked(found), None, {}
    one = _Artifact(folder, manifest)
    if any(missing_programs(manifest)):
        return Checked(one.found), manifest, {}
    one.read()
    one.together()
    inner, problems = _check_inside(folder, manifest, one.wrong)
    if not problems:
        one.equal(inner)
    one.found += problems
    return one.checked(), manifest, one.models


Inside: TypeAlias = "tuple[Path, Manifest, dict[int, ModelProto]]"


def _check_inside(folder: Path, manifest: Manifest, wrong: Collection[str]) -> tuple[Inside | None, list[Violation]]:
    """The program of a part of a batch, and what is wrong with it and the evaluation, alone and beside the training."""
    from partc.runtime.checker.training.accumulation import check_accumulation
    from partc.runtime.checker.training.companions import check_evaluation, check_part, check_totals

    if manifest.training is None:
        return None, []
    training, found, accumulation = manifest.training, list[Violation](), None
    kinds = {"evaluation": check_evaluation, "accumulation": check_part, "totals": check_totals}
    folders = (training.evaluation, training.accumulation, TOTALS if training.totals else "")
    for kind, name in zip(kinds, folders, strict=True):
        if not name:
            continue
        if not stays_inside(name) or f"{name}/{MANIFEST}" not in manifest.files:
            fact = f"its {kind} lies at '{name}', where the manifest lists no other one"
            found.append(Violation(MANIFEST, fact, help="compile the model again"))
            continue
        if f"{name}/{MANIFEST}" in wrong:
            continue
        checked, inner, models = _check(folder / name)
        if inner is None:
            found += [replace(one, file=f"{name}/{MANIFEST}") for one in checked.violations]
            continue
        found += [replace(one, file=f"{name}/{one.file}") for one in checked.violations]
        if inner.training is not None:
            found.append(Violation(f"{name}/{MANIFEST}", f"it trains, and is the {kind} of another one"))
        found += kinds[kind](manifest, inner, name)
        if kind == "accumulation":
            accumulation = folder / name, inner, models
    if not training.accumulation or accumulation is not None:
        found += check_accumulation(manifest, accumulation[1] if accumulation else None)
    return accumulation, found
