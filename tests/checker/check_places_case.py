"""Damages an artifact as if a collective had been forgotten."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from mutated import change_manifest, correct
from onnx import NodeProto, helper
from partc.runtime.artifact.format import MANIFEST


def without(folder: Path, *tags: int) -> None:
    """The artifact as if some collectives had been forgotten: what they reduce goes on as it is, on all ranks and in the manifest."""
    for path in sorted(folder.glob("rank_*.onnx")):
        model = onnx.load(path, load_external_data=False)
        for nodes in (model.graph.node, *[function.node for function in model.functions]):
            kept = [one for node in nodes for one in (_copies(node) if _is_call(node, tags) else [node])]
            del nodes[:]
            nodes.extend(kept)
        path.write_bytes(model.SerializeToString(deterministic=True))

    def kept(data: dict[str, Any]) -> None:
        data["collectives"] = [one for one in data["collectives"] if one["tag"] not in tags]

    change_manifest(folder, kept)
    correct(folder)


def _is_call(node: NodeProto, tags: Sequence[int]) -> bool:
    return node.domain == "partc.comm" and any(one.name == "tag" and one.i in tags for one in node.attribute)


def _copies(node: NodeProto) -> list[NodeProto]:
    return [
        helper.make_node("Identity", [source], [result], name=f"{node.name}.{result}")
        for source, result in zip(node.input, node.output, strict=False)
    ]


def without_any(folder: Path) -> None:
    """The artifact as if all collectives had been forgotten."""
    data = json.loads((folder / MANIFEST).read_text())
    without(folder, *[one["tag"] for program in data["programs"].values() for one in program["collectives"]])
