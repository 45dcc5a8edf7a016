"""What a check looks at, and what checks count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnx import ModelProto
from partc.runtime.artifact.format import Manifest, StateRecord
from partc.runtime.artifact.generation import GenerationRecord
from partc.runtime.artifact.tasks.rows import Row
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
    kept: Sequence[StateRecord] = ()
    model: ModelProto = field(default_factory=ModelProto)
    row: Row | None = None


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
    wrong: frozenset[str] = frozenset()
    models: dict[int, ModelProto] = field(default_factory=dict)
    file: SingleFile = field(default_factory=SingleFile)
    rows: dict[int, Row] = field(default_factory=dict)
    """By rank the row of tasks, of those whose files have tasks."""
    counts: StateCounts = field(default_factory=StateCounts)
