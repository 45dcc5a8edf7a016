"""The subject of a check, and the counts of checks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from onnx import AttributeProto, ModelProto, NodeProto
from partc.runtime.artifact.format import Manifest, StateRecord
from partc.runtime.artifact.generation import GenerationRecord
from partc.runtime.artifact.tasks.rows import Row
from partc.runtime.artifact.training.training_record import TrainingRecord
from partc.runtime.errors import Violation


@dataclass
class StateCounts:
    """Tensors of the state, of all ranks."""

    in_place: int = 0
    """Tensors that are replaced in place."""
    copied: int = 0
    """Tensors that are replaced by a copy when a step ends."""
    copies: int = 0
    """Shards that several ranks hold, and that are proven to stay equal there."""


@dataclass
class SingleFile:
    """A rank file that is checked by itself: its graph, its row of tasks where it has tasks, and what its ranks keep."""

    name: str = ""
    state: Sequence[StateRecord] = ()
    model: ModelProto = field(default_factory=ModelProto)
    row: Row | None = None


CONSTANT = "constant"
"""The first part of the origin of a constant."""

Origin: TypeAlias = tuple[Hashable, ...]
"""A tensor's name; a constant's numbers; the node of a result, which output it is, and the node's source; else a value's name."""


@dataclass(frozen=True, eq=False)
class NamedNode:
    """The node of a name, with the origins of what it reads, in the first file that has it."""

    file: str
    program: str
    node: NodeProto
    operands: tuple[Origin, ...]
    types: Mapping[str, object]
    """What the file declares of its values."""

    @cached_property
    def attributes(self) -> dict[str, Hashable]:
        """The attributes by name."""
        return {one.name: _content(one) for one in self.node.attribute}


def _content(attribute: AttributeProto) -> Hashable:
    """An attribute, of a body its ops, their attributes and its constants: values may have other names there, and a training notes some."""
    bodies = [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    if not bodies:
        return bytes(attribute.SerializeToString(deterministic=True))
    return tuple(
        (
            tuple((one.data_type, *one.dims, one.raw_data) for one in body.initializer),
            tuple(
                (node.domain, node.op_type, *sorted(map(_content, node.attribute), key=repr))
                for node in body.node
                if node.op_type != "Identity"
            ),
        )
        for body in bodies
    )


@dataclass
class Known:
    """What programs of an artifact have: nodes by name and source, those of a loss also by the number of microbatches, the programs with a
    value of an origin, by rank and weight its shard's text, and by such a text its numbers in rank files."""

    nodes: dict[tuple[str, str, int], NamedNode] = field(default_factory=dict)
    programs: dict[Origin, set[str]] = field(default_factory=dict)
    shards: dict[tuple[int, str], str] = field(default_factory=dict)
    numbers: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Subject:
    """A program of an artifact that is checked: `wrong` are the files that are not the manifest's, `models` those of the ranks whose files
    can be read.

    A check of a single rank file gets it as `file`. `check_beside` checks another program of the artifact by its name, `others` are those
    of the main one.
    """

    folder: Path
    manifest: Manifest
    check_beside: Callable[[str], list[Violation]]
    others: Sequence[str] = ()
    generation: GenerationRecord | None = None
    """What the artifact says of making tokens, whichever of its programs this is."""
    training: TrainingRecord | None = None
    """What the artifact says of its training, likewise."""
    known: Known = field(default_factory=Known)
    """What the programs that have been looked at have; one object for all of them."""
    wrong: frozenset[str] = frozenset()
    models: dict[int, ModelProto] = field(default_factory=dict)
    file: SingleFile = field(default_factory=SingleFile)
    rows: dict[int, Row] = field(default_factory=dict)
    """Maps each rank whose file has tasks to its row of tasks."""
    counts: StateCounts = field(default_factory=StateCounts)
