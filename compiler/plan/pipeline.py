"""`pipeline` of a plan: into how many microbatches a batch is cut, and in which order the stages run them."""

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
"""Every microbatch is written into the programs of the ranks."""


@dataclass(frozen=True)
class RecomputeRule:
    """What patterns match is computed again in the backward pass: of one pattern each module by itself, of several all together.

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
    """A valid `pipeline:`. `schedule` is a name, rows as text, or None for the one that fits; `rows` are the places of rows."""

    where: str
    microbatches: int
    schedule: str | tuple[str, ...] | None = None
    memory: str | int | None = None
    statistics: Literal["microbatch"] | None = None
    rows: tuple[str, ...] = ()
    stages: tuple[StageRule, ...] = ()
    recompute: tuple[RecomputeRule, ...] = ()
    accumulates: bool = False
    """Whether it is a plan's `accumulate`, which says nothing of a pipeline."""
    parts: int = 0
    """The number of parts of a batch that all sums are added up of in one order, whatever the ranks; 0: in the order of ranks."""
    shares: int = 1
    """The number that a dim of a parameter must divide by to be shared out over ranks, beside that of the ranks."""
    pieces: int = 1
    """Into how many pieces a batch is dealt out at least, of each of which a microbatch has a share: those of ranks that one stands for."""

    def of_forward_passes(self, groups: int) -> PipelineRules:
        """The rules for a program of forward passes alone over so many groups of ranks: nothing is left of the schedule, which orders both.

        Microbatches are as large as lets the groups work at the same time: the fewest, several of the plan's together, that are twice as
        many as groups. Of g groups 2g of them take 3g - 1 turns, and small products, which take longer for each record, are few.
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
        """The entry as the compiler sees it; `where` gives the place of a key."""
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
