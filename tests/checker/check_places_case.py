"""Damages an artifact as if a collective had been forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from mutated import change_manifest, correct


def without(folder: Path, tag: int) -> None:
    """The artifact as if a collective had been forgotten: what it reduces goes on as it is, on all ranks and in the manifest."""
    for path in sorted(folder.glob("rank_*.onnx")):
        model = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            if node.domain == "partc.comm" and any(one.name == "tag" and one.i == tag for one in node.attribute):
                node.CopyFrom(onnx.helper.make_node("Identity", list(node.input), list(node.output), name=node.name))
        path.write_bytes(model.SerializeToString(deterministic=True))

    def kept(data: dict[str, Any]) -> None:
        data["collectives"] = [one for one in data["collectives"] if one["tag"] != tag]

    change_manifest(folder, kept)
    correct(folder)
