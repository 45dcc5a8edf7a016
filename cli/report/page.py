"""Writes the page: the template with styles, scripts and data inside, one file that loads no other file.

The data is JSON in which every `<`, `>` and `&` is escaped, so no name in a model can end its element or begin another one. Scripts set
texts as text, never as HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from html import escape
from pathlib import Path

from partc.cli.difference import KINDS, MEASURES, Difference, common_sizes, differences, grouped_changes
from partc.cli.job.inputs import choose_sizes
from partc.cli.report.document import Request, document_of
from partc.compiler.cost.machine_file import read_machine
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.errors import UsageError
from partc.runtime.files.regular import read_regular

STYLES = ("vendor/uPlot.min.css", "report.css")
SCRIPTS = (
    "vendor/dagre.min.js",
    "vendor/uPlot.iife.min.js",
    "elements.js",
    "units.js",
    "tables.js",
    "tree.js",
    "layout.js",
    "picture.js",
    "details.js",
    "summary.js",
    "transfers.js",
    "memory.js",
    "schedule.js",
    "timeline.js",
    "changes.js",
    "search.js",
    "report.js",
)
"""The scripts in the order in which they run."""
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page_text(title: str, data: Mapping[str, object]) -> str:
    """Returns the page with the data that its scripts read."""
    parts = {
        "title": escape(title),
        "styles": "\n".join(map(_file, STYLES)),
        "licences": _file("vendor/LICENCES.txt"),
        "data": json_text(data),
        "scripts": "\n".join(f"<script>\n{_file(name)}</script>" for name in SCRIPTS),
    }
    before, *rest = _file("report.html").split("{{")
    return before + "".join(parts[name] + after for name, _, after in (one.partition("}}") for one in rest))


def json_text(data: Mapping[str, object]) -> str:
    """Returns JSON that is safe inside an HTML element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character, instead in _ESCAPED.items():
        text = text.replace(character, instead)
    return text


def _file(name: str) -> str:
    return read_regular(Path(__file__).parent / name).decode()


def report_data(artifact: Artifact, before: Artifact | None, request: Request) -> dict[str, object]:
    """Returns the data of the page. Raises UsageError where a size is not legal.

    A trace and a machine apply to the artifact itself, not to `before`.
    """
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


def _program(difference: Difference) -> dict[str, object]:
    """Returns the measures and changes of a program; `rows` have equal changes once."""
    measures = [
        {"name": one.name, "title": MEASURES[one.name], "before": one.before, "after": one.after}
        for one in difference.measures
    ]
    rows: list[dict[str, object]] = []
    for kind in KINDS:
        rows += [{**asdict(change), "times": times} for change, times in grouped_changes(difference.of(kind))]
    return {
        "program": difference.program,
        "measures": measures,
        "changes": [*map(asdict, difference.changes)],
        "rows": rows,
    }
