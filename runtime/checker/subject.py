"""The program that checks examine, and the counts that they report."""

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
    """Counts of tensors of the state, over all ranks."""

    in_place: int = 0
    """Tensors that are replaced in place."""
    copied: int = 0
    """Tensors that are replaced by a copy when a step ends."""
    copies: int = 0
    """Shards that several ranks hold, and that are proven to stay equal there."""


@dataclass
class SingleFile:
    """A rank file that is checked by itself: its graph, its row of tasks if it has tasks, and the state that its ranks keep."""

    name: str = ""
    state: Sequence[StateRecord] = ()
    listed: ModelProto = field(default_factory=ModelProto)
    """The file as it is, with calls of tasks."""
    model: ModelProto = field(default_factory=ModelProto)
    """The graph with the nodes of tasks in place of their calls."""
    once: ModelProto = field(default_factory=ModelProto)
    """The graph with the nodes of each task once, for its first call."""
    traffic: ModelProto = field(default_factory=ModelProto)
    """The graph with the communication of all calls."""
    rest: ModelProto = field(default_factory=ModelProto)
    """The graph without nodes of kinds that were checked before."""
    row: Row | None = None
    uniform: bool = True
    """Whether later microbatches repeat what the first two do."""
    structure: bytes = b""
    """A key that is equal for files of equal nodes, whose weights may be other shards."""


CONSTANT = "constant"
"""The first element of a constant's origin."""

Origin: TypeAlias = tuple[Hashable, ...]
"""A tensor's name; a constant's numbers; a result's node, output index and source of the node; for other values the value's name."""


@dataclass(frozen=True, eq=False)
class NamedNode:
    """A named node with the origins of its operands, in the first file that has it."""

    file: str
    program: str
    node: NodeProto
    operands: tuple[Origin, ...]
    types: Mapping[str, object]
    """Maps the file's values to their declared types."""

    @cached_property
    def attributes(self) -> dict[str, Hashable]:
        """The attributes by name."""
        return {one.name: _content(one) for one in self.node.attribute}


def _content(attribute: AttributeProto) -> Hashable:
    """A key for an attribute; for a body its ops but Identity, their attributes and its constants: its values may have other names."""
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
    """The contents of an artifact's programs that were checked before.

    `nodes`: nodes by name and source, those of a loss also by the number of microbatches. `programs`: the programs that have a value of an
    origin. `shards` maps a rank and a weight to the text of its shard, `numbers` such a text to its numbers in rank files.
    """

    nodes: dict[tuple[str, str, int], NamedNode] = field(default_factory=dict)
    programs: dict[Origin, set[str]] = field(default_factory=dict)
    shards: dict[tuple[int, str], str] = field(default_factory=dict)
    numbers: dict[str, bytes] = field(default_factory=dict)
    kinds: dict[Hashable, int] = field(default_factory=dict)
    """Maps each kind of node to a number."""


@dataclass
class Subject:
    """A program of an artifact that is checked. `wrong`: the files that differ from the manifest; `models`: the readable files, by rank,
    with the nodes of the first two microbatches where all others repeat these (`graph/uniform_rows.py`).

    A check of a single rank file gets it as `file`. `check_beside` checks another program of the artifact by its name; `others`: for the
    main program, the names of all other programs.
    """

    folder: Path
    manifest: Manifest
    check_beside: Callable[[str], list[Violation]]
    others: Sequence[str] = ()
    generation: GenerationRecord | None = None
    """The artifact's record of token generation, whichever of its programs this is."""
    training: TrainingRecord | None = None
    """The artifact's record of its training, whichever of its programs this is."""
    known: Known = field(default_factory=Known)
    """The contents of the programs that were checked before; one object for all programs."""
    wrong: frozenset[str] = frozenset()
    models: dict[int, ModelProto] = field(default_factory=dict)
    once: dict[int, ModelProto] = field(default_factory=dict)
    """Maps each rank to its readable file with the nodes of each task once."""
    traffic: dict[int, ModelProto] = field(default_factory=dict)
    """Maps each rank to its readable file with the communication of all calls."""
    nodes: int = 0
    """The number of nodes of all ranks and calls."""
    file: SingleFile = field(default_factory=SingleFile)
    rows: dict[int, Row] = field(default_factory=dict)
    """Maps each rank whose file has tasks to its row of tasks."""
    counts: StateCounts = field(default_factory=StateCounts)
    shared: Manifest = field(init=False)
    """The manifest with one file for all ranks whose programs have equal nodes."""

    def __post_init__(self) -> None:
        self.shared = self.manifest
