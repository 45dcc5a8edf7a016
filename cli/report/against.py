"""What a page is drawn from: the document of an artifact, and with another one its document and what `partc diff` says of both."""

from __future__ import annotations

from dataclasses import asdict, replace

from partc.cli.difference.compare import Difference, grouped_changes
from partc.cli.difference.facts import KINDS, MEASURES
from partc.cli.difference.programs import common_sizes, differences
from partc.cli.job.inputs import choose_sizes
from partc.cli.report.document import Request, document_of
from partc.compiler.cost.machine_file import read_machine
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.errors import UsageError


def report_data(artifact: Artifact, before: Artifact | None, request: Request) -> dict[str, object]:
    """The data of the page; UsageError where a size is not legal. A trace and a machine are of the artifact itself, not of `before`."""
    if before is None:
        if problems := choose_sizes(artifact.manifest.symbols, request.sizes)[1]:
            raise UsageError("\n".join(problems))
        return {"artifacts": [document_of(artifact, request)], "difference": None}
    sizes = common_sizes(before, artifact, request.sizes)
    machine = read_machine(request.machine) if request.machine is not None else None
    after = document_of(artifact, replace(request, sizes=sizes), request.sizes)  # first, since its trace may be refused
    documents = [after, document_of(before, Request(sizes), request.sizes)]
    found, _ = differences(before, artifact, sizes, machine)
    found.sort(key=lambda one: one.program != artifact.manifest.name)
    difference = {"before": str(before.folder), "after": str(artifact.folder), "programs": [*map(_program, found)]}
    return {"artifacts": documents, "difference": difference}


def _program(found: Difference) -> dict[str, object]:
    """The measures and changes of a program; `rows` have alike changes once."""
    measures = [
        {"name": one.name, "title": MEASURES[one.name], "before": one.before, "after": one.after}
        for one in found.measures
    ]
    rows: list[dict[str, object]] = []
    for kind in KINDS:
        rows += [{**asdict(change), "times": times} for change, times in grouped_changes(found.of(kind))]
    return {"program": found.program, "measures": measures, "changes": [*map(asdict, found.changes)], "rows": rows}
