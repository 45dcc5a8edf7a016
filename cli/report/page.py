"""The page: the template with styles, scripts and data inside, one file that loads nothing.

Data is JSON in which no `<`, `>` or `&` stands as it is, so no name of a model can end its element or begin another one; scripts set texts
as texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path

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
"""In the order in which they run."""
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page_text(title: str, data: Mapping[str, object]) -> str:
    """The page with the data that its scripts read."""
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
    """JSON that may stand in an element of HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character, instead in _ESCAPED.items():
        text = text.replace(character, instead)
    return text


def _file(name: str) -> str:
    return read_regular(Path(__file__).parent / name).decode()
