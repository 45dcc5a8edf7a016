"""Checks an artifact from its files alone: proves the compiler's promises again, without running it.

`checks.py` lists the checks. Each program of the artifact is checked by itself and against the main one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from partc.runtime.artifact.byte_count import largest_text
from partc.runtime.artifact.format import MANIFEST, StateRecord
from partc.runtime.artifact.graph.targets import forget_copies
from partc.runtime.artifact.manifest import Artifact, stamp
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.saved import saved
from partc.runtime.artifact.training.named import Named, outside
from partc.runtime.checker.checks import ACROSS, CHECKS, FILES, GRAPH, NO_CODE, SOUND, TRAINING, Check, Run
from partc.runtime.checker.files import read_artifact
from partc.runtime.checker.graph.declared import declared_types
from partc.runtime.checker.graph.rank_file import read_rank
from partc.runtime.checker.subject import SingleFile, StateCounts, Subject
from partc.runtime.checker.training.state import different_tensors
from partc.runtime.errors import Violation, out_of_memory

__all__ = ["Checked", "RowsMemory", "Violation", "check", "check_artifact"]


@dataclass(frozen=True)
class Checked:
    """The violations found, and the counts of checked parts.

    `state`: the number of tensors that ranks keep. `named`: the files outside of the folder that a training names, which only the user can
    approve. `memory`: the saved values of a sound pipeline's rows, of `microbatches` in all.
    """

    violations: list[Violation]
    ranks: int = 0
    files: int = 0
    nodes: int = 0
    transfers: int = 0
    collectives: int = 0
    state: StateCounts = field(default_factory=StateCounts)
    named: Sequence[Named] = ()
    memory: Sequence[RowsMemory] = ()
    microbatches: int = 0
    trains: bool = False
    lacks_weights: bool = False


@dataclass(frozen=True)
class RowsMemory:
    """The peak of the values that the rows of some ranks save for backward passes: microbatches, and bytes as an expression in the symbols.

    `unknown`: the number of values whose size is known only at run time.
    """

    ranks: str
    microbatches: float
    bytes: str
    unknown: int


def check_artifact(folder: str | Path) -> list[Violation]:
    """Returns every violation in the artifact `folder`; an empty list means that all promises hold."""
    return check(folder).violations


def check(folder: str | Path) -> Checked:
    """Returns the violations together with counts of what was checked."""
    place = Path(folder)
    before = stamp(place)
    artifact, unread = read_artifact(place)
    checked = Checked(unread) if artifact is None else _checked(_Run(artifact))
    if artifact is not None:
        checked.violations.extend(_of_other_numbers(artifact))
    if stamp(place) != before:
        return Checked([Violation(MANIFEST, "the artifact was replaced while it was checked", help="check it again")])
    return checked


def _of_other_numbers(artifact: Artifact) -> Iterator[Violation]:
    """Yields the violations in the artifacts for other numbers of ranks, and those of tensors that differ from this one's."""
    for folder in filter(None, artifact.manifest.numbers.values()):
        other, unread = read_artifact(artifact.folder / folder)
        found = unread if other is None else _Run(other).violations
        yield from (replace(one, file=f"{folder}/{one.file}") for one in found)
        if other is not None:
            yield from different_tensors(artifact.manifest, other.manifest, f"{folder}/{MANIFEST}")


