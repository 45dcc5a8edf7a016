"""Messages and collectives as rows of a report: those of alike ranks, and of all microbatches, are one row that lists each.

{"op": "Send", "value": "h", "bytes": "96*batch", "at": 6144, "times": 8, "ends": [[0, 4, 17], ...]}    0 to 4 with the tag 17
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from partc.cli.output.stats import moved
from partc.cli.report.classes import RankClass
from partc.cli.report.graph import type_text
from partc.cli.report.mesh import axes_of
from partc.runtime.artifact.format import LayoutRecord, Manifest
from partc.runtime.artifact.ranks import ranks_text

_MICROBATCH = re.compile(r"\.\d+$")
_RANK = re.compile(r"\brank \d+")
SEND = "Send"


def communication_rows(
    manifest: Manifest, classes: Sequence[RankClass], sizes: Mapping[str, int], in_tasks: bool
) -> list[dict[str, object]]:
    """The rows, in the order of the manifest. `in_tasks`: whether names of values end with their microbatch."""
    class_of = {rank: k for k, one in enumerate(classes) for rank in one.ranks}
    messages: dict[object, list[list[int]]] = {}
    rows: dict[object, dict[str, object]] = {}
    for one in manifest.transfers:
        value = _MICROBATCH.sub("", one.value) if in_tasks else one.value
        ends = class_of[one.source], class_of[one.target]
        key: object = (SEND, value, ends, str(one.shape), one.bytes, _RANK.sub("", one.cause))
        messages.setdefault(key, []).append([one.source, one.target, one.tag])
        if key not in rows:
            rows[key] = {"op": SEND, "value": value, "type": type_text(one.type, one.shape), "bytes": one.bytes}
            rows[key] |= {"at": _at(one.bytes, sizes), "cause": one.cause}
    for call in manifest.collectives:
        value = _MICROBATCH.sub("", call.value) if in_tasks else call.value
        lists = manifest.groups[call.group]
        key = call.op, value, call.group, str(call.shape), call.bytes, call.cause
        messages.setdefault(key, []).append([call.tag])
        if key not in rows:
            rows[key] = {"op": call.op, "value": value, "type": type_text(call.type, call.shape), "bytes": call.bytes}
            rows[key] |= {"at": _at(call.bytes, sizes), "cause": call.cause, "lists": [*map(ranks_text, lists)]}
            rows[key]["axes"] = axes_of(manifest.mesh, lists)
            rows[key] |= {
                "ranks": sum(map(len, lists)),
                "before": layout_text(call.given),
                "after": layout_text(call.made),
            }
    return [{**row, "ends": messages[key], "times": len(messages[key])} for key, row in rows.items()]


def _at(bytes: str, sizes: Mapping[str, int]) -> int | None:
    """The bytes at the sizes, None where only a run tells."""
    found = moved([bytes], sizes)
    return None if found.unknown else found.bytes


def layout_text(layout: LayoutRecord | None) -> str:
    """A layout in words: `ranks 0-3 as a 2 x 2 grid: dim 0 sharded over axis 0, partial sum over axis 1`."""
    if layout is None:
        return ""
    grid = f"ranks {layout.ranks} as a grid of {' x '.join(map(str, layout.mesh))}"
    said = [
        f"dim {dim} sharded over axis {' and '.join(map(str, axes))}" for dim, axes in enumerate(layout.cuts) if axes
    ]
    said += [f"partial {reduce} over axis {axis}" for axis, reduce in layout.partial]
    return f"{grid}: {', '.join(said) or 'replicated'}"
