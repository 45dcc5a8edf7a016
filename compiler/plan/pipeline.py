"""The plan's `pipeline`: the number of microbatches of a batch, and the order in which the stages run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Annotated, Literal

from partc.compiler.plan.groups import frame_in
from partc.compiler.plan.pattern import checked_pattern
from partc.compiler.plan.stages import StageForm, StageRule, apart, groups_of
from partc.runtime.options import Options, Refused, shown
from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

MICROBATCH: Literal["microbatch"] = "microbatch"
MOST_MICROBATCHES = 4096
"""The most microbatches: every microbatch is written into the programs of the ranks."""


@dataclass(frozen=True)
class RecomputeRule:
    """A rule that recomputes matched nodes in the backward pass: each module of a single pattern separately, those of several patterns
    together.

    Prints as `plan.yaml:8 'layers.*'`, without the folder.
    """

    patterns: tuple[str, ...]
    where: str

    @property
    def text(self) -> str:
        """The patterns as a plan writes them."""
        return ", ".join(self.patterns)

    def __str__(self) -> str:
        return f"{PurePath(self.where).name} '{self.text}'"


@dataclass(frozen=True)
class PipelineRules:
    """A valid `pipeline:`. `schedule` is a name, rows as text, or None to choose one; `rows` are the places of rows in the plan."""

    where: str
    microbatches: int
    schedule: str | tuple[str, ...] | None = None
    memory: str | int | None = None
    statistics: Literal["microbatch", "part"] | None = None
    """The records of which a layer takes its statistics; `part`: batch normalizations only, with `parts`."""
    rows: tuple[str, ...] = ()
    stages: tuple[StageRule, ...] = ()
    recompute: tuple[RecomputeRule, ...] = ()
    accumulates: bool = False
    """Whether it comes from a plan's `accumulate`, and not from `pipeline`."""
    parts: int = 0
    """The number of parts of a batch over which all sums are added in one order for any number of ranks; 0: in the order of ranks."""
    shares: int = 1
    """A number by which a dim of a parameter must be divisible to be sharded over ranks, besides the number of the ranks."""
    pieces: int = 1
    """The least number of pieces into which a batch is dealt, a share of each per microbatch: those of ranks for which one stands."""

    def of_forward_passes(self, groups: int) -> PipelineRules:
        """Returns the rules for a program of forward passes alone over `groups` groups of ranks; the schedule, which orders both passes, is
        dropped.

        The microbatches are as large as possible with all groups working at the same time: their number is the least that is at least twice
        the number of groups and divides the plan's. With g groups, 2g microbatches take 3g - 1 turns; larger products take less time for
        each record.
        """
        fits = (
            one for one in range(min(2 * groups, self.microbatches), self.microbatches) if not self.microbatches % one
        )
        return replace(
            self, microbatches=next(fits, self.microbatches), schedule=None, memory=None, rows=(), recompute=(), parts=0
        )


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _patterns(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    texts = [item for item in items if isinstance(item, str)]
    found = tuple(checked_pattern(pattern) for text in texts for pattern in apart(text))
    if not found or len(texts) < len(items):
        law = "what is recomputed is 'layers.*', or 'conv1, relu'"
        raise Refused(f"expected patterns, but got {shown(value)}", law)
    return found


_Form = Annotated[tuple[str, ...], PlainValidator(_patterns, json_schema_input_type=str | list[str])]


class PipelineEntry(Options):
    """How a batch runs through the stages that the placement makes."""

    microbatches: int = Field(
        ge=1, le=MOST_MICROBATCHES, description="The number of equal parts of a batch, which follow each other."
    )
    schedule: str | list[str] | None = Field(
        None,
        description="The order of the stages' tasks: gpipe, 1f1b, interleaved, zb_h1, zbv, auto, or a row of tasks "
        "for each rank, ['0F0 0F1 0B0 0B1', ...]. Without it 1f1b where every stage has ranks of its own, else auto.",
    )
    memory: str | int | None = Field(
        None,
        description="The most that a rank may keep: 4GB or a number of bytes, of parameters, state, the batch and saved values; or "
        "'2.5 microbatches' of saved values.",
    )
    statistics: Literal["microbatch"] | None = Field(
        None,
        description="microbatch: what a layer takes of all records, such as a batch normalization's mean, it takes of each "
        "microbatch; without it such a layer is refused.",
    )

    recompute: Annotated[
        list[_Form],
        BeforeValidator(_listed, json_schema_input_type=str | list[str | list[str]]),
    ] = Field(
        [],
        description="Patterns of modules or nodes whose values are not kept for the backward pass, but computed again there: "
        "[layers.*] keeps what every layer reads. What patterns with commas between them, or a list of them, match is computed again "
        "together. With microbatches: 1 it is for a batch that is not divided.",
    )

    stages: Annotated[list[StageForm], Field(min_length=1)] | None = Field(
        None,
        description="The nodes of each stage in the order of the data's way: patterns with commas between them, a list of them, "
        "or {nodes: ..., on: 0} with the ranks as in 'placement'. Without 'on' they run on the slices of the mesh axis 'pp', or on equal "
        "runs of ranks, in turn. Without 'stages' the placement makes them.",
    )
    _groups: tuple[tuple[int, ...], ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _on_ranks(self, info: ValidationInfo) -> PipelineEntry:
        frame = frame_in(info)
        try:
            self._groups = groups_of(self.stages or (), self.schedule, frame)
        except Refused as violation:
            violation.key = "stages"
            raise
        return self

    def rules(self, where: Callable[..., str]) -> PipelineRules:
        """Returns the entry as rules for the compiler; `where` returns the place of a key."""
        rows = self.schedule if isinstance(self.schedule, list) else []
        return PipelineRules(
            where("pipeline"),
            self.microbatches,
            tuple(rows) or (self.schedule if isinstance(self.schedule, str) else None),
            self.memory,
            self.statistics,
            tuple(where("pipeline", "schedule", k) for k in range(len(rows))),
            tuple(
                stage.rule(ranks, where, "pipeline", "stages", k)
                for k, (stage, ranks) in enumerate(zip(self.stages or (), self._groups, strict=True))
            ),
            tuple(
                RecomputeRule(patterns, where("pipeline", "recompute", k)) for k, patterns in enumerate(self.recompute)
            ),
        )
