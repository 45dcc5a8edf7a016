"""What a program of an artifact does, as facts that a review compares: where nodes run, how they are cut, what travels, what it costs.

Everything is read from the manifest and from one rank file of each kind; a rank whose file another rank has, too, costs nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from partc.cli.output.stats import moved
from partc.compiler.cost.memory import memory_of_ranks
from partc.compiler.cost.step import simulated
from partc.runtime.artifact.format import BYTES, CUT, DOMAIN, PATH, RULE, TAG, TARGET
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.artifact.tensors.dtypes import element

if TYPE_CHECKING:
    from onnx import ModelProto
    from partc.compiler.cost.machine import Machine
    from partc.runtime.artifact.format import Collective, Transfer
    from partc.runtime.artifact.manifest import Artifact

MEASURES = {
    "messages": "messages and collectives of a step",
    "bytes": "bytes that all ranks send in a step",
    "memory": "peak memory of the largest rank",
    "weights": "weights of the largest rank, without the optimizer's state",
    "time": "time of a step on the machine",
}
"""By name what is measured of a program; the time, in nanoseconds, where a machine is given."""
TIME = "time"
IN_BYTES = ("bytes", "memory", "weights")
_CUT = re.compile(r"(?:^|, |; )(\S+ in \d+) by ")


@dataclass(frozen=True)
class Fact:
    """What one thing is, as text to compare, and why."""

    text: str
    why: str = ""


@dataclass
class Facts:
    """A program's facts by kind and name, and its measures at chosen sizes. `unknown`: what `bytes` and `memory` leave out."""

    placement: dict[str, Fact] = field(default_factory=dict)
    layouts: dict[str, Fact] = field(default_factory=dict)
    shards: dict[str, Fact] = field(default_factory=dict)
    communication: dict[str, Fact] = field(default_factory=dict)
    measures: dict[str, int] = field(default_factory=dict)
    unknown: int = 0


KINDS = ("placement", "layouts", "shards", "communication")
"""The fields of `Facts` that hold facts by name."""


def facts_of(artifact: Artifact, sizes: Mapping[str, int], machine: Machine | None = None) -> Facts:
    """The facts of the program that the artifact is seen from, with the time of a step that a `machine` is simulated to take.

    Raises UsageError where a dim is not a whole number at the sizes.
    """
    from onnx import TensorProto

    manifest, found = artifact.manifest, Facts()
    collectives: list[tuple[str, int]] = []
    places: dict[str, dict[str, list[int]]] = {}
    cuts: dict[str, dict[str, None]] = {}
    shapes: dict[str, dict[str, list[int]]] = {}
    why: dict[str, str] = {}
    stated = {one.tag: one.bytes for one in manifest.collectives}
    for ranks in manifest.by_file(range(manifest.ranks)).values():
        model = artifact.model(ranks[0])
        for path, target, cut, rule in dict.fromkeys(_nodes(model)):
            places.setdefault(path, {}).setdefault(target, []).extend(ranks)
            cuts.setdefault(path, {}).update(dict.fromkeys(cut))
            why.setdefault(path, rule)
        for tensor in model.graph.initializer:
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            shape = f"{element(tensor.data_type)}[{', '.join(map(str, tensor.dims))}]"
            shapes.setdefault(tensor.name, {}).setdefault(shape, []).extend(ranks)
        collectives += [
            (metadata_of(node, BYTES, stated[tag]), len(ranks))
            for node in unrolled(model).graph.node
            if node.domain == DOMAIN and (tag := integer_of(node, TAG, -1)) in stated
        ]
    for path, by_target in places.items():
        text = "; ".join(
            f"{ranks_text(ranks)}{f' on {target}' * bool(target)}" for target, ranks in sorted(by_target.items())
        )
        found.placement[path] = Fact(text, why[path])
        found.layouts[path] = Fact(", ".join(sorted(cuts[path])) or "whole", why[path])
    for name, by_shape in shapes.items():
        found.shards[name] = Fact("; ".join(f"{shape} on {ranks_text(ranks)}" for shape, ranks in by_shape.items()))
    _add_communication(found, artifact, sizes)
    sent = [moved([one.bytes for one in manifest.messages], sizes)]
    sent += [moved([text] * times, sizes) for text, times in collectives]
    memory = memory_of_ranks(artifact, sizes)
    found.measures = {
        "messages": len(manifest.messages) + len(manifest.collectives),
        "bytes": sum(one.bytes for one in sent),
        "memory": max(one.peak for one in memory),
        "weights": max(sum(target.weights + target.parameters for target in one.targets) for one in memory),
    }
    if machine is not None:
        own = {name: size for name, size in sizes.items() if name in manifest.symbols}
        found.measures[TIME] = round(1e9 * simulated(artifact, machine, own).played.seconds)
    found.unknown = sum(one.unknown for one in sent) + sum(one.unknown for one in memory)
    return found


def _nodes(model: ModelProto) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Path, target, cuts, and the rule that placed it, for each compute node that has a path."""
    nodes = chain(model.graph.node, *(function.node for function in model.functions))
    for node in nodes:
        said = {entry.key: entry.value for entry in node.metadata_props}
        if node.domain != DOMAIN and (path := said.get(PATH)):
            yield path, said.get(TARGET, ""), tuple(_CUT.findall(said.get(CUT, ""))), said.get(RULE, "")


def _add_communication(found: Facts, artifact: Artifact, sizes: Mapping[str, int]) -> None:
    """What travels, by op, value and ends: its bytes for a rank, and the cause. What several messages move is added up."""
    manifest = artifact.manifest
    texts: dict[str, list[str]] = {}
    causes: dict[str, str] = {}
    groups = {name: " | ".join(map(ranks_text, lists)) for name, lists in manifest.groups.items()}
    named: list[tuple[str, Transfer | Collective]] = [
        (f"message {one.value}: {one.source} to {one.target}", one) for one in manifest.messages
    ]
    named += [(f"{one.op} {one.value}: {groups[one.group]}", one) for one in manifest.collectives]
    for name, one in named:
        texts.setdefault(name, []).append(one.bytes)
        causes.setdefault(name, one.cause)
    for name, some in texts.items():
        total = moved(some, sizes)
        found.communication[name] = Fact("unknown" if total.unknown else f"{total.bytes:,} B", causes[name])