class _Run:
    """A run of all checks over one program: `violations` are the violations, `failed` names the checks and files that have any.

    The folder is checked once, with the main program; the runs of other programs get the facts found in the subject `main`.
    """

    def __init__(self, artifact: Artifact, main: Subject | None = None) -> None:
        others = artifact.programs[1:] if artifact.manifest.is_main else []
        about = artifact.generation, artifact.training
        self.subject = Subject(artifact.folder, artifact.manifest, self._beside, others, *about)
        if main is not None:
            self.subject.wrong, self.subject.known = main.wrong, main.known
        self.artifact = artifact
        self.violations: list[Violation] = []
        self.failed: set[str] = set()
        if artifact.manifest.is_main:
            self._run(FILES)
            self.subject.wrong = frozenset(one.file for one in self.violations)
        self._read()
        self._run(ACROSS, TRAINING)

    def _beside(self, program: str) -> list[Violation]:
        """Returns the violations of another program of the artifact."""
        found = _Run(self.artifact.program_named(program), self.subject).violations
        return [replace(one, file=f"{MANIFEST}: {program}") if one.file == MANIFEST else one for one in found]

    def _run(self, *scopes: str) -> None:
        for check in CHECKS:
            if (
                check.scope in scopes
                and _is_due(check, self.failed)
                and self._finds(check.proves, check.run, self.subject)
            ):
                self.failed.add(check.proves)

    def _read(self) -> None:
        """Reads and checks each rank file once; a file whose hash differs from the manifest's is not read."""
        subject = self.subject
        kept: dict[int, list[StateRecord]] = {}
        for record in subject.manifest.state:
            for rank in record.ranks:
                kept.setdefault(rank, []).append(record)
        for file, ranks in subject.manifest.by_file(range(subject.manifest.ranks)).items():
            if file in subject.wrong:
                continue
            single, failed = SingleFile(file, kept.get(ranks[0], ())), set[str]()
            rank_subject = replace(subject, file=single)
            if self._finds(f"that {file} is a model", read_rank, rank_subject):
                self.failed.add(file)
                continue
            subject.models |= dict.fromkeys(ranks, single.model)
            subject.once |= dict.fromkeys(ranks, single.once)
            subject.rows |= dict.fromkeys(ranks, single.row) if single.row is not None else {}
            for check in CHECKS:
                if (
                    check.scope == GRAPH
                    and _is_due(check, failed)
                    and self._finds(f"{check.proves} of {file}", check.run, rank_subject)
                ):
                    failed.add(check.proves)
            for model in (single.model, *([single.once] if single.once is not single.model else [])):
                forget_copies(model, {record.next for record in single.state})
            self.failed |= failed

    def _finds(self, proves: str, run: Run, subject: Subject) -> bool:
        """Runs a check, and returns whether it finds violations. A check that fails on files known to be wrong adds none."""
        try:
            violations = [*dict.fromkeys(run(subject))]
        except Exception as error:  # whatever bytes a file has, the artifact counts as not proven sound
            if out_of_memory(error):
                raise
            kind = f"{type(error).__name__}: {error}".splitlines()[0]
            fact = f"{proves} cannot be proven: the check itself failed with {kind}"
            self.violations += (
                [] if self.violations else [Violation(MANIFEST, fact, help="compile the model again, and report this")]
            )
            return True
        self.violations += violations
        return bool(violations)


def _is_due(check: Check, failed: set[str]) -> bool:
    """Whether a check can run: none of the checks on which it relies has failed."""
    return not failed if check.after == SOUND else failed.isdisjoint(check.after)


def _checked(run: _Run) -> Checked:
    subject, manifest = run.subject, run.subject.manifest
    named = outside(subject.folder, manifest.training) if manifest.training and NO_CODE not in run.failed else []
    return Checked(
        run.violations,
        manifest.ranks,
        1 + sum(not record.absent for record in manifest.files.values()),
        sum(len(model.graph.node) for model in subject.models.values()),
        len(manifest.messages),
        len(manifest.collectives),
        subject.counts,
        named,
        [] if run.violations else _rows_memory(subject),
        max((1 + task.microbatch for row in subject.rows.values() for task in row.tasks if task), default=0),
        manifest.training is not None,
        manifest.lacks_weights,
    )


def _rows_memory(subject: Subject) -> list[RowsMemory]:
    """Returns the values that rows save, with equal ranks together."""
    found: dict[tuple[float, str, int], list[int]] = {}
    for ranks in subject.manifest.by_file(subject.rows).values():
        most = saved(subject.rows[ranks[0]], declared_types(subject.models[ranks[0]]))
        found.setdefault((most.microbatches, largest_text(most.bytes), most.unknown), []).extend(ranks)
    return [RowsMemory(ranks_text(ranks), *most) for most, ranks in found.items()]
