"""Checks the rows of tasks: every microbatch runs once through every task, in a possible order, and equally on all ranks.

1. A cell is a call of a function for a microbatch, and is named after both.
2. Every function of a file is called once for each microbatch, 0 to m - 1.
3. A stage's F of a microbatch comes before its B, and B before W.
4. Ranks that share stages run their tasks in the same order.
5. A task reads only values that tasks of its own microbatch make, but sums of gradients pass from one call of a function to its next.
6. `ir/schedule.txt`, which shows the rows to users, has the same rows: each row has the tasks of the rank's stages that the rank runs, and
   every task that a rank runs is in one of the rows.

That each message has both ends, and that rows do not wait for each other, is proven for all communication (`ordering.py`).

    rank_0001.onnx: rank 1, cell 4: 1B0 appears twice, first in cell 2
        1F0 1B0 1F1 1B0 1B1
                    ^^^
      every function is called once for each microbatch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from partc.runtime.artifact.format import SCHEDULE, dump_file
from partc.runtime.artifact.graph.onnx_graph import addends
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.calls import Call
from partc.runtime.artifact.tasks.microbatches import LAW, other_counts
from partc.runtime.artifact.tasks.rows import Row, rows_of_text
from partc.runtime.artifact.tasks.task import Kind, Task, marked
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import ArtifactError, Violation, reason_of
from partc.runtime.files.counted import SCHEDULE_BYTES, read_text

_ONCE = "every function is called once for each microbatch"
_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
_ORDER = "of one stage and microbatch F comes before B, and B before W"
_ALIKE = "ranks that share stages run their tasks in one order"
_OWN = "a task reads what tasks of its own microbatch make; a sum goes from one call of a function to its next"
_ONE = "the rows of people and of ranks are one"
_AGAIN = "compile the model again"
_SHOWN = 6


@dataclass(frozen=True)
class _File:
    """The row of a rank file, with the ranks that run the file."""

    file: str
    ranks: tuple[int, ...]
    row: Row

    @property
    def label(self) -> str:
        """The ranks as text: `ranks 0-3`."""
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranks_text(self.ranks)}"

    def wrong(self, at: int, fact: str, law: str) -> Violation:
        """A violation of `law` at the cell `at`, with the cell marked."""
        text = f"{self.label}, cell {at + 1}: {fact}\n{marked(self.row.cells, at)}\n  {law}"
        return Violation(self.file, text, help=_AGAIN)


def check_rows(subject: Subject) -> Iterator[Violation]:
    """Yields the faults of an artifact's rows: for each row the first fault of each kind."""
    files = [
        _File(file, tuple(ranks), subject.rows[ranks[0]])
        for file, ranks in subject.manifest.by_file(subject.rows).items()
    ]
    if not files:
        return
    stated: Mapping[int, tuple[str, ...]] = {}
    count = 1 + max((task.microbatch for one in files for task in one.row.tasks if task), default=0)
    text = dump_file(SCHEDULE, subject.manifest.prefix)
    if text in subject.manifest.files and text not in subject.wrong:
        try:
            read = rows_of_text(read_text(subject.folder / text, SCHEDULE_BYTES))
            count, stated = read.microbatches, read.rows
        except (ArtifactError, OSError, UnicodeDecodeError) as error:
            yield Violation(text, reason_of(error), help=_AGAIN)
    wrong = [violation for one in files for violation in _row_violations(one, count)]
    yield from wrong
    if wrong:
        return
    yield from _unlike(files)
    yield from _not_as_stated(files, stated, text)
    makers = {name: one.row.tasks[at] for one in files for name, at in one.row.makers.items()}
    for one in files:
        yield from _reads_others(one, makers)


def _row_violations(file: _File, count: int) -> Iterator[Violation]:
    """Yields one violation for each law that a row breaks by itself, at the first cell that does; `count`: the number of microbatches."""
    first: dict[Task, int] = {}
    told = set[str]()

    def wrong_at(law: str, at: int, fact: str) -> Iterator[Violation]:
        if law not in told:
            told.add(law)
            yield file.wrong(at, fact, law)

    for at, (call, task) in enumerate(zip(file.row.calls, file.row.tasks, strict=True)):
        if task is None:
            law = "the functions of tasks are F, B or W and a stage, such as F2"
            yield from wrong_at(law, at, f"'{call.cell}' is a call of '{call.node.op_type}'")
            continue
        if call.cell != str(task):
            law = "a task is named by its stage, kind and microbatch"
            yield from wrong_at(law, at, f"{task} is named '{call.cell}'")
        if task in first:
            yield from wrong_at(_ONCE, at, f"{task} appears twice, first in cell {first[task] + 1}")
        elif task.microbatch >= count:
            yield from wrong_at(
                f"the microbatches are 0 to {count - 1}", at, f"{task} is of microbatch {task.microbatch}"
            )
        for kind in _KINDS[: _KINDS.index(task.kind)]:
            before = task._replace(kind=kind)
            if before.body in file.row.functions and before not in first:
                yield from wrong_at(_ORDER, at, f"{task} comes before {before}")
        first.setdefault(task, at)
    called = {(task.body, task.microbatch) for task in first}
    absent = [
        f"{name[1:]}{name[:1]}{k}" for name in file.row.functions for k in range(count) if (name, k) not in called
    ]
    if absent:
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        fact = f"{' '.join(absent[:_SHOWN])}{more} {'is' if len(absent) == 1 else 'are'} missing"
        yield from wrong_at(_ONCE, len(file.row.cells), fact)


