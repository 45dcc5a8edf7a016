"""Checks an artifact from its files alone: proves the compiler's promises again, without running it.

`CHECKS` lists the checks. Each program of the artifact is checked by itself and against the main one.

All checks of `partc check`, in order: the law that each proves, the files that it reads, and the checks that must come before.

    FILES      the folder, before any of its files is read
    GRAPH      each rank file by itself
    ACROSS     rank files and the manifest against each other
    TRAINING   the state of ranks, in artifacts that train

A check is a function that returns violations, and one row here. It may rely on the rows that it names as `after`, and is skipped if one of
them has violations; `SOUND` stands for all rows before it, and for the programs inside of the artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from partc.runtime.artifact.byte_count import largest_text
from partc.runtime.artifact.format import MANIFEST, StateRecord
from partc.runtime.artifact.graph.targets import forget_copies
from partc.runtime.artifact.manifest import Artifact, stamp
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.saved import saved
from partc.runtime.artifact.training.named import Named, carried_code, outside
from partc.runtime.checker.across.bodies import check_bodies
from partc.runtime.checker.across.constants import check_constants
from partc.runtime.checker.across.equal_nodes import check_alike
from partc.runtime.checker.across.ordering import check_order
from partc.runtime.checker.across.orders import check_orders
from partc.runtime.checker.across.places import check_places
from partc.runtime.checker.across.rings import check_rings
from partc.runtime.checker.across.rows import check_microbatches, check_rows
from partc.runtime.checker.across.tree_sums import check_tree_sums
from partc.runtime.checker.files import check_folder, read_artifact
from partc.runtime.checker.graph.declared import declared_types
from partc.runtime.checker.graph.nodes import check_graph, check_targets
from partc.runtime.checker.graph.rank_file import check_onnx, check_ranks, inline_as, inline_tasks, read_rank
from partc.runtime.checker.graph.run_list import check_run_list
from partc.runtime.checker.graph.types import check_types
from partc.runtime.checker.graph.weights import check_weights
from partc.runtime.checker.subject import SingleFile, StateCounts, Subject
from partc.runtime.checker.training.generation import check_generation
from partc.runtime.checker.training.in_place import check_updates
from partc.runtime.checker.training.packed import check_packed
from partc.runtime.checker.training.section import check_training
from partc.runtime.checker.training.sharded_caches import check_sharded_caches
from partc.runtime.checker.training.slot_rows import check_slots
from partc.runtime.checker.training.state import check_state, different_tensors
from partc.runtime.checker.training.stored import check_stored
from partc.runtime.checker.training.value_numbering import check_copies
from partc.runtime.errors import Violation, out_of_memory

FILES, GRAPH, ACROSS, TRAINING = "files", "graph", "across", "training"
SOUND = ("*",)
NO_CODE = "that no code is carried"
RANKS = "whose program each file is"
Run: TypeAlias = Callable[[Subject], Iterable[Violation]]


@dataclass(frozen=True)
class Check:
    """One check: the law that it proves, in the words of messages, the files that it reads, and its function.

    `each`: of a single rank file, whether it also reads what differs between files of equal nodes; others are run for one of these files.
    """

    proves: str
    scope: str
    run: Run
    after: Sequence[str] = ()
    each: bool = False


CHECKS = (
    Check("the files", FILES, lambda one: check_folder(one.folder, one.manifest)),
    Check("the nodes", GRAPH, lambda one: check_graph(one.file.name, one.file.model)),
    Check(
        "the weights",
        GRAPH,
        lambda one: check_weights(one.folder, one.file.name, one.file.model, one.manifest, one.wrong, one.file.state),
        each=True,
    ),
    Check(RANKS, GRAPH, lambda one: check_ranks(one.file.name, one.file.model, one.manifest), each=True),
    Check("the targets", GRAPH, lambda one: check_targets(one.file.name, one.file.model, one.file.state)),
    Check("ONNX", GRAPH, lambda one: check_onnx(one.file.name, one.file.rest), SOUND),
    Check(
        "the run list",
        GRAPH,
        lambda one: check_run_list(one.folder, one.file.name, one.manifest, one.file.state, one.file.listed),
        SOUND,
        each=True,
    ),
    Check("the types", GRAPH, lambda one: check_types(one.file.name, one.file.rest, one.manifest), SOUND),
    Check(NO_CODE, TRAINING, lambda one: carried_code(one.folder, one.manifest)),
    Check("the training", TRAINING, lambda one: check_training(one.manifest, one.models)),
    Check("what ranks keep", TRAINING, lambda one: check_state(one.manifest, one.models)),
    Check("constants by rank", ACROSS, lambda one: check_constants(one.manifest, one.models)),
    Check("the rows of tasks", ACROSS, check_rows),
    Check("the number of microbatches", ACROSS, check_microbatches, ("the rows of tasks",)),
    Check(
        "the order of communication",
        ACROSS,
        lambda one: check_order(one.manifest, one.models, one.rows, one.traffic, one.shared),
        (RANKS,),
    ),
    Check("how stored parameters are gathered", TRAINING, check_stored, SOUND),
    Check("updates in place", TRAINING, check_updates, ("what ranks keep",)),
    Check("the generation", TRAINING, check_generation, ("what ranks keep",)),
    Check("that slots keep apart", TRAINING, check_slots, SOUND),
    Check("that each entry of a cache is on one rank", TRAINING, check_sharded_caches, SOUND),
    Check("the bodies of branches and loops", ACROSS, lambda one: check_bodies(one.manifest, one.models), SOUND),
    Check(
        "that shards fit and partial values are reduced",
        ACROSS,
        lambda one: check_places(one.shared, one.models),
        SOUND,
    ),
    Check("the order of sums over parts", ACROSS, lambda one: check_tree_sums(one.manifest, one.models), SOUND),
    Check(
        "the other programs", TRAINING, lambda one: (found for name in one.others for found in one.check_beside(name))
    ),
    Check("messages of few bits", TRAINING, lambda one: check_packed(one.manifest, one.models), SOUND),
    Check("the hops of rings", ACROSS, check_rings, SOUND),
    Check("the order of tokens", ACROSS, lambda one: check_orders(one.shared, one.models), SOUND),
    Check("that copies stay equal", TRAINING, check_copies, SOUND),
    Check("that nodes of one name are one", TRAINING, check_alike, SOUND),
)


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
        """Reads each rank file once, and checks one of those with equal nodes; one with another hash than the manifest's is not read."""
        subject = self.subject
        kept: dict[int, list[StateRecord]] = {}
        for record in subject.manifest.state:
            for rank in record.ranks:
                kept.setdefault(rank, []).append(record)
        singles: list[tuple[SingleFile, list[int]]] = []
        firsts: dict[bytes, SingleFile] = {}
        for file, ranks in subject.manifest.by_file(range(subject.manifest.ranks)).items():
            if file in subject.wrong:
                continue
            single = SingleFile(file, kept.get(ranks[0], ()))
            alone = replace(subject, file=single)
            if self._finds(f"that {file} is a model", lambda one: read_rank(one, firsts), alone):
                self.failed.add(file)
            else:
                singles.append((single, ranks))
        uniform = not self.failed and all(single.uniform for single, _ in singles)
        sound: dict[bytes, bool] = {}
        files = {rank: subject.manifest.program(rank) for rank in range(subject.manifest.ranks)}
        for single, ranks in singles:
            first = firsts[single.structure]
            if first.name in self.failed:
                continue
            if first is not single:
                inline_as(single, first)
                files |= dict.fromkeys(ranks, first.name)
            elif self._finds(
                f"that {single.name} is a program",
                lambda one: inline_tasks(one.file, uniform, one.known.kinds),
                replace(subject, file=single),
            ):
                self.failed.add(single.name)
                continue
            failed = self._check_file(replace(subject, file=single), ranks, sound.get(single.structure, False))
            sound.setdefault(single.structure, not failed)
            self.failed |= failed
        if len({*files.values()}) < len({*map(subject.manifest.program, files)}):
            subject.shared = subject.manifest.model_copy(update={"rank_files": [*files.values()]})

    def _check_file(self, subject: Subject, ranks: Sequence[int], sound: bool) -> set[str]:
        """Checks a rank file by itself, and returns the checks that fail; `sound`: whether a file of equal nodes has been checked."""
        single, failed = subject.file, set[str]()
        main = self.subject
        main.models |= dict.fromkeys(ranks, single.model)
        main.once |= dict.fromkeys(ranks, single.once)
        main.traffic |= dict.fromkeys(ranks, single.traffic)
        main.rows |= dict.fromkeys(ranks, single.row) if single.row is not None else {}
        inlined = sum(len(call.body.nodes) - 1 for call in single.row.calls) if single.row is not None else 0
        main.nodes += len(ranks) * (len(single.listed.graph.node) + inlined)
        for check in CHECKS:
            if (
                check.scope == GRAPH
                and (check.each or not sound)
                and _is_due(check, failed)
                and self._finds(f"{check.proves} of {single.name}", check.run, subject)
            ):
                failed.add(check.proves)
        for model in {id(one): one for one in (single.model, single.once, single.traffic)}.values():
            forget_copies(model, {record.next for record in single.state})
        return failed

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
        subject.nodes,
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
    for ranks in subject.shared.by_file(subject.rows).values():
        most = saved(subject.rows[ranks[0]], declared_types(subject.traffic[ranks[0]]))
        found.setdefault((most.microbatches, largest_text(most.bytes), most.unknown), []).extend(ranks)
    return [RowsMemory(ranks_text(ranks), *most) for most, ranks in found.items()]
