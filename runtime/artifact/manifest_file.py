"""The file `manifest.json`: the facts common to all programs of an artifact, and those of each; a `Manifest` has those of one program.

    {"format": 3, "partc": "0.1.0", "model": {...}, "plan": {...}, "ranks": 2, "files": {...}, "symbols": {...}, "groups": {...},
     "programs": {"train": {"inputs": [...], ..., "kept": {"w": "w.next"}},
                  "evaluate": {"inputs": [...], ..., "kept": {"w": ""}}},
     "state": [{"value": "w", ...}], "training": {...}, ...}

Only the first wrong record of a list is reported: a short list of empty ones would make a thousand times as many messages.

The first program is the main one. Its rank files have the initial values of the state, and only it updates the state, except caches: a
prefill updates these too, and its records have only the slots that it computes (`generation.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ..files.counted import MOST_PROGRAMS
from .format import (
    CACHE,
    ArtifactRecord,
    Collective,
    Manifest,
    Port,
    Record,
    StateRecord,
    StoredRecord,
    SymbolRecord,
    TensorRecord,
    TrainingRecord,
    Transfer,
    inside,
)
from .generation import GenerationRecord
from .ranks import Programs, Ranks

_COMMON = tuple(ArtifactRecord.model_fields)
_OWN = ("inputs", "outputs", "transfers", "collectives", "rank_files", "stored")


def _all_inside(paths: list[str]) -> list[str]:
    for path in dict.fromkeys(paths):
        inside(path)
    return paths


class ProgramRecord(Record):
    """What is of one program of an artifact: its inputs and outputs, its communication and its files.

    `rank_files`: by rank its file, which equal ranks share; empty: `rank_file`. `kept`: by tensor of the state that the program reads the
    output that takes its place, empty where none does; where ranks call that by several names, one for each record of the tensor.
    `symbols`, `groups`: those that are not the artifact's.
    """

    inputs: Annotated[list[Port], FailFast()]
    outputs: Annotated[list[Port], FailFast()]
    transfers: Annotated[list[Transfer], FailFast()]
    collectives: Annotated[list[Collective], FailFast()] = Field([])
    rank_files: Annotated[Programs, AfterValidator(_all_inside)] = Field([])
    kept: dict[str, str | list[str]] = Field({})
    symbols: dict[str, SymbolRecord] = Field({})
    groups: dict[str, list[Ranks]] = Field({})
    stored: StoredRecord | None = None

    @model_serializer(mode="wrap")
    def _without_nothing_stored(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = write(self)
        return found if self.stored is not None else {key: one for key, one in found.items() if key != "stored"}


class ManifestFile(ArtifactRecord):
    """The schema of the file: what all programs have in common, and by name what is of each."""

    symbols: dict[str, SymbolRecord]
    groups: dict[str, list[Ranks]] = Field({})
    programs: dict[Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")], ProgramRecord] = Field(
        min_length=1, max_length=MOST_PROGRAMS
    )
    state: Annotated[list[TensorRecord], FailFast()] = Field([])
    training: TrainingRecord | None = None
    generation: GenerationRecord | None = None
    _manifests: dict[str, Manifest] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _all_ranks_are_the_mesh(self) -> Self:
        if self.mesh and math.prod(self.mesh.values()) != self.ranks:
            raise ValueError(f"the mesh {self.mesh} is not a grid of {self.ranks} ranks")
        return self

    def manifest(self, name: str = "") -> Manifest:
        """Returns the manifest for a program, by default the main one; always the same object."""
        name = name or next(iter(self.programs))
        if name not in self._manifests:
            self._manifests[name] = self._manifest(name)
        return self._manifests[name]

    def _manifest(self, name: str) -> Manifest:
        own, is_main = self.programs[name], name == next(iter(self.programs))
        return Manifest.model_construct(
            name=name,
            is_main=is_main,
            symbols={**self.symbols, **own.symbols},
            groups={**self.groups, **own.groups},
            state=[
                StateRecord.model_construct(**vars(one), next=following)
                for one, following in self._following(own.kept, "" if is_main else name)
            ],
            training=self.training if is_main else None,
            generation=self.generation if is_main else None,
            **{key: getattr(self, key) for key in _COMMON},
            **{key: getattr(own, key) for key in _OWN},
        )

    def _following(self, kept: Mapping[str, str | list[str]], name: str) -> Iterator[tuple[TensorRecord, str]]:
        """Yields the records of the state that a program keeps, in the program's form, each with the output that replaces it."""
        turn: Counter[str] = Counter()
        rows = None if self.generation is None else self.generation.rows_of(name)
        for one in self.state:
            if (names := kept.get(one.value)) is not None:
                of_rows = rows is not None and one.kind == CACHE
                record = one.model_copy(update={"shape": [rows, *one.shape[1:]]}) if of_rows else one
                yield record, names if isinstance(names, str) else names[turn[one.value]]
                turn[one.value] += 1

    @classmethod
    def of(cls, manifests: Sequence[Manifest]) -> ManifestFile:
        """Returns the file for these programs of one artifact, the main one first; the others read its state."""
        main = manifests[0]
        groups = {name: lists for one in reversed(manifests) for name, lists in one.groups.items()}
        return cls.model_construct(
            symbols=main.symbols,
            groups=groups,
            programs={
                one.name: ProgramRecord.model_construct(
                    kept=_next_by_value(one.state),
                    symbols={name: law for name, law in one.symbols.items() if main.symbols.get(name) != law},
                    groups={name: lists for name, lists in one.groups.items() if groups[name] != lists},
                    **{key: getattr(one, key) for key in _OWN},
                )
                for one in manifests
            },
            state=[
                TensorRecord.model_construct(**{key: field for key, field in dict(one).items() if key != "next"})
                for one in main.state
            ],
            training=main.training,
            generation=main.generation,
            **{key: getattr(main, key) for key in _COMMON},
        )


def _next_by_value(state: Sequence[StateRecord]) -> dict[str, str | list[str]]:
    """Maps each tensor of the state to the output that replaces it, or to its names in the order of the tensor's records."""
    found: dict[str, list[str]] = {}
    for record in state:
        found.setdefault(record.value, []).append(record.next)
    return {value: names[0] if len({*names}) == 1 else names for value, names in found.items()}
