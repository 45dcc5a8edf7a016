"""Checks that an artifact states one number of microbatches wherever it states one, in all rank files (`artifact/tasks/microbatches.py`).

rank_0000.onnx: rank 0: 'ids' is split into 8 parts, but the rows have 7 microbatches
"""

from __future__ import annotations

from collections.abc import Iterator

from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.microbatches import LAW, other_counts
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import Violation


def check_microbatches(subject: Subject) -> Iterator[Violation]:
    """Statements of rank files that differ from the number of microbatches of the rows."""
    files = subject.manifest.by_file(subject.rows)
    rows = [subject.rows[ranks[0]] for ranks in files.values()]
    count = 1 + max((task.microbatch for row in rows for task in row.tasks if task is not None), default=0)
    for (file, ranks), row in zip(files.items(), rows, strict=True):
        label = f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"
        for fact in other_counts(row, subject.models[ranks[0]], count, subject.manifest):
            yield Violation(file, f"{label}: {fact}\n  {LAW}", help="compile the model again")