def _unlike(files: Sequence[_File]) -> Iterator[Violation]:
    """Yields the rows whose order of tasks differs from that of other ranks with the same stages."""
    firsts: dict[frozenset[int], _File] = {}
    by_stage: dict[int, _File] = {}
    for one in files:
        others = [firsts.setdefault(one.row.stages, one)]
        others += [by_stage.setdefault(stage, one) for stage in sorted(one.row.stages)]
        for other in dict.fromkeys(others):
            if other is not one and (violation := _first_unlike(one, other)) is not None:
                yield violation
                break


def _first_unlike(file: _File, other: _File) -> Violation | None:
    shared = {*file.row.tasks} & {*other.row.tasks}
    mine = [at for at, task in enumerate(file.row.tasks) if task in shared]
    theirs = [task for task in other.row.tasks if task in shared]
    for at, task in zip(mine, theirs, strict=True):
        if file.row.tasks[at] != task:
            return file.wrong(at, f"{file.row.tasks[at]} stands where {other.label} has {task}", _ALIKE)
    return None


def _not_as_stated(files: Sequence[_File], stated: Mapping[int, tuple[str, ...]], text: str) -> Iterator[Violation]:
    """Yields for each row the first cell that differs from the file `text`, whose rows have the tasks of a rank's own stages.

    A rank has no call of a task in which it has no work, and may have calls of other stages, in whose values it takes part.
    """
    every = {cell for cells in {*stated.values()} for cell in cells}
    for file in files if stated else ():
        for rank in file.ranks:
            cells = [cell for cell in stated.get(rank, ()) if _body(cell) in file.row.functions]
            own = {_body(cell)[1:] for cell in cells}
            row = [at for at, task in enumerate(file.row.tasks) if task is not None and str(task.stage) in own]
            pairs = zip_longest(row, cells)
            wrong = next(((at, cell) for at, cell in pairs if at is None or file.row.cells[at] != cell), None)
            if wrong is not None:
                at = len(file.row.cells) if wrong[0] is None else wrong[0]
                stands = "its end" if wrong[0] is None else file.row.cells[at]
                fact = f"{stands} stands where {text} has {wrong[1] or 'no task'}"
                yield file.wrong(at, fact, _ONE)
                break
        else:
            absent = next((at for at, cell in enumerate(file.row.cells) if cell not in every), None)
            if absent is not None:
                yield file.wrong(absent, f"{file.row.cells[absent]} is in no row of {text}", _ONE)


def _body(cell: str) -> str:
    """The function that a cell calls; a text that is not a cell is returned unchanged."""
    kind = next((letter for letter in cell if letter in "FBW"), "")
    return f"{kind}{cell.partition(kind)[0]}" if kind else cell


def _reads_others(file: _File, makers: Mapping[str, Task | None]) -> Iterator[Violation]:
    """Yields the first task that reads a value of another microbatch or does not continue a sum of gradients."""
    by_function: dict[str, list[int]] = {}
    for at, call in enumerate(file.row.calls):
        by_function.setdefault(call.node.op_type, []).append(at)
    faults: list[tuple[int, str]] = []
    for places in by_function.values():
        calls = [file.row.calls[at] for at in places]
        sums = _sums(calls[0])
        for k, formal in enumerate(calls[0].body.function.input):
            names = [call.node.input[k] for call in calls]
            if len({*names}) == 1:
                continue
            output = sums.get(formal)
            carried = [
                output is not None and after.node.input[k] == before.node.output[output]
                for before, after in pairwise(calls)
            ]
            if any(carried):
                if not all(carried):
                    at = places[1 + carried.index(False)]
                    fact = f"it adds to '{file.row.calls[at].node.input[k]}', not to what the call before it made"
                    faults.append((at, f"{file.row.cells[at]}: {fact}"))
                continue
            for at, name in zip(places, names, strict=True):
                own = file.row.calls[at].microbatch
                maker = makers.get(name)
                other = maker.microbatch if maker else file.row.split.get(name, own)
                if other != own:
                    fact = f"{file.row.cells[at]} reads '{name}', which is of microbatch {other}"
                    faults.append((at, fact))
                    break
    if faults:
        yield file.wrong(*min(faults), _OWN)


def _sums(call: Call) -> dict[str, int]:
    """Maps each input of a body that is added to an output to the index of that output."""
    places = {name: k for k, name in enumerate(call.body.function.output)}
    return {
        term: places[node.output[0]]
        for node in call.body.nodes
        if node.output and node.output[0] in places
        for term in addends(node)
        if term in call.body.function.input
    }


def check_microbatches(subject: Subject) -> Iterator[Violation]:
    """Yields the places in rank files that state another number of microbatches than the rows have."""
    files = subject.manifest.by_file(subject.rows)
    rows = [subject.rows[ranks[0]] for ranks in files.values()]
    count = 1 + max((task.microbatch for row in rows for task in row.tasks if task is not None), default=0)
    for (file, ranks), row in zip(files.items(), rows, strict=True):
        label = f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"
        for fact in other_counts(row, subject.traffic[ranks[0]], count, subject.manifest):
            yield Violation(file, f"{label}: {fact}\n  {LAW}", help="compile the model again")
